"""Compiled training steps of real models with dropout end, each in a process of its own.

`pytest -m long` runs the whole list of `tests/capture/compiled_steps.py`, some 20 seconds each.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.capture.compiled_steps import MODELS

FEW = ("bert-classifier",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.long]) for name in MODELS]
)
def test_three_steps(name: str) -> None:
    if name.partition("-")[0] not in ("convolutions", "encoder", "lstm"):
        pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-m", "tests.capture.compiled_steps", name], capture_output=True, text=True)
    assert done.returncode == 0, f"{name} ended with {done.returncode}: {done.stderr[-3000:]}"
    assert done.stdout.splitlines()[-1] == "three steps"
