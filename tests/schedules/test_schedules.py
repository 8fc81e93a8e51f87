"""Each kind of schedule, positions, evaluation, text and copies."""

import copy
import functools
import math
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpt_fx import schedules
from cpt_fx.schedules import NAMES, Bits, Custom, Cyclic, Deficit, Delayed, Piecewise, Schedule, Sequence, Static, named


def cr(**changes: Any) -> Cyclic:
    arguments: dict[str, Any] = {"name": "CR", "q_min": 3, "q_max": 8, "total_steps": 80}
    return named(**(arguments | changes))


def squared(t: float) -> float:
    return t * t


def by_parity(step: int) -> Bits:
    return Bits(4 + step % 2, 6, 8)


def one_of_each() -> list[Schedule]:
    return [
        *(named(name, q_min=3, q_max=8, total_steps=80) for name in NAMES),
        cr(q_grad=(6, 8), period=11, eval_bits="current"),
        cr(period=10.5, eval_bits=6),
        Cyclic(profile="rex", rex_constant=0.5, q_min=3, q_max=8, total_steps=80),
        Cyclic(profile=squared, pattern="triangular", reflection="horizontal", q_min=3, q_max=8, total_steps=80),
        Static(8),
        Static(4, 8, total_steps=10),
        Static(Bits(2, 4, 0), eval_bits="current"),
        Deficit(q_min=3, q_max=8, start=5, steps=10, total_steps=80, inclusive=True),
        Delayed(cr(), 20),
        Sequence([Static(8, total_steps=10), Delayed(cr(), 5), Static(6)]),
        Piecewise({0: 3, 10: Bits(4, 4, 8), 20: 0}, total_steps=30),
        Custom(by_parity, total_steps=10),
    ]


EACH = pytest.mark.parametrize("schedule", one_of_each(), ids=repr)


@EACH
def test_repr_rebuilds_an_equal_schedule(schedule: Schedule) -> None:
    scope = {name: getattr(schedules, name) for name in schedules.__all__}
    rebuilt = eval(repr(schedule), scope, {"squared": squared, "by_parity": by_parity})
    assert rebuilt == schedule
    assert hash(rebuilt) == hash(schedule)
    np.testing.assert_array_equal(rebuilt.trajectory(90), schedule.trajectory(90))


def test_repr_of_a_published_schedule_uses_its_name() -> None:
    assert repr(cr()) == "named('CR', q_min=3, q_max=8, total_steps=80, cycles=8)"
    assert repr(Cyclic(profile="rex", rex_constant=0.5, q_min=3, q_max=8, total_steps=80)).startswith("Cyclic(profile=")


def test_equality_is_by_configuration() -> None:
    everything = one_of_each()
    for index, schedule in enumerate(everything):
        assert [other == schedule for other in everything] == [i == index for i in range(len(everything))]
    moved = cr()
    moved.step(3)
    assert moved == cr()
    assert cr() != "CR"


class Widths:
    """Widths by a method of an object, and by the object itself."""

    def of(self, step: int) -> int:
        return 8

    def __call__(self, step: int) -> int:
        return 8

    @staticmethod
    def fixed(step: int) -> int:
        return 8


def replaced(step: int) -> int:
    return 4


first = replaced


def replaced(step: int) -> int:  # type: ignore[no-redef]
    return 8


def nested() -> Callable[[int], int]:
    def inner(step: int) -> int:
        return 8

    return inner


UNNAMED: list[Any] = [
    lambda step: 8,
    nested(),
    functools.partial(by_parity),
    Widths().of,
    Widths(),
    first,
]
HOLDING: list[Callable[[Schedule], Schedule]] = [
    lambda schedule: schedule,
    lambda schedule: Delayed(schedule, 5),
    lambda schedule: Sequence([Static(8, total_steps=10), schedule]),
    lambda schedule: Sequence([Sequence([schedule])]),
]


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize("function", UNNAMED)
def test_what_cannot_be_imported_equals_itself_alone(function: Any, holding: Callable[[Schedule], Schedule]) -> None:
    inner = Custom(function, total_steps=10)
    schedule, other = holding(inner), holding(inner)
    assert schedule == schedule
    assert schedule is inner or schedule != other
    assert schedule != holding(Custom(function, total_steps=10))
    assert schedule != copy.deepcopy(schedule)
    assert hash(schedule) == hash(other)


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize("function", [by_parity, Widths.fixed, replaced])
def test_what_can_be_imported_is_equal(function: Any, holding: Callable[[Schedule], Schedule]) -> None:
    assert holding(Custom(function, total_steps=10)) == holding(Custom(function, total_steps=10))


