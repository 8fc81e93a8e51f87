"""The base class of passes, the stages of a graph, and what a pass reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from cpt_fx.ir.meta import PASS, Uncovered
from cpt_fx.ir.subgraphs import graphs_of

LOG = "cpt_fx"
"""Key in `GraphModule.meta` of the stage that a graph has reached."""

STAGES = ("captured", "normalized", "annotated", "inserted", "bound", "lowered")
"""The stages of a graph, in order; `verifier.py` checks the invariants of each."""


@dataclass(frozen=True)
class Report:
    """What one pass did: the number of changes, notes, and what stays in full precision."""

    name: str
    changed: int
    notes: tuple[str, ...] = ()
    uncovered: tuple[Uncovered, ...] = ()

    def __str__(self) -> str:
        """Return a summary line, then the notes."""
        return "\n    ".join((f"{self.name}: {self.changed} changed", *self.notes))


@dataclass(frozen=True)
class Pass(ABC):
    """A transformation of a graph; its options are dataclass fields, set when it is created and shown by `repr`.

    `requires` is the earliest stage a graph must have reached, `reaches` the stage it has after the pass (None: the
    stage does not change). The pipeline checks the invariants of the stage after every pass.

    A graph may have subgraphs, such as the bodies of loops and checkpoints. `run` is called for each graph, the
    outermost first. A pass that must see all of them at once sets `whole`: its `run` is called once.
    """

    name: ClassVar[str]
    requires: ClassVar[str] = "captured"
    reaches: ClassVar[str | None] = None
    whole: ClassVar[bool] = False

    @abstractmethod
    def run(self, module: fx.GraphModule) -> Report:
        """Change the graph in place and return a report, even if nothing changed."""

    def __call__(self, module: fx.GraphModule) -> Report:
        """Run this pass alone on a GraphModule: `apply`, then recompile the module if its graph changed."""
        report = self.apply(module)
        if report.changed:
            recompile(module)
        return report

    def apply(self, module: fx.GraphModule) -> Report:
        """Check the stage, run, and set the new stage; the caller recompiles the module."""
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
    """Recompile a graph and its subgraphs."""
    for graph in graphs_of(module):
        graph.recompile()


def _merged(reports: list[Report]) -> Report:
    """Return one report for a graph and its subgraphs, without the notes of subgraphs in which nothing changed."""
    first, *inner = reports
    notes = (*first.notes, *(f"inside: {note}" for report in inner if report.changed for note in report.notes))
    uncovered = tuple(item for report in reports for item in report.uncovered)
    return Report(first.name, sum(report.changed for report in reports), notes, uncovered)


def stage_of(module: fx.GraphModule) -> str:
    """Return the stage a graph has reached; "captured" if it is not marked."""
    stage: str = module.meta.get(LOG, "captured")
    return stage


def set_stage(module: fx.GraphModule, stage: str) -> None:
    """Mark a graph as having reached a stage."""
    module.meta[LOG] = stage


def unique(items: Iterable[str]) -> tuple[str, ...]:
    """Return the items once each, in order."""
    return tuple(dict.fromkeys(items))
