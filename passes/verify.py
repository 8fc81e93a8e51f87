"""Check the invariants of a graph's stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from cpt_fx.ir.pass_base import Pass, Report, stage_of
from cpt_fx.ir.verifier import check


@dataclass(frozen=True)
class Verify(Pass):
    """Check all invariants of a graph's stage; raise `SpecError`, which names the violations and the pass `after`."""

    after: str = ""

    name: ClassVar[str] = "verify"
    whole: ClassVar[bool] = True

    def run(self, module: fx.GraphModule) -> Report:
        """Check the graph without changing it."""
        checked = check(module, stage_of(module), self.after)
        return Report(self.name, 0, (f"{checked} nodes keep the promises of a graph that is {stage_of(module)}",))
