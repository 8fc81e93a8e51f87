"""Kernels do nothing that C++ leaves undefined: the short form of `python -m tests.native.sanitized`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.native.sanitized import missing

SHORT = "one_pixel or longest_sum or (geometry and plain) or any_layout or (bits_of_the_torch_operators and keep)"


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_no_undefined_behaviour() -> None:
    command = [sys.executable, "-m", "tests.native.sanitized", "-k", SHORT]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CPT_FX_NATIVE": "1"})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert " passed" in done.stdout
