"""Train a BERT from transformers to tell whether one text entails another, under a precision schedule.

    python examples/entailment.py                          # pairs of words from WordNet: a few minutes on one core
    python examples/entailment.py --preset xnli --data path/to/xnli --language de
    python examples/entailment.py --data path/to/snli --model bert-base-uncased --epochs 2 --lr 2e-5
    python examples/entailment.py --fast                   # a few seconds, nothing to fetch

--data is `wordnet` (noun pairs from a Debian package), `python` (Python's own classes), or a folder with SNLI (jsonl)
or XNLI (tsv or jsonl). --model is any checkpoint of transformers by name or path, with its own tokenizer, or `tiny`:
a few layers with random weights, and a vocabulary built from the training pairs.

**`wordnet` and `python` are lexical entailment, not natural language inference**: they ask whether one of two
words is a kind of the other, and have no sentences. Guessing is right in one of three cases. No test word is seen in
training; support/lexical.py describes the other measures that keep single words from revealing the label. Their metric
is always called `lexical_accuracy`.

All linear layers are quantized, and the two products of attention, the pooler and the classifier.
"""

from __future__ import annotations

import argparse
from typing import Any, cast

import torch
from support.pair_models import checkpoint, tiny
from support.pairs import Numbers, Tokenizer, load
from support.script import Script
from support.task import Task, epoch_order
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx import recipes


class Entailment(Task):
    """Three labels for each pair of texts; AdamW, and a learning rate that falls to zero."""

    better = "higher"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.recipe = recipes.paper()
        self.pairs = load(options.data, options.language)
        self.metric = "lexical_accuracy" if self.pairs.lexical else "accuracy"
        if options.model == "tiny":
            self.build, tokenizer = tiny(self.pairs, options.length, options.layers)
        else:
            self.build, tokenizer = checkpoint(options.model, self.pairs, options.length)
        self.train = self._numbers(tokenizer, "train", options.train_pairs)
        self.test = self._numbers(tokenizer, "test", options.test_pairs)
        self.steps_per_epoch = -(-len(self.train.labels) // options.batch)  # the last batch of an epoch may be smaller

    def _numbers(self, tokenizer: Tokenizer, part: str, limit: int | None) -> Numbers:
        pairs = getattr(self.pairs, part)
        if not pairs:
            raise ValueError(f"{self.pairs.name}: there are no {part} pairs")
        return tokenizer(pairs[:limit], self.options.length)

    def model(self) -> nn.Module:
        """Return an unmodified classifier of transformers."""
        return self.build()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=self.options.lr, weight_decay=self.options.weight_decay)

    def learning_rate(self, step: int, total_steps: int) -> float:
        """Return the rate, which falls linearly."""
        return cast(float, self.options.lr * (1 - step / total_steps))

    def batch(self, step: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return encoded pairs, and their labels."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = epoch_order(len(self.train.labels), epoch, seed)
        chosen = order[place * self.options.batch :][: self.options.batch]
        return self.train[chosen], self.train.labels[chosen]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross entropy."""
        texts, labels = batch
        return F.cross_entropy(model(**texts).logits, labels)

    def after_backward(self, model: nn.Module) -> None:
        """Clip the gradient, as the trainer of transformers does."""
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the share of test pairs that get the right label, and their cross entropy."""
        right, loss, count = 0, 0.0, len(self.test.labels)
        for start in range(0, count, 128):
            chosen = slice(start, start + 128)
            scores, labels = model(**self.test[chosen]).logits, self.test.labels[chosen]
            right += int((scores.argmax(dim=1) == labels).sum())
            loss += float(F.cross_entropy(scores, labels, reduction="sum"))
        return {self.metric: right / count, "loss": loss / count}


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("entailment")
    group.add_argument("--language", default="de", help="of XNLI, two letters (default: %(default)s)")
    group.add_argument(
        "--length", type=int, default=32, help="tokens in a pair, longer ones are cut (default: %(default)s)"
    )
    group.add_argument("--layers", type=int, default=2, help="of --model tiny (default: %(default)s)")
    group.add_argument("--train-pairs", type=int, metavar="N", help="train on the first N pairs only")
    group.add_argument("--test-pairs", type=int, metavar="N", help="evaluate on the first N pairs only")
    parser.set_defaults(data="wordnet", model="tiny", epochs=1, batch=64, lr=1e-3)


XNLI = {
    "data": "xnli", "language": "de", "model": "bert-base-multilingual-cased", "length": 128, "batch": 64, "epochs": 2,
    "lr": 1e-5, "q_min": 5, "q_max": 8, "cycles": 2, "period": "published", "eval_bits": "current",
}  # fmt: skip
PRESETS = {"xnli": XNLI, "xnli-6": XNLI | {"q_max": 6}}
FAST = {"data": "python", "batch": 16, "layers": 1, "length": 40, "steps": 24, "cycles": 2, "test_pairs": 96}

SCRIPT = Script(description=__doc__, presets=PRESETS, fast=FAST, add_options=add_options, make_task=Entailment)


def train(schedule: Any, seed: int = 0, **options: Any) -> dict[str, float]:
    """Train under a schedule and return the metrics; a study calls this."""
    return SCRIPT.train(schedule, seed, **options)


if __name__ == "__main__":
    SCRIPT.main()
