"""What a pass is, and what it reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from cpt_fx.bodies import graphs_of
from cpt_fx.meta import PASS, Uncovered

LOG = "cpt_fx"
"""Key in `GraphModule.meta` under which the stage reached and the passes' findings are kept."""

STAGES = ("captured", "normalized", "annotated", "inserted", "bound", "lowered")
"""What holds of a graph, in order; `spec.py` says what each one promises."""


@dataclass(frozen=True)
class Report:
    """What one pass did: how many places it changed, and what is worth knowing about those it did not."""

    name: str
    changed: int
    notes: tuple[str, ...] = ()
    uncovered: tuple[Uncovered, ...] = ()

    def __str__(self) -> str:
        """One line, then the notes."""
        return "\n    ".join((f"{self.name}: {self.changed} changed", *self.notes))


@dataclass(frozen=True)
class Pass(ABC):
    """A change to a graph. Options are dataclass fields, bound when the pass is made; `repr` is their full record.

    `requires` is the earliest stage a graph must have reached, `reaches` the stage it has after the pass (None: the
    stage does not change). After every pass the graph is checked against the promises of its stage.

    A graph may have others inside it, the bodies of loops and checkpoints. `run` is called for each of them, the
    outermost first. A pass that must see all of them at once sets `whole`: its `run` is called once.
    """

    name: ClassVar[str]
    requires: ClassVar[str] = "captured"
    reaches: ClassVar[str | None] = None
    whole: ClassVar[bool] = False

    @abstractmethod
    def run(self, module: fx.GraphModule) -> Report:
        """Change the graph in place and report honestly: adding nothing is a report too."""

    def __call__(self, module: fx.GraphModule) -> Report:
        """Run on any GraphModule, alone: `apply`, then compile the code anew, so that the module runs its new graph."""
        report = self.apply(module)
        if report.changed:
            recompile(module)
        return report

    def apply(self, module: fx.GraphModule) -> Report:
        """Check the order, run, note the stage. The module's code is compiled by whoever runs several passes."""
        stage = stage_of(module)
        if STAGES.index(stage) < STAGES.index(self.requires):
            raise ValueError(f"pass {self.name!r} needs a graph that is {self.requires}, this one is {stage}")
        graphs = graphs_of(module)
        before = {node for graph in graphs for node in graph.graph.nodes}
        report = self.run(module) if self.whole else _merged([self.run(graph) for graph in graphs])
        if self.reaches is not None and STAGES.index(self.reaches) > STAGES.index(stage):
            stage = self.reaches
        for graph in graphs_of(module):
            for node in graph.graph.nodes:
                if node not in before:
                    node.meta.setdefault(PASS, self.name)
            if stage_of(graph) != stage:
                set_stage(graph, stage)
        return report


def recompile(module: fx.GraphModule) -> None:
    """Compile the code of a graph and its bodies anew."""
    for graph in graphs_of(module):
        graph.recompile()


def _merged(reports: list[Report]) -> Report:
    """Return one report for a graph and its bodies; of bodies in which nothing changed the notes say nothing."""
    first, *inner = reports
    notes = (*first.notes, *(f"inside: {note}" for report in inner if report.changed for note in report.notes))
    uncovered = tuple(item for report in reports for item in report.uncovered)
    return Report(first.name, sum(report.changed for report in reports), notes, uncovered)


def stage_of(module: fx.GraphModule) -> str:
    """Return the stage a graph has reached; a graph nobody marked is merely captured."""
    stage: str = module.meta.get(LOG, "captured")
    return stage


def set_stage(module: fx.GraphModule, stage: str) -> None:
    """Mark a graph as having reached a stage."""
    module.meta[LOG] = stage


def unique(items: Iterable[str]) -> tuple[str, ...]:
    """Return the items once each, in order."""
    return tuple(dict.fromkeys(items))
