"""The outputs of a finished file in ONNX Runtime against those of PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from cpt_fx.export.program import Call, Graph
from cpt_fx.export.qdq_report import Difference

_WITHOUT = "session.disable_quant_qdq"


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
    expected = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    differences = tuple(
        _difference(name, np.asarray(theirs), ours.detach().float().cpu().numpy())
        for name, theirs, ours in zip(graph.outputs, found, expected, strict=True)
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
