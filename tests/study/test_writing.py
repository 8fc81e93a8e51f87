"""The report: its files, whole or not there, and a page that needs nothing else."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cpt_fx.common import files
from cpt_fx.study import writing
from cpt_fx.study.records import Record, duration
from cpt_fx.study.writing import facts, write
from tests.study import made_up


def everything() -> list[Record]:
    return [
        *made_up.by_cost(noise=4e-3), *made_up.by_cost(noise=4e-3, bits=(3, 6)), *made_up.deficits(noise=2e-3),
        *made_up.windows(), *made_up.first_cycles(), *made_up.delayed(),
        made_up.record("RR", made_up.schedules()["RR"], None, 3),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("report") / "new"
    return write(everything(), folder, title="Digits", notes="Made up: <no data>.", command="cpt-fx study x:train")


@pytest.mark.slow
def test_the_files(report: dict[str, Path]) -> None:
    figures = [
        f"{name}.{kind}" for name in ("cost", "deficit", "window", "first-cycle", "delayed") for kind in ("png", "svg")
    ]
    assert set(report) == {"html", "md", "csv", "records.csv", *figures}
    assert report["html"].name == "made-up.html" and report["cost.png"].name == "made-up-cost.png"
    assert report["records.csv"].name == "made-up-records.csv"
    assert {path.name for path in report["html"].parent.iterdir()} == {path.name for path in report.values()}
    assert all(path.stat().st_size > 100 for path in report.values())


class Page(HTMLParser):
    """Collects what a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.used: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            text = value or ""
            if name == "id":
                self.ids.append(text)
            if name in ("href", "xlink:href", "src"):
                (self.used.add(text[1:]) if text.startswith("#") else self.loaded.append(text))
            self.used.update(re.findall(r"url\(#([^)]+)\)", text))


def test_the_page_stands_alone(report: dict[str, Path]) -> None:
    text = report["html"].read_text()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids)) > 50
    assert page.used <= set(page.ids) and page.used
    assert page.loaded == [] and "<script" not in text and "@import" not in text
    assert text.count("<svg") == 5


def test_the_page_follows_light_and_dark(report: dict[str, Path]) -> None:
    text = report["html"].read_text()
    assert "prefers-color-scheme: dark" in text
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--ink)" in drawings and "var(--small)" in drawings
    for fixed in ("#16191d", "#0072b2", "#ffffff", "#e4e7eb"):
        assert fixed not in drawings.lower()
    # A file of its own has its own colours.
    assert "#0072b2" in report["cost.svg"].read_text() and "var(--" not in report["cost.svg"].read_text()


def test_the_page_says_what_was_run_and_what_was_not(report: dict[str, Path]) -> None:
    text = report["html"].read_text()
    for part in (
        "<h1>Digits</h1>", "Made up: &lt;no data&gt;.", "cpt-fx study x:train", "a processor, 2 cores, 1 thread",
        "torch 2.13.0", "data=digits", "Runs without a value", "ValueError: the loss is nan at step 40",
        "need not hold for other data", "Spearman", "Savings groups at (3, 6)",
    ):  # fmt: skip
        assert part in text, part


def test_markdown_says_the_same(report: dict[str, Path]) -> None:
    text = report["md"].read_text()
    assert text.startswith("# Digits\n") and "![Quality against cost](made-up-cost.png)" in text
    assert "| RR | large | 0.397 |" in text and "* Command: `cpt-fx study x:train`" in text
    assert "## Runs without a value" in text and "ValueError: the loss is nan at step 40" in text
    for name in re.findall(r"\]\(([^)]+)\)", text):
        assert (report["md"].parent / name).exists()


@pytest.mark.slow
def test_equal_records_give_equal_files(report: dict[str, Path], tmp_path: Path) -> None:
    again = write(everything(), tmp_path, title="Digits", notes="Made up: <no data>.", command="cpt-fx study x:train")
    for key, path in report.items():
        assert again[key].read_bytes() == path.read_bytes(), key


def test_the_order_of_records_does_not_matter(tmp_path: Path) -> None:
    records = made_up.by_cost(noise=4e-3)
    one, two = write(records, tmp_path / "one"), write(records[::-1], tmp_path / "two")
    for key in ("md", "html", "csv", "cost.svg"):
        assert one[key].read_text() == two[key].read_text()


def test_without_matplotlib_there_is_all_but_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    made = write(made_up.by_cost(), tmp_path)
    assert set(made) == {"html", "md", "csv", "records.csv"}
    for key in ("html", "md"):
        assert "There are no figures, because matplotlib is not installed" in made[key].read_text()
    assert "pip install" in made["md"].read_text()


def test_several_studies_are_written_side_by_side(tmp_path: Path) -> None:
    records = made_up.by_cost(seeds=1)
    others = [dataclasses.replace(record, study="other one/q") for record in records]
    made = write([*records, *others], tmp_path)
    assert made["made-up: html"].name == "made-up.html" and made["other one/q: html"].name == "other-one-q.html"
    assert "<h1>other one/q</h1>" in made["other one/q: html"].read_text()
    clash = [dataclasses.replace(record, study="other one-q") for record in records]
    with pytest.raises(ValueError, match=r"would be written to the same files.*'other one/q', 'other one-q'"):
        write([*others, *clash], tmp_path)


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no records to write"):
        write([], tmp_path)


def test_only_failures_are_a_report_too(tmp_path: Path) -> None:
    made = write([made_up.record("RR", made_up.schedules()["RR"], None)], tmp_path)
    assert "No run has a value." in made["md"].read_text() and "cost.png" not in made


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "made-up.md"
    path.write_text("old")
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        files.replace(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_written_files_are_for_everyone_who_may_read_ordinary_ones(tmp_path: Path) -> None:
    ordinary, ours = tmp_path / "ordinary", tmp_path / "ours"
    ordinary.write_text("x")
    files.replace(ours, b"x")
    assert ours.stat().st_mode == ordinary.stat().st_mode


@pytest.mark.parametrize(
    ("name", "expected"),
    [("digits", "digits"), ("mine.train: 3/8", "mine.train-3-8"), ("../..", "study"), ("Übung 1", "Übung-1")],
)
def test_names_of_files(name: str, expected: str) -> None:
    assert writing.stem(name) == expected


def test_facts_name_all_values_where_runs_differ() -> None:
    one = made_up.record("CR", made_up.schedules()["CR"], 0.5)
    two = dataclasses.replace(
        one, seed=3, versions={"torch": "2.14.0"}, started="2026-01-03T01:00:00+00:00", options={}
    )
    found = dict(facts([one, two]))
    assert found["Versions"] == "cpt_fx 0.1.0, torch 2.13.0; torch 2.14.0"
    assert found["Dates"] == "2026-01-01 to 2026-01-03" and found["Seeds"] == "0; 3"
    assert found["Options"] == "data=digits; none" and found["Runs"].startswith("2, of which 2 finished; 25 s")
    assert "Command" not in found


def test_a_run_that_two_experiments_share_counts_once() -> None:
    one = made_up.record("static 8", made_up.schedules()["static 8"], 0.5)
    shared = dataclasses.replace(one, experiment="window")
    other = dataclasses.replace(one, options={"data": "others"})
    assert dict(facts([one, shared, other]))["Runs"].startswith("2, of which 2 finished; 25 s")


def test_durations() -> None:
    assert [duration(seconds) for seconds in (42.4, 720, 12_240)] == ["42 s", "12 min", "3.4 h"]
