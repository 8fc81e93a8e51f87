"""`Inspection`: one object with everything that is known about a transformed model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import ConsoleRenderable
from rich.table import Table
from torch import fx, nn

from cpt_fx.api import graphs, history_of
from cpt_fx.capture.proof import proven_state
from cpt_fx.capture.standalone import transformed_in
from cpt_fx.inspection import table
from cpt_fx.inspection.html import page
from cpt_fx.inspection.svg import drawing
from cpt_fx.inspection.tree import digraph
from cpt_fx.inspection.verification import Verification, verify
from cpt_fx.inspection.views import OF_A_SECOND, ProductView, QuantizerView, fields, products_in, views_in
from cpt_fx.ir.meta import Uncovered
from cpt_fx.ir.pass_base import Report


@dataclass(frozen=True)
class CaptureInfo:
    """How the model was captured."""

    frontend: str
    notes: tuple[str, ...] = ()
    breaks: tuple[str, ...] = ()
    """The graph breaks, each with file, line and reason."""

    def __str__(self) -> str:
        """Return the frontend, then the notes, then the graph breaks."""
        breaks = (f"the graph breaks at {place}" for place in self.breaks)
        return "\n  ".join((self.frontend, *self.notes, *breaks))


@dataclass(frozen=True, repr=False)
class Inspection:
    """A live view of a transformed model: what is quantized, what is not, and how it was made."""

    model: nn.Module
    shown: Verification | None = None
    """A proof: the counters of its dry run are shown instead of those of the model."""

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """The rewritten graphs."""
        return graphs(self.model)

    @property
    def name(self) -> str:
        """The class name of the model that was transformed."""
        return history_of(self.model).kind

    @property
    def quantizers(self) -> tuple[QuantizerView, ...]:
        """Every quantize node as it is now; with `shown`, as it was in the dry run."""
        return views_in(self.model) if self.shown is None else self.shown.views

    @property
    def products(self) -> tuple[ProductView, ...]:
        """Every quantized product: how often it ran on integers, forward and backward, and why the rest did not."""
        return products_in(self.model)

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """Every product, or operand of one, that stays in full precision, with the reason."""
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
        """Which frontend captured the model, with its notes and graph breaks."""
        history = history_of(self.model)
        return CaptureInfo(history.frontend, history.notes, history.breaks)

    @property
    def state(self) -> str:
        """Whether the result is proven to equal the model at 32 bits and to quantize below, and if that is still so."""
        outside = history_of(self.model).outside
        return proven_state(transformed_in(self.model), [item.layer or "(root)" for item in outside])

    def verify(self, *inputs: Any, gradients: bool = True, **kwargs: Any) -> Verification:
        """Prove that the result equals the model and quantizes; without inputs, only the latter, from its counters.

        With inputs, the result at 32 bits and the plain model run side by side, in training and in evaluation mode,
        with and without gradients: outputs, gradients, buffers and random number states must be equal to the last bit,
        or up to float rounding where operators were decomposed. Then the result runs at 2 bits, and every product is
        checked: its operands come from quantizers, or it is listed in `uncovered`, to which products of a second
        backward pass are added. These runs are eager and have no side effects on the model. Without inputs, the
        counters hold what the model has run so far, so train a step first.

        Args:
            inputs: positional arguments of the model, for a dry run.
            gradients: require that gradient quantizers ran too; False for a model that is only evaluated.
            kwargs: keyword arguments of the model.

        Raises:
            TypeError: if the arguments are passed as one tuple: call `verify(x)`, not `verify((x,))`.
            ValueError: if the model does not run on the inputs.
            VerificationError: listing whatever differs from the plain model; every product that bypasses the
                quantizers; and the layer of every quantizer that never ran, showed more than 2^b levels, follows no
                schedule, or has a running range that is not finite.
        """
        return verify(self.model, inputs, kwargs, gradients)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, which JSON can hold: for logs, for programs, for a diff of two runs."""
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
        """Return the quantizers as a rich table, grouped by layer, with the state of the proof below it."""
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
            depth: how many levels of modules are expanded; by default as many as stay readable on one page.
        """
        return _written(drawing(self, depth), path)

    def html(self, path: str | os.PathLike[str] | None = None) -> str:
        """Draw the graph as one self-contained page: modules expand and collapse, quantizers show their counters."""
        return _written(page(self), path)

    def _repr_html_(self) -> str:
        return drawing(self, None)

    def __rich__(self) -> ConsoleRenderable:
        """Return tables for a terminal."""
        return table.overview(self)

    def __str__(self) -> str:
        """Return the same tables as plain text."""
        return table.as_text(self, 100)

    def __repr__(self) -> str:
        """Return a summary in one line."""
        counts = f"{len(self.quantizers)} quantizers, {len(self.uncovered)} uncovered"
        return f"<Inspection of {self.name}: {counts}; {self.state}>"


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
