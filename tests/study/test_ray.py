"""Studies on Ray, for real: a local instance with two processors."""

from __future__ import annotations

import builtins
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpt_fx import study
from cpt_fx.study.cells import Setting, plan
from tests.study import trains

ray = pytest.importorskip("ray")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # tests report nothing to anybody


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One for all tests: to start it takes seconds."""
    printing = builtins.print
    environment = {"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}}
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=1,  # Ray counts what it is told, there need not be any
        object_store_memory=100_000_000,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env=environment,
    )
    yield
    ray.shutdown()
    builtins.print = printing  # not Ray's own: other tests look at the code of print


def run(folder: Path, train: Any = trains.train, **changed: Any) -> study.Study:
    given: dict[str, Any] = {
        "store": folder / "s.sqlite", "total_steps": 80, "seeds": 2, "progress": False, "ray": "auto",
        "schedules": ["CR", "RR", "static"],
    }  # fmt: skip
    return study.run(train, **given | changed)


@pytest.mark.usefixtures("cluster")
def test_ray_gives_what_this_process_gives(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    log = tmp_path / "log"
    here = run(tmp_path / "here", ray=None)
    there = run(tmp_path, options={"log": str(log)})
    assert [(r.label, r.seed, r.metrics) for r in there.records] == [(r.label, r.seed, r.metrics) for r in here.records]
    run(tmp_path, options={"log": str(log)}, seeds=3)
    assert Counter(Counter(log.read_text().splitlines()).values()) == {1: 9}
    assert ray.is_initialized()  # it was there before, so it stays


@pytest.mark.usefixtures("cluster")
def test_what_goes_wrong_costs_one_cell(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="3 of 4 cells failed"):
        found = run(tmp_path, trains.deadly, schedules=["LR", "ER", ("own", trains_own), "RR"], seeds=1)
    errors = {r.label: r.error or "" for r in found.failed}
    assert set(errors) == {"LR", "ER", "own"}
    assert all(errors[label].startswith("Ray lost the cell: ") for label in ("LR", "ER"))
    assert "KeyError: 'own'" in errors["own"]
    assert [r.label for r in found.records if r.status == "done"] == ["RR"]


def trains_own(q_min: int, q_max: int, total_steps: int) -> Any:
    from cpt_fx.schedules import Custom

    return Custom(trains.four, total_steps=total_steps)


@pytest.mark.usefixtures("cluster")
def test_leaving_early_cancels_what_is_left(tmp_path: Path) -> None:
    from cpt_fx.study.engines import run_on_ray

    (tmp_path / "folder").mkdir()
    options = {"folder": str(tmp_path / "folder")}
    common = Setting(
        trains.blocking,
        name="s",
        total_steps=80,
        seeds=1,
        cycles=8,
        q_grad=None,
        better="higher",
        metric=None,
        options=options,
    )
    cells = plan(common, ["CR", "LR", "RR", "CT", "ER"], [(3, 8)])
    results = run_on_ray(cells, common.train, address="auto", threads=1)
    assert {next(results)[0].label, next(results)[0].label} == {"CR", "LR"}
    results.close()  # RR and CT would wait for ten minutes, and keep both processors
    assert len(run(tmp_path).records) == 6


@pytest.mark.usefixtures("cluster")
def test_gpus_are_reserved(tmp_path: Path) -> None:
    assert {r.value for r in run(tmp_path, trains.gpus, gpus=0.5, seeds=1, schedules=["CR"]).records} == {1.0}


@pytest.mark.usefixtures("cluster")
def test_what_cannot_be_imported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be imported by another process"):
        run(tmp_path, lambda schedule: 0.5)


def test_the_command_starts_ray_and_sends_the_file(tmp_path: Path) -> None:
    """A file and what lies beside it reach the workers, which run in a copy of its folder."""
    task = tmp_path / "task"
    task.mkdir()
    (task / "beside_task.py").write_text("VALUE = 0.25\n")
    (task / "ray_task.py").write_text(
        "import os\nfrom beside_task import VALUE\n"
        "def train(schedule, seed):\n"
        f"    return {{'value': VALUE, 'elsewhere': float(os.getcwd() != {str(task)!r})}}\n"
    )
    store = tmp_path / "s.sqlite"
    command = [sys.executable, "-m", "cpt_fx", "study", "run", "task/ray_task.py:train", "--store", str(store)]
    done = subprocess.run(
        [*command, "--steps", "80", "--schedules", "CR,RR", "--seeds", "1", "--ray", "local"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    records = study.load(store).records
    assert [(r.label, r.value) for r in records] == [("CR", 0.25), ("RR", 0.25)]
    assert {r.metrics["elsewhere"] for r in records} == {1.0}
