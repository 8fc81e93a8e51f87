"""What ran on integers: every quantized product, how often it did, and why it did not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from cpt_fx.inspection.views import Graphs, named_below, read_in
from cpt_fx.integer.counts import COUNTS, DIRECTIONS, RATIO, REASONS, Outcome
from cpt_fx.integer.ops import INTEGER_PRODUCTS
from cpt_fx.layer_state import has_value
from cpt_fx.meta import SIMULATED, SITE, Site, get_attribute
from cpt_fx.operators import MULTIPLY

HEADS = ("layer", "product", *DIRECTIONS, "in floating point because")


@dataclass(frozen=True)
class ProductView:
    """One quantized product as it stands now. Three numbers each: forward, gradient of the left and right operand."""

    layer: str
    op: str
    """The operator of the model, such as `linear`."""
    node: str
    integer: tuple[int, ...] = (0, 0, 0)
    """How often it ran on integers."""
    floating: tuple[int, ...] = (0, 0, 0)
    """How often it ran in floating point, as far as it was counted: what is not lowered counts nothing."""
    reasons: tuple[str, ...] = ()
    """Why it is not on integers, or was not on all runs."""
    ratios: tuple[float | None, ...] = (None, None, None)
    """How many times as fast the last run of each is on integers here, where a measurement decided about it."""
    lowered: bool = False
    """Whether it is an integer operator in the graph."""
    graph: int = 0
    """Index of its graph in `cpt_fx.graphs(result)`."""

    @property
    def on_integers(self) -> bool:
        """Whether all its products ran on integers, whenever they ran."""
        return self.lowered and sum(self.integer) > 0 and not sum(self.floating)

    def __str__(self) -> str:
        """Say it in one line."""
        runs = ", ".join(f"{name} {text}" for name, text in zip(DIRECTIONS, self.ran(), strict=True))
        why = f": {'; '.join(self.reasons)}" if self.reasons else ""
        return f"{self.layer or '(root)'}: {self.op}: {f'on integers: {runs}' if self.lowered else 'simulated'}{why}"

    def ran(self) -> tuple[str, ...]:
        """Return for each direction how many of its runs were on integers."""
        both = zip(self.integer, self.floating, strict=True)
        return tuple(f"{integer} of {integer + floating}" if floating else str(integer) for integer, floating in both)

    def cells(self) -> tuple[str, ...]:
        """Return what a table shows, under `HEADS`."""
        ran = self.ran() if self.lowered else ("–",) * 3
        return self.layer or "(root)", self.op, *ran, "; ".join(self.reasons)


def products_in(model: nn.Module) -> tuple[ProductView, ...]:
    """Read every quantized product of a model, once where several captures of one layer count together."""
    return read_in(model, _products_of)


def _products_of(path: str, graphs: Graphs) -> Iterable[ProductView]:
    found: dict[Any, ProductView] = {}
    for index, module in graphs:
        for node in module.graph.nodes:
            if SITE not in node.meta or node.meta[SITE].family not in MULTIPLY:
                continue
            counts: Any = node.kwargs.get("counts") if node.target in INTEGER_PRODUCTS else None
            key = counts.target if counts is not None else (node.meta[SITE].layer, node.target)
            if key not in found:
                found[key] = _view(path, index, module, node, counts)
    return found.values()


def _view(path: str, index: int, module: fx.GraphModule, node: fx.Node, counts: fx.Node | None) -> ProductView:
    site: Site = node.meta[SITE]
    layer = named_below(path, site.layer)
    static = [node.meta[SIMULATED]] if SIMULATED in node.meta else []
    if counts is None:
        reasons = static or ["the model was transformed with execution='simulated'"]
        return ProductView(layer, site.op, node.name, reasons=tuple(reasons), graph=index)
    counted = get_attribute(module, str(counts.target))
    table = (counted if has_value(counted) else torch.zeros(COUNTS, dtype=torch.int64)).tolist()
    ran = [sum(row[:RATIO]) for row in table]
    ratios = tuple(row[RATIO] / 1000 if row[RATIO] else None for row in table)
    seen = [
        f"{DIRECTIONS[place]}: {_because(outcome, ratios[place])} ({row[outcome]} of {ran[place]})"
        for place, row in enumerate(table)
        for outcome in REASONS
        if row[outcome]
    ]
    return ProductView(
        layer=layer,
        op=site.op,
        node=node.name,
        integer=tuple(row[Outcome.INTEGER] for row in table),
        floating=tuple(total - row[Outcome.INTEGER] for total, row in zip(ran, table, strict=True)),
        reasons=(*static, *seen),
        ratios=ratios,
        lowered=True,
        graph=index,
    )


def _because(outcome: Outcome, ratio: float | None) -> str:
    measured = f", {ratio:.2g} times as fast" if outcome is Outcome.SIZE and ratio is not None else ""
    return REASONS[outcome] + measured
