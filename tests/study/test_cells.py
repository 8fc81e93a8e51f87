"""What a study consists of, and what it refuses to consist of."""

from __future__ import annotations

from typing import Any

import pytest

from cpt_fx.schedules import NAMES, Bits, Custom, Cyclic, Delayed, Schedule, Static, named, relative_cost
from cpt_fx.study.cells import Cell, Setting, check_options, facts, plan
from cpt_fx.study.records import rebuild


def common(**changed: Any) -> Setting:
    given: dict[str, Any] = {
        "name": "s", "total_steps": 800, "seeds": 2, "cycles": 8, "q_grad": None, "better": "higher", "metric": None,
        "options": None,
    }  # fmt: skip
    return Setting(trained, **given | changed)


def trained(schedule: Schedule, **options: Any) -> float:
    return 0.0


def cells(schedules: Any = None, bits: Any = ((3, 8),), **changed: Any) -> list[Cell]:
    return plan(common(**changed), schedules, bits)


def one(schedules: Any, **changed: Any) -> Cell:
    (cell,) = cells(schedules, **{"seeds": 1} | changed)
    return cell


def test_by_default_it_is_the_ten_and_the_baselines_seed_by_seed() -> None:
    found = cells(bits=[(3, 8), (4, 6)])
    labels = [*NAMES, "static 8", "static 3", "full precision", *NAMES, "static 6", "static 4", "full precision"]
    assert [cell.label for cell in found] == 2 * labels
    assert [cell.seed for cell in found] == [0] * 26 + [1] * 26
    assert {(cell.q_min, cell.q_max) for cell in found} == {(3, 8), (4, 6)}
    assert {cell.experiment for cell in found} == {"schedules"}


def test_schedules_are_the_published_ones() -> None:
    by_label = {cell.label: cell for cell in cells(seeds=1)}
    for name in NAMES:
        expected = named(name, q_min=3, q_max=8, total_steps=800)
        assert by_label[name].schedule == expected
        assert by_label[name].facts.relative_cost == pytest.approx(relative_cost(expected))
    # Static q_min is the same training without the cycles: gradients stay at q_max.
    assert by_label["static 3"].schedule == Static(Bits(3, 3, 8), total_steps=800)
    assert by_label["static 3"].facts.relative_cost == pytest.approx((9 + 2 * 3 * 8) / (3 * 64))
    assert by_label["static 8"].schedule == Static(8, total_steps=800)
    assert by_label["static 8"].facts.relative_cost == 1
    assert by_label["full precision"].schedule == Static(32, total_steps=800)
    assert by_label["full precision"].facts.relative_cost == 16


def test_costs_are_relative_to_static_q_max_of_the_pair() -> None:
    # (3, 6) with gradients of 8 bits, as one published experiment has it: more than static 6.
    found = {cell.label: cell for cell in cells(["static", "static 5"], bits=[(3, 6)], seeds=1, q_grad=8)}
    assert found["static 6"].facts.relative_cost == pytest.approx((36 + 2 * 6 * 8) / (3 * 36))
    assert found["static 5"].schedule == Static(Bits(5, 5, 8), total_steps=800)


def test_the_first_cycle() -> None:
    """Equal cost, first-cycle means of 7.2 and 4.2 bits: the published numbers."""
    high, low = cells(["RTV", "ETV"], seeds=1, total_steps=64_000)
    assert round(high.facts.first_cycle_bits or 0, 1) == 7.2
    assert round(low.facts.first_cycle_bits or 0, 1) == 4.2
    assert high.facts.relative_cost == pytest.approx(low.facts.relative_cost, rel=0.005)
    assert one(["static 5"]).facts.first_cycle_bits == 5
    inner = named("RR", q_min=3, q_max=8, total_steps=720, cycles=8)
    late = facts(Delayed(inner, 80), 8)
    assert late.first_cycle_bits == pytest.approx((80 * 8 + sum(inner.bits(i).weight for i in range(10))) / 90)
    assert facts(Custom(lambda step: 4, total_steps=10), 8).first_cycle_bits is None


def own(q_min: int, q_max: int, total_steps: int) -> Schedule:
    return Cyclic(profile="linear", q_min=q_min, q_max=q_max, total_steps=total_steps, cycles=2)


def test_schedules_of_ones_own() -> None:
    fixed = Static(5, total_steps=800)
    found = cells(["cr", ("mine", fixed), own, ("other", own), ("again", "RR"), named("LT", q_min=2, q_max=4,
                   total_steps=800)], bits=[(3, 8), (4, 8)], seeds=1)  # fmt: skip
    assert [cell.label for cell in found] == 2 * ["CR", "mine", "own", "other", "again", "LT"]
    assert found[2].schedule == own(3, 8, 800)
    assert found[8].schedule == own(4, 8, 800)
    assert found[4].schedule == named("RR", q_min=3, q_max=8, total_steps=800)
    assert one("static 6").label == "static 6"
    assert one("static", bits=(2, 7)).label == "static 7"


