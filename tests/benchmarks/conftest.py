"""Scripts run with their folder on the path; so do these tests."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(autouse=True)
def _little_to_collect() -> Iterator[None]:
    """Before each step that is timed, garbage is collected: of the test, not of all that pytest and torch hold."""
    gc.freeze()
    yield
    gc.unfreeze()
