"""Entailment: what is read from files, that the test words are new, and any checkpoint of transformers."""

from __future__ import annotations

import argparse
import builtins
import csv
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import entailment
import pytest
import torch
from entailment import SCRIPT, Entailment
from support import lexical
from support.pairs import NLI, Pair, Vocabulary, load

import cpt_fx
from cpt_fx.schedules import Static
from tests.examples.resuming import assert_resumes

transformers = pytest.importorskip("transformers")

FETCHES = pytest.mark.skipif(not os.environ.get("CPT_FX_FETCH"), reason="downloads; set CPT_FX_FETCH=1 to run it")


def options(**given: Any) -> argparse.Namespace:
    return SCRIPT.options(fast=True, **given)


def table(path: Path, *rows: tuple[str, ...]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None).writerows(rows)


def lines(path: Path, *rows: dict[str, str]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


XNLI_TEST = (
    ("language", "gold_label", "sentence1", "sentence2", "pairID"),
    ("de", "contradiction", 'Er sagte "nein.', "Er sagte ja.", "1"),
    ("fr", "neutral", "Bonjour.", "Salut.", "1"),
    ("de", "entailment", "Es regnet.", "Es ist nass.", "2"),
)
XNLI_TRAIN = (
    ("premise", "hypo", "label"),
    ("Eins ist eins .", "Das ist so .", "entailment"),
    ("Zwei .", "Nein .", "contradictory"),
)
GERMAN = [('Er sagte "nein.', "Er sagte ja.", 2), ("Es regnet.", "Es ist nass.", 0)]


def test_xnli_in_columns(tmp_path: Path) -> None:
    (tmp_path / "XNLI-1.0").mkdir()
    (tmp_path / "XNLI-MT-1.0" / "multinli").mkdir(parents=True)
    table(tmp_path / "XNLI-1.0" / "xnli.test.tsv", *XNLI_TEST)
    table(tmp_path / "XNLI-MT-1.0" / "multinli" / "multinli.train.de.tsv", *XNLI_TRAIN)
    found = load(str(tmp_path), "de")
    assert found.test == GERMAN
    assert found.train == [("Eins ist eins .", "Das ist so .", 0), ("Zwei .", "Nein .", 2)]
    assert (found.labels, found.lexical, found.name) == (NLI, False, "XNLI (de)")
    with pytest.raises(FileNotFoundError, match=r"no multinli\.train\.sw\.tsv or .*XNLI-MT-1\.0\.zip"):
        load(str(tmp_path), "sw")


def test_xnli_in_json(tmp_path: Path) -> None:
    lines(tmp_path / "xnli.test.jsonl", *(dict(zip(XNLI_TEST[0], row, strict=True)) for row in XNLI_TEST[1:]))
    lines(tmp_path / "multinli_1.0_train.jsonl", {"gold_label": "neutral", "sentence1": "A.", "sentence2": "B."})
    (tmp_path / "multinli.train.de.tsv").write_text("premise\thypo\tlabel\nA\tB\tneutral\n", encoding="utf-8")
    assert load(str(tmp_path), "de").test == GERMAN
    with pytest.raises(ValueError, match=r"no labelled pairs in language 'en'; there is de, fr\. Change --language"):
        load(str(tmp_path), "en")


def test_snli_without_pairs_that_annotators_disagreed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "dev", "test"):
        lines(
            tmp_path / f"snli_1.0_{part}.jsonl",
            {"gold_label": "entailment", "sentence1": "A man plays.", "sentence2": part},
            {"gold_label": "-", "sentence1": "A man.", "sentence2": "A boy."},
        )
    found = load(str(tmp_path), "de")
    assert found.train == [("A man plays.", "train", 0)]
    assert found.test == [("A man plays.", "test", 0)]
    assert "snli_1.0_train.jsonl: 1 pairs are left out" in capsys.readouterr().err


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder\. Give one of wordnet, python, or.*XNLI-1\.0\.zip"):
        load(str(tmp_path / "nothing"), "de")
    with pytest.raises(FileNotFoundError, match=r"there is no xnli\.test\.tsv or xnli\.test\.jsonl"):
        load(str(tmp_path), "de")
    train, test = tmp_path / "snli_1.0_train.jsonl", tmp_path / "snli_1.0_test.jsonl"
    for content, message in (
        ("{broken\n", "line 1: this is not JSON"),
        ('{"gold_label": "maybe", "sentence1": "", "sentence2": ""}\n', "line 1: unknown label 'maybe'"),
        ('{"gold_label": "neutral", "text": ""}\n', "line 1: two texts and a label are expected, there are gold_label"),
    ):
        train.write_text(content, encoding="utf-8")
        test.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            load(str(tmp_path), "de")