def test_the_identity_is_what_the_result_depends_on() -> None:
    def identity(schedules: Any = ("CR",), **changed: Any) -> str:
        return one(schedules, **changed).identity

    same = identity()
    assert identity() == same
    assert identity(metric="loss", better="lower") == same
    assert identity([("another label", "CR")]) == same
    assert identity(options={"a": 1, "b": [2]}) == identity(options={"b": [2], "a": 1})
    others = [
        identity(name="t"),
        identity(seeds=[1]),
        identity(options={"a": 1}),
        identity(options={"a": 2}),
        identity(options={"a": "1"}),
        identity(cycles=4),
        identity(total_steps=400),
        identity(q_grad=6),
        identity(["RR"]),
        identity(bits=(3, 7)),
    ]
    assert len({same, *others}) == 1 + len(others)


def test_functions_that_look_alike_are_told_apart() -> None:
    def made(width: int) -> Custom:
        return Custom(lambda step: width, total_steps=800)

    assert repr(made(4)) == repr(made(5))
    assert one([("mine", made(4))]).identity != one([("mine", made(5))]).identity


def test_baselines_of_two_pairs_are_one_run() -> None:
    found = [cell for cell in cells(bits=[(3, 8), (4, 8)], seeds=1) if cell.label in ("static 8", "full precision")]
    assert len(found) == 4
    assert len({cell.identity for cell in found}) == 2


def test_every_schedule_can_be_rebuilt_from_its_text() -> None:
    for cell in cells(seeds=1, q_grad=(6, 8)):
        assert rebuild(repr(cell.schedule)) == cell.schedule
    delayed = Delayed(named("RR", q_min=3, q_max=8, total_steps=80), 8)
    assert rebuild(repr(delayed)) == delayed
    with pytest.raises(ValueError, match="cannot be rebuilt"):
        rebuild(repr(Custom(own_widths, total_steps=8)))
    with pytest.raises(ValueError, match="is not a schedule"):
        rebuild("3")


def own_widths(step: int) -> int:
    return 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schedules": ["static qmax"]}, 'schedules may name "CR".*Did you mean "static q_max"'),
        ({"schedules": ["static 33"]}, "33"),
        ({"schedules": [Static(5, total_steps=800)]}, "needs a label"),
        ({"schedules": [("x", Static(5, total_steps=400))]}, "'x' has total_steps=400 where the study has"),
        ({"schedules": [("x", Static(5))]}, "total_steps=None"),
        ({"schedules": [lambda q_min, q_max, total_steps: Static(5, total_steps=800)]}, "needs a label"),
        ({"schedules": [("x", "CR"), ("x", "RR")]}, "two schedules have the label 'x'"),
        ({"schedules": []}, "at least one schedule"),
        ({"bits": []}, "at least one schedule and one pair of bits"),
        ({"bits": [(8, 3)]}, "q_min must not exceed q_max"),
        ({"seeds": 0}, "seeds must be"),
        ({"seeds": []}, "at least one seed"),
        ({"seeds": [-1]}, "a seed of seeds"),
        ({"name": " "}, "name must be"),
        ({"better": "highest"}, 'Did you mean "higher"'),
        ({"total_steps": 4}, "cycles must not exceed total_steps"),
    ],
)
def test_what_is_wrong_is_said(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cells(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schedules": [3]}, "schedules must hold names"),
        ({"schedules": [("a", "CR", 3)]}, "schedules must hold names"),
        ({"schedules": [("x", lambda **_: 3)]}, "must return a schedule"),
        ({"bits": [3]}, "bits must hold"),
        ({"bits": ["38"]}, "bits must hold"),
        ({"seeds": 2.0}, "seeds must be"),
        ({"metric": 3}, "metric must be"),
        ({"options": [1]}, "options must map"),
        ({"options": {"a": object()}}, "options must be texts, numbers"),
        ({"options": {"a": float("nan")}}, "options must be texts, numbers"),
    ],
)
def test_what_has_the_wrong_type_is_said(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cells(**changed)


def test_options_are_passed_as_they_are_kept() -> None:
    with pytest.warns(UserWarning, match="passed on as they are kept"):
        assert check_options({"a": (1, 2)}) == {"a": [1, 2]}
    assert check_options(None) == {}
