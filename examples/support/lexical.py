"""Lexical entailment: is one of two words a kind of the other? From WordNet, or from Python's own classes.

This is not natural language inference: there are no sentences. Each true pair (dog, animal) makes three examples: (dog,
animal) entails, (animal, dog) is reversed, and one of its words with a word of another pair is unrelated. So guessing
is right in one of three cases. What a model can know without comparing the words is limited:

* Words are divided between training and test, and pairs that have one of each are left out. No word of a test pair, on
  either side, has been seen in training.
* Unrelated pairs recombine the words of true pairs, half of them in each order. So a word by itself says nothing about
  whether a pair is related.
* A general word, such as "plant", occurs in few of the true pairs, so that a model gains little by learning the most
  general words.

What remains, and what a model with random weights can learn here, is form: what general words look like and how they
end, and that a bluebird is a bird.
"""

from __future__ import annotations

import importlib
import math
import random
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LABELS = ("entails", "reversed", "unrelated")
Pair = tuple[str, str, int]


@dataclass(frozen=True)
class Lexical:
    """Pairs of words and the number of their label."""

    name: str
    train: list[Pair]
    test: list[Pair]


def in_test(word: str, part: int) -> bool:
    """Whether a word belongs to the test: one in `part` does, the same on every machine."""
    return zlib.crc32(word.encode()) % part == 0


def examples(
    close: Mapping[str, set[str]], above: Callable[[str], set[str]], test: bool, part: int, limit: int = 12
) -> list[Pair]:
    """Return labelled pairs of the training or the test words.

    Args:
        close: the general words that make true pairs with each word.
        above: all words that are as general as a word or more, whether they make pairs with it or not.
        test: use the test words, or else the training words.
        part: one word in `part` is a test word.
        limit: the largest number of true pairs that a general word occurs in.
    """
    draw = random.Random(0)
    words = sorted(word for word in close if in_test(word, part) == test)
    pairs = [(word, other) for word in words for other in sorted(close[word]) if in_test(other, part) == test]
    draw.shuffle(pairs)
    counts: Counter[str] = Counter()
    kept = []
    for word, general in pairs:
        if counts[general] < limit and word not in above(general):
            counts[general] += 1
            kept.append((word, general))
    found: list[Pair] = []
    for word, general in kept:
        other = _unrelated(word, kept, above, draw)
        if other is None:
            continue  # all three examples or none: the labels stay balanced
        mixed = (word, other) if draw.random() < 0.5 else (other, word)
        found += [(word, general, 0), (general, word, 1), (*mixed, 2)]
    return found


def _unrelated(
    word: str, pairs: list[tuple[str, str]], above: Callable[[str], set[str]], draw: random.Random
) -> str | None:
    """Return the general word of another pair that is neither above nor below a word, if a few attempts find one."""
    for _ in range(20):
        other = draw.choice(pairs)[1]
        if other != word and other not in above(word) and word not in above(other):
            return other
    return None


def read_wordnet(path: Path, levels: int = 3) -> Lexical:
    """Return noun pairs from WordNet's data.noun: a word and what it is a kind of, up to `levels` levels above it.

    Only single words of 3 to 14 lowercase letters are used. A word stands for all its senses.
    """
    words: dict[str, list[str]] = {}
    parents: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.startswith("  "):
                continue  # the licence
            fields = line.partition(" | ")[0].split()
            try:
                count = int(fields[3], 16)
                pointers = fields[4 + 2 * count :]
                words[fields[0]] = [name for name in fields[4 : 4 + 2 * count : 2] if re.fullmatch("[a-z]{3,14}", name)]
                parents[fields[0]] = [
                    pointers[at + 1] for at in range(1, 4 * int(pointers[0]), 4) if pointers[at] == "@"
                ]
            except (IndexError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: this is no line of WordNet's data.noun") from error
    senses = defaultdict(list)
    for synset, names in words.items():
        for name in names:
            senses[name].append(synset)

    def upwards(synsets: Iterable[str], most: float = math.inf) -> set[str]:
        found: set[str] = set()
        level, height = set(synsets), 0
        while level and height < most:
            level = {parent for synset in level for parent in parents[synset]} - found
            found |= level
            height += 1
        return found

    def names_of(synsets: Iterable[str]) -> set[str]:
        return {name for synset in synsets for name in words[synset]}

    @cache
    def above(word: str) -> set[str]:
        return names_of(upwards(senses[word]).union(senses[word]))  # synonyms as well: they are related

    close = {word: names_of(upwards(synsets, levels)) - {word} for word, synsets in senses.items()}
    train, test = (examples(close, above, test, part=4) for test in (False, True))
    return Lexical("WordNet noun pairs (lexical entailment)", train, test)


def wordnet() -> Lexical:
    """Return noun pairs of WordNet, which Debian packages."""
    from support import fetch

    return read_wordnet(fetch.debian("wordnet-base") / "usr/share/wordnet/data.noun")


def python_classes() -> Lexical:
    """Return pairs of Python's own classes: a KeyError is a LookupError."""
    modules = [importlib.import_module(name) for name in ("ast", "builtins", "collections.abc", "io", "numbers")]
    classes = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__name__ == name and value is not object
    }
    above = {
        name: {other.__name__ for other in value.__mro__[1:] if classes.get(other.__name__) is other}
        for name, value in classes.items()
    }
    train, test = (examples(above, above.__getitem__, test, part=2) for test in (False, True))
    return Lexical("Python's classes (lexical entailment)", train, test)


NAMED: dict[str, Callable[[], Lexical]] = {"wordnet": wordnet, "python": python_classes}
"""Small datasets that need no path."""