def test_equality_of_profiles() -> None:
    form: dict[str, Any] = {"q_min": 3, "q_max": 8, "total_steps": 80}
    assert Cyclic(profile=squared, **form) == Cyclic(profile=squared, **form)
    assert Cyclic(profile=math.sqrt, **form) == Cyclic(profile=math.sqrt, **form)
    curve = lambda t: t  # noqa: E731
    assert Cyclic(profile=curve, **form) != Cyclic(profile=curve, **form)


def test_position_may_be_set() -> None:
    schedule = cr()
    schedule.position = 40
    assert schedule.position == 40
    assert schedule.current == schedule.bits(40)
    schedule.step()
    assert schedule.current == schedule.bits(41)
    for wrong, error in ((-1, ValueError), (2.0, TypeError), (True, TypeError), ("3", TypeError)):
        with pytest.raises(error, match="position must be an integer of at least 0, got"):
            schedule.position = wrong  # type: ignore[assignment]
    assert schedule.position == 41


def test_reset_starts_anew() -> None:
    schedule = cr()
    for _ in range(2):
        with pytest.warns(UserWarning, match="past the end"):
            schedule.step(81)
        schedule.reset()
        assert schedule.position == 0
        assert schedule.current == schedule.bits(0)


@EACH
def test_pickle_and_deepcopy_keep_configuration_and_position(schedule: Schedule) -> None:
    schedule = copy.deepcopy(schedule)  # the parametrized one is shared
    schedule.step(7)
    for clone in (copy.deepcopy(schedule), pickle.loads(pickle.dumps(schedule))):
        assert clone == schedule
        assert clone.position == 7
        clone.step()
        assert schedule.position == 7


@EACH
def test_state_passes_to_an_equal_schedule_only(schedule: Schedule) -> None:
    source, target = copy.deepcopy(schedule), copy.deepcopy(schedule)
    source.step(9)
    target.load_state_dict(source.state_dict())
    assert target.position == 9
    for other in one_of_each():
        if other != schedule:
            with pytest.raises(ValueError, match="this state is of another schedule"):
                other.load_state_dict(source.state_dict())


def test_state_of_another_schedule_names_the_difference() -> None:
    saved = cr(q_min=4, period=9)
    saved.step(5)
    with pytest.raises(ValueError, match=r"q_min is 4 there and 3 here; period is 9 there and None here") as caught:
        cr().load_state_dict(saved.state_dict())
    assert "call step(5) on a fresh schedule" in str(caught.value)
    with pytest.raises(ValueError, match="it is a Static, this is a Cyclic"):
        cr().load_state_dict(Static(8).state_dict())
    with pytest.raises(ValueError, match=r"not the state of a schedule: no schedule, config among \['position'\]"):
        cr().load_state_dict({"position": 3})
    with pytest.raises(ValueError, match="its config is 3, not a mapping"):
        cr().load_state_dict({"position": 3, "schedule": "Cyclic", "config": 3})
    with pytest.raises(ValueError, match=r'state\["position"\] must be an integer of at least 0, got -1'):
        cr().load_state_dict(cr().state_dict() | {"position": -1})


def test_state_is_plain_data() -> None:
    state = cr().state_dict()
    assert state["position"] == 0
    assert all(type(k) is type(v) is str for k, v in dict(state["config"]).items())  # type: ignore[call-overload]


def test_past_the_end_warns_once_and_holds() -> None:
    schedule = cr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(80):
            schedule.step()  # the step that ends the run is no mistake
    assert schedule.position == 80
    with pytest.warns(UserWarning, match="step 81 is past the end of a schedule of total_steps=80") as caught:
        schedule.step()
        schedule.step(10)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert schedule.position == 91
    assert schedule.bits(schedule.position) == schedule.bits(79) == Bits(8, 8, 8)


