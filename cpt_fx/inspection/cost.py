"""What a training run will cost, before any training: the published BitOps, layer by layer.

A product of operands at widths a and b costs a·b/32² of its floating point operations. Forward that is
weight·activation; backward the input gradient multiplies gradient·weight and the weight gradient gradient·activation,
each with as many operations as the forward pass. BitOps are summed over the steps of a run, for batches of the size of
the example inputs.

`count="paper"` counts every operation at the schedule's widths, as the published figures do: ratios then depend on the
schedule alone. `count="covered"` counts a transformed model as it is: each product at the widths of its own quantizers,
which may be fixed, shifted or follow a schedule of their own, and at 32 where an operand or gradient is not quantized.
Width 0 (off) counts as 32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from rich import box
from rich.console import ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text
from torch import nn

from cpt_fx.errors import check_choice, check_int
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.inspection.flops import CountedProduct, counted_products
from cpt_fx.ir.meta import WidthSource
from cpt_fx.ir.result import sessions_in
from cpt_fx.ir.state import width_from
from cpt_fx.schedules import Bits, Static, mean_costs
from cpt_fx.schedules.base import Schedule
from cpt_fx.schedules.savings import static_cost

COUNTS = ("paper", "covered")
ROOT = "(root)"


@dataclass(frozen=True)
class LayerCost:
    """One layer: its operations in a forward pass, and their cost over the run."""

    name: str
    flops: int
    quantized: bool | None
    """Whether any of its operations is quantized; None for a model that is not transformed."""
    forward: float
    backward: float

    @property
    def bitops(self) -> float:
        """Forward and backward, over the whole run."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Cost:
    """The cost of a run; `bitops` are in units of one full precision operation (32 × 32 bits)."""

    layers: tuple[LayerCost, ...]
    steps: int
    count: str
    forward: float
    """Mean cost of a forward pass, relative to full precision: the published mean of q²/32²."""
    backward: float
    """Mean cost of a backward pass, in full precision forward passes: the published mean of 2·q·g/32²."""
    average: float
    """The published average, mean of (forward + backward) / 3: 1 is full precision."""
    static: float
    """The same average for a run at `static_bits` throughout, with overriding schedules at their largest widths too."""
    static_bits: Bits
    relative: float
    """`average` divided by `static`."""

    @property
    def saving(self) -> float:
        """The share of the static run's cost that the schedule saves."""
        return 1 - self.relative

    @property
    def flops(self) -> int:
        """Operations of one forward pass."""
        return sum(layer.flops for layer in self.layers)

    @property
    def bitops(self) -> float:
        """Forward and backward passes of the whole run."""
        return sum(layer.bitops for layer in self.layers)

    def table(self) -> Table:
        """Return the layers as a rich table."""
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("layer", overflow="fold", max_width=40)
        for name in ("FLOPs", "of all", "quantized", "BitOps", "of full precision"):
            table.add_column(name, justify="right")
        for layer in self.layers:
            said = "–" if layer.quantized is None else "yes" if layer.quantized else "no"
            full = 3 * layer.flops * self.steps
            table.add_row(layer.name, f"{layer.flops:,}", f"{layer.flops / self.flops:.1%}", said,
                          f"{layer.bitops:.3e}", f"{layer.bitops / full:.2%}")  # fmt: skip
        return table

    def __rich__(self) -> ConsoleRenderable:
        """Return the table, with the totals below it."""
        return Group(self.table(), Text(""), Text(str(self)))

    def __str__(self) -> str:
        """Return the totals in one paragraph."""
        return (
            f"{self.bitops:.3e} BitOps (32 × 32 bit operations) over {self.steps} steps, "
            f"{self.flops:,} FLOPs in a forward pass; {self.average:.2%} of full precision, {self.relative:.2%} of "
            f"static {self.static_bits.weight} bits: saves {self.saving:.2%} ({self.count} count)"
        )


