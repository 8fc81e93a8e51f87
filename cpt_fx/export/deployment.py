"""`export.qdq`: a trained model on integers, in the standard QuantizeLinear and DequantizeLinear, for deployment."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx, nn

from cpt_fx.errors import ExportError
from cpt_fx.export.capture_modes import call_of, in_mode, run
from cpt_fx.export.comparing import Difference, compared
from cpt_fx.export.directory import new_file
from cpt_fx.export.plain import evaluation_of, finish, write
from cpt_fx.export.qdq_formats import CONVERTED, EXACT, MOST_BITS, Plan, Watch, Watched, plan_of, watched_in
from cpt_fx.export.qdq_graph import complete, constants, quantizers, replace
from cpt_fx.formats import Range
from cpt_fx.schedules.bits import Bits, as_bits
from cpt_fx.standalone import precision_of

ADVICE = (
    "What recipes.default() quantizes is exported exactly: symmetric weights per channel, activations with an integer "
    "zero point and a running range."
)
IN_STEPS = "in whole steps of input times weight, as integer kernels add"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What became of one quantizer."""

    layer: str
    operand: str
    role: str
    format: str
    """How it was trained."""
    bits: int
    status: str
    """`"exact"`, `"converted"` or `"float"`."""
    error: float
    """Norm of the difference between what PyTorch and the file make of the examples there, relative to PyTorch's."""
    note: str = ""

    def __str__(self) -> str:
        """Say it in one line."""
        error = "" if self.status == EXACT else f" {self.error:.2%}"
        note = f": {self.note}" if self.note else ""
        return f"{self.layer} {self.operand} ({self.format}, {self.bits} bits): {self.status}{error}{note}"


@dataclass(frozen=True, kw_only=True)
class QdqReport:
    """What was written, and how true it is to the trained model. Printed, it is a summary."""

    path: Path
    quantizers: tuple[Converted, ...]
    outputs: tuple[Difference, ...]
    """Of each output, in each runtime that is installed: ONNX Runtime, OpenVINO."""
    runtime: str
    """What the outputs come from."""
    untrained: str = ""
    """What the model looks as if it had never been trained by, if it does."""

    @property
    def exact(self) -> bool:
        """Whether every quantizer is in the file exactly as it was trained."""
        return all(item.status == EXACT for item in self.quantizers)

    def __str__(self) -> str:
        """Return the counts, everything that is not exact, and the difference of the outputs."""
        others = [item for item in self.quantizers if item.status != EXACT]
        exact = len(self.quantizers) - len(others)
        converted = sum(item.status == CONVERTED for item in others)
        counts = f"{exact} exact, {converted} converted, {len(others) - converted} left in floating point"
        lines = [f"{self.path}: {len(self.quantizers)} quantizers: {counts}"]
        lines += [f"  WARNING: {self.untrained}"] if self.untrained else []
        lines += [f"  {item}" for item in others]
        lines += [f"  {ADVICE}"] if others else []
        rounded = max((item.error for item in self.quantizers if IN_STEPS in item.note), default=0.0)
        lines += [f"  biases are stored {IN_STEPS} them: off by {rounded:.2g} of their size at most"] if rounded else []
        lines += [f"  {item}" for item in self.outputs]
        return "\n".join((*lines, f"  {self.runtime}"))


