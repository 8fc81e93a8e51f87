"""Datasets from registries: what goes wrong is said, and nothing half fetched is ever seen."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest
from support import fetch

FETCHES = pytest.mark.skipif(not os.environ.get("CPT_FX_FETCH"), reason="downloads; set CPT_FX_FETCH=1 to run it")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CPT_FX_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def archive(path: Path, name: str) -> None:
    with tarfile.open(path, "w:gz") as tar:
        content = b"1,2,3"
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))


def test_it_is_fetched_once(folder: Path) -> None:
    calls = []

    def download(temporary: Path) -> Path:
        calls.append(temporary)
        archive(temporary / "thing.tgz", "package/numbers.csv")
        return fetch._unpacked(temporary, "*.tgz")

    for _ in range(2):
        files = fetch._cached("thing-1.0", download)
        assert (files / "numbers.csv").read_text(encoding="utf-8") == "1,2,3"
    assert len(calls) == 1
    assert [path.name for path in folder.iterdir()] == ["thing-1.0"]


def test_what_fails_leaves_nothing_behind_and_says_what_to_do(folder: Path) -> None:
    def download(temporary: Path) -> Path:
        (temporary / "half").write_text("", encoding="utf-8")
        raise RuntimeError("the line went dead")

    with pytest.raises(OSError, match=r"thing-1\.0 could not be fetched: the line went dead.*by hand into"):
        fetch._cached("thing-1.0", download)
    assert not list(folder.iterdir())


def test_a_tool_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="needs the command 'npm'"):
        fetch.npm("anything", "1.0")


def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    archive(tmp_path / "evil.tgz", "../../outside.csv")
    with pytest.raises(tarfile.OutsideDestinationError):
        fetch._unpacked(tmp_path, "*.tgz")


@FETCHES
def test_the_registries_answer() -> None:
    assert (fetch.npm("is-number", "7.0.0") / "package.json").exists()
    assert (fetch.debian("hostname") / "usr").is_dir()
    assert (fetch.sdist("six", "1.16.0") / "six.py").exists()


@FETCHES
@pytest.mark.parametrize("call", [fetch.npm, fetch.sdist])
def test_a_package_that_does_not_exist(call: object) -> None:
    assert callable(call)
    with pytest.raises(OSError, match="could not be fetched"):
        call("six", "0.0.99")
