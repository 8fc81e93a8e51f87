"""Integer convolutions of every geometry give what simulated ones give: a short run of `tests/fuzz_convolutions.py`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cpt_fx import native
from cpt_fx.integer.choice import chosen
from tests.fuzz_convolutions import ROUNDING, Shape, errors, wrong


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 3, 4, [3], [1], [2], [1], [1], False),  # as many places as pixels, but others
        Shape(1, 3, 4, [5], [1], [3], [5], [1], True),
        Shape(2, 3, 4, [1, 3], [1, 1], [1, 2], [0, 1], [1, 1], False),
        Shape(2, 3, 4, [1, 3], [1, 1], [2, 2], [0, 1], [1, 1], False),
        Shape(2, 3, 4, [3, 3], [1, 1], [1, 1], [2, 2], [1, 1], True),
        Shape(1, 5, 7, [4, 4], [1, 1], [1, 1], [0, 0], [1, 1], True),
    ],
    ids=str,
)
def test_kernels_of_one_pixel(shape: Shape) -> None:
    """The shortcut for images without neighbours is for those that lie as they are."""
    with chosen("always"):
        assert max(errors(shape, 0)) < ROUNDING


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_any_geometry(kernels: str) -> None:
    if kernels == "on":
        assert wrong(700, seed=1) == []
    else:
        with native.disabled():
            assert wrong(150, seed=2) == []


@pytest.mark.skipif(native.status() != "used", reason=f"native kernels: {native.status()}")
def test_any_geometry_without_vector_instructions() -> None:
    command = [sys.executable, "-m", "tests.fuzz_convolutions", "400", "--seed", "3", "--here"]
    done = subprocess.run(command, env={**os.environ, "CPT_FX_NATIVE": "plain"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong; native kernels: used" in done.stdout
