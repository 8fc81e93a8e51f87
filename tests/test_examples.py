"""Every script in examples/ runs in its short form, as a user runs it: a process of its own, another folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.selecting import mostly_slow

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

# What an environment may lack. The default one has no training in ONNX Runtime: .ci/export runs that.
NEEDS = {"node_classification.py": "torch_geometric", "ort_training.py": "onnxruntime"}


@pytest.mark.parametrize("name", mostly_slow(SCRIPTS, every=len(SCRIPTS)))
def test_it_runs(name: str, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    command = [sys.executable, str(ROOT / "examples" / name), "--fast"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not list(tmp_path.iterdir()), "an example leaves files behind"
    if name == "digits.py":
        found = re.search(r"test accuracy ([\d.]+) %", run.stdout)
        assert found is not None
        assert float(found[1]) > 60
        assert "quantizers ran" in run.stdout


def test_the_table_lists_every_script() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| \[([\w.]+)\]", text, flags=re.MULTILINE) == SCRIPTS
