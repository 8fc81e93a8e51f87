"""Two exports of one model are equal, byte for byte, whatever process makes them, and say nothing of where that was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxscript")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from cpt_fx import export
from tests.export.exported_cases import trained

folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    model, x = trained(name)
    export.onnx(model, (x,), folder / f"{name}.open.onnx")
    export.onnx(model, (x,), folder / f"{name}.fixed.onnx", 8)
    export.qdq(model, (x,), folder / f"{name}.qdq.onnx", verbose=False)
"""


def test_processes_write_the_same_bytes(tmp_path: Path) -> None:
    folders = [tmp_path / "somewhere", tmp_path / "elsewhere" / "deeper"]
    for seed, folder in enumerate(folders, 1):
        folder.mkdir(parents=True)
        # From a file: a line that is typed has no path.
        script = folder / "script.py"
        script.write_text(SCRIPT)
        environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, str(script), str(folder), "residual", "transformer"],
            cwd=folder, env=environment, check=True, capture_output=True,
        )  # fmt: skip
    first, second = ({path.name: path.read_bytes() for path in folder.glob("*.onnx")} for folder in folders)
    assert len(first) == 6 and first == second
    for content in first.values():
        for word in (str(ROOT), str(tmp_path), sys.prefix, "site-packages", ".py", "Traceback", "stack_trace"):
            assert word.encode() not in content, word
