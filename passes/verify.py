"""The promises of a graph's stage, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from cpt_fx.pass_base import Pass, Report, stage_of
from cpt_fx.spec import check


@dataclass(frozen=True)
class Verify(Pass):
    """Check everything that holds of a graph at its stage; raise `SpecError` with every violation found.

    The pipeline runs it after each pass; alone, it checks a graph of one's own. With `after`, the error names the
    pass that is to blame.
    """

    after: str = ""

    name: ClassVar[str] = "verify"
    whole: ClassVar[bool] = True

    def run(self, module: fx.GraphModule) -> Report:
        """Check; change nothing."""
        checked = check(module, stage_of(module), self.after)
        return Report(self.name, 0, (f"{checked} nodes keep the promises of a graph that is {stage_of(module)}",))
