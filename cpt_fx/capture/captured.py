"""What a session keeps of each graph it has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cpt_fx.capture.watch import Watch
from cpt_fx.graph_module import QuantizedGraphModule
from cpt_fx.pass_base import Report


class Entry(NamedTuple):
    """What a traced graph is of."""

    path: str
    """That of the module whose forward it is."""
    every_module: bool
    """Whether it calls every module inside, since hooks are set that run for all."""


WHOLE = Entry("", False)
"""The model."""


@dataclass(frozen=True)
class Capture:
    """One rewritten graph, and why it ends where it ends."""

    view: QuantizedGraphModule
    reports: tuple[Report, ...]
    broken_by: str = ""
    """Why the code could not go on in this graph, with file and line; empty where it returned."""
    is_whole: bool = False
    """Whether Dynamo made it of all of the model's code."""
    watch: Watch | None = None
    """What the code of a traced graph has read; None where Dynamo guards it, and in a copy before its first call."""

    def is_outdated(self) -> bool:
        """Whether the code of a traced graph would make another one by now."""
        return self.watch is not None and not self.view.is_edited() and self.watch.changed()