def cost(
    model: nn.Module,
    schedule: Schedule,
    example_inputs: tuple[Any, ...],
    *,
    example_kwargs: dict[str, Any] | None = None,
    count: str = "paper",
    steps: int | None = None,
) -> Cost:
    """Return the cost of training a model under a schedule, without training or changing it.

    The operations are counted in one forward pass in evaluation mode, with `torch.utils.flop_counter`.

    Args:
        model: a plain or a transformed model.
        schedule: the widths over the run.
        example_inputs: positional arguments of the model: one training batch, or one example of it.
        example_kwargs: keyword arguments of the model.
        count: `"paper"`, every operation at the schedule's widths; `"covered"`, only what a transformed model really
            quantizes, at the widths of its quantizers.
        steps: length of the run, for a schedule without `total_steps`; by default a static one counts a single step.
    """
    check_choice("count", count, COUNTS)
    if steps is None and isinstance(schedule, Static):
        steps = schedule.total_steps or 1
    length = _length(model, schedule, example_inputs, steps)
    static = _static(schedule, length)
    parts = sessions_in(model)
    transformed = bool(parts)
    if count == "covered" and not transformed:
        raise ValueError(f"count='covered' asks what is quantized, and {type(model).__name__} is not transformed")
    kwargs = dict(example_kwargs or {})
    products = counted_products(model, example_inputs, kwargs, transformed)
    if not any(product.flops for product in products):
        kind = parts[0][1].kind if parts else type(model).__name__
        raise ValueError(
            f"{kind} does no matrix product, convolution or attention on these inputs: there are no FLOPs to count"
        )
    paper = count == "paper"
    widths = cache(lambda own: _widths((schedule, *own), length))
    terms = [_costs(product, widths, paper) for product in products]
    layers = tuple(_layers(products, terms, transformed))
    if paper:
        means = mean_costs(schedule, steps)
        forward, backward, average = means.forward, means.backward, means.average
        static_average = static_cost(static)
    else:
        total = sum(product.flops for product in products)
        forward = sum(term[0] for term in terms) / total / length
        backward = sum(term[1] for term in terms) / total / length
        average = (forward + backward) / 3
        constant = cache(lambda own: {tuple(_static(one, length) for one in (schedule, *own)): 1})
        static_average = sum(sum(_costs(product, constant, paper)) for product in products) / total / 3
    return Cost(layers, length, count, forward, backward, average, static_average, static,
                average / static_average)  # fmt: skip


Own = tuple[Schedule, ...]
"""Schedules that quantizers follow instead of the model's."""
Widths = dict[tuple[Bits, ...], int]
"""Widths of several schedules in the same step -> number of such steps."""


def _widths(schedules: Own, length: int) -> Widths:
    rows = np.hstack([schedule.trajectory(length) for schedule in schedules])
    distinct, steps = np.unique(rows, axis=0, return_counts=True)
    split = (tuple(Bits(*row[place : place + 3]) for place in range(0, len(row), 3)) for row in distinct.tolist())
    return dict(zip(split, steps.tolist(), strict=True))


def _static(schedule: Schedule, length: int) -> Bits:
    """Return the widths of the static run that a schedule is compared with."""
    best = schedule._widest() or Bits(*(int(width) for width in schedule.trajectory(length).max(axis=0)))
    weight, activation = best.weight or FULL_PRECISION, best.activation or FULL_PRECISION
    # As in the published ratios, the gradients of the static run have the forward width too.
    return Bits(weight, activation, max(weight, activation))


def _length(model: nn.Module, schedule: Schedule, example_inputs: tuple[Any, ...], steps: int | None) -> int:
    """Check the arguments; return the number of steps of the run."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule must be a schedule such as cpt_fx.schedules.named(...), got {type(schedule).__name__}"
        )
    if not isinstance(example_inputs, tuple):
        raise TypeError(f"example_inputs must be a tuple of the model's arguments, got {type(example_inputs).__name__}")
    length = schedule.total_steps if steps is None else check_int("steps", steps, 1)
    if length is None:
        raise ValueError(f"{schedule!r} has no end: pass the length of the run, as in cost(..., steps=10_000)")
    return length


def _costs(product: CountedProduct, run: Callable[[Own], Widths], paper: bool) -> tuple[float, float]:
    """Return the forward and backward BitOps of a product over a run."""
    sources: list[WidthSource | None]
    if paper:
        sources = [WidthSource("weight"), WidthSource("activation"), WidthSource("gradient")]
    elif product.decision is None:
        sources = [None, None, None]
    else:
        decision = product.decision
        roles = [operand.role for operand in decision.operands if operand.role != "bias"]
        sources = [*map(decision.width_source, roles), None, None][:2]
        sources.append(decision.width_source("gradient") if decision.gradient is not None else None)
    schedules = [None if source is None else source.schedule for source in sources]
    own = tuple(dict.fromkeys(schedule for schedule in schedules if schedule is not None))
    followed = [0 if schedule is None else own.index(schedule) + 1 for schedule in schedules]
    forward = backward = 0
    for bits, steps in run(own).items():
        # Both not quantized and switched off mean full precision.
        widths = (source and width_from(source, bits[place]) for source, place in zip(sources, followed, strict=True))
        first, second, gradient = (width or FULL_PRECISION for width in widths)
        forward += steps * first * second
        backward += steps * (first + second) * gradient
    return product.flops * forward / FULL_PRECISION**2, product.flops * backward / FULL_PRECISION**2


def _layers(products: list[CountedProduct], terms: list[tuple[float, float]], transformed: bool) -> Iterator[LayerCost]:
    rows: dict[str, list[tuple[CountedProduct, tuple[float, float]]]] = {}
    for product, term in zip(products, terms, strict=True):
        rows.setdefault(product.layer or ROOT, []).append((product, term))
    for name, members in rows.items():
        flops = sum(product.flops for product, _ in members)
        if flops:
            quantized = any(product.decision for product, _ in members) if transformed else None
            yield LayerCost(name, flops, quantized, sum(t[0] for _, t in members), sum(t[1] for _, t in members))
