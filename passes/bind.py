"""Connect the schedule: every quantizer reads its own bit-width source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from cpt_fx.ir.meta import QUANTIZER, VIEW, Quantizer, WidthSource, read_before
from cpt_fx.ir.pass_base import Pass, Report
from cpt_fx.ir.state import Precision
from cpt_fx.ir.subgraphs import graphs_of, state_of
from cpt_fx.schedules.base import Schedule


@dataclass(frozen=True)
class Bind(Pass):
    """Give layers with an override their own bit-widths, then let the schedule set all of them.

    Without a schedule they stay at 32, the identity, until `schedule.bind(model)` is called.
    """

    schedule: Schedule | None = None

    name: ClassVar[str] = "bind"
    requires: ClassVar[str] = "inserted"
    reaches: ClassVar[str | None] = "bound"
    whole: ClassVar[bool] = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Bind:
        """Copy the pass but share the schedule, unless that is being copied in the same call."""
        return Bind(memo.get(id(self.schedule), self.schedule))

    def run(self, module: fx.GraphModule) -> Report:
        """Connect quantizers to their bit-width sources and attach the schedule."""
        state = state_of(module)
        moved = sum(_connect(graph.graph, state) for graph in graphs_of(module))
        for role in ("weight", "activation", "gradient"):
            state.add_width_source(WidthSource(role))
        # A model in evaluation mode starts with the evaluation widths.
        state.train(module.training)
        # A later graph of the same model must not replace a schedule that was bound in the meantime.
        if self.schedule is not None and (state.schedule is None or VIEW not in module.meta):
            self.schedule.bind(state)
        widths = ", ".join(sorted(state.width_sources)) or "none"
        return Report(self.name, moved, (f"widths: {widths}",))


def _connect(graph: fx.Graph, state: Precision) -> int:
    """Make every quantizer of a graph read its bit-width source; return how many changed."""
    reads: dict[str, fx.Node] = {}
    moved = 0
    for node in list(graph.nodes):
        if QUANTIZER not in node.meta:
            continue
        quantizer: Quantizer = node.meta[QUANTIZER]
        path = state.add_width_source(quantizer.width_source)
        current = node.args[1]
        assert isinstance(current, fx.Node)
        if current.target == path:
            continue
        if path not in reads:
            reads[path] = read_before(current, path)
        node.update_arg(1, reads[path])
        moved += 1
        if not current.users:
            graph.erase_node(current)
    return moved
