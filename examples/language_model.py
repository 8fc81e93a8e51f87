"""Train a language model, an LSTM or a small transformer, under a precision schedule.

    python examples/language_model.py                     # King James text, words: about a minute on one core
    python examples/language_model.py --model transformer --optimizer adam --lr 0.002 --layers 2
    python examples/language_model.py --level character --data some.txt
    python examples/language_model.py --preset ptb --data path/to/ptb
    python examples/language_model.py --fast              # a few seconds, nothing to fetch

--data is `kjv` (the King James Bible, from a Debian package), `python` (the help topics of this Python), a text file,
or a folder with PTB (ptb.train.txt, ...) or WikiText (wiki.train.tokens, ...). A single text is split by position:
the first 90 % are for training, the last 5 % for the test. So the test part of `kjv` is the end of the New Testament,
from Colossians 4 on: harder than a sample of all verses would be. The vocabulary holds the most frequent words of the
training part; all others count as one word, <unk>, whose share in the test is the column `unknown`. Perplexities with
different vocabularies cannot be compared.

The gates of the LSTM and the decoder are quantized, or the products of the transformer. Embeddings stay in full
precision.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from support.script import Script
from support.task import Task
from support.text import LEVELS, columns, corpus
from support.text_models import MODELS, LSTMModel, TransformerModel
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx import recipes

RATES = ("cosine", "constant", "plateau")


class LanguageModel(Task):
    """Predict the next word or character. The state of an LSTM is carried from each batch to the next."""

    metric = "perplexity"
    better = "lower"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.recipe = recipes.paper()
        self.corpus = corpus(options.data, options.level, options.vocabulary)
        self.streams = {part: columns(getattr(self.corpus, part), options.batch) for part in ("train", "valid", "test")}
        self.steps_per_epoch = (len(self.streams["train"]) - 1) // options.bptt
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"--bptt {options.bptt} and --batch {options.batch} need more text than the training part has, "
                f"{len(self.corpus.train)} words or characters"
            )
        self.state: tuple[Tensor, ...] | None = None  # of the last training batch
        self.best = math.inf  # loss on the validation part, for the plateau rule

    def model(self) -> nn.Module:
        """Return a plain model."""
        given = self.options
        if given.model not in MODELS:
            raise ValueError(f"unknown model {given.model!r}; there are {sorted(MODELS)}")
        made: LSTMModel | TransformerModel = MODELS[given.model](
            len(self.corpus.vocabulary), given.width, given.layers, given.dropout
        )
        self.first_state = made.first_state
        return made

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return plain SGD, as published, or Adam."""
        given = self.options
        if given.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), lr=given.lr, weight_decay=given.weight_decay)
        return torch.optim.SGD(model.parameters(), lr=given.lr, weight_decay=given.weight_decay)

    def learning_rate(self, step: int, total_steps: int) -> float | None:
        """Return the rate: a cosine to a twentieth, or constant; the plateau rule leaves it to `after_epoch`."""
        if self.options.rate == "plateau":
            return None  # the optimizer's own, which after_epoch divides
        highest: float = self.options.lr
        if self.options.rate == "constant":
            return highest
        return highest * (0.05 + 0.95 * (1 + math.cos(math.pi * step / total_steps)) / 2)

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor, bool]:
        """Return a piece of the text, the next token at each position, and whether the text starts over."""
        place = step % self.steps_per_epoch
        return (*self._piece("train", place * self.options.bptt), place == 0)

    def _piece(self, part: str, start: int) -> tuple[Tensor, Tensor]:
        """Return a piece of a text, and the next token at each of its positions."""
        stream = self.streams[part]
        end = min(start + self.options.bptt, len(stream) - 1)
        return stream[start:end], stream[start + 1 : end + 1]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross entropy, and keep the state that the model ends with."""
        tokens, following, starts_over = batch
        if starts_over or self.state is None:
            self.state = self.first_state(self.options.batch)
        logits, *state = model(tokens, *self.state)
        self.state = tuple(part.detach() for part in state)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())

    def after_backward(self, model: nn.Module) -> None:
        """Clip the gradient."""
        nn.utils.clip_grad_norm_(model.parameters(), self.options.clip)

    def after_epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Divide the rate by 4 if the validation loss has not improved."""
        if self.options.rate != "plateau":
            return
        loss = self._mean_loss(model, "valid")
        if loss < self.best:
            self.best = loss
            return
        for group in optimizer.param_groups:
            group["lr"] /= 4

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the perplexity of the test part."""
        loss = self._mean_loss(model, "test")
        return {"perplexity": math.exp(min(loss, 700.0)), "loss": loss, "unknown": self.corpus.unknown}

    def _mean_loss(self, model: nn.Module, part: str) -> float:
        state, total, count = self.first_state(self.options.batch), 0.0, 0
        for start in range(0, len(self.streams[part]) - 1, self.options.bptt):
            tokens, following = self._piece(part, start)
            logits, *state = model(tokens, *state)
            total += F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum").item()
            count += following.numel()
        return total / count

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch, and the best validation loss."""
        return {"state": self.state, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.state, self.best = state["state"], state["best"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of language models, and set the defaults."""
    group = parser.add_argument_group("language model")
    group.add_argument("--level", choices=LEVELS, default="word", help="default: %(default)s")
    group.add_argument("--vocabulary", type=int, metavar="N", help="keep the N most frequent words (default: 2000)")
    group.add_argument("--width", type=int, help="of embedding and layers (default: 128)")
    group.add_argument("--layers", type=int, default=1, help="default: %(default)s")
    group.add_argument("--dropout", type=float, default=0.0, help="default: %(default)s")
    group.add_argument("--bptt", type=int, metavar="N", help="positions in a batch (default: 20)")
    group.add_argument("--clip", type=float, default=0.25, help="norm of the gradient (default: %(default)s)")
    group.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd", help="default: %(default)s")
    group.add_argument(
        "--rate", choices=RATES, default="cosine", help="how the learning rate falls (default: %(default)s)"
    )
    parser.set_defaults(data="kjv", model="lstm", epochs=1, batch=32, lr=20.0, vocabulary=2000, width=128, bptt=20)


PTB = {
    "data": "ptb", "level": "word", "vocabulary": None, "model": "lstm", "width": 800, "layers": 1, "dropout": 0.5,
    "bptt": 35, "batch": 20, "optimizer": "sgd", "lr": 20.0, "rate": "plateau", "clip": 0.25, "epochs": 40, "q_min": 5,
    "q_max": 8, "cycles": 8, "period": "published", "eval_bits": "current",
}  # fmt: skip
PRESETS = {"ptb": PTB, "ptb-6": PTB | {"q_max": 6}}
FAST = {"data": "python", "vocabulary": 500, "width": 16, "batch": 8, "bptt": 8, "steps": 24, "cycles": 2}

SCRIPT = Script(description=__doc__, presets=PRESETS, fast=FAST, add_options=add_options, make_task=LanguageModel)


def train(schedule: Any, seed: int = 0, **options: Any) -> dict[str, float]:
    """Train under a schedule and return the metrics; a study calls this."""
    return SCRIPT.train(schedule, seed, **options)


if __name__ == "__main__":
    SCRIPT.main()
