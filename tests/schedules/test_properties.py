"""What holds for every schedule, whatever its settings."""

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cpt_fx.schedules import NAMES, Custom, Cyclic, Deficit, Delayed, Piecewise, Schedule, Sequence, Static, named

WIDTHS = st.tuples(st.integers(1, 32), st.integers(1, 32)).map(lambda pair: (min(pair), max(pair)))
UNHURRIED = settings(deadline=None)  # other workers may hold the processor
REPEATED = ("CR", "LR", "ER", "RR")
TRIANGULAR = tuple(name for name in NAMES if name not in REPEATED)


@st.composite
def cyclics(draw: st.DrawFn, names: tuple[str, ...] = NAMES, periods: bool = True) -> Cyclic:
    total = draw(st.integers(1, 300))
    (q_min, q_max), grad = draw(WIDTHS), draw(WIDTHS)
    arguments: dict[str, Any] = {
        "q_min": q_min,
        "q_max": q_max,
        "total_steps": total,
        "cycles": draw(st.integers(1, min(total, 12))),
        "q_grad": draw(st.sampled_from([None, grad[0], grad])),
        "period": draw(st.none() | st.integers(1, 400) | st.floats(0.5, 400)) if periods else None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return named(draw(st.sampled_from(names)), **arguments)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    inner = draw(cyclics())
    low, high = draw(WIDTHS)
    total = draw(st.integers(1, 50))
    kinds: list[Schedule] = [
        inner,
        Static(low, high, total_steps=total),
        Deficit(
            q_min=low, q_max=high, start=draw(st.integers(0, 20)), steps=draw(st.integers(0, 60)), total_steps=total
        ),
        Delayed(inner, draw(st.integers(0, 60))),
        Sequence([Static(low, total_steps=total), inner]),
        Piecewise({0: low, total: high, 2 * total: 0}, total_steps=3 * total),
        Custom(lambda step: 1 + step % high, total_steps=total),
    ]
    return draw(st.sampled_from(kinds))


@UNHURRIED
@given(cyclics())
def test_widths_stay_within_bounds(schedule: Cyclic) -> None:
    forward = schedule.trajectory()[:, 0]
    assert schedule.q_min <= forward.min()
    assert forward.max() <= schedule.q_max


@UNHURRIED
@given(schedules())
def test_trajectory_is_the_bits_of_each_step(schedule: Schedule) -> None:
    assert schedule.total_steps is not None
    each = [schedule.bits(step) for step in range(schedule.total_steps)]
    trajectory = schedule.trajectory()
    assert trajectory.dtype == np.int64
    assert trajectory.shape == (schedule.total_steps, 3)
    np.testing.assert_array_equal(trajectory, np.array(each))


@UNHURRIED
@given(schedules(), st.data())
def test_trajectory_does_not_depend_on_how_it_is_cut(schedule: Schedule, data: st.DataObject) -> None:
    assert schedule.total_steps is not None
    cut = data.draw(st.integers(0, schedule.total_steps))
    parts = [schedule.trajectory(cut), schedule.trajectory(start=cut)]
    np.testing.assert_array_equal(np.concatenate(parts), schedule.trajectory())


@UNHURRIED
@given(schedules(), st.integers(0, 1000))
def test_last_bits_hold_after_the_end(schedule: Schedule, beyond: int) -> None:
    assert schedule.total_steps is not None
    last = schedule.total_steps - 1
    assert schedule.bits(last + beyond) == schedule.bits(last)
    assert schedule.value(last + beyond) == schedule.value(last)
    longer = schedule.trajectory(schedule.total_steps + 2)
    np.testing.assert_array_equal(longer[last], longer[-1])


@UNHURRIED
@given(schedules(), st.integers(0, 400))
def test_bits_are_the_rounded_value(schedule: Schedule, step: int) -> None:
    assert schedule.bits(step).weight == round(schedule.value(step))  # both round half to even


@UNHURRIED
@given(cyclics(REPEATED))
def test_repeated_grows_within_a_cycle(schedule: Cyclic) -> None:
    assert schedule.total_steps is not None
    cycle = schedule._positions(np.arange(schedule.total_steps))[0]
    rows = schedule.trajectory()
    for number in np.unique(cycle):
        assert (np.diff(rows[cycle == number], axis=0) >= 0).all()
    starts = np.flatnonzero(np.diff(cycle, prepend=-1))
    if schedule.period is None and schedule.total_steps % schedule.cycles == 0:
        assert (rows[starts, 0] == schedule.q_min).all()
        assert len(starts) == schedule.cycles


@UNHURRIED
@given(cyclics(TRIANGULAR))
def test_triangular_starts_at_the_top_and_turns_each_cycle(schedule: Cyclic) -> None:
    assert schedule.total_steps is not None
    # Run backwards, the exponential starts the tail it never closes, e^-4 of the span, below q_max.
    tail = np.exp(-4) * (schedule.q_max - schedule.q_min) if schedule.name == "ETH" else 0.0
    assert schedule.value(0) == pytest.approx(schedule.q_max - tail, rel=1e-12)
    assert schedule.bits(0).weight == schedule.q_max - round(tail)
    cycle = schedule._positions(np.arange(schedule.total_steps))[0]
    forward = schedule.trajectory()[:, 0]
    for number in np.unique(cycle):
        sign = -1 if number % 2 == 0 else 1
        assert (sign * np.diff(forward[cycle == number]) >= 0).all()


@UNHURRIED
@given(WIDTHS, st.integers(1, 40), st.sampled_from(["CT", "LT", "RTH", "ETH"]))
def test_horizontal_triangles_are_mirror_images(widths: tuple[int, int], half: int, name: str) -> None:
    schedule = named(name, q_min=widths[0], q_max=widths[1], total_steps=2 * half, cycles=2)
    for distance in range(1, half):
        mirrored = schedule.value(half - distance), schedule.value(half + distance)
        assert mirrored[0] == pytest.approx(mirrored[1], rel=1e-12)


@UNHURRIED
@given(cyclics(periods=False))
def test_default_period_tiles_the_run(schedule: Cyclic) -> None:
    assert schedule.total_steps is not None
    cycle = schedule._positions(np.arange(schedule.total_steps))[0]
    lengths = np.bincount(cycle)
    assert len(lengths) == schedule.cycles
    assert lengths.max() - lengths.min() <= 1


@UNHURRIED
@given(st.integers(1, 12), st.integers(1, 40), st.sampled_from(NAMES), WIDTHS)
def test_default_period_equals_the_integer_one_bit_for_bit(
    cycles: int, length: int, name: str, widths: tuple[int, int]
) -> None:
    assume(name in REPEATED or cycles % 2 == 0)
    arguments: dict[str, Any] = {"q_min": widths[0], "q_max": widths[1], "total_steps": cycles * length}
    exact = named(name, cycles=cycles, **arguments)
    given_period = named(name, cycles=cycles, period=length, **arguments)
    assert [exact.value(i) for i in range(cycles * length)] == [given_period.value(i) for i in range(cycles * length)]


@UNHURRIED
@given(schedules(), st.integers(0, 200), st.integers(0, 200))
def test_resume_in_the_middle(schedule: Schedule, before: int, after: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule.step(before)
        state = schedule.state_dict()
        bits = schedule.bits(schedule.position)
        schedule.step(after)
        schedule.load_state_dict(state)
    assert schedule.position == before
    assert schedule.bits(schedule.position) == bits
