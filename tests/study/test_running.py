"""Studies that run in this process: what is kept, what is run again, and what is said."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from cpt_fx import study
from cpt_fx.schedules import Schedule, Static, named
from cpt_fx.study.training import load_in_worker
from tests.study import trains

FEW = ("CR", "RR", "static")


def run(folder: Path, train: Any = trains.train, **changed: Any) -> study.Study:
    given: dict[str, Any] = {
        "store": folder / "s.sqlite", "total_steps": 80, "schedules": FEW, "seeds": 2, "progress": False,
    }  # fmt: skip
    return study.run(train, **given | changed)


def logged(log: Path) -> Counter[str]:
    return Counter(log.read_text().splitlines())


def test_every_cell_becomes_a_record(tmp_path: Path) -> None:
    found = run(tmp_path, name="n", options={"scale": 2.0}, bits=[(3, 8), (4, 8)], threads=1)
    records = found.records
    assert [(r.label, r.q_min, r.seed) for r in records] == [
        (label, q_min, seed) for seed in (0, 1) for q_min in (3, 4) for label in ("CR", "RR", "static 8")
    ]
    first = records[0]
    schedule = named("CR", q_min=3, q_max=8, total_steps=80)
    assert first.rebuilt() == schedule
    assert (first.study, first.experiment, first.total_steps, first.q_max) == ("n", "schedules", 80, 8)
    assert (first.status, first.error, first.metric, first.better) == ("done", None, "accuracy", "higher")
    assert first.value == first.metrics["accuracy"] == 2 * schedule.trajectory()[:, 0].mean()
    assert first.mean_bits == pytest.approx(schedule.trajectory()[:, 0].mean())
    assert first.options == {"scale": 2.0}
    assert first.machine["threads"] == 1
    assert {"Python", "torch", "code"} <= set(first.versions)
    assert first.started.endswith("+00:00")
    assert first.seconds >= 0
    # Every run starts from a schedule of its own, at its beginning.
    assert {r.metrics["position"] for r in records} == {0.0}
    assert study.load(tmp_path / "s.sqlite").records == records


def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = {"log": str(log)}
    run(tmp_path, options=options, schedules=["CR"], seeds=1)
    run(tmp_path, options=options, schedules=["CR", "RR"], seeds=3)
    found = run(tmp_path, options=options, seeds=3)
    assert len(found.records) == 9
    assert set(logged(log).values()) == {1}
    assert len(logged(log)) == 9


def test_cells_that_are_the_same_training_share_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = run(tmp_path, options={"log": str(log)}, bits=[(3, 8), (4, 8)], seeds=1)
    assert len(found.records) == 6
    assert logged(log)["Static(bits=8, total_steps=80) 0"] == 1
    assert len(logged(log)) == 5
    statics = [r for r in found.records if r.label == "static 8"]
    assert [r.q_min for r in statics] == [3, 4]
    assert statics[0].value == statics[1].value


def test_failures_are_kept_with_their_reason_and_tried_again(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"5 of 8 cells failed, the first one, LR \(3, 8\) seed 0, with: KeyError"):
        found = run(tmp_path, trains.faulty, seeds=1, options={"mended": str(tmp_path / "mended")},
                    schedules=["CR", "LR", "ER", "RR", "CT", "LT", "ETV", "ETH"], metric="accuracy")  # fmt: skip
    errors = {r.label: r.error or "" for r in found.failed}
    assert list(errors) == ["LR", "ER", "RR", "CT", "LT"]
    assert "Traceback" in errors["LR"]
    assert "trains.py" in errors["LR"]
    assert errors["ER"] == "the training function returned accuracy = nan"
    assert errors["RR"] == "the training function returned accuracy = 'good', not a number"
    assert "SystemExit: 3" in errors["CT"]
    assert errors["LT"] == "the training function returned no 'accuracy', but an empty dict"
    assert all(r.value is None for r in found.failed)
    # What is not compared may be infinite: it is left out, and the run counts.
    (partly,) = (r for r in found.records if r.label == "ETV")
    assert (partly.status, partly.value, partly.metrics) == ("done", 0.5, {"accuracy": 0.5})
    (tensor,) = (r for r in found.records if r.label == "CR")
    assert tensor.value == 0.5
    (tmp_path / "mended").touch()
    again = run(tmp_path, trains.faulty, seeds=1, options={"mended": str(tmp_path / "mended")},
                schedules=["CR", "LR", "ER", "RR", "CT", "LT", "ETV", "ETH"], metric="accuracy")  # fmt: skip
    assert again.failed == []
    assert {r.label: r.value for r in again.records}["LR"] == 1.0
    assert {r.label: r.value for r in again.records}["CR"] == 0.5


def test_a_failed_cell_that_is_no_longer_asked_for_goes(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="1 of 2 cells failed"):
        run(tmp_path, trains.faulty, seeds=1, schedules=["CR", "LR"])
    found = run(tmp_path, trains.faulty, seeds=1, schedules=["ETH"])
    assert {cell.label for cell in found.cells} == {"CR", "ETH"}


def test_a_metric_that_is_not_there_is_a_failure_that_can_be_mended(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="failed"):
        found = run(tmp_path, metric="acuracy")
    assert "returned no 'acuracy', but accuracy, position" in str(found.records[0].error)
    assert run(tmp_path, metric="position", better="lower").records[0].value == 0.0
    # Nothing is trained anew for another metric, and it holds for all of the study.
    (tmp_path / "log").touch()
    records = run(tmp_path, metric="accuracy", schedules=["CR"]).records
    assert {(r.metric, r.better) for r in records} == {("accuracy", "higher")}


def test_other_settings_need_another_name(tmp_path: Path) -> None:
    run(tmp_path)
    for changed, message in (
        ({"options": {"scale": 2.0}}, r'with options \{\}, not with options \{"scale":2.0\}'),
        ({"total_steps": 160}, "total_steps=80.*not with.*total_steps=160"),
        ({"cycles": 4}, "cycles=8.*not with.*cycles=4"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*another name"):
            run(tmp_path, **changed)
    run(tmp_path, name="other", options={"scale": 2.0})
    both = study.load(tmp_path / "s.sqlite")
    assert Counter(r.study for r in both.records) == {"trains": 6, "other": 6}
    assert {r.study for r in study.load(tmp_path / "s.sqlite", "other").records} == {"other"}
    with pytest.raises(ValueError, match=r"has no study 'othr'.*Did you mean \"other\""):
        study.load(tmp_path / "s.sqlite", "othr")


def test_the_seed_is_set_before_training(tmp_path: Path) -> None:
    found = run(tmp_path, trains.draws, seeds=[3, 4], schedules=FEW)
    drawn = {(r.seed, *r.metrics.values()) for r in found.records}
    assert len(drawn) == 2  # the same for every schedule, different for every seed
    assert len({one[1:] for one in drawn}) == 2
    before = {r.seed: r.metrics for r in found.records}
    again = run(tmp_path, trains.draws, seeds=[3], name="again").records[0]
    assert again.metrics == before[3]


def test_threads_are_set_and_given_back(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    found = run(tmp_path, trains.threads, threads=before + 1, seeds=1)
    assert {r.value for r in found.records} == {before + 1}
    assert torch.get_num_threads() == before


def test_a_change_of_the_code_is_said(tmp_path: Path) -> None:
    file = tmp_path / "changing_task.py"
    file.write_text("def train(schedule):\n    return 1.0\n")
    reference = f"{file}:train"
    assert run(tmp_path, reference, seeds=1).records[0].study == "changing_task"
    file.write_text("def train(schedule):\n    return 2.0\n")
    with pytest.warns(UserWarning, match="3 of 6 cells of 'changing_task' were made by other code"):
        found = run(tmp_path, reference, seeds=2)
    assert len({r.versions["code"] for r in found.records}) == 2
    assert len(found.records) == 6


def test_an_interrupted_study_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, trains.interrupted, schedules=["CR", "ER", "RR"], seeds=1)
    assert "stopped: 1 of 3 cells are done and kept in" in capsys.readouterr().err
    found = study.load(tmp_path / "s.sqlite")
    assert [(cell.label, cell.record is not None) for cell in found.cells] == [
        ("CR", True),
        ("ER", False),
        ("RR", False),
    ]
    run(tmp_path, trains.interrupted, schedules=["CR", "RR"], seeds=1)  # the lock was given back


def test_progress_is_a_line_for_each_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, schedules=["CR"], seeds=1, progress=True)
    with pytest.warns(UserWarning, match="failed"):
        run(tmp_path, lambda schedule: "x", schedules=["RR"], seeds=1, progress=True, name="broken")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "trains: 1 cell"
    assert lines[1].startswith("[1/1] CR (3, 8) seed 0: accuracy 5.")
    assert lines[3].startswith("[1/1] RR (3, 8) seed 0: failed: the training function returned metric = 'x'")


def test_any_function_will_do_in_this_process(tmp_path: Path) -> None:
    assert run(tmp_path, lambda schedule: 0.5).records[0].study == "study"

    def inner(schedule: Schedule, *, width: int = 3) -> int:
        return width

    assert run(tmp_path, inner, options={"width": 7}).records[0].value == 7
    assert run(tmp_path, lambda schedule, **rest: rest["seed"], name="rest", seeds=[5]).records[0].value == 5


@pytest.mark.parametrize(
    ("train", "options", "error", "message"),
    [
        (trains.train, {"scal": 2}, ValueError, "takes no argument 'scal' of options.*Did you mean \"scale\""),
        (trains.train, {"seed": 2}, ValueError, "the study itself gives it"),
        (trains.blocking, {}, TypeError, "blocking needs folder"),
        (lambda: 1.0, {}, TypeError, "must take the schedule"),
        (3, {}, TypeError, "train must be a function"),
        ("train", {}, ValueError, "is named as in"),
        ("nowhere.py:train", {}, FileNotFoundError, "there is no file .*nowhere.py"),
        ("nowhere:train", {}, ImportError, "there is no module nowhere"),
        ("tests.study.trains:trian", {}, ValueError, "Did you mean \"train\""),
        ("tests.study.trains:os.sep", {}, TypeError, "must be a function"),
    ],
)  # fmt: skip
def test_a_function_that_will_not_do(
    tmp_path: Path, train: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path, train, options=options)
    assert not (tmp_path / "s.sqlite").exists()


def test_counts_are_checked(tmp_path: Path) -> None:
    for field in ("workers", "threads"):
        with pytest.raises(ValueError, match=f"{field} must be"):
            run(tmp_path, **{field: 0})
    with pytest.raises(ValueError, match="with ray the cluster decides, got workers=2"):
        run(tmp_path, ray="auto", workers=2)
    with pytest.raises(ValueError, match="without ray the training chooses its device, got gpus=1"):
        run(tmp_path, gpus=1)
    with pytest.raises(ValueError, match="gpus must be"):
        run(tmp_path, ray="auto", gpus=-1)


def test_references_are_followed(tmp_path: Path) -> None:
    assert run(tmp_path, "tests.study.trains:train", seeds=1).records[0].study == "trains"
    assert run(tmp_path, "tests.study.trains:threads", seeds=1).records[-1].study == "trains.threads"
    # What lies beside the file can be imported by it.
    (tmp_path / "beside_it.py").write_text("VALUE = 4.0\n")
    (tmp_path / "my-task.py").write_text("from beside_it import VALUE\ndef train(schedule):\n    return VALUE\n")
    found = run(tmp_path, str(tmp_path / "my-task.py:train"), seeds=1, name="mine")
    assert study.load(found.store, "mine").records[0].value == 4.0


def test_own_schedules_can_be_studied(tmp_path: Path) -> None:
    found = run(tmp_path, schedules=[("five", Static(5, total_steps=80))], seeds=1)
    assert (found.records[0].label, found.records[0].value) == ("five", 5.0)


def test_on_another_machine_the_file_lies_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sent_task.py").write_text("def train(schedule):\n    return 0.25\n")
    monkeypatch.chdir(tmp_path)
    call = load_in_worker("/home/somebody/else/sent_task.py:train")
    assert call(None) == 0.25
