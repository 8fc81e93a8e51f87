"""Pairs of texts for entailment: their file formats, and their encoding as numbers."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from support import lexical

NLI = ("entailment", "neutral", "contradiction")
Pair = tuple[str, str, int]


@dataclass(frozen=True)
class Pairs:
    """Pairs of texts and the number of their label, for training and for the test."""

    name: str
    labels: tuple[str, ...]
    train: Sequence[Pair]
    test: Sequence[Pair]
    units: Literal["words", "trigrams"]
    """The units of a vocabulary that is built from these texts."""
    lexical: bool = False
    """Pairs of words, not of sentences: lexical entailment, not natural language inference."""


@cache
def load(data: str, language: str) -> Pairs:
    """Return pairs by the name of a small dataset, or by path."""
    if data in lexical.NAMED:
        found = lexical.NAMED[data]()
        return Pairs(found.name, lexical.LABELS, found.train, found.test, "trigrams", lexical=True)
    folder = Path(data)
    if not folder.is_dir():
        raise FileNotFoundError(f"--data {data}: no such folder. {_WHERE}")
    if list(folder.rglob("snli_1.0_*.jsonl")):
        train, test = (_one(folder, [f"snli_1.0_{part}.jsonl"]) for part in ("train", "test"))
        return Pairs("SNLI", NLI, _labelled(train), _labelled(test), "words")
    test = _one(folder, ["xnli.test.tsv", "xnli.test.jsonl"])
    english = ["multinli_1.0_train.jsonl", "multinli_1.0_train.txt"] if language == "en" else []
    train = _one(folder, [f"multinli.train.{language}.tsv", f"multinli.train.{language}.jsonl", *english])
    return Pairs(f"XNLI ({language})", NLI, _labelled(train), _labelled(test, language), "words")


_WHERE = (
    f"Give one of {', '.join(lexical.NAMED)}, or a folder. SNLI: unpack snli_1.0.zip there, from "
    "https://nlp.stanford.edu/projects/snli. XNLI: unpack XNLI-1.0.zip there (xnli.test.tsv) and XNLI-MT-1.0.zip "
    "(multinli.train.LANGUAGE.tsv, the training pairs in 15 languages), from "
    "https://github.com/facebookresearch/XNLI"
)


def _one(folder: Path, names: Sequence[str]) -> Path:
    """Return the first of these files that is somewhere in the folder."""
    for name in names:
        found = sorted(folder.rglob(name))
        if found:
            return found[0]
    raise FileNotFoundError(f"--data {folder}: there is no {' or '.join(names)} in it. {_WHERE}")


TEXTS = (("sentence1", "sentence2"), ("premise", "hypo"), ("premise", "hypothesis"))
"""Names of the columns of the two texts: in SNLI, MultiNLI and XNLI; in XNLI's training pairs; elsewhere."""
LABELS = ("gold_label", "label")


def _labelled(path: Path, language: str | None = None) -> list[Pair]:
    """Return the pairs of a file, in one language if it has several, without those that annotators disagreed on."""
    pairs: list[Pair] = []
    disagreed, languages = 0, set()
    for place, row in _rows(path):
        languages.add(row.get("language"))
        if language is not None and row.get("language") != language:
            continue
        texts = next((names for names in TEXTS if all(row.get(name) is not None for name in names)), None)
        label = next((row[name] for name in LABELS if row.get(name) is not None), None)
        if texts is None or label is None:
            raise ValueError(f"{path}, line {place}: two texts and a label are expected, there are {', '.join(row)}")
        if label == "-":
            disagreed += 1
            continue
        label = "contradiction" if label == "contradictory" else label  # the name in XNLI's training pairs
        if label not in NLI:
            raise ValueError(f"{path}, line {place}: unknown label {label!r}; labels are {', '.join(NLI)} and -")
        pairs.append((row[texts[0]], row[texts[1]], NLI.index(label)))
    if not pairs:
        there = ", ".join(sorted(str(name) for name in languages)) or "no lines"
        raise ValueError(f"{path}: no labelled pairs in language {language!r}; there is {there}. Change --language")
    if disagreed:
        print(f"{path.name}: {disagreed} pairs are left out, on whose label annotators disagreed", file=sys.stderr)
    return pairs


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield the lines of a table with their numbers: JSON in each line, or tab-separated columns under a heading."""
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix != ".jsonl":
            reader = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            yield from ((reader.line_num, row) for row in reader)
            return
        for place, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}, line {place}: this is not JSON ({error})") from error
                yield place, row


@dataclass(frozen=True)
class Numbers:
    """Pairs as a BERT reads them, all of one length."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor
    labels: Tensor

    def __getitem__(self, chosen: Tensor | slice) -> dict[str, Tensor]:
        """Return the arguments of a model for some of the pairs."""
        return {name: getattr(self, name)[chosen] for name in ("input_ids", "attention_mask", "token_type_ids")}


class Tokenizer(Protocol):
    """A function that encodes pairs as numbers."""

    def __call__(self, pairs: Sequence[Pair], length: int, /) -> Numbers:
        """Return pairs as numbers, cut to a length."""


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
PAD, UNKNOWN, FIRST, SEPARATOR = range(4)


class Vocabulary:
    """The most frequent words or parts of words of some texts, for a model that has no tokenizer of its own."""

    def __init__(self, pairs: Sequence[Pair], units: Literal["words", "trigrams"], limit: int = 8000) -> None:
        self.split: Callable[[str], Iterable[str]] = _words if units == "words" else _trigrams
        found = Counter(unit for one, other, _ in pairs for text in (one, other) for unit in self.split(text))
        self.entries = (*SPECIAL, *(unit for unit, _ in found.most_common(limit)))
        self.numbers = {entry: number for number, entry in enumerate(self.entries)}

    def __call__(self, pairs: Sequence[Pair], length: int) -> Numbers:
        """Return pairs between marker tokens, truncated if they are too long: the longer text first."""
        ids = torch.full((len(pairs), length), PAD)
        kinds = torch.zeros_like(ids)
        for row, (one, other, _) in enumerate(pairs):
            first, second = ([self.numbers.get(unit, UNKNOWN) for unit in self.split(text)] for text in (one, other))
            while len(first) + len(second) + 3 > length:
                (first if len(first) > len(second) else second).pop()
            tokens = [FIRST, *first, SEPARATOR, *second, SEPARATOR]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            kinds[row, len(first) + 2 : len(tokens)] = 1
        return Numbers(ids, (ids != PAD).long(), kinds, torch.tensor([label for _, _, label in pairs]))


def _words(text: str) -> list[str]:
    return text.lower().split()


def _trigrams(word: str) -> list[str]:
    """Return each letter with its neighbours, so that beginnings and endings of new words are in the vocabulary."""
    padded = f" {word} "
    return [padded[place : place + 3] for place in range(len(word))]
