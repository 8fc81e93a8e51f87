"""The tests of the kernels, with kernels that a compiler has told to look for undefined behaviour.

    python -m tests.native.sanitized              # all that run kernels
    python -m tests.native.sanitized -k noise     # options go to pytest

Ends with an error at the first overflow of a signed sum, bad shift, misaligned read, or number that does not fit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cpt_fx import native
from cpt_fx.native import building

SANITIZER = ("-fsanitize=undefined,float-cast-overflow,float-divide-by-zero", "-fno-sanitize-recover=all", "-g")
TESTS = ("tests/native/test_native.py", "tests/integer/test_products.py", "tests/integer/test_convolutions.py",
         "tests/quantizers/test_counters.py")  # fmt: skip


def missing() -> str:
    """Say why the compiler here cannot do this; nothing where it can."""
    compiler = next(filter(shutil.which, building.COMPILERS), None)
    if compiler is None or native.status() != "used":
        return f"native kernels: {native.status()}"
    with tempfile.TemporaryDirectory() as folder:
        command = [compiler, "-xc++", "-", "-shared", "-fPIC", *SANITIZER, "-o", str(Path(folder) / "made.so")]
        done = subprocess.run(command, input="int f(int x) { return x + 1; }", capture_output=True, text=True)
    return f"{compiler} has no sanitizer of undefined behaviour" if done.returncode else ""


if __name__ == "__main__":
    if missing():
        raise SystemExit(missing())
    building.FLAGS += SANITIZER
    native._built.cache_clear()
    raise SystemExit(pytest.main(["-n0", "-q", "-x", "-s", "-p", "no:cacheprovider", *sys.argv[1:], *TESTS]))