# Offsets are those of this text only: what counts is that they are the names that pointers use.
NOUNS = """\
  1 This is the licence.
00000001 03 n 01 entity 0 000 | all
00000002 05 n 02 animal 0 fauna 0 002 @ 00000001 n 0000 ~ 00000003 n 0000 | a living thing
00000003 05 n 03 dog 0 domestic_dog 0 Rover 1 002 @ 00000002 n 0000 #m 00000004 n 0000 | it barks | or not
00000004 05 n 01 poodle 0 001 @ 00000003 n 0000 | a dog
00000005 06 n 01 hammer 0 001 @ 00000001 n 0000 | a tool
00000006 18 n 01 plato 0 001 @i 00000001 n 0000 | an instance is no kind
"""


def test_wordnet_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.noun").write_text(NOUNS, encoding="utf-8")
    monkeypatch.setattr(lexical, "in_test", lambda word, part: False)
    found = lexical.read_wordnet(tmp_path / "data.noun")
    assert not found.test
    true = {(one, other) for one, other, label in found.train if label == 0}
    assert true <= {
        ("animal", "entity"), ("fauna", "entity"), ("hammer", "entity"), ("dog", "animal"), ("dog", "fauna"),
        ("dog", "entity"), ("poodle", "dog"), ("poodle", "animal"), ("poodle", "fauna"), ("poodle", "entity"),
    }  # fmt: skip
    unrelated = {frozenset((one, other)) for one, other, label in found.train if label == 2}
    assert unrelated <= {frozenset(("hammer", other)) for other in ("animal", "fauna", "dog")}  # no synonyms
    assert unrelated
    (tmp_path / "data.noun").write_text("00000001 03 n what\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"line 1: this is no line of WordNet's data\.noun"):
        lexical.read_wordnet(tmp_path / "data.noun")


def words_of(pairs: list[Pair]) -> set[str]:
    return {word for one, other, _ in pairs for word in (one, other)}


def check(found: lexical.Lexical) -> None:
    """What limits how much words by themselves tell."""
    assert found.train
    assert found.test
    assert not words_of(found.train) & words_of(found.test)
    for pairs in (found.train, found.test):
        assert set(Counter(label for _, _, label in pairs).values()) == {len(pairs) // 3}
        true = {(one, other) for one, other, label in pairs if label == 0}
        assert {(other, one) for one, other, label in pairs if label == 1} == true
        assert max(Counter(general for _, general in true).values()) <= 12
        general = {other for _, other in true}
        mixed = [(one, other) for one, other, label in pairs if label == 2]
        assert words_of([(*pair, 2) for pair in mixed]) <= words_of([(*pair, 0) for pair in true])
        assert not {frozenset(pair) for pair in mixed} & {frozenset(pair) for pair in true}
        assert 0.3 < sum(other in general for _, other in mixed) / len(mixed) < 0.9  # both orders


def test_words_of_the_test_are_new_and_say_nothing_by_themselves() -> None:
    found = lexical.python_classes()
    check(found)
    assert lexical.python_classes() == found

    errors = [(one, other) for one, other, label in found.train if label == 0 and one.endswith("Error")]
    assert errors
    assert all(
        issubclass(getattr(builtins, one), getattr(builtins, other)) for one, other in errors if hasattr(builtins, one)
    )


@FETCHES
def test_the_real_wordnet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPT_FX_DATA", str(tmp_path))
    found = lexical.wordnet()
    check(found)
    assert len(found.train) > 100_000
    assert len(found.test) > 20_000
    assert found == lexical.wordnet()


def test_numbers_of_pairs() -> None:
    pairs = [("a b", "b a", 0), ("a", "a b c", 2)]
    vocabulary = Vocabulary(pairs[:1], "words")
    found = vocabulary(pairs, 8)
    a, b = (vocabulary.entries.index(unit) for unit in "ab")
    assert found.input_ids.tolist() == [[2, a, b, 3, b, a, 3, 0], [2, a, 3, a, b, 1, 3, 0]]
    assert found.attention_mask.tolist() == [[1] * 7 + [0]] * 2
    assert found.token_type_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 0]]
    assert found.labels.tolist() == [0, 2]
    assert vocabulary(pairs[1:], 6).input_ids.tolist() == [[2, a, 3, a, b, 3]]
    parts = Vocabulary([("bird", "d", 0)], "trigrams")
    assert set(parts.entries[4:]) == {" bi", "bir", "ird", "rd ", " d "}
    assert len(parts([("blackbird", "ox", 1)], 16).input_ids.unique()) == 4 + 3  # three are known
    words = Vocabulary([("A man plays.", "a man", 0)], "words", limit=2)
    assert words.entries[4:] == ("a", "man")


