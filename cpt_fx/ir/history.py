"""How a model was transformed, and how much of it was quantized: kept with the result, and logged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from cpt_fx.errors import TransformError
from cpt_fx.ir.meta import DECISION, QUANTIZER, SIMULATED, Uncovered
from cpt_fx.ir.pass_base import Report, unique
from cpt_fx.operators import MULTIPLY

LOGGER = logging.getLogger("cpt_fx")
OUTSIDE = "outside"


@dataclass(frozen=True)
class History:
    """How a model was transformed; `kind` is the name of its class."""

    frontend: str
    notes: tuple[str, ...]
    reports: tuple[Report, ...]
    pipeline: str
    kind: str
    breaks: tuple[str, ...] = ()
    """Graph breaks, each with file, line and reason."""

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """Everything that multiplies and stays in full precision, each once, however often it was captured."""
        return tuple(dict.fromkeys(item for report in self.reports for item in report.uncovered))

    @property
    def outside(self) -> tuple[Uncovered, ...]:
        """What multiplies, or may multiply, outside the transformed parts."""
        return tuple(item for report in self.reports if report.name == OUTSIDE for item in report.uncovered)


def joined(parts: Sequence[tuple[str, History]], rest: tuple[Uncovered, ...], kind: str) -> History:
    """Return the history of a model that contains transformed models; `rest` lists what its other modules multiply."""
    outside = (Report(OUTSIDE, 0, uncovered=rest),) if rest else ()
    return History(
        frontend=", ".join(unique(history.frontend for _, history in parts)),
        notes=tuple(f"{path}: {note}" for path, history in parts for note in history.notes),
        reports=(*(_below(path, report) for path, history in parts for report in history.reports), *outside),
        pipeline="\n".join(f"{path}: {history.pipeline}" for path, history in parts),
        kind=kind,
        breaks=tuple(place for _, history in parts for place in history.breaks),
    )


def _below(path: str, report: Report) -> Report:
    uncovered = tuple(replace(item, layer=f"{path}.{item.layer}".strip(".")) for item in report.uncovered)
    return replace(report, uncovered=uncovered)


def check_coverage(history: History, graphs: Sequence[fx.GraphModule], *, strict: bool, complete: bool = True) -> None:
    """Raise if nothing is quantized or, if `strict`, not everything; log the coverage.

    If the graphs are not `complete`, finding nothing to quantize is only a warning.
    """
    nodes = [node for module in graphs for node in module.graph.nodes]
    decisions = {node.meta[DECISION].layer for node in nodes if DECISION in node.meta}
    quantizers = {node.meta[QUANTIZER].counters for node in nodes if QUANTIZER in node.meta}
    name = history.kind
    left = [item for item in history.uncovered if not item.by_choice]
    if not quantizers:
        shown = "".join(f"\n  {item}" for item in history.uncovered[:10])
        nothing = f"there is nothing to quantize in {name}{':' if shown else ''}{shown}"
        if complete:
            raise TransformError(nothing)
        LOGGER.warning("in this call %s", nothing)
    if strict and left:
        shown = "".join(f"\n  {item}" for item in left)
        raise TransformError(f"strict=True, but {len(left)} operators or operands stay in full precision:{shown}")
    simulated = unique(
        f"{node.meta[DECISION].layer}: {node.meta[DECISION].op}: {node.meta[SIMULATED]}"
        for node in nodes
        if SIMULATED in node.meta and node.meta[DECISION].family in MULTIPLY
    )
    if strict and simulated:
        shown = "".join(f"\n  {item}" for item in simulated)
        raise TransformError(f"strict=True, but {len(simulated)} products do not wholly run on integers:{shown}")
    places = {(item.layer, item.op) for item in history.uncovered if not item.operand}
    chosen = {(item.layer, item.op) for item in history.uncovered if item.by_choice and not item.operand}
    LOGGER.info(
        "%s: %d operators found, %d quantized by %d quantizers, %d excluded, %d uncovered, %d %s, %d %s (%s)",
        name, len(decisions) + len(places), len(decisions), len(quantizers), len(chosen), len(left),
        len(graphs), "graph" if len(graphs) == 1 else "graphs",
        len(history.breaks), "break" if len(history.breaks) == 1 else "breaks", history.frontend,
    )  # fmt: skip
    # Dynamo's notes are about speed, not precision.
    level = logging.INFO if history.frontend == "dynamo" else logging.WARNING
    for note in (*history.notes, *(f"the graph breaks at {place}" for place in history.breaks)):
        LOGGER.log(level, "%s", note)
    for text in simulated:
        LOGGER.warning("not on integers: %s", text)
    for item in left:
        LOGGER.warning("in full precision: %s", item)
