"""The noise of stochastic rounding: no number overflows, all executions agree, and nothing tells it from chance."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from cpt_fx.formats import Rounding
from cpt_fx.quantizers import kernels as simulate
from cpt_fx.quantizers import noise
from cpt_fx.quantizers.numerics import Grid
from tests.native.kernel_kinds import KINDS, kernels_of

Seed = tuple[int, int]
Hash = Callable[[Seed, int, int], Tensor]
"""Gives the 24 bits of so many places, from a place on."""
SEEDS: list[Seed] = [(0, 0), (0, 1), (1, 0), (5, 77), (2**30 - 1, 2**30 - 2), (990_625_871, 143_287_006)]
LAGS = (1, 2, 3, 5, 7, 8, 9, 16, 31, 32, 33, 49, 64, 100, 127, 128, 196, 255, 256, 257, 512, 768, 1000, 1024, 3072,
        4096, 12544, 16384, 65536)  # fmt: skip


def tensor(seed: Seed) -> Tensor:
    return torch.tensor(seed, dtype=torch.int32)


def ours(seed: Seed, start: int, count: int) -> Tensor:
    """What `noise.uniform` gives; behind the first places by the definition, which a test below compares with it."""
    if start:
        return defined(seed, start, count)
    return (noise.uniform(tensor(seed), torch.empty(count)).double() * 2**24).long()


def defined(seed: Seed, start: int, count: int, rounds: int = 2, folds: bool = True, squares: bool = True) -> Tensor:
    """The hash as it is written down, and what is left of it when parts are missing."""
    places = torch.arange(start, start + count)
    factor = 2 * (seed[1] % 2**30 + (seed[1] % 2**30 >> 15 if folds else 0)) + 1
    mixed = (places * 0x2545F491 + seed[0]) % 2**30
    for _ in range(rounds):
        mixed = (mixed + (mixed >> 15 if folds else 0)) * ((2 * mixed if squares else 0x1E3779B8) + factor) % 2**30
    return mixed >> 6


def counter(seed: Seed, start: int, count: int) -> Tensor:
    """A plain linear congruential sequence of the place."""
    return (torch.arange(start, start + count) * 0x2545F491 + seed[0] + (seed[1] << 13)) % 2**30 >> 6


# What follows would be a standard normal number each, for numbers drawn by chance.


def of_cells(cells: Tensor, count: int) -> float:
    """Chi-square of how often each cell is met, as a number of standard deviations."""
    expected = cells.numel() / count
    square = float(((torch.bincount(cells, minlength=count) - expected) ** 2).sum()) / expected
    return (square - (count - 1)) / math.sqrt(2 * (count - 1))


def of_bits(bits: Tensor) -> Iterator[float]:
    """How far each of 24 bits is from being set half of the time."""
    for bit in range(24):
        yield (float((bits >> bit & 1).sum()) - bits.numel() / 2) / math.sqrt(bits.numel() / 4)


def of_pairs(one: Tensor, two: Tensor) -> Iterator[float]:
    """Whether two rows of numbers know of each other: their correlation, and how they fall on a square."""
    x, y = ((part.double() + 0.5) / 2**24 - 0.5 for part in (one, two))
    yield float(x @ y) * 12 / math.sqrt(x.numel())
    yield of_cells((one >> 19) * 32 + (two >> 19), 1024)


def statistics(made: Hash, start: int = 0, count: int = 1 << 17) -> list[float]:
    """Uniformity, bits, serial correlation, and what becomes of a place and of a seed when one bit of it changes."""
    found: list[float] = []
    for seed in SEEDS:
        bits = made(seed, start, count)
        found += [of_cells(bits >> 14, 1024), of_cells(bits & 1023, 1024), *of_bits(bits)]
        found += [z for lag in LAGS for z in of_pairs(bits[:-lag], bits[lag:])]
        # Rounding up with the odds of a fraction.
        for fraction in (1 / 3, 0.1, 0.999, 2**-7):
            ups = float((bits < fraction * 2**24).sum())
            found.append((ups - fraction * count) / math.sqrt(count * fraction * (1 - fraction)))
        for bit in range(17):
            pairs = bits.view(-1, 2, 1 << bit)
            found += of_bits((pairs[:, 0] ^ pairs[:, 1]).reshape(-1))
    some = 1 << 13
    for first, second in SEEDS[2:]:
        bits = made((first, second), start, some)
        others = [(first ^ 1 << bit, second) for bit in range(30)] + [(first, second ^ 1 << bit) for bit in range(30)]
        others += [(first + 1, second), (first, second + 1), (first + 1, second + 1), (second, first)]
        for other in others:
            changed = made(other, start, some)
            found += [*of_bits(bits ^ changed), *of_pairs(bits, changed)]
    return found


CHANCE = 6.5
"""Chance passes 6.5 standard deviations once in 1e10, and here are 3e4 numbers; hashes that are too poor pass 20."""


@pytest.mark.parametrize("start", [0, 2**24 - 7, 2**29])
def test_nothing_tells_it_from_chance(start: int) -> None:
    found = statistics(ours, start)
    assert len(found) > 9000 and max(map(abs, found)) < CHANCE
    # Nor is it more even than chance: of all these numbers a third is beyond one standard deviation.
    assert 0.30 < sum(abs(z) > 1 for z in found) / len(found) < 0.335


POOR: dict[str, Hash] = {
    "a linear sequence": counter,
    "one round": partial(defined, rounds=1),
    "without folds": partial(defined, folds=False),
    "without squares": partial(defined, squares=False),
}


@pytest.mark.parametrize("name", POOR)
def test_a_poor_hash_is_told(name: str) -> None:
    assert max(map(abs, statistics(POOR[name]))) > 20


# The same everywhere


@pytest.mark.parametrize("seed", [*SEEDS, (123456789, -987654321), (-(2**31), 2**31 - 1), (-1, -(2**31))])
def test_it_is_what_is_written_down(seed: Seed) -> None:
    x = torch.empty(3, 1001)
    found = noise.uniform(tensor(seed), x)
    assert torch.equal((found.double() * 2**24).long().view(-1), defined(seed, 0, x.numel()))
    assert found.shape == x.shape and found.dtype is x.dtype


@pytest.mark.parametrize("kind", KINDS[1:])
def test_kernels_compute_it_for_far_places_too(kind: str) -> None:
    count, seed = 2**24 + 2**12, (5, -77)
    x = torch.full((1,), 0.5).expand(count).clone()
    x[0], x[1] = 0.0, 1.0
    with kernels_of(kind):
        made = simulate.quantize(x, 1, Grid(rounding=Rounding.STOCHASTIC), seed=tensor(seed)).values
    far = slice(count - 2**13, count)
    assert torch.equal(made[far] == 1, defined(seed, far.start, 2**13) < 2**23)


def test_seeds_are_drawn_from_the_generator() -> None:
    device = torch.device("cpu")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    drawn = torch.stack([noise.new_seed(device) for _ in range(2000)])
    assert drawn.dtype is torch.int32 and drawn.shape == (2000, 2)
    assert int(drawn.min()) >= 0 and 2**29 < int(drawn.max()) < 2**30
    assert len(drawn.unique(dim=0)) == 2000
    torch.set_rng_state(state)
    assert torch.equal(noise.new_seed(device), drawn[0])
    # One after the other they give noise that does not know of each other.
    rows = [ours((int(a), int(b)), 0, 4096) for a, b in drawn[:200]]
    found = [z for one, two in pairwise(rows) for z in of_pairs(one, two)]
    assert max(map(abs, found)) < CHANCE


SUMS: dict[str, Callable[..., int]] = {
    "mul": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "neg": operator.neg,
}
PLACES = [0, 1, 2**24, 2**30 - 1, 2**30 - 1, 2**29 + 1, 123_456_789, 2**30 - 2]


class Exact(fx.Interpreter):
    """Runs a graph, and computes every integer a second time, as Python does: without a bound."""

    checked = 0

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name = str(n.target).split(".")[-2] if "." in str(n.target) else ""
        if name == "arange":
            return torch.tensor(PLACES)
        if isinstance(result, Tensor) and not result.is_floating_point():
            # Where sums and products of 32 bits are, some overflow.
            assert result.dtype is torch.int64 or name not in SUMS, n
            if name in SUMS:
                parts = [self.env[part] if isinstance(part, fx.Node) else part for part in n.args]
                lines = [torch.as_tensor(part).expand(result.shape).flatten().tolist() for part in parts]
                assert [SUMS[name](*numbers) for numbers in zip(*lines, strict=True)] == result.flatten().tolist()
                self.checked += 1
        return result


@pytest.mark.parametrize("seed", [(0, 0), (2**31 - 1, 2**31 - 1), (-(2**31), -(2**31)), (-1, -1)])
def test_no_integer_overflows(seed: Seed) -> None:
    """Compilers take it for granted that signed numbers do not: a loop over them ran past its end."""
    graph = make_fx(torch.func.functionalize(noise.uniform))(tensor(seed), torch.empty(8))
    graph.graph.eliminate_dead_code()
    run = Exact(graph)
    run.run(tensor(seed), torch.empty(8))
    assert run.checked >= 10
    assert (2**30 - 1) * noise.STEP + 2**30 < 2**63
    assert 2**63 > (2**30 + 2**15) * (2 * 2**30 + 2 * (2**30 + 2**15) + 1)


@pytest.mark.slow
def test_compiled_code_agrees() -> None:
    """Sizes that fill vectors, and one that does not."""

    def several(seed: Tensor, *like: Tensor) -> list[Tensor]:
        return [noise.uniform(seed, x) for x in like]

    sizes = [torch.empty(size) for size in (1, 5, 128, 1000, (3, 50))]
    compiled = torch.compile(several)
    for seed in SEEDS[-3:]:
        for found, x in zip(compiled(tensor(seed), *sizes), sizes, strict=True):
            assert torch.equal(found, noise.uniform(tensor(seed), x))
