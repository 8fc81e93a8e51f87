"""Training on integers: every eligible product runs there, and the loss falls as in simulated execution.

The test of quality. Two executions of one recipe differ in rounding of float32 only, but training amplifies the last
bit: after some steps two runs are as different as two seeds of the stochastic rounding. So both are trained with
several seeds, from the same weights on the same batches, and the mean final losses may differ by no more than the
standard error of their difference, times 3, plus 1 % of how far the loss has come down.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.integer.counts import ProductOutcome
from cpt_fx.schedules import named
from tests.integer.models import CONVOLUTIONS_PRODUCTS, ENCODER_PRODUCTS, Convolutions, Encoder, always, both, counts

__all__ = ["always"]
SEEDS, STEPS, TAIL = 4, 100, 20
Batches = Callable[[torch.Generator], tuple[Tensor, Tensor]]


@cache
def text() -> tuple[Tensor, int]:
    """Return the letters of the Zen of Python, or where that is not installed as a file, of this one."""
    this = Path(sys.modules["os"].__file__ or __file__).with_name("this.py")
    letters = (this if this.exists() else Path(__file__)).read_text()
    alphabet = sorted(set(letters))
    return torch.tensor([alphabet.index(letter) for letter in letters]), len(alphabet)


def letters(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a batch of pieces of text, and the same one letter later."""
    found, _ = text()
    starts = torch.randint(0, len(found) - 17, (16,), generator=generator)
    pieces = torch.stack([found[start : start + 17] for start in starts.tolist()])
    return pieces[:, :-1], pieces[:, 1:]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return the images of digits that scikit-learn brings along."""
    bunch = pytest.importorskip("sklearn.datasets").load_digits()
    return torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16, torch.tensor(bunch.target)


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a batch of images with their labels."""
    found, labels = digits()
    chosen = torch.randint(0, len(labels), (64,), generator=generator)
    return found[chosen], labels[chosen]


def transformer() -> nn.Module:
    return Encoder(symbols=text()[1], width=32, heads=2, positions=16)


def network() -> nn.Module:
    return Convolutions(width=12)


CASES = {
    "transformer": (transformer, letters, ENCODER_PRODUCTS),
    "convolutions": (network, images, CONVOLUTIONS_PRODUCTS),
}


def losses(model: nn.Module, batches: Batches, execution: str, seed: int) -> tuple[list[float], nn.Module]:
    """Train from the weights of a model; a seed is for the noise of rounding alone."""
    schedule = named("CR", q_min=4, q_max=8, total_steps=STEPS)
    result = cpt_fx.transform(copy.deepcopy(model), schedule, recipe="integer", execution=execution)
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(0)
    torch.manual_seed(seed)
    found = []
    for _ in range(STEPS):
        x, y = batches(data)
        loss = F.cross_entropy(result(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        found.append(float(loss.detach()))
    return found, result


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_loss_falls_as_in_simulated_execution(kind: str) -> None:
    make, batches, products = CASES[kind]
    torch.manual_seed(0)
    model = make()
    curves: dict[str, list[list[float]]] = {"integer": [], "simulated": []}
    for seed in range(SEEDS):
        for execution, found in curves.items():
            curve, result = losses(model, batches, execution, seed)
            found.append(curve)
            if execution == "integer":
                # Every product of every step, at widths from 4 to 8, forward and backward: none in floating point.
                table = counts(result)
                lefts = products - (kind == "convolutions")  # an image asks for no gradient
                assert table[:, ProductOutcome.INTEGER].tolist() == [STEPS * products, STEPS * lefts, STEPS * products]
                assert table[:, 1:].sum() == 0
                assert all(view.on_integers for view in cpt_fx.inspect(result).products)
    final = {name: torch.tensor([sum(curve[-TAIL:]) / TAIL for curve in found]) for name, found in curves.items()}
    difference = float((final["integer"].mean() - final["simulated"].mean()).abs())
    spread = float((final["integer"].var() / SEEDS + final["simulated"].var() / SEEDS).sqrt())
    fallen = curves["simulated"][0][0] - float(final["simulated"].mean())
    assert fallen > 0.5, "the loss has to fall, or there is nothing to compare"
    assert difference < 3 * spread + 0.01 * fallen, (final, fallen)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_first_step_is_the_same(kind: str) -> None:
    """Before the last bit is amplified: with one seed, the first losses agree to rounding."""
    make, batches, _ = CASES[kind]
    torch.manual_seed(0)
    model = make()
    first, second = (losses(model, batches, execution, 0)[0] for execution in ("integer", "simulated"))
    assert first[0] == pytest.approx(second[0], rel=2e-3)


def test_counts_start_at_zero_and_are_no_part_of_a_checkpoint() -> None:
    ours, theirs = both(network())
    assert counts(ours).sum() == 0
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours(images(torch.Generator())[0])
    assert counts(ours).sum() == CONVOLUTIONS_PRODUCTS
    # A trial run leaves no trace.
    cpt_fx.inspect(ours).verify(images(torch.Generator())[0])
    assert counts(ours).sum() == CONVOLUTIONS_PRODUCTS
