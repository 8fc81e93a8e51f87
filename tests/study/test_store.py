"""The file: who may write it, who may read it, and what it refuses to be."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from cpt_fx import study
from cpt_fx.study import store
from tests.study import trains


def run(path: Path, **changed: object) -> study.Study:
    return study.run(trains.train, store=path, total_steps=80, schedules=["CR"], seeds=1, progress=False, **changed)  # type: ignore[arg-type]


HOLD = """
import sys
from pathlib import Path
from cpt_fx.study import store
with store.writing(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_one_study_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    run(path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RuntimeError, match=rf"another study is running on the store .*process {holder.pid}, since"):
            run(path)
        assert len(study.load(path).records) == 1  # reading does not wait
        holder.kill()
    assert len(run(path).records) == 1  # the system has released the lock


def test_within_one_process_too(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    with store.writing(path):
        with pytest.raises(RuntimeError, match="another study is running"):
            run(path)
        run(tmp_path / "t.sqlite")
    run(path)


def test_nothing_but_the_lock_file_is_left(tmp_path: Path) -> None:
    run(tmp_path / "s.sqlite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.sqlite", "s.sqlite.lock"]


def test_what_is_no_store_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, and longer than the header of one would be: " * 20)
    before = text.read_bytes()
    with pytest.raises(ValueError, match=r"notes.txt cannot be used as a store"):
        run(text)
    assert text.read_bytes() == before

    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    for call in (run, study.load):
        with pytest.raises(ValueError, match="is a SQLite file, but not of a study"):
            call(other)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    run(path)
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(ValueError, match="has format 9; this version of cpt_fx reads format 1"):
        study.load(path)


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no store"):
        study.load(tmp_path / "s.sqlite")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        run(tmp_path / "nowhere" / "s.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(run(Path("s.sqlite")).records) == 1


def test_a_new_attempt_replaces_a_failure(tmp_path: Path) -> None:
    path, mended = tmp_path / "s.sqlite", tmp_path / "mended"
    for _ in range(2):
        with pytest.warns(UserWarning, match="failed"):
            study.run(trains.faulty, store=path, total_steps=80, schedules=["LR"], seeds=1, progress=False,
                      options={"mended": str(mended)})  # fmt: skip
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT status, attempts FROM runs").fetchall() == [("failed", 2)]
    connection.close()
