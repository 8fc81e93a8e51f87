"""Comparison of an exported file, run in the installed runtimes, with PyTorch's outputs on the same examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpt_fx.capture.dry_run import tensors_in
from cpt_fx.common.arrays import array_of
from cpt_fx.export.program import Call, Graph
from cpt_fx.export.sizes import tensors_of
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.ort.environment import CPU

_WITHOUT = "session.disable_quant_qdq"
Feed = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far an output of a file in one runtime is from PyTorch at the same bit-widths, on the examples."""

    output: str
    runtime: str
    maximum: float
    mean: float
    largest: float
    """Largest magnitude of the output itself."""
    agreement: float | None = None
    """Share of rows with the same argmax, for outputs of two dims."""

    def __str__(self) -> str:
        """Return a one-line summary."""
        same = "" if self.agreement is None else f", the same class for {self.agreement:.1%} of the rows"
        off = f"differs by {self.maximum:.3g} at most, {self.mean:.3g} on average"
        return f"{self.output} in {self.runtime}: {off}, of {self.largest:.3g}{same}"


def compared(path: Path, graph: Graph, call: Call, outputs: Any) -> dict[str, Any]:
    """Run a file in every installed runtime; return the differences of the outputs, and remarks on the runtimes."""
    feed = _feed(graph, call)
    differences: list[Difference] = []
    remarks = []
    for run in (_in_onnxruntime, _in_openvino):
        try:
            runtime, remark, found = run(path, feed, graph.outputs)
        except ImportError:
            continue
        remarks.append(f"{'' if found else 'not '}compared in {runtime}{remark}")
        differences += [
            _difference(name, runtime, np.asarray(theirs), ours.detach().double().cpu().numpy())
            for name, theirs, ours in zip(graph.outputs, found, tensors_in(outputs), strict=bool(found))
            if ours.is_floating_point() and ours.numel()
        ]
    nowhere = "outputs were not compared: install onnxruntime for that"
    return {"outputs": tuple(differences), "runtime": "; ".join(remarks) or nowhere}


def at_full_precision(path: Path, graph: Graph, call: Call) -> dict[str, np.ndarray[Any, Any]]:
    """Return the outputs by name of a file with bit-width inputs, on the examples at full precision."""
    widths = dict.fromkeys(graph.dials, np.array(FULL_PRECISION))
    return dict(zip(graph.outputs, _in_onnxruntime(path, _feed(graph, call) | widths, graph.outputs)[2], strict=True))


def _feed(graph: Graph, call: Call) -> Feed:
    return {name: array_of(tensor) for name, tensor in zip(graph.inputs, tensors_of(call), strict=True)}


def _in_onnxruntime(path: Path, feed: Feed, names: tuple[str, ...]) -> tuple[str, str, list[Any]]:
    """Run a file in ONNX Runtime; some versions fuse integer products of opset 21 that they have no kernel for."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    remark = ""
    try:
        made = onnxruntime.InferenceSession(str(path), options, providers=[CPU])
    except Exception as error:
        if "QLinear" not in str(error):
            raise
        options.add_session_config_entry(_WITHOUT, "1")
        made = onnxruntime.InferenceSession(str(path), options, providers=[CPU])
        remark = f' with {_WITHOUT} = "1": this version lacks an integer kernel of opset 21'
    read = {value.name for value in made.get_inputs()}
    found = made.run(list(names), {name: value for name, value in feed.items() if name in read})
    return f"onnxruntime {onnxruntime.__version__}", remark, found


def _in_openvino(path: Path, feed: Feed, names: tuple[str, ...]) -> tuple[str, str, list[Any]]:
    """Run a file in OpenVINO with float32 arithmetic: on some processors the default is 16 bits."""
    import openvino

    runtime = f"OpenVINO {openvino.__version__.partition('-')[0]}"
    try:
        made = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        read = {name for value in made.inputs for name in value.names}
        found = made({name: value for name, value in feed.items() if name in read})
    except RuntimeError as error:
        # An operator that OpenVINO lacks is not the file's fault.
        return runtime, f": {str(error).strip().splitlines()[-1]}", []
    return runtime, "", [found[name] for name in names]


def _difference(name: str, runtime: str, theirs: Any, ours: Any) -> Difference:
    # Equal infinities (a mask that is returned, say) are no difference.
    far = np.abs(np.where(theirs == ours, 0.0, theirs - ours))
    same = float((theirs.argmax(1) == ours.argmax(1)).mean()) if ours.ndim == 2 and ours.shape[1] > 1 else None
    maximum, mean, largest = float(far.max()), float(far.mean()), float(np.abs(ours).max())
    return Difference(output=name, runtime=runtime, maximum=maximum, mean=mean, largest=largest, agreement=same)
