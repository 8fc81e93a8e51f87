"""Run exported files where there is no torch: `python run_exported.py FOLDER`.

Every folder in FOLDER that holds `case.onnx` and `case.npz` is a case: inputs, and the outputs that PyTorch computed.
Needs numpy, onnx and onnxruntime, nothing of this repository. The exit code is 1 where a case fails.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime


def run(folder: Path) -> str:
    """Run one case. Returns what is wrong with it, or an empty string."""
    onnx.checker.check_model(str(folder / "case.onnx"), full_check=True)
    with np.load(folder / "case.npz") as held:
        values = dict(held)
    tolerance = float(values["tolerance"])
    inputs = {name.removeprefix("input."): value for name, value in values.items() if name.startswith("input.")}
    outputs = {name.removeprefix("output."): value for name, value in values.items() if name.startswith("output.")}
    session = _session(folder / "case.onnx")
    read = {value.name for value in session.get_inputs()}
    if read != set(inputs):
        return f"its inputs are {sorted(read)}, not {sorted(inputs)}"
    for name, found in zip(outputs, session.run(list(outputs), inputs), strict=True):
        largest = float(np.abs(outputs[name]).max())
        difference = float(np.abs(found - outputs[name]).max())
        print(f"{folder.name:28} {name}: differs by {difference:.3g} at most, of {largest:.3g}")
        if not difference <= tolerance * largest:
            return f"{name} differs by {difference:.3g}, of {largest:.3g}: more than {tolerance:g} of it"
    return ""


def _session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # Version 1.19 makes integer products of opset 21 for which it has no kernel.
        if "QLinear" not in str(error):
            raise
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main(folder: Path) -> int:
    """Run all cases of a folder."""
    cases = sorted(path.parent for path in folder.glob("*/case.onnx"))
    if not cases:
        print(f"{folder} holds no case: a folder with case.onnx and case.npz")
        return 1
    failed = 0
    for case in cases:
        wrong = run(case)
        if wrong:
            failed += 1
            print(f"FAILED {case.name}: {wrong}")
    print(f"onnxruntime {onnxruntime.__version__}: {len(cases) - failed} of {len(cases)} cases are right")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