def qdq(
    result: nn.Module,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    path: str | os.PathLike[str],
    bits: int | Bits | tuple[int, int, int] = 8,
    *,
    dynamic_batch: bool = True,
    overwrite: bool = False,
    verbose: bool = True,
) -> QdqReport:
    """Write a trained model with integer weights and integer activations, as ONNX Runtime and others deploy it.

    Weights are stored as integers, symmetric per output channel: of 8 bits, and of 4 where the width is 4 or less.
    Activations have unsigned codes of 8 bits and one fixed range each, the running one that training left; at a
    narrower width the codes are clipped to those of the width. Biases of integer products are whole steps of them; what
    was not quantized stays in floating point. What cannot be said like this is converted to the nearest
    that can, and listed in the report with the error that this makes. Formats of `recipes.default()` are exact.

    Args:
        result: what `transform` returned, trained. It is left as it is, whatever mode it is in.
        example_inputs: a tuple of the model's arguments, or a dict of them by name: real data, best a whole batch.
            Errors are measured on it, and where a range is not fixed by training, it is that of the examples.
        path: the file to write. One that exists is refused. Weights of more than 1.9 GB go to a file beside it.
        bits: 1 to 8, for all, or `Bits`. Layers that follow the schedule at a distance, or not at all, do so here;
            those with a schedule of their own have its evaluation bits at the model's position.
        dynamic_batch: let sizes vary from call to call, as far as the model does; else they are those of the examples.
        overwrite: replace the file, as soon as the new one is complete.
        verbose: print the report.

    Returns:
        What became of every quantizer, and how far the outputs are from those of PyTorch at the same widths.

    Raises:
        ExportError: where the model cannot be exported, or the file cannot be written.
    """
    widths = as_bits("bits", bits)
    for name, width in zip(("weight", "activation"), widths, strict=False):
        if not 1 <= width <= MOST_BITS:
            raise ExportError(
                f"bits: {name}s of {width} bits are no integers of at most {MOST_BITS}: pass widths from 1 to "
                f"{MOST_BITS}, or write the model with export.onnx, which takes any"
            )
    call = call_of(example_inputs)
    with (
        new_file(path, overwrite=overwrite) as made,
        in_mode(result, False, call) as module,
        precision_of(module).at(widths),
    ):
        graph = evaluation_of(module, call, widths, dynamic_batch=dynamic_batch, plain=True)
        model = finish(graph)
        nodes = quantizers(model)
        watched = watched_in(module)
        for name in constants(model, nodes):
            watched[name].constant = watched[name].quantizer.role != "activation"
        # Ranges first, for they decide the plans, then errors.
        with Watch(module, {name: item.see for name, item in watched.items()}):
            outputs = run(module, call)
        plans = {name: plan_of(item) for name, item in watched.items() if name in nodes}
        with Watch(module, {name: partial(watched[name].compare, plan.values) for name, plan in plans.items()}):
            run(module, call)
        for name, places in nodes.items():
            replace(model, places, plans[name], watched[name].label)
        rounded = complete(model)
        write(model, result, widths, made)
        report = QdqReport(
            path=Path(os.path.abspath(path)),
            quantizers=tuple(_row(watched[name], plan, rounded) for name, plan in plans.items()),
            untrained=_untrained(module, watched.values()),
            **compared(made, graph, call, outputs),
        )
    if verbose:
        print(report)
    return report


def _row(item: Watched, plan: Plan, rounded: Mapping[str, tuple[float, float]]) -> Converted:
    """Say what became of a quantizer; `rounded` are biases that were put into steps of a product, by name."""
    stored = rounded.get(f"{item.label}.quantized")
    difference, reference = stored or (item.difference, item.reference)
    return Converted(
        layer=", ".join(item.quantizer.layers),
        operand=item.quantizer.operand,
        role=item.quantizer.role,
        format=str(item.quantizer.format),
        bits=item.bits,
        status=plan.status,
        error=(difference / reference) ** 0.5 if reference else float("inf") if difference else 0.0,
        note="; ".join((*plan.notes, *((IN_STEPS,) if stored else ()))),
    )


def _untrained(module: fx.GraphModule, watched: Collection[Watched]) -> str:
    """Say what speaks for a model that was never trained: ranges that nobody learned, a schedule at its start."""
    learns = [item for item in watched if item.extent and item.quantizer.format.range is not Range.DYNAMIC]
    unseen = [item.label for item in learns if not item.learned]
    if unseen:
        others = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        return f"the model was never trained: the range of {unseen[0]}{others} has seen no batch in training mode"
    schedule = precision_of(module).schedule
    if schedule is not None and schedule.position == 0:
        return "the model has been trained for zero steps by its schedule: schedule.step() belongs behind each of them"
    return ""
