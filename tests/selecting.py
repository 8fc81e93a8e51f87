"""What the default run selects of many cases."""

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *, every: int) -> list[Any]:
    """Mark cases as slow, but for the first and every n-th after it, which stay in the default run."""
    cases = list(cases)
    slow = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
    slow[::every] = cases[::every]
    return slow
