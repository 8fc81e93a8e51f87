"""What `export.qdq` made of a model: exact, converted or left in floating point, and how far outputs are off."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from cpt_fx.export.program import Call, Graph
from cpt_fx.export.qdq_formats import CONVERTED, EXACT
from cpt_fx.trial import tensors_in

_WITHOUT = "session.disable_quant_qdq"

ADVICE = (
    "What recipes.default() quantizes is exported exactly: symmetric weights per channel, activations with an integer "
    "zero point and a running range."
)


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
class Difference:
    """One output of the file in ONNX Runtime against PyTorch at the same widths, on the examples."""

    output: str
    maximum: float
    mean: float
    largest: float
    """Largest magnitude of the output itself."""
    agreement: float | None = None
    """Part of the rows whose largest element is the same one, for outputs of two dims."""

    def __str__(self) -> str:
        """Say it in one line."""
        same = "" if self.agreement is None else f", the same class for {self.agreement:.1%} of the rows"
        off = f"differs by {self.maximum:.3g} at most, {self.mean:.3g} on average"
        return f"{self.output}: {off}, of {self.largest:.3g}{same}"


@dataclass(frozen=True, kw_only=True)
class QdqReport:
    """What was written, and how true it is to the trained model. Printed, it is a summary."""

    path: Path
    quantizers: tuple[Converted, ...]
    outputs: tuple[Difference, ...]
    runtime: str
    """What the outputs come from."""
    opset: int

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
        lines += [f"  {item}" for item in others]
        lines += [f"  {ADVICE}"] if others else []
        lines += [f"  {item}" for item in self.outputs]
        return "\n".join((*lines, f"  {self.runtime}"))


def compared(path: Path, graph: Graph, call: Call, outputs: Any) -> dict[str, Any]:
    """Run a file on the examples; return how far each output is off, and what to know about where it ran."""
    try:
        import onnxruntime
    except ImportError:
        return {"outputs": (), "runtime": "outputs were not compared: install onnxruntime for that"}
    given = [leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
    session, remark = _session(onnxruntime, path)
    read = {value.name for value in session.get_inputs()}
    feed = {
        name: tensor.detach().cpu().numpy() for name, tensor in zip(graph.inputs, given, strict=True) if name in read
    }
    found = session.run(list(graph.outputs), feed)
    differences = tuple(
        _difference(name, np.asarray(theirs), ours.detach().float().cpu().numpy())
        for name, theirs, ours in zip(graph.outputs, found, tensors_in(outputs), strict=True)
        if ours.is_floating_point() and ours.numel()
    )
    return {"outputs": differences, "runtime": f"compared in onnxruntime {onnxruntime.__version__}{remark}"}


def _session(onnxruntime: Any, path: Path) -> tuple[Any, str]:
    """Load a file. Some versions make integer products of opset 21 for which they have no kernel."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=providers), ""
    except Exception as error:
        if "QLinear" not in str(error):
            raise
    options.add_session_config_entry(_WITHOUT, "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    return session, f' with {_WITHOUT} = "1": this version lacks an integer kernel of opset 21'


def _difference(name: str, theirs: np.ndarray[Any, Any], ours: np.ndarray[Any, Any]) -> Difference:
    theirs, ours = theirs.astype(np.float64), ours.astype(np.float64)
    # Where both are the same infinity (a mask that is returned), there is no difference.
    far = np.abs(np.where(theirs == ours, 0.0, theirs - ours))
    classes = ours.ndim == 2 and ours.shape[1] > 1
    return Difference(
        output=name,
        maximum=float(far.max()),
        mean=float(far.mean()),
        largest=float(np.abs(ours).max()),
        agreement=float((theirs.argmax(1) == ours.argmax(1)).mean()) if classes else None,
    )
