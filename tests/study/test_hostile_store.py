"""A store that someone sent: whatever is in it, reading it runs nothing, and ends in a value or in a plain error."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpt_fx import study
from cpt_fx.cli import main
from cpt_fx.schedules import NAMES, Custom, Cyclic, Deficit, Delayed, Piecewise, Schedule, Sequence, Static, named
from cpt_fx.schedules.bits import Bits
from cpt_fx.study.records import rebuild
from tests.study import trains

WAYS_OUT = [
    "__import__('os').system('touch {mark}')",
    "open('{mark}', 'w')",
    "eval('1')",
    "().__class__.__base__.__subclasses__()",
    "[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0].__init__.__globals__"
    "['system']('touch {mark}')",
    "Static(bits=8).__class__.bits.__globals__['sys'].modules['os'].system('touch {mark}')",
    "Static.__init__.__globals__['__builtins__']['__import__']('os').system('touch {mark}')",
    "Static(bits=[open('{mark}', 'w')])",
    "Custom(fn=__import__('os').getpid)",
    "Custom(lambda step: [c for c in ().__class__.__base__.__subclasses__() if c.__name__ == '_wrap_close'][0]"
    ".__init__.__globals__['system']('touch {mark}') or 8)",
    "Custom(fn=relative_cost)",
    "Cyclic(profile=recommend, q_min=3, q_max=8, total_steps=80)",
    "Static(bits=(8).__class__('8'))",
    "Static(bits=f'{{().__class__.__base__.__subclasses__()}}')",
    "Static(bits=8) if open('{mark}', 'w') else Static(bits=3)",
    "(lambda: Static(bits=8))()",
    "[Static(bits=8) for _ in open('{mark}', 'w') or [1]][0]",
    "Static(**{{'bits': 8}})",
    "Static(*[8])",
    "Static(bits=10**10**10)",
    "Static(bits=8, total_steps=10**10**10)",
    "Static(bits=8, total_steps=1" + "0" * 100_000 + ")",
    "Static(bits=8, total_steps=1e999)",
    "Static(bits=1<<10**10)",
    "Static(bits='a'*10**10)",
    "Static(bits=" + "(" * 100_000 + "8" + ")" * 100_000 + ")",
    "Static(bits=" + "[" * 3_000 + "8" + "]" * 3_000 + ")",
    "Delayed(schedule=" * 3_000 + "Static(bits=8)" + ", start=1)" * 3_000,
    "Static(bits=" + "-" * 100_000 + "8)",
    "Static(bits=" + "not " * 50_000 + "8)",
    "Static(bits=8" + ".a" * 100_000 + ")",
    "Static(bits=8" + "+1" * 100_000 + ")",
    "Static(bits='" + "\\" * 100_001 + "')",
    "named('CR', q_min=3, q_max=8, total_steps=8" + "0" * 60 + ")",
    "Piecewise(pieces={{0: 3, 1" + "0" * 30 + ": 8}})",
    "Static(bits=8, bits=3)",
    "Static(bits={{[]: 3}})",
    "Static(bits=\x008)",
    "import os",
    "",
    "\ud800",
]


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "ran"
    yield path
    assert not path.exists(), "text of a store was run"


@pytest.mark.parametrize("way", WAYS_OUT, ids=lambda way: way[:40])
def test_no_way_out_of_a_schedules_text(way: str, mark: Path) -> None:
    text, began = way.format(mark=mark), time.perf_counter()
    with pytest.raises(ValueError, match="cannot be rebuilt") as caught:
        rebuild(text)
    assert time.perf_counter() - began < 2
    assert len(str(caught.value)) < 1000


def test_a_function_of_yours_is_recorded_by_name_and_never_called() -> None:
    for schedule in (Custom(trains.four, total_steps=8), Sequence([Static(3, total_steps=4), Custom(trains.four)])):
        with pytest.raises(ValueError, match=r"cannot be rebuilt .*four.* is recorded as text and never called"):
            rebuild(repr(schedule))
    curve = Cyclic(profile=trains.identity, q_min=3, q_max=8, total_steps=80)
    with pytest.raises(ValueError, match="identity is recorded by its name and never called"):
        rebuild(repr(curve))


def random_schedule(draw: random.Random, depth: int = 0) -> Schedule:
    total, low = draw.randrange(8, 500), draw.randrange(1, 7)
    high, grad = draw.randrange(low, 33), draw.choice([None, 8, (5, 8)])
    eval_bits: Any = draw.choice([None, "current", 6])
    kind = draw.randrange(5 if depth > 2 else 7)
    if kind == 0:
        bits: int | Bits = low if draw.random() < 0.5 else Bits(low, high, 0)
        return Static(bits, total_steps=total, eval_bits=eval_bits)
    if kind == 1:
        return Deficit(q_min=low, q_max=high, start=3, steps=9, total_steps=total, inclusive=draw.random() < 0.5)
    if kind == 2:
        return Piecewise({0: low, draw.randrange(1, 99): Bits(low, low, high)}, total_steps=total)
    if kind == 3:
        period = draw.choice([None, 7, 12.5, 1e3])
        return named(draw.choice(NAMES), q_min=low, q_max=high, total_steps=total, q_grad=grad, period=period)
    if kind == 4:
        form = {"profile": "rex", "pattern": "triangular", "reflection": "vertical", "rex_constant": 0.25}
        return Cyclic(**form, q_min=low, q_max=high, total_steps=total, eval_bits=eval_bits)  # type: ignore[arg-type]
    if kind == 5:
        return Delayed(random_schedule(draw, depth + 1), draw.randrange(9))
    members = [random_schedule(draw, depth + 1) for _ in range(draw.randrange(1, 4))]
    return Sequence(members, eval_bits=eval_bits or 8)


@pytest.mark.filterwarnings("ignore:this triangular schedule")
def test_every_schedule_of_the_package_comes_back() -> None:
    draw = random.Random(1)
    for _ in range(150):
        schedule = random_schedule(draw)
        assert rebuild(repr(schedule)) == schedule


@pytest.mark.filterwarnings("ignore:this triangular schedule")
def test_any_damage_ends_in_a_schedule_or_in_one_kind_of_error() -> None:
    draw = random.Random(2)
    pieces = "()[]{},:='\"-_.0123456789 \n\\#*@%" + "abcNone"
    words = ["Static", "named", "Bits", "None", "True", "__class__", "(", ")", "[", "{0:", "1e400", "'", "=", "**"]
    for _ in range(1500):
        text = list(repr(random_schedule(draw, 2)))
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(text) + 1)
            text[place : place + draw.randrange(3)] = draw.choice([[draw.choice(pieces)], [draw.choice(words)], []])
        try:
            assert isinstance(rebuild("".join(text)), Schedule)
        except ValueError as error:
            assert "cannot be rebuilt" in str(error)


def stored(path: Path) -> Path:
    study.run(trains.train, store=path, total_steps=80, schedules=["CR", "static"], seeds=2, progress=False)
    return path


def written(path: Path, *statements: str) -> Path:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path


SCRIPT = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def test_text_of_a_store_is_text_on_a_page_and_in_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nasty = f"{SCRIPT}\n# [a](javascript:b) ![c](http://d) `e` | $\\frac{{$ \x1b]0;title\x07 [red]f[/]"
    quoted = "'" + nasty + "'"
    path = written(
        stored(tmp_path / "s.sqlite"),
        f"UPDATE cells SET study = {quoted}, experiment = 'x' || {quoted}, label = label || {quoted}, metric = NULL",
        f"UPDATE runs SET status = 'failed', error = {quoted} WHERE rowid = 1",
        "UPDATE runs SET machine = json_object('processor', " + quoted + "), started = " + quoted,
        "UPDATE runs SET versions = json_object(" + quoted + ", " + quoted + ")",
        "UPDATE runs SET metrics = json_object(" + quoted + ", 0.5 + 0.1 * rowid) WHERE status = 'done'",
        "UPDATE cells SET options = json_object(" + quoted + ", " + quoted + ")",
        f"UPDATE cells SET schedule = {quoted}",
    )
    files = study.load(path).write(tmp_path / "report")
    assert all(file.parent == tmp_path / "report" for file in files.values())
    for kind in ("html", "md", *(name for name in files if "svg" in name)):
        text = files[kind].read_text(encoding="utf-8")
        assert "<script" not in text and "<img" not in text, kind
        assert "script" in text or "svg" in kind
        assert "\x1b" not in text
    markdown = files["md"].read_text(encoding="utf-8")
    assert "[a](" not in markdown.replace("\\[", "") and "\n# [" not in markdown
    assert main(["study", "status", str(path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b]" not in said and "\x07" not in said and "[red]f[/]" in said


WRONG = {
    "label": "UPDATE cells SET label = x'00ff' WHERE rowid = 1",
    "seed": "UPDATE cells SET seed = 'first' WHERE rowid = 1",
    "relative_cost": "UPDATE cells SET relative_cost = 'cheap'",
    "mean_bits": "UPDATE cells SET mean_bits = 9e999",
    "options": "UPDATE cells SET options = '[1]'",
    "metrics": 'UPDATE runs SET metrics = \'{"accuracy": "high"}\'',
    "machine": "UPDATE runs SET machine = " + repr("[" * 50_000),
    "versions": "UPDATE runs SET versions = 'import os'",
    "seconds": "UPDATE runs SET seconds = x'00'",
    "widths": "UPDATE ran SET widths = '[[8, 8, 8, 1e18]]'",
    "widths ": "UPDATE ran SET widths = '[[8, 8, 8]]'",
    "widths  ": "UPDATE ran SET widths = '[[8, 8, 8, 99999999999]]'",
    "widths   ": "UPDATE ran SET widths = '[[99, 8, 8, 1]]'",
    "status": "UPDATE runs SET status = 'odd'",
    "better": "UPDATE cells SET better = 'else'",
    "view": "CREATE VIEW more AS WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x FROM r) SELECT * FROM r",
    "trigger": "CREATE TRIGGER t AFTER INSERT ON runs BEGIN DELETE FROM cells; END",
}


@pytest.mark.parametrize("what", WRONG)
def test_values_of_another_kind_are_named(what: str, tmp_path: Path) -> None:
    path = written(stored(tmp_path / "s.sqlite"), WRONG[what])
    with pytest.raises(ValueError, match=what.strip()):
        study.load(path).write(tmp_path / "report")


def test_numbers_beyond_measure_end_in_a_report_or_an_error(tmp_path: Path) -> None:
    for number in ("1" + "0" * 400, "1" + "0" * 6000, "1e999", "NaN", "-1e300"):
        path = written(
            stored(tmp_path / f"{len(number)}{number[:2]}.sqlite"),
            f"UPDATE runs SET metrics = '{{\"accuracy\": {number}}}'",
        )
        _ends_plainly(lambda path=path: study.load(path).write(tmp_path / "report"))  # type: ignore[misc]


def _ends_plainly(action: Callable[[], object]) -> None:
    try:
        action()
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize("name", ["../../outside", "é" * 300, "x\\..\\y\x00"])
def test_a_name_does_not_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    path = stored(tmp_path / "s.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE cells SET study = ?, experiment = ?", (name, name))
    connection.close()
    files = study.load(path).write(tmp_path / "in" / "report")
    assert files and all(file.resolve().parent == tmp_path / "in" / "report" for file in files.values())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["in", "s.sqlite", "s.sqlite.lock"]
