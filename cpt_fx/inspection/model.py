"""The inspection itself: one object from which everything else is asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import ConsoleRenderable
from rich.table import Table
from torch import fx, nn

from cpt_fx.api import graphs, history_of
from cpt_fx.inspection import table
from cpt_fx.inspection.html import page
from cpt_fx.inspection.svg import drawing
from cpt_fx.inspection.tree import digraph
from cpt_fx.inspection.verification import Verification, verify
from cpt_fx.inspection.views import OF_A_SECOND, ProductView, QuantizerView, fields, products_in, views_in
from cpt_fx.meta import Uncovered
from cpt_fx.pass_base import Report
from cpt_fx.proof import proven_state
from cpt_fx.standalone import transformed_in


@dataclass(frozen=True)
class CaptureInfo:
    """How the model became a graph."""

    frontend: str
    notes: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    """Where the code could not be kept in one graph, each with file, line and reason."""

    def __str__(self) -> str:
        """The frontend, then the notes, then the breaks."""
        breaks = (f"the graph breaks at {place}" for place in self.breaks)
        return "\n  ".join((self.frontend, *self.notes, *breaks))


@dataclass(frozen=True, repr=False)
class Inspection:
    """What a transformed model is: what is quantized, what is not, how it came about. Read when asked, not before."""

    model: nn.Module
    shown: Verification | None = None
    """A proof whose records are shown instead of those of the model: what its trial run saw."""

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The rewritten graphs."""
        return graphs(self.model)

    @property
    def name(self) -> str:
        """The class of the model that was transformed."""
        return history_of(self.model).kind

    @property
    def quantizers(self) -> tuple[QuantizerView, ...]:
        """Every quantize node as it stands now, or with `shown` as the trial run saw it."""
        return views_in(self.model) if self.shown is None else self.shown.views

    @property
    def products(self) -> tuple[ProductView, ...]:
        """Every quantized product: how often it ran on integers, forward and backward, and why where it did not."""
        return products_in(self.model)

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """Everything that multiplies and stays in full precision, with the reason."""
        came = (
            Uncovered(view.layer, view.op, view.left, view.operand, by_choice=view.left == OF_A_SECOND)
            for view in self.quantizers
            if view.left
        )
        return tuple(dict.fromkeys((*history_of(self.model).uncovered, *came)))

    @property
    def passes(self) -> tuple[Report, ...]:
        """What each pass did, in order."""
        return history_of(self.model).reports

    @property
    def capture(self) -> CaptureInfo:
        """Which frontend captured the model, and what it had to say."""
        history = history_of(self.model)
        return CaptureInfo(history.frontend, history.notes, history.breaks)

    @property
    def state(self) -> str:
        """Whether it was proven that the result is the model at 32 bits and quantizes below, and whether that holds."""
        outside = history_of(self.model).outside
        return proven_state(transformed_in(self.model), [item.layer or "(root)" for item in outside])

    def verify(self, *inputs: Any, gradients: bool = True, **kwargs: Any) -> Verification:
        """Prove that the result is the model and that it quantizes; without inputs, the latter from its records so far.

        Given inputs, the result at 32 bits and the plain model run beside each other, in training and in evaluation,
        with and without gradients: outputs, gradients, buffers and random numbers must be equal to the last bit, or to
        float rounding where operators were opened. Then the result runs at 2 bits, and everything that multiplies is
        seen: operands come from quantizers, or the product is listed in `uncovered`, to which those of a second
        backward pass are added. All of it is eager and leaves no trace. Without inputs the records count what the
        model has done until now, so train a step first.

        Args:
            inputs: what the model is called with, for a trial run.
            gradients: demand that gradient quantizers ran too; False for a model that only evaluates.
            kwargs: keyword arguments of the model.

        Raises:
            TypeError: where a tuple is given that holds the arguments: it is `verify(x)`, not `verify((x,))`.
            ValueError: where the model does not run on the inputs.
            VerificationError: naming whatever differs from the plain model; every product that goes around the
                quantizers; and the layer of every quantizer that never ran, showed more than 2^b levels, follows no
                schedule, or has a running range that is not finite.
        """
        return verify(self.model, inputs, kwargs, gradients)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, which JSON can hold: for logs, for programs, for a diff of two runs."""
        return {
            "model": self.name,
            "state": self.state,
            "capture": fields(self.capture, "frontend", "notes", "breaks"),
            "graphs": len(self.graphs),
            "quantizers": [
                fields(view, "layer", "layers", "role", "op", "operand", "format", "group", "bits", "times_run",
                          "skipped", "levels", "error", "range", "node", "graph")
                for view in self.quantizers
            ],
            "products": [
                fields(view, "layer", "op", "lowered", "integer", "floating", "reasons") for view in self.products
            ],
            "uncovered": [
                fields(item, "layer", "op", "operand", "reason", "by_choice") for item in self.uncovered
            ],
            "passes": [fields(report, "name", "changed", "notes") for report in self.passes],
        }  # fmt: skip

    def table(self) -> Table:
        """Return the quantizers as a rich table, grouped by layer, and below it whether they were proven."""
        quantizers = table.quantizer_table(self.quantizers)
        quantizers.caption, quantizers.caption_justify = self.state, "left"
        return quantizers

    def networkx(self) -> Any:
        """Return the rewritten graph as a `networkx.DiGraph`.

        Node attributes: op, target, kind, role, layer, bits, module, made_by.
        """
        return digraph(self.graphs, self.quantizers)

    def svg(self, path: str | os.PathLike[str] | None = None, *, depth: int | None = None) -> str:
        """Draw the rewritten graph, and write it to `path` if one is given.

        Args:
            path: the file to write.
            depth: how many levels of modules are opened; by default as many as stay readable on one page.
        """
        return _written(drawing(self, depth), path)

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Draw the graph as one self-contained page: modules open and fold, quantizers show what they did."""
        return _written(page(self), path)

    def _repr_html_(self) -> str:
        return drawing(self, None)

    def __rich__(self) -> ConsoleRenderable:
        """Show tables in a terminal."""
        return table.overview(self)

    def __str__(self) -> str:
        """Show the same as plain text."""
        return table.as_text(self, 100)

    def __repr__(self) -> str:
        """Say what there is."""
        counts = f"{len(self.quantizers)} quantizers, {len(self.uncovered)} uncovered"
        return f"<Inspection of {self.name}: {counts}; {self.state}>"


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
