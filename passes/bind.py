"""The schedule connected: every quantizer reads the width that its layer follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from cpt_fx.bodies import graphs_of, state_of
from cpt_fx.meta import QUANTIZER, VIEW, Dial, Quantizer, read_before
from cpt_fx.pass_base import Pass, Report
from cpt_fx.runtime import Precision
from cpt_fx.schedules.base import Schedule


@dataclass(frozen=True)
class Bind(Pass):
    """Give layers with an override a width of their own, then let the schedule write all widths.

    Without a schedule the widths stay at 32, the identity, until `schedule.bind(model)` is called.
    """

    schedule: Schedule | None = None

    name: ClassVar[str] = "bind"
    requires: ClassVar[str] = "inserted"
    reaches: ClassVar[str | None] = "bound"
    whole: ClassVar[bool] = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Bind:
        """Keep the schedule: the copy of a model follows the same one, unless that is being copied too."""
        return Bind(memo.get(id(self.schedule), self.schedule))

    def run(self, module: fx.GraphModule) -> Report:
        """Point quantizers at their dials and attach the schedule."""
        state = state_of(module)
        moved = sum(_point(graph.graph, state) for graph in graphs_of(module))
        for role in ("weight", "activation", "gradient"):
            state.add_dial(Dial(role))
        # A model that is in evaluation mode now starts with the widths for evaluation.
        state.train(module.training)
        # A later graph of a model is no reason to leave a schedule that took over in the meantime.
        if self.schedule is not None and (state.schedule is None or VIEW not in module.meta):
            self.schedule.bind(state)
        widths = ", ".join(sorted(state.dials)) or "none"
        return Report(self.name, moved, (f"widths: {widths}",))


def _point(graph: fx.Graph, state: Precision) -> int:
    """Let every quantizer of a graph read the width of its dial."""
    reads: dict[str, fx.Node] = {}
    moved = 0
    for node in list(graph.nodes):
        if QUANTIZER not in node.meta:
            continue
        quantizer: Quantizer = node.meta[QUANTIZER]
        path = state.add_dial(quantizer.dial)
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
