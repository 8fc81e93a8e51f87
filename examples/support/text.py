"""Text for language models: its sources, and its encoding."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from support import lzw

UNKNOWN, END = "<unk>", "<eos>"
LEVELS = ("word", "character")
PARTS = ("train", "valid", "test")
SHARES = (0.90, 0.05, 0.05)
"""How a single text is split by position: the parts are the same on every machine."""

FILES = {
    "PTB": "ptb.{}.txt",
    "WikiText": "wiki.{}.tokens",
    "WikiText, raw": "wiki.{}.raw",
    "three files": "{}.txt",
}
"""Files of texts that are already split. All but the raw ones hold words between spaces, with rare words
replaced by <unk>."""


@dataclass(frozen=True)
class Text:
    """A text in three parts."""

    name: str
    train: str
    valid: str
    test: str
    words: bool = False
    """Whether spaces separate the words. Otherwise words, numbers and marks are separated, and letters lowercased."""


@dataclass(frozen=True)
class Corpus:
    """A text as numbers. The vocabulary is that of the training part."""

    name: str
    vocabulary: tuple[str, ...]
    train: Tensor
    valid: Tensor
    test: Tensor
    unknown: float
    """The share of the test part that is not in the vocabulary, and counts as one word, <unk>."""


@cache
def corpus(data: str, level: str, vocabulary: int | None) -> Corpus:
    """Return a text, by the name of a small one or by path, with only the most frequent words or characters."""
    if level not in LEVELS:
        raise ValueError(f"unknown level {level!r}: a text is read by {' or '.join(LEVELS)}")
    text = NAMED[data]() if data in NAMED else read(Path(data))
    split = str if level == "character" else _words_between_spaces if text.words else _words
    parts = {part: list(split(getattr(text, part))) for part in PARTS}
    for part, tokens in parts.items():
        if not tokens:
            raise ValueError(f"{text.name}: the {part} part is empty")
    entries = _entries(parts, vocabulary)
    numbers = {entry: number for number, entry in enumerate(entries)}
    other = numbers.get(UNKNOWN, 0)
    train, valid, test = (torch.tensor([numbers.get(token, other) for token in parts[part]]) for part in PARTS)
    unknown = (test == other).double().mean().item() if UNKNOWN in numbers else 0.0
    return Corpus(text.name, tuple(entries), train, valid, test, unknown)


def _entries(parts: dict[str, list[str]], limit: int | None) -> list[str]:
    """Return the most frequent entries of the training part, with <unk> first if some are left out."""
    if limit is not None and limit < 2:
        raise ValueError(f"--vocabulary must be at least 2, got {limit}")
    found = Counter(parts["train"])
    entries = [token for token, _ in found.most_common(limit)]
    complete = set(entries)
    if UNKNOWN not in complete and all(complete.issuperset(tokens) for tokens in parts.values()):
        return entries
    others = [token for token in entries if token != UNKNOWN]
    return [UNKNOWN, *(others if limit is None else others[: limit - 1])]


def read(path: Path) -> Text:
    """Return the text of a file, or of a folder with three files."""
    if path.is_file():
        return cut(path.name, path.read_text(encoding="utf-8"))
    if not path.is_dir():
        raise FileNotFoundError(
            f"--data {path}: no such file or folder. Give one of {', '.join(NAMED)}, a text file, or a folder with "
            f"{_expected()}"
        )
    for name, pattern in FILES.items():
        files = [path / pattern.format(part) for part in PARTS]
        missing = [file.name for file in files if not file.exists()]
        if not missing:
            train, valid, test = (file.read_text(encoding="utf-8") for file in files)
            return Text(name, train, valid, test, words=not name.endswith("raw"))
        if len(missing) < len(files):
            raise FileNotFoundError(f"--data {path}: {name} lacks {', '.join(missing)}")
    raise FileNotFoundError(
        f"--data {path}: there is no text that is cut into three files. Put there {_expected()}. PTB as prepared by "
        "Mikolov is in the folder data of simple-examples.tgz; WikiText-2 and WikiText-103 are published as zip files "
        "that hold these three"
    )


def _expected() -> str:
    listed = {name: ", ".join(pattern.format(part) for part in PARTS) for name, pattern in FILES.items()}
    return "; or ".join(f"{files} ({name})" for name, files in listed.items())


def cut(name: str, text: str) -> Text:
    """Split a text into its parts, at ends of lines."""
    lines = text.splitlines()
    first, second = (int(len(lines) * sum(SHARES[:count])) for count in (1, 2))
    return Text(name, "\n".join(lines[:first]), "\n".join(lines[first:second]), "\n".join(lines[second:]))


def _words(text: str) -> Iterable[str]:
    for line in text.splitlines():
        found = re.findall(r"\w+(?:['’]\w+)*|[^\w\s]", line.lower())
        if found:
            yield from found
            yield END


def _words_between_spaces(text: str) -> Iterable[str]:
    for line in text.splitlines():
        found = line.split()
        if found:
            yield from found
            yield END


def king_james() -> Text:
    """Return the King James Bible, which Debian packages: 31,102 verses, one per line, without their numbers."""
    from support import fetch

    return cut("King James Bible", verses((fetch.debian("bible-kjv-text") / "usr/lib/bible.data").read_bytes()))


def verses(data: bytes) -> str:
    """Return the verses in the file of Debian's package.

    It begins with a title; at byte 84 are the size of a window of text and the number of windows, then the start of
    each and the end of the last, then three bytes that mark `compress`, and the windows, each packed separately.
    """
    if not data.startswith(b"EC02Compressed Data File"):
        raise ValueError("bible.data does not begin as the file of Debian's bible-kjv-text 4.38 does")
    _, count = struct.unpack_from(">2I", data, 84)
    places = struct.unpack_from(f">{count + 1}I", data, 92)
    text = b"".join(lzw.unpack(data[first:last]) for first, last in pairwise(places))
    found = re.findall(r"^[1-3]?[A-Z][A-Za-z]*\d+:\d+ (.*)$", text.decode("ascii"), flags=re.MULTILINE)
    return "\n".join(found)


def python_topics() -> Text:
    """Return the English chapters of the language reference that every Python includes for its `help()`."""
    from pydoc_data.topics import topics

    return cut("Python's help topics", "\n".join(topics[name] for name in sorted(topics)))


NAMED: dict[str, Callable[[], Text]] = {"kjv": king_james, "python": python_topics}
"""Small texts that need no path."""


def columns(stream: Tensor, count: int) -> Tensor:
    """Lay a stream out in columns that are read side by side, (positions, columns); the remainder is dropped."""
    rows = len(stream) // count
    if rows < 2:
        raise ValueError(f"a text of {len(stream)} words or characters is too short for a batch of {count}")
    return stream[: rows * count].view(count, rows).t().contiguous()
