"""`export.qdq`: a trained model for integer deployment, in standard QuantizeLinear and DequantizeLinear nodes."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import fx, nn

from cpt_fx.capture.standalone import precision_of
from cpt_fx.common.files import new_file
from cpt_fx.errors import ExportError
from cpt_fx.export import qdq_formats as formats
from cpt_fx.export.examples import call_of, in_mode, run
from cpt_fx.export.plain import evaluation_of, finish, write
from cpt_fx.export.qdq_graph import complete, constants, quantizers, replace
from cpt_fx.export.verify import Difference, compared
from cpt_fx.formats import Range
from cpt_fx.schedules.bits import Bits, as_bits

ADVICE = (
    "What recipes.default() quantizes is exported exactly: symmetric weights per channel, activations with an integer "
    "zero point and a running range."
)
IN_STEPS = "in whole steps of input times weight, as integer kernels add"


@dataclass(frozen=True, kw_only=True)
class Converted:
    """How one quantizer was exported."""

    layer: str
    operand: str
    role: str
    format: str
    """The format that it was trained with."""
    bits: int
    status: str
    """`"exact"`, `"converted"` or `"float"`."""
    error: float
    """Norm of the difference between the file's values and PyTorch's on the examples, relative to PyTorch's."""
    note: str = ""

    def __str__(self) -> str:
        """Return a one-line summary."""
        error = "" if self.status == formats.EXACT else f" {self.error:.2%}"
        note = f": {self.note}" if self.note else ""
        return f"{self.layer} {self.operand} ({self.format}, {self.bits} bits): {self.status}{error}{note}"


@dataclass(frozen=True, kw_only=True)
class QdqReport:
    """What was written, and how close it is to the trained model. `print` shows a summary."""

    path: Path
    quantizers: tuple[Converted, ...]
    outputs: tuple[Difference, ...]
    """The difference of each output, in each installed runtime: ONNX Runtime, OpenVINO."""
    runtime: str
    """The runtimes that the outputs were compared in."""
    untrained: str = ""
    """Why the model looks untrained; empty if it does not."""

    @property
    def exact(self) -> bool:
        """Whether every quantizer is in the file exactly as it was trained."""
        return all(item.status == formats.EXACT for item in self.quantizers)

    def __str__(self) -> str:
        """Return the counts, every quantizer that is not exact, and the differences of the outputs."""
        others = [item for item in self.quantizers if item.status != formats.EXACT]
        exact = len(self.quantizers) - len(others)
        converted = sum(item.status == formats.CONVERTED for item in others)
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
    """Write a trained model with integer weights and integer activations, for deployment in ONNX Runtime and others.

    Weights are stored as symmetric integers per output channel, of 8 bits, or of 4 if the bit-width is 4 or less.
    Activations are unsigned 8-bit codes with one fixed range each, the running range of training; at narrower
    bit-widths the codes are clipped. Biases of integer products are stored in whole steps of input scale times weight
    scale; what was not quantized stays in floating point. Formats that QDQ cannot express are converted to the nearest
    one that it can, and listed in the report with the resulting error. Formats of `recipes.default()` are exact.

    Args:
        result: a trained model that `transform` returned. It is not modified, and may be in either mode.
        example_inputs: a tuple of the model's arguments, or a dict of them by name: real data, ideally a whole batch.
            Errors are measured on it, and ranges that training did not fix are taken from it.
        path: the file to write. An existing one is refused. Weights of more than 1.9 GB go to a file beside it.
        bits: 1 to 8, for all, or `Bits`. Layers with an offset from the schedule, or with a fixed bit-width, keep it;
            those with a schedule of their own use its evaluation bits at the model's position.
        dynamic_batch: keep sizes dynamic, as far as the model allows; otherwise fix them to those of the examples.
        overwrite: replace an existing file, once the new one is complete.
        verbose: print the report.

    Returns:
        How every quantizer was exported, and how far the outputs are from PyTorch's at the same bit-widths.

    Raises:
        ExportError: the model cannot be exported, or the file cannot be written.
    """
    widths = as_bits("bits", bits)
    for name, width in zip(("weight", "activation"), widths, strict=False):
        if not 1 <= width <= formats.MOST_BITS:
            raise ExportError(
                f"bits: {name}s of {width} bits are no integers of at most {formats.MOST_BITS}: pass widths from 1 to "
                f"{formats.MOST_BITS}, or write the model with export.onnx, which takes any"
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
        watched = formats.watched_in(module)
        for name in constants(model, nodes):
            watched[name].constant = watched[name].quantizer.role != "activation"
        # The first run collects ranges, which decide the plans, the second one errors.
        with formats.WatchQuantizers(module, {name: item.see for name, item in watched.items()}):
            outputs = run(module, call)
        plans = {name: formats.plan_of(item) for name, item in watched.items() if name in nodes}
        with formats.WatchQuantizers(
            module, {name: partial(watched[name].compare, plan.values) for name, plan in plans.items()}
        ):
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


def _row(item: formats.Watched, plan: formats.QdqPlan, rounded: Mapping[str, tuple[float, float]]) -> Converted:
    """Return the report on a quantizer; `rounded` are the biases that were rounded to steps of a product, by name."""
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


def _untrained(module: fx.GraphModule, watched: Collection[formats.Watched]) -> str:
    """Return why a model looks untrained (ranges that saw no batch, a schedule at its start), or an empty string."""
    learns = [item for item in watched if item.extent and item.quantizer.format.range is not Range.DYNAMIC]
    unseen = [item.label for item in learns if not item.learned]
    if unseen:
        others = f" and {len(unseen) - 1} more" if len(unseen) > 1 else ""
        return f"the model was never trained: the range of {unseen[0]}{others} has seen no batch in training mode"
    schedule = precision_of(module).schedule
    if schedule is not None and schedule.position == 0:
        return "the model has been trained for zero steps by its schedule: schedule.step() belongs behind each of them"
    return ""
