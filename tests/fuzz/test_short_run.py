"""A short run of the fuzzer, of the same models each time: nothing is wrong with any of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.report import Report
from tests.fuzz.workers import Numbered, Pool

SEED = 2026
MODELS = int(os.environ.get("CPT_FX_FUZZ", "6"))
"""Each takes some two seconds of one core; `.ci/run` asks for more of them."""
RUNS = 2
"""As many as a small machine has cores, and each has a process of its own, which warnings of torch do not stop."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(RUNS))
def test_nothing_is_wrong(first: int) -> None:
    report, pool = Report("pytest"), Pool(1)
    try:
        for task, found in pool.results(Numbered(SEED, number) for number in range(first, MODELS, RUNS)):
            assert not isinstance(found, str), f"model {task.number}: {found}"
            report.add(found[0])
    finally:
        pool.close()
    assert report.models + report.unfit == len(range(first, MODELS, RUNS))
    assert not report.faults, f"python -m tests.fuzz --seed {SEED} --model N shows one of these:\n{report}"


def test_a_model_is_the_same_each_time() -> None:
    from tests.fuzz.model import draw

    assert draw(SEED, 3) == draw(SEED, 3)
    assert "class Model(nn.Module):" in draw(SEED, 3)
    assert draw(SEED, 3) != draw(SEED, 4) != draw(SEED + 1, 4)


def test_failures_are_tests() -> None:
    """The folder holds nothing but what the fuzzer wrote."""
    names = {path.name for path in (Path(__file__).parent / "failures").glob("*.py")}
    assert all(name == "__init__.py" or name.startswith("test_") for name in names)