def test_epochs_have_as_many_steps_as_published() -> None:
    task = Entailment(options(batch=64))
    assert task.steps_per_epoch == -(-len(task.train.labels) // 64)
    preset = SCRIPT.options(preset="xnli")
    assert preset.epochs * -(-392_702 // preset.batch) == 12_272
    seen = [task.batch(step, 1)[1] for step in range(task.steps_per_epoch)]
    assert sorted(torch.cat(seen).tolist()) == sorted(task.train.labels.tolist())
    assert task.learning_rate(0, 100) == task.options.lr
    assert task.learning_rate(100, 100) == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers saves it, with a tokenizer of its own; another number of labels than three."""
    folder = tmp_path_factory.mktemp("checkpoint")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join([*vocabulary, *(f"##{letter}" for letter in vocabulary[5:])]))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=57, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=48, num_labels=2,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_any_checkpoint_with_its_own_tokenizer(checkpoint: Path) -> None:
    task = Entailment(options(model=str(checkpoint), length=48))
    model = task.model()
    assert type(model) is transformers.BertForSequenceClassification
    assert task.train.input_ids.max() > 30
    assert (task.train.input_ids[:, 0] == 2).all()
    assert task.train.token_type_ids.max() == 1
    saved = transformers.BertModel.from_pretrained(checkpoint)
    name = "encoder.layer.0.output.dense.weight"
    assert torch.equal(model.get_parameter(f"bert.{name}"), saved.get_parameter(name))
    quantized = cpt_fx.transform(model, Static(4), recipe=task.recipe)
    task.loss(quantized, task.batch(0, 0)).backward()
    layers = {quantizer.layer for quantizer in cpt_fx.inspect(quantized).quantizers}
    assert {"classifier", "bert.pooler.dense", "bert.encoder.layer.0.attention.self.query"} <= layers
    assert not any("embedding" in layer for layer in layers)
    with pytest.raises(ValueError, match=r"--length 49: .* reads at most 48 tokens"):
        Entailment(options(model=str(checkpoint), length=49))


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="transformers finds no checkpoint there, give `tiny`"):
        Entailment(options(model=str(tmp_path)))


@pytest.mark.slow
def test_a_study_can_call_it_and_the_metric_says_that_it_is_lexical() -> None:
    found = entailment.train(Static(8, total_steps=3), 0, fast=True)
    assert set(found) == {"lexical_accuracy", "loss"}
    assert 0 <= found["lexical_accuracy"] <= 1


@pytest.mark.slow
def test_a_run_that_broke_down_resumes_exactly(tmp_path: Path) -> None:
    """Dropout and the moments of AdamW go on where they stopped."""
    assert_resumes(lambda: Entailment(SCRIPT.options(fast=True)), tmp_path / "run.pt", steps=8, stop=5, save_every=3)
