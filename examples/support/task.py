"""The interface of a domain: all that the training loop and the study know about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cpt_fx.recipes import Recipe


class Task(ABC):
    """A model, its data and its training. Only the recipe and the exclusions are about precision."""

    metric: str
    """The key of `evaluate` that runs are compared by."""
    better: Literal["higher", "lower"]
    steps_per_epoch: int
    recipe: Recipe
    exclude: tuple[str | type[nn.Module], ...] = ()
    """What `cpt_fx.transform` leaves in full precision: names, globs or types."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a fresh, plain model. The seed is set."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters."""

    @abstractmethod
    def batch(self, step: int, seed: int) -> Any:
        """Return the batch of a step. It depends on step and seed only, so that a resumed run sees the same data."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the training loss."""

    def run(self, model: nn.Module, batch: Any) -> object:
        """Run the model on a training batch as in evaluation, for batch norm's statistics; by default by `loss`."""
        return self.loss(model, batch)

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return metrics on held-out data. The model is in evaluation mode, and gradients are off."""

    def learning_rate(self, step: int, total_steps: int) -> float | None:
        """Return the rate of a step, or None to keep the optimizer's own."""
        return None

    def after_backward(self, model: nn.Module) -> None:
        """Change the gradients before the optimizer uses them, by clipping for example."""

    def after_epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Run after each epoch. The model is in evaluation mode, and gradients are off."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state carried from one batch to the next, such as that of an LSTM."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""


def epoch_order(size: int, epoch: int, seed: int) -> Tensor:
    """Return the order in which an epoch sees its examples."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    return torch.randperm(size, generator=generator)


def drop_at(lr: float, step: int, total_steps: int, parts: tuple[float, ...] = (0.5, 0.75)) -> float:
    """Return a rate that falls to a tenth at each of these parts of the run."""
    return lr * 0.1 ** sum(step >= int(part * total_steps) for part in parts)
