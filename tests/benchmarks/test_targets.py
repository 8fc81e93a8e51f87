"""Targets: what they say, and that a measurement is judged the right way round."""

import re
from collections.abc import Callable

import pytest
from harness.catalog import CONTENDERS, PRESETS, Settings, chosen
from harness.machine import here
from harness.page import LEFT, RIGHT, WIDTH, Bar, bars, html, linear_ticks
from harness.results import Executed, Facts, Result, Row, Spread
from harness.targets import TARGETS, Target, verdicts


def row(name: str, *seconds: float, peak: int = 100, saved: int | None = 100, again: int | None = None) -> Row:
    executed = Executed(integer=0, floating=1)
    facts = Facts(peak_bytes=peak, saved_bytes=saved, build_seconds=0.1, recompilations=again, executed=executed)
    return Row(contender=CONTENDERS[name], seconds=seconds, facts=facts)


def gone(name: str) -> Row:
    return Row(contender=CONTENDERS[name], reason="ValueError: no")


def target(
    measure: str, limit: float, ours: tuple[str, ...] = ("integer",), theirs: tuple[str, ...] = ("fp32",)
) -> Target:
    return Target(models=("m",), measure=measure, contender=ours, against=theirs, limit=limit)


@pytest.mark.parametrize(
    ("measure", "limit", "value", "met"),
    [
        ("step", 0.5, 0.5, True),
        ("step", 0.4, 0.5, False),
        ("speedup", 2.0, 2.0, True),
        ("speedup", 2.1, 2.0, False),
        ("memory", 0.9, 0.9, True),
        ("memory", 0.8, 0.9, False),
        ("saved", 0.35, 0.3, True),
        ("saved", 0.25, 0.3, False),
    ],
)
def test_judged_the_right_way_round(measure: str, limit: float, value: float, met: bool) -> None:
    rows = {"fp32": row("fp32", 2, 4, 8), "integer": row("integer", 1, 2, 4, peak=90, saved=30)}
    (verdict,) = verdicts("m", rows, (target(measure, limit),))
    assert verdict.value == pytest.approx(value)
    assert verdict.met is met
    assert verdict.word == ("met" if met else "MISSED")


def test_ratios_are_those_of_rounds_not_of_medians() -> None:
    assert row("integer", 1, 20, 3).against(row("fp32", 1, 10, 1)) == Spread(2.0, 1.2, 2.8)


def test_the_faster_form_counts_on_both_sides() -> None:
    one = target("speedup", 1.1, ("integer", "integer-compiled"), ("bf16", "bf16-compiled"))
    rows = [row("integer", 4, 4), row("integer-compiled", 2, 2), row("bf16", 3, 3), row("bf16-compiled", 9, 9)]
    (verdict,) = verdicts("m", {one.contender.name: one for one in rows}, (one,))
    assert verdict.value == 1.5
    assert "the faster of eager and compiled" in str(verdict)


def test_what_did_not_run_is_said() -> None:
    both = {"fp32": row("fp32", 1, 1), "integer": gone("integer")}
    (verdict,) = verdicts("m", both, (target("step", 1),))
    assert (verdict.met, verdict.word, verdict.measured) == (None, "not measured", "integer did not run")
    both = {"fp32": gone("fp32"), "integer": row("integer", 1, 1)}
    (verdict,) = verdicts("m", both, (target("step", 1),))
    assert verdict.measured == "FP32 did not run"
    both = {"fp32": row("fp32", 1, 1), "integer": row("integer", 1, 1, saved=None)}
    (verdict,) = verdicts("m", both, (target("saved", 1),))
    assert verdict.measured == "the batch cannot be halved"


def test_recompilations_are_counted() -> None:
    one = target("recompilations", 0, ("simulated-compiled",), ())
    for again, met in ((0, True), (1, False)):
        (verdict,) = verdicts("m", {"simulated-compiled": row("simulated-compiled", 1, 1, again=again)}, (one,))
        assert (verdict.met, verdict.measured) == (met, f"measured {again}")


def test_other_models_and_contenders_have_no_verdict() -> None:
    assert verdicts("other", {"integer": row("integer", 1, 1)}, (target("step", 1),)) == []
    assert verdicts("m", {"fp32": row("fp32", 1, 1)}, (target("step", 1),)) == []


def test_the_table_of_targets_names_what_exists() -> None:
    for one in TARGETS:
        assert set(one.models) <= set(PRESETS)
        assert set(one.contender + one.against) <= set(CONTENDERS)
        assert str(one.limit).rstrip("0").rstrip(".") in str(one)


def test_a_missed_target_is_on_the_page() -> None:
    rows = (row("fp32", 1, 1), row("simulated", 2, 2))
    settings = Settings(steps=2, contenders=chosen(["simulated"]))
    result = Result(model="resnet74", about="a net", settings=settings, machine=here(1, "x"), rows=rows)
    assert [verdict.word for verdict in result.verdicts] == ["MISSED", "met"]
    assert '<b class="missed">MISSED</b><span>simulated: step time at most 1.2 x FP32</span>' in html(result)
    step = result.verdicts[0].to_dict()
    assert (step["measured"], step["met"], step["limit"]) == (2.0, False, 1.2)


def test_choosing_contenders() -> None:
    assert chosen([]) == tuple(CONTENDERS)
    assert chosen(["integer", "bf16"]) == ("fp32", "bf16", "integer")
    assert chosen(["eager"]) == tuple(name for name in CONTENDERS if not name.endswith("-compiled"))
    assert chosen(["compiled"]) == ("fp32", *(name for name in CONTENDERS if name.endswith("-compiled")))
    with pytest.raises(ValueError, match='Did you mean "simulated"'):
        chosen(["simulate"])


def test_a_long_whisker_leaves_the_bars_their_room() -> None:
    svg = bars([Bar(label="a", kind="ours", compiled=False, value=2.0, low=1.0, high=90.0)], "ratio")
    width = float(re.findall(r'<rect class="bar ours"[^>]* width="([\d.]+)"', svg)[0])
    assert width > (WIDTH - LEFT - RIGHT) / 2
    assert max(float(x) for x in re.findall(r'x[12]="([\d.]+)"', svg)) <= WIDTH
    assert float(re.findall(r"H([\d.]+)", svg)[0]) == WIDTH - RIGHT


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: linear_ticks(0, 1600, 8), [0, 200, 400, 600, 800, 1000, 1200, 1400, 1600]),
        (lambda: linear_ticks(95, 100.5, 5), [96, 98, 100]),
        (lambda: linear_ticks(0.1, 0.5, 4), [0.1, 0.2, 0.3, 0.4, 0.5]),
        (lambda: linear_ticks(2, 2, 5), [2]),
    ],
)
def test_ticks_are_round(make: Callable[[], list[float]], expected: list[float]) -> None:
    assert make() == pytest.approx(expected)
