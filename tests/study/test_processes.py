"""Studies in processes of their own: what happens when one dies, and when the whole study is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cpt_fx import study
from cpt_fx.schedules import Custom
from tests.study import trains

ROOT = Path(__file__).parents[2]


def run(folder: Path, train: Any = trains.train, **changed: Any) -> study.Study:
    given: dict[str, Any] = {
        "store": folder / "s.sqlite", "total_steps": 80, "seeds": 2, "progress": False, "workers": 2,
        "schedules": ["CR", "RR", "static"],
    }  # fmt: skip
    return study.run(train, **given | changed)


@pytest.mark.slow
def test_processes_give_what_this_process_gives(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    log = tmp_path / "log"
    here = run(tmp_path / "here", workers=1, options={"scale": 3.0})
    there = run(tmp_path, options={"scale": 3.0, "log": str(log)})
    assert [(r.label, r.seed, r.metrics) for r in there.records] == [(r.label, r.seed, r.metrics) for r in here.records]
    assert set(Counter(log.read_text().splitlines()).values()) == {1}
    assert len(run(tmp_path, options={"scale": 3.0, "log": str(log)}).records) == 6
    assert len(log.read_text().splitlines()) == 6


@pytest.mark.slow
def test_a_process_that_dies_costs_one_cell(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="2 of 6 cells failed"):
        found = run(tmp_path, trains.deadly, schedules=["LR", "CR", "ER", "RR", "CT", "ETV"], seeds=1)
    errors = {r.label: r.error for r in found.failed}
    assert errors == {
        "LR": "the process died while it trained: exit code 7",
        "ER": "the process died while it trained: SIGSEGV",
    }
    assert {r.label for r in found.records if r.status == "done"} == {"CR", "RR", "CT", "ETV"}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # One that has ended but is not waited for (by whoever adopted it) counts as gone.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(what: Any) -> None:
    """Waits for something that will come; the limit only keeps a broken test from hanging."""
    limit = time.monotonic() + 300
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.05)


def command(folder: Path) -> list[str]:
    """RR and CT of seed 0 wait: when both do, what came before is finished, and both workers are in the middle."""
    return [
        *(sys.executable, "-m", "cpt_fx", "study", "run", "tests/study/trains.py:blocking"),
        *("--store", str(folder / "s.sqlite"), "--steps", "80", "--seeds", "2", "--workers", "2"),
        *("--schedules", "CR,LR,RR,CT,ER,static", "--set", f"folder={folder}"),
    ]


def both_wait(folder: Path) -> None:
    wait_for(lambda: (folder / "RR waits").exists() and (folder / "CT waits").exists())
    wait_for(lambda: len(study.load(folder / "s.sqlite").records) == 2)


def workers_are_gone(folder: Path) -> None:
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    wait_for(lambda: not any(alive(int(pid)) for _, pid, *_ in lines))


@pytest.mark.slow
def test_a_study_that_is_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """kill -9 in the middle: nothing finished is run twice, nothing is lost, no process stays behind."""
    store = tmp_path / "s.sqlite"
    first = subprocess.Popen(command(tmp_path), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with first:
        both_wait(tmp_path)
        # Meanwhile the store can be read, and nobody else may run it.
        with pytest.raises(RuntimeError, match=f"another study is running on the store .*process {first.pid}"):
            run(tmp_path, trains.blocking, options={"folder": str(tmp_path)}, workers=1)
        first.send_signal(signal.SIGKILL)
    workers_are_gone(tmp_path)
    assert [(cell.label, cell.seed) for cell in study.load(store).cells if cell.record] == [("CR", 0), ("LR", 0)]

    (tmp_path / "go").touch()
    second = subprocess.run(command(tmp_path), cwd=ROOT, capture_output=True, text=True)
    assert second.returncode == 0, second.stderr
    assert "12 cells, 2 of them done before" in second.stderr
    records = study.load(store).records
    assert len(records) == 12
    assert {r.status for r in records} == {"done"}
    events = Counter((event, *name) for event, _, *name in map(str.split, (tmp_path / "log").read_text().splitlines()))
    ends = {key[1:]: count for key, count in events.items() if key[0] == "end"}
    begins = {key[1:]: count for key, count in events.items() if key[0] == "begin"}
    assert len(ends) == 12
    assert set(ends.values()) == {1}
    assert {name: count for name, count in begins.items() if count > 1} == {("RR", "0"): 2, ("CT", "0"): 2}


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal; only the one that runs the study speaks."""
    running = subprocess.Popen(
        command(tmp_path), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # Tests in the background of a shell ignore it, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    both_wait(tmp_path)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert out == ""
    assert err.splitlines()[-2:] == [
        f"stopped: 2 of 12 cells are done and kept in {tmp_path / 's.sqlite'}; the same call goes on from there",
        "cpt-fx: interrupted",
    ]
    assert "Traceback" not in err
    workers_are_gone(tmp_path)
    assert len(study.load(tmp_path / "s.sqlite").records) == 2


def test_what_no_other_process_can_import_is_refused_first(tmp_path: Path) -> None:
    def inner(schedule: object) -> float:
        return 0.5

    for train in (inner, lambda schedule: 0.5):
        with pytest.raises(
            ValueError, match="cannot be imported by another process: write it as a function at the top"
        ):
            run(tmp_path, train)
    own = Custom(lambda step: 4, total_steps=80)
    with pytest.raises(ValueError, match=r"the schedule 'mine' cannot be sent to another process.*workers=1"):
        run(tmp_path, schedules=["CR", ("mine", own)])
    assert study.load(tmp_path / "s.sqlite").records == []


def test_a_file_that_another_process_cannot_import(tmp_path: Path) -> None:
    file = tmp_path / "fragile.py"
    file.write_text(
        "import multiprocessing\n"
        "if multiprocessing.parent_process() is not None:\n    raise KeyError('not here')\n"
        "def train(schedule):\n    return 0.5\n"
    )
    with pytest.raises(RuntimeError, match="cannot be imported by a worker: KeyError: 'not here'"):
        run(tmp_path, f"{file}:train")
    assert study.load(tmp_path / "s.sqlite").records == []


@pytest.mark.slow
def test_a_process_that_dies_at_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is nobody to train it, a cell fails; the others go on."""
    submit, killed = ProcessPoolExecutor.submit, list[int]()

    def spoilt(pool: ProcessPoolExecutor, call: Any, *arguments: Any) -> Any:
        if call is not os.getpid and not killed:
            killed.append(submit(pool, os.getpid).result())
            os.kill(killed[0], signal.SIGKILL)
            wait_for(lambda: pool._broken)
        return submit(pool, call, *arguments)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", spoilt)
    with pytest.warns(UserWarning, match="1 of 3 cells failed"):
        found = run(tmp_path, seeds=1)
    assert [(r.label, r.error) for r in found.failed] == [
        ("CR", "the process died while it trained: SIGKILL, as when the system has no memory left")
    ]


SCRIPT = """
from cpt_fx import study

def train(schedule):
    return schedule.bits(0).weight

{guard}
found = study.run(train, store="s.sqlite", total_steps=80, schedules=["CR", "RR"], seeds=1, workers=2, progress=False)
print(len(found.records), found.records[0].study, found.records[0].value)
"""


def script(folder: Path, guard: str) -> subprocess.CompletedProcess[str]:
    body = SCRIPT.format(guard=guard)
    if guard:
        head, _, tail = body.partition(guard)
        body = head + guard + tail.replace("\n", "\n    ").rstrip() + "\n"
    (folder / "my_script.py").write_text(body)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "my_script.py"], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_function_of_the_script_itself(tmp_path: Path) -> None:
    done = script(tmp_path, 'if __name__ == "__main__":')
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 my_script 3.0\n", "")


def test_a_script_that_starts_its_study_on_import_is_told(tmp_path: Path) -> None:
    done = script(tmp_path, "")
    assert done.returncode == 1
    assert 'the study must start below the line `if __name__ == "__main__":`' in done.stderr
    assert "put the call below the line" in done.stderr
    assert study.load(tmp_path / "s.sqlite").records == []
