"""Language models: what is read from files, what a model sees of it, and that a run resumes with its state."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any

import language_model
import pytest
import torch
from language_model import SCRIPT, LanguageModel
from support import lzw, text
from support.text_models import LSTMModel, TransformerModel
from support.training import fit

import cpt_fx
from cpt_fx.schedules import Schedule, Static, named

FETCHES = pytest.mark.skipif(not os.environ.get("CPT_FX_FETCH"), reason="downloads; set CPT_FX_FETCH=1 to run it")


def options(**given: Any) -> argparse.Namespace:
    return SCRIPT.options(fast=True, **given)


def compressed(data: bytes, clear_at: int) -> bytes:
    """Write LZW as `compress` does, and start the table anew once, after so many codes."""
    codes: list[tuple[int, int]] = []
    table = {bytes([value]): value for value in range(256)}
    width, free, group, piece = 9, 257, 0, b""

    def emit(code: int) -> None:
        nonlocal width, free, group
        codes.append((code, width))
        group += 1

    def pad() -> None:
        nonlocal group
        codes.extend([(0, width)] * (-group % 8))
        group = 0

    for place, value in enumerate(data):
        longer = piece + bytes([value])
        if longer in table:
            piece = longer
            continue
        emit(table[piece])
        table[longer], free = free, free + 1
        piece = bytes([value])
        if free > 1 << width:
            pad()
            width += 1
        if place >= clear_at:
            emit(256)
            pad()
            table = {bytes([value]): value for value in range(256)}
            width, free, clear_at = 9, 257, len(data)
    emit(table[piece])
    bits = place = 0
    for code, wide in codes:
        bits |= code << place
        place += wide
    return bits.to_bytes(-(-place // 8), "little")


@pytest.mark.parametrize("clear_at", [10**6, 3000, 100])
def test_what_compress_packs_is_unpacked(clear_at: int) -> None:
    data = b"".join(b"%d and %d. " % (number, number * number % 97) for number in range(900))
    assert lzw.unpack(compressed(data, clear_at)) == data


def test_what_the_real_compress_wrote_is_unpacked() -> None:
    assert lzw.unpack(bytes.fromhex("61c4041c28b020")) == b"ab" * 6
    assert lzw.unpack(b"") == b""


def test_damaged_data_are_refused() -> None:
    with pytest.raises(ValueError, match="damaged data: nothing stands for code 511 at bit 9"):
        lzw.unpack(b"a\xfe\xff\xff")


VERSES = ["In the beginning God created the heaven and the earth.", "And God said, Let there be light.", "Amen."]


def bible(head: bytes = b"EC02Compressed Data File") -> bytes:
    """A file as Debian packages it, in two windows."""
    content = "\n".join(["Holy Bible. Textfile 930105.", f"Ge1:1 {VERSES[0]}", f"1Sa10:12 {VERSES[1]}",
                         f"Rev22:21 {VERSES[2]}", ""]).encode()  # fmt: skip
    windows = [compressed(content[:64], 10**6), compressed(content[64:], 10**6)]
    places = [84 + 8 + 12 + 3]
    for window in windows:
        places.append(places[-1] + len(window))
    numbers = b"".join(number.to_bytes(4, "big") for number in (64, 2, *places))
    return head.ljust(84, b"\0") + numbers + b"\x1f\x9d\x90" + b"".join(windows)


def test_the_king_james_text_is_read_from_its_package() -> None:
    assert text.verses(bible()).splitlines() == VERSES
    with pytest.raises(ValueError, match=r"bible\.data does not begin as"):
        text.verses(bible(b"something else"))


@FETCHES
def test_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPT_FX_DATA", str(tmp_path))
    found = text.king_james()
    lines = [line for part in text.PARTS for line in getattr(found, part).splitlines()]
    assert len(lines) == 31_102
    assert lines[0] == VERSES[0]
    assert lines[-1] == "The grace of our Lord Jesus Christ be with you all. Amen."


def put(folder: Path, pattern: str, *parts: str) -> Path:
    for part, content in zip(text.PARTS, parts or ("a b a <unk>\n\na a\n", "b\n", "a c\n"), strict=True):
        (folder / pattern.format(part)).write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize("pattern", ["ptb.{}.txt", "wiki.{}.tokens", "{}.txt"])
def test_texts_in_three_files_have_words_between_spaces(pattern: str, tmp_path: Path) -> None:
    found = text.corpus(str(put(tmp_path, pattern)), "word", None)
    assert found.vocabulary == ("<unk>", "a", "<eos>", "b")
    assert found.train.tolist() == [1, 3, 1, 0, 2, 1, 1, 2]
    assert found.test.tolist() == [1, 0, 2]
    assert found.unknown == pytest.approx(1 / 3)


def test_raw_text_is_split_into_words_and_marks(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("God said: don't.\n" * 20, encoding="utf-8")
    found = text.corpus(str(tmp_path / "my.txt"), "word", None)
    assert set(found.vocabulary) == {"god", "said", ":", "don't", ".", "<eos>"}
    assert [len(part) // 6 for part in (found.train, found.valid, found.test)] == [18, 1, 1]
    raw = text.corpus(str(put(tmp_path, "wiki.{}.raw", "A b.\n", "a\n", "b\n")), "word", None)
    assert set(raw.vocabulary) == {"a", "b", ".", "<eos>"}


def test_the_vocabulary_is_cut_and_the_rest_is_unknown(tmp_path: Path) -> None:
    folder = put(tmp_path, "{}.txt", "a a a b b c d\n", "a\n", "a b c x\n")
    found = text.corpus(str(folder), "word", 3)
    assert found.vocabulary == ("<unk>", "a", "b")
    assert found.test.tolist() == [1, 2, 0, 0, 0]
    assert found.unknown == pytest.approx(3 / 5)
    with pytest.raises(ValueError, match="--vocabulary must be at least 2, got 1"):
        text.corpus(str(folder), "word", 1)


def test_characters(tmp_path: Path) -> None:
    found = text.corpus(str(put(tmp_path, "{}.txt", "ab a", "a", "b\n")), "character", None)
    assert found.vocabulary == ("<unk>", "a", "b", " ")
    assert found.test.tolist() == [2, 0]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such file or folder.*ptb\.train\.txt.*wiki\.train\.tokens"):
        text.corpus(str(tmp_path / "nothing"), "word", None)
    with pytest.raises(FileNotFoundError, match=r"Put there ptb\.train\.txt.*simple-examples\.tgz"):
        text.corpus(str(tmp_path), "word", None)
    put(tmp_path, "ptb.{}.txt")
    (tmp_path / "ptb.valid.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"PTB lacks ptb\.valid\.txt"):
        text.corpus(str(tmp_path), "word", None)
    (tmp_path / "short.txt").write_text("a\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"short\.txt: the \w+ part is empty"):
        text.corpus(str(tmp_path / "short.txt"), "word", None)


def test_texts_too_short_for_a_batch_are_refused(tmp_path: Path) -> None:
    folder = put(tmp_path, "{}.txt")
    with pytest.raises(ValueError, match="8 words or characters is too short for a batch of 8"):
        LanguageModel(options(data=str(folder), batch=8))
    with pytest.raises(ValueError, match="--bptt 50 and --batch 1 need more text"):
        LanguageModel(options(data=str(folder), batch=1, bptt=50))
    with pytest.raises(ValueError, match="unknown model 'bert'"):
        LanguageModel(options(model="bert")).model()


def test_the_published_run_has_as_many_steps_as_published() -> None:
    task = LanguageModel(SCRIPT.options(preset="ptb", data="python"))
    given = task.options
    assert given.epochs * ((text.columns(torch.zeros(929_589), given.batch).size(0) - 1) // given.bptt) == 53_080
    assert task.learning_rate(0, 53_080) is None
    assert task.optimizer(task.model()).param_groups[0]["lr"] == 20


def test_batches_follow_each_other_and_state_goes_along() -> None:
    task = LanguageModel(options())
    model = task.model()
    ends = None
    for step in range(3):
        tokens, following, _ = task.batch(step, seed=0)
        assert torch.equal(tokens[1:], following[:-1])
        if ends is not None:
            assert torch.equal(ends, tokens[0])
        ends = following[-1]
    assert torch.equal(task.batch(task.steps_per_epoch, 5)[0], task.batch(0, 0)[0])

    def losses(steps: list[int]) -> list[float]:
        task.state = None
        return [task.loss(model, task.batch(step, 0)).item() for step in steps]

    assert losses([0, 1])[1] != losses([1])[0]
    assert losses([1, task.steps_per_epoch])[1] == losses([0])[0]


def test_perplexity_is_that_of_all_positions() -> None:
    task = LanguageModel(options(batch=3))
    model = task.model()
    assert isinstance(model, LSTMModel)
    torch.nn.init.zeros_(model.decoder.weight)
    assert task.evaluate(model)["perplexity"] == pytest.approx(len(task.corpus.vocabulary), rel=1e-5)
    model = task.model()
    stream = task.streams["test"]
    with torch.no_grad():
        logits, *_ = model(stream[:-1], *task.first_state(3))
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), stream[1:].flatten())
        assert task.evaluate(model)["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_the_rate_is_divided_where_validation_does_not_improve(monkeypatch: pytest.MonkeyPatch) -> None:
    task = LanguageModel(options(rate="plateau", lr=20.0))
    model = task.model()
    optimizer = task.optimizer(model)
    rates = []
    for loss in (5.0, 4.0, 4.0, 4.5, 3.0):
        monkeypatch.setattr(task, "_mean_loss", lambda model, part, loss=loss: loss if part == "valid" else 0.0)
        task.after_epoch(model, optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [20, 20, 5, 1.25, 1.25]


@pytest.mark.slow
def test_a_transformer_does_not_see_what_comes() -> None:
    model = TransformerModel(50, 16).eval()
    tokens = torch.randint(50, (9, 2))
    changed = tokens.clone()
    changed[5:] = torch.randint(50, (4, 2))
    for each in (model, cpt_fx.transform(model, Static(32), recipe=cpt_fx.recipes.paper())):
        (one,), (other,) = each(tokens), each(changed)
        torch.testing.assert_close(one[:5], other[:5])
        assert not torch.allclose(one[5:], other[5:])


@pytest.mark.slow
def test_gates_and_decoder_are_quantized_and_the_embedding_is_not() -> None:
    task = LanguageModel(options(layers=2))
    model = cpt_fx.transform(task.model(), Static(4), recipe=task.recipe, strict=True)
    task.loss(model, task.batch(0, 0)).backward()
    layers = {quantizer.layer for quantizer in cpt_fx.inspect(model).quantizers}
    assert layers == {"decoder", *(f"lstm.{which}_l{depth}" for which in ("ih", "hh") for depth in (0, 1))}


def schedule(steps: int) -> Schedule:
    return named("CR", q_min=3, q_max=8, total_steps=steps, cycles=2)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["lstm", "transformer"])
def test_a_run_resumes_with_its_state(model: str, tmp_path: Path) -> None:
    """Two epochs and a half, with dropout, the plateau rule and the state of the LSTM; cut short in the second."""
    (tmp_path / "a.txt").write_text("the cat sat on the mat and saw the dog\n" * 40, encoding="utf-8")
    given = options(data=str(tmp_path / "a.txt"), model=model, batch=4, bptt=20, dropout=0.3, rate="plateau")
    per_epoch = LanguageModel(given).steps_per_epoch
    total = 5 * per_epoch // 2

    class StoppedError(Exception):
        pass

    class Fragile(LanguageModel):
        def batch(self, step: int, seed: int) -> Any:
            if step == per_epoch + 2:
                raise StoppedError
            return super().batch(step, seed)

    whole = fit(LanguageModel(given), schedule(total), seed=1)
    with pytest.raises(StoppedError):
        fit(Fragile(given), schedule(total), seed=1, checkpoint=tmp_path / "run.pt", save_every=1)
    resumed = fit(LanguageModel(given), schedule(total), seed=1, checkpoint=tmp_path / "run.pt", save_every=1)
    assert resumed.resumed_at == per_epoch + 2
    assert resumed.losses == whole.losses
    assert resumed.metrics == whole.metrics
    states = [dict(outcome.model.state_dict()) for outcome in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0] if torch.is_tensor(states[0][name]))


@pytest.mark.slow
def test_it_learns_and_a_study_can_call_it() -> None:
    options = {"fast": True, "lr": 5.0}
    found = language_model.train(Static(8, total_steps=60), 0, **options)
    start = language_model.train(Static(8, total_steps=1), 0, **options)
    assert found["perplexity"] < 0.6 * start["perplexity"]
    assert found == language_model.train(Static(8, total_steps=60), 0, **options)
    assert math.log(found["perplexity"]) == pytest.approx(found["loss"])
    assert 0 < found["unknown"] < 0.3
