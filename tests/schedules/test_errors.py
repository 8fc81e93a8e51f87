"""What is refused, and in which words."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cpt_fx.errors import TransformError, check_int, nearest
from cpt_fx.schedules import Bits, Custom, Cyclic, Deficit, Delayed, Piecewise, Schedule, Sequence, Static, named


def cr(**changes: Any) -> Cyclic:
    arguments: dict[str, Any] = {"name": "CR", "q_min": 3, "q_max": 8, "total_steps": 100}
    return named(**(arguments | changes))


def cyclic(**changes: Any) -> Cyclic:
    arguments: dict[str, Any] = {"profile": "linear", "q_min": 3, "q_max": 8, "total_steps": 100}
    return Cyclic(**(arguments | changes))


def deficit(**changes: Any) -> Deficit:
    arguments: dict[str, Any] = {"q_min": 3, "q_max": 8}
    return Deficit(**(arguments | changes))


def too_steep(t: float) -> float:
    return 2 * t


CASES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: cr(q_min=9), ValueError, "q_min must not exceed q_max, got q_min=9 and q_max=8"),
    (lambda: cr(q_min=0), ValueError, "q_min must be an integer from 1 to 32, got 0"),
    (lambda: cr(q_max=33), ValueError, "q_max must be an integer from 1 to 32, got 33"),
    (lambda: cr(q_min=3.0), TypeError, "q_min must be an integer from 1 to 32, got 3.0 (float)"),
    (lambda: cr(q_min=np.float64(3)), TypeError, "q_min must be an integer from 1 to 32"),
    (lambda: cr(q_max=True), TypeError, "q_max must be an integer from 1 to 32, got True (bool)"),
    (lambda: cr(q_max="8"), TypeError, "q_max must be an integer from 1 to 32, got '8' (str)"),
    (lambda: cr(total_steps=0), ValueError, "total_steps must be an integer of at least 1, got 0"),
    (lambda: cr(total_steps=1e4), TypeError, "total_steps must be an integer of at least 1, got 10000.0 (float)"),
    (lambda: cr(total_steps=None), TypeError, "total_steps must be an integer of at least 1, got None"),
    (lambda: cr(cycles=0), ValueError, "cycles must be an integer of at least 1, got 0"),
    (lambda: cr(cycles=2.5), TypeError, "cycles must be an integer of at least 1, got 2.5 (float)"),
    (lambda: cr(total_steps=5), ValueError, "cycles must not exceed total_steps, got cycles=8 and total_steps=5"),
    (lambda: cr(period=0), ValueError, "period must be a number of steps above 0, got 0"),
    (lambda: cr(period=-2.5), ValueError, "period must be a number of steps above 0, got -2.5"),
    (lambda: cr(period=float("nan")), ValueError, "period must be a number of steps above 0, got nan"),
    (lambda: cr(period=float("inf")), ValueError, "period must be a number of steps above 0, got inf"),
    (lambda: cr(period="9"), TypeError, "period must be a number of steps above 0, got '9'"),
    (lambda: cr(period=True), TypeError, "period must be a number of steps above 0, got True"),
    (lambda: cr(q_grad=(8, 6)), ValueError, "q_grad[0] must not exceed q_grad[1], got q_grad[0]=8 and q_grad[1]=6"),
    (lambda: cr(q_grad=(6,)), ValueError, "q_grad must be None, an int or a (min, max) pair, got (6,)"),
    (lambda: cr(q_grad=0), ValueError, "q_grad must be an integer from 1 to 32, got 0"),
    (lambda: cr(eval_bits="curent"), ValueError, "got 'curent'. Did you mean \"current\"?"),
    (lambda: cr(eval_bits=0), ValueError, "eval_bits must be an integer from 1 to 32, got 0"),
    (lambda: cr(eval_bits=8.0), TypeError, "eval_bits must be an integer from 1 to 32, got 8.0 (float)"),
    (lambda: cr(name="cr"), ValueError, "got 'cr'. Did you mean \"CR\"?"),
    (lambda: cr(name="EVT"), ValueError, "got 'EVT'. Did you mean \"ETV\"?"),
    (lambda: cr(name=3), ValueError, 'name must be one of "CR", "LR"'),
    (lambda: cyclic(profile="cosin"), ValueError, "got 'cosin'. Did you mean \"cosine\"?"),
    (lambda: cyclic(profile=None), ValueError, 'profile must be one of "cosine"'),
    (lambda: cyclic(profile=too_steep), ValueError, "must map [0, 1] into [0, 1], but too_steep returned 2.0 at 1.0"),
    (lambda: cyclic(profile=lambda t: float("nan")), ValueError, "returned nan at 0.0"),
    (lambda: cyclic(pattern="triangle"), ValueError, "got 'triangle'. Did you mean \"triangular\"?"),
    (lambda: cyclic(pattern="triangular", reflection="both"), ValueError, "reflection must be one of"),
    (lambda: cyclic(reflection="vertical"), ValueError, 'reflection applies to pattern="triangular" only'),
    (
        lambda: cyclic(profile="rex", pattern="triangular"),
        ValueError,
        "for a triangular schedule with the asymmetric profile 'rex', got None",
    ),
    (lambda: cyclic(rex_constant=0.5), ValueError, 'rex_constant applies to profile="rex" only, got 0.5'),
    (lambda: cyclic(profile="rex", rex_constant=1.0), ValueError, "rex_constant must be a number c with 0 <= c < 1"),
    (lambda: Static(33), ValueError, "bits must be an integer from 0 to 32, got 33"),
    (lambda: Static(8.0), TypeError, "bits must be an integer from 0 to 32, got 8.0 (float)"),  # type: ignore[arg-type]
    (lambda: Static(Bits(8, -1, 8)), ValueError, "bits.activation must be an integer from 0 to 32, got -1"),
    (lambda: Static((8, 8)), ValueError, "bits must be an int or Bits"),  # type: ignore[arg-type]
    (lambda: Static(Bits(8, 8, 8), 4), ValueError, "gradient is already part of Bits"),
    (lambda: Static(8, 40), ValueError, "gradient must be an integer from 0 to 32, got 40"),
    (deficit, ValueError, "give either steps or end of the deficit, got steps=None and end=None"),
    (lambda: deficit(steps=1, end=1), ValueError, "give either steps or end of the deficit, got steps=1 and end=1"),
    (lambda: deficit(start=5, end=4), ValueError, "end must not lie before start, got start=5 and end=4"),
    (lambda: deficit(steps=-1), ValueError, "steps must be an integer of at least 0, got -1"),
    (lambda: deficit(steps=1, inclusive=1), TypeError, "inclusive must be True or False, got 1"),
    (lambda: deficit(steps=1, q_min=9), ValueError, "q_min must not exceed q_max"),
    (lambda: Piecewise({5: 8}), ValueError, "pieces must say what holds from step 0, got steps [5]"),
    (lambda: Piecewise({0: 8, -1: 3}), ValueError, "a step of pieces must be an integer of at least 0, got -1"),
    (lambda: Piecewise({0: 3.5}), TypeError, "pieces[0] must be an integer from 0 to 32"),  # type: ignore[dict-item]
    (lambda: Piecewise([3, 8]), TypeError, "pieces must map steps to bits"),  # type: ignore[arg-type]
    (lambda: Custom(8), TypeError, "fn must be a function of the step, got 8 (int)"),  # type: ignore[arg-type]
    (lambda: Custom(lambda s: 8.5), TypeError, "fn(0) must be an integer from 0 to 32"),  # type: ignore[arg-type,return-value]
    (lambda: Custom(lambda s: 8 - s, total_steps=50).trajectory(), ValueError, "fn(9) must be an integer from 0 to 32"),
    (lambda: Delayed(8, 3), TypeError, "schedule must be a schedule, got 8 (int)"),  # type: ignore[arg-type]
    (lambda: Delayed(Static(8), -3), ValueError, "start must be an integer of at least 0, got -3"),
    (lambda: Delayed(Custom(lambda s: 8), 3), ValueError, "starts at its largest width"),
    (lambda: Sequence([]), ValueError, "schedules must hold at least one schedule, got none"),
    (lambda: Sequence([Static(8), Static(4)]), ValueError, "schedules[0] must have total_steps"),
    (lambda: Sequence([3]), TypeError, "schedules[0] must be a schedule, got 3 (int)"),  # type: ignore[list-item]
    (
        lambda: Sequence([cr(), cr(eval_bits="current")]),
        ValueError,
        "eval_bits must be given, since the schedules differ in theirs: [None, 'current']",
    ),
    (lambda: cr().bits(-1), ValueError, "step must be an integer of at least 0, got -1"),
    (lambda: cr().bits(1.0), TypeError, "step must be an integer of at least 0, got 1.0 (float)"),  # type: ignore[arg-type]
    (lambda: cr().step(-1), ValueError, "n must be an integer of at least 0, got -1"),
    (lambda: cr().trajectory(-1), ValueError, "length must be an integer of at least 0, got -1"),
    (lambda: cr().trajectory(start=-1), ValueError, "start must be an integer of at least 0, got -1"),
    (lambda: Static(8).trajectory(), ValueError, "Static(bits=8) has no total_steps: pass a length"),
]


@pytest.mark.parametrize(("build", "error", "message"), CASES, ids=[message for _, _, message in CASES])
def test_refused(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        build()


def test_numpy_integers_are_integers() -> None:
    schedule = cr(
        q_min=np.int64(3), q_max=np.int32(8), total_steps=np.int64(100), cycles=np.uint8(4), period=np.int64(9)
    )
    assert schedule == cr(cycles=4, period=9)
    assert type(schedule.q_min) is type(schedule.total_steps) is type(schedule.period) is int


@pytest.mark.parametrize("name", ["CT", "LT", "ETV", "ETH", "RTV", "RTH"])
def test_odd_number_of_falling_cycles_warns(name: str) -> None:
    with pytest.warns(UserWarning, match=r"ends at low precision \(3 bits\): the last of its 3 cycles"):
        cr(name=name, cycles=3, total_steps=300)


@pytest.mark.parametrize(
    "build",
    [
        lambda: cr(cycles=3),
        lambda: cr(name="CT", cycles=4),
        lambda: cr(name="CT", q_min=8, cycles=3),
        # The ninth cycle of the ImageNet convention is two steps long, still at q_max.
        lambda: cr(name="CT", total_steps=450450, period=450450 // 8),
    ],
)
def test_no_warning_where_the_end_is_not_low(build: Callable[[], Schedule]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build()


def test_warning_points_at_the_caller() -> None:
    with pytest.warns(UserWarning) as caught:
        cyclic(pattern="triangular", cycles=1)
    assert caught[0].filename == __file__


def test_nearest() -> None:
    assert nearest("rtv", ["RTH", "RTV"]) == ' Did you mean "RTV"?'
    assert nearest("something else", ["RTH", "RTV"]) == ""


def test_check_int_bounds() -> None:
    assert check_int("n", 5) == 5
    assert check_int("n", np.int8(-5), -9, 0) == -5
    with pytest.raises(ValueError, match="n must be an integer from 0 to 4, got 5"):
        check_int("n", 5, 0, 4)
    with pytest.raises(TypeError, match=r"n must be an integer, got None \(NoneType\)"):
        check_int("n", None)


def test_transform_error_is_a_value_error() -> None:
    assert issubclass(TransformError, ValueError)