def test_unbounded_schedules_have_no_end() -> None:
    schedule = Static(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step(10**9)
    assert schedule.total_steps is None
    assert schedule.trajectory(3).tolist() == [[8, 8, 8]] * 3


def test_static() -> None:
    assert Static(4).bits(5) == Bits(4, 4, 4)
    assert Static(4, 8).bits(5) == Bits(4, 4, 8)
    assert Static(Bits(2, 4, 8)).bits(0) == Bits(2, 4, 8)
    assert Static(0).bits(0) == Bits(0, 0, 0)
    assert Static(8, 0).bits(0) == Bits(8, 8, 0)
    assert Static(Bits(4, 4, 4)) == Static(4, 4) == Static(4)


def test_deficit_window_and_its_published_off_by_one() -> None:
    def forward(**window: Any) -> list[int]:
        return Deficit(q_min=3, q_max=8, **window).trajectory(6)[:, 0].tolist()  # type: ignore[no-any-return]

    assert forward(steps=2) == [3, 3, 8, 8, 8, 8]
    assert forward(steps=2, inclusive=True) == [3, 3, 3, 8, 8, 8]
    assert forward(steps=0) == [8] * 6
    assert forward(steps=0, inclusive=True) == [3, 8, 8, 8, 8, 8]
    assert forward(start=1, end=4) == forward(start=1, steps=3) == [8, 3, 3, 3, 8, 8]
    assert Deficit(q_min=3, q_max=8, steps=2, q_grad=6).bits(0) == Bits(3, 3, 6)
    assert Deficit(q_min=3, q_max=8, steps=2).bits(0).gradient == 8


def test_delayed_holds_the_largest_widths_then_counts_from_the_start() -> None:
    inner = cr(q_grad=(6, 8))
    delayed = Delayed(inner, 20)
    assert delayed.total_steps == 100
    assert delayed.trajectory(20).tolist() == [[8, 8, 8]] * 20
    np.testing.assert_array_equal(delayed.trajectory(start=20), inner.trajectory())
    assert Delayed(Static(4), 3).total_steps is None
    assert Delayed(inner, 0).trajectory().tolist() == inner.trajectory().tolist()


def test_sequence_counts_each_member_from_zero() -> None:
    first, second = Static(8, total_steps=5), cr()
    both = Sequence([first, second])
    assert both.total_steps == 85
    np.testing.assert_array_equal(both.trajectory(), np.concatenate([first.trajectory(), second.trajectory()]))
    assert Sequence([first, Static(3)]).trajectory(8)[:, 0].tolist() == [8] * 5 + [3] * 3
    assert Sequence([Sequence([first, first]), first]).total_steps == 15


def test_piecewise() -> None:
    table = Piecewise({10: 8, 0: 3, 12: Bits(4, 5, 6)})
    assert table.bits(9) == Bits(3, 3, 3)
    assert table.bits(10) == table.bits(11) == Bits(8, 8, 8)
    assert table.bits(10**6) == Bits(4, 5, 6)


def test_custom_functions_and_profiles() -> None:
    assert Custom(by_parity).bits(1) == Bits(5, 6, 8)
    assert Custom(lambda step: 2 + step).bits(3) == Bits(5, 5, 5)
    growing = Cyclic(profile=squared, q_min=4, q_max=8, total_steps=8, cycles=2)
    assert [growing.value(step) for step in range(5)] == [4.0, 4.25, 5.0, 6.25, 4.0]
    form: dict[str, Any] = {"profile": squared, "pattern": "triangular", "q_min": 4, "q_max": 8, "total_steps": 8}
    upside_down = Cyclic(**form, reflection="vertical", cycles=2)
    assert [upside_down.value(step) for step in range(5)] == [8.0, 7.75, 7.0, 5.75, 4.0]
    backwards = Cyclic(**form, reflection="horizontal", cycles=2)
    assert [backwards.value(step) for step in range(5)] == [8.0, 6.25, 5.0, 4.25, 4.0]


def test_rex_constant() -> None:
    straight = Cyclic(profile="rex", rex_constant=0, q_min=4, q_max=8, total_steps=32)
    assert straight.trajectory().tolist() == named("LR", q_min=4, q_max=8, total_steps=32).trajectory().tolist()
    half = Cyclic(profile="rex", rex_constant=0.5, q_min=3, q_max=9, total_steps=8, cycles=1)
    assert half.value(4) == pytest.approx(9 - 6 * (0.5 / (0.5 + 0.25)))
    assert half.name is None
    assert half != Cyclic(profile="rex", q_min=3, q_max=9, total_steps=8, cycles=1)


def test_reflections_of_a_symmetric_profile_are_one() -> None:
    form: dict[str, Any] = {"profile": "cosine", "pattern": "triangular", "q_min": 3, "q_max": 8, "total_steps": 80}
    assert Cyclic(**form) == Cyclic(**form, reflection="vertical") == Cyclic(**form, reflection="horizontal")


def test_imagenet_period_ends_at_the_bottom_of_an_extra_cycle() -> None:
    run: dict[str, Any] = {"name": "CR", "q_min": 4, "q_max": 8, "total_steps": 450_450}
    assert named(**run, period=450_450 // 8).bits(450_449).weight == 4
    assert named(**run).bits(450_449).weight == 8


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        (cr(), 0, Bits(8, 8, 8)),
        (cr(q_grad=(4, 6)), 0, Bits(8, 8, 4)),
        (cr(eval_bits="current"), 0, Bits(3, 3, 8)),
        (cr(eval_bits=5, q_grad=6), 0, Bits(5, 5, 6)),
        (Static(Bits(2, 4, 8)), 0, Bits(2, 4, 8)),
        (Deficit(q_min=3, q_max=8, steps=5), 0, Bits(8, 8, 8)),
        (Delayed(cr(eval_bits="current"), 5), 5, Bits(3, 3, 8)),
        (Delayed(cr(), 5), 5, Bits(8, 8, 8)),
        (Sequence([Static(4, total_steps=3), Static(6)]), 0, Bits(6, 6, 4)),
        (Sequence([cr(eval_bits=5), cr(eval_bits=5)]), 0, Bits(5, 5, 8)),
        (Sequence([cr(), cr(eval_bits=5)], eval_bits="current"), 0, Bits(3, 3, 8)),
        (Piecewise({0: 4, 10: Bits(8, 3, 2)}), 0, Bits(8, 4, 4)),
        (Piecewise({0: 32, 10: 0}), 0, Bits(0, 0, 32)),  # off is the most precise of all
        (Piecewise({0: 4, 10: 8}, total_steps=5), 0, Bits(4, 4, 4)),
        (Custom(by_parity, total_steps=10), 0, Bits(5, 6, 8)),
        (Custom(by_parity), 0, Bits(4, 6, 8)),
        (Sequence([Static(8, total_steps=3), Custom(by_parity)]), 3, Bits(4, 6, 8)),
    ],
    ids=repr,
)
def test_evaluation_bits(schedule: Schedule, step: int, expected: Bits) -> None:
    assert schedule.evaluation_bits(step) == expected


def test_plot_draws_what_is_scheduled(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    ax: Axes = Figure().subplots()
    assert cr(q_grad=6).plot(ax=ax) is ax
    drawn = {patch.get_label(): patch.get_data().values.tolist() for patch in ax.patches}  # type: ignore[attr-defined]
    assert drawn == {"forward": cr().trajectory()[:, 0].tolist(), "gradient": [6] * 80}
    Piecewise({0: 3, 5: Bits(4, 6, 8)}).plot(tmp_path / "table.png", length=10)
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"pass a length, as in length=1000$"):
        Static(8).plot(tmp_path / "endless.png")


def test_trajectory_of_a_long_run_is_quick() -> None:
    from time import perf_counter

    schedule = cr(total_steps=64_000)
    schedule.trajectory()
    start = perf_counter()
    schedule.trajectory()
    assert perf_counter() - start < 0.2  # about 5 ms on one core; step by step it would take over a second
