"""A task small enough to train in a test: real images, a net with dropout, momentum, state between batches."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from support.script import Script
from support.task import Task, drop_at, epoch_order
from torch import Tensor, nn
from torch.nn import functional as F

from cpt_fx import recipes


class Digits(Task):
    """A perceptron on scikit-learn's digits, whose rate is quartered after every epoch."""

    metric = "accuracy"
    better = "higher"
    recipe = recipes.paper()

    def __init__(self, lr: float = 0.1, batch: int = 64) -> None:
        bunch = load_digits()
        self.images = torch.tensor(bunch.data, dtype=torch.float32) / 16
        self.labels = torch.tensor(bunch.target)
        self.lr, self.size = lr, batch
        self.steps_per_epoch = 1200 // batch
        self.seen = 0

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)

    def learning_rate(self, step: int, total_steps: int) -> float | None:
        return drop_at(self.lr, step, total_steps)

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        epoch, place = divmod(step, self.steps_per_epoch)
        chosen = epoch_order(1200, epoch, seed)[place * self.size : (place + 1) * self.size]
        return self.images[chosen], self.labels[chosen]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.seen += len(batch[0])
        return F.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        right = model(self.images[1200:]).argmax(1) == self.labels[1200:]
        return {"accuracy": right.float().mean().item(), "seen": float(self.seen)}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def make_task(options: argparse.Namespace) -> Task:
    return Digits(options.lr or 0.1, options.batch or 64)


SCRIPT = Script(
    description="Digits.",
    make_task=make_task,
    presets={"slow": {"lr": 0.01, "steps": 30}},
    fast={"steps": 20},
)

if __name__ == "__main__":
    SCRIPT.main()
