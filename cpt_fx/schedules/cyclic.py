"""Schedules that cycle between two widths: the general form and the ten published ones."""

import math
import warnings

import numpy as np

from cpt_fx.errors import check_choice, check_int
from cpt_fx.schedules.base import EvalBits, FloatArray, IntArray, Schedule, show
from cpt_fx.schedules.bits import Bits, check_range, check_width
from cpt_fx.schedules.profiles import REX_CONSTANT, Growth, make_profile

_FORMS: dict[str, tuple[str, str, str | None]] = {
    "CR": ("cosine", "repeated", None),
    "LR": ("linear", "repeated", None),
    "ER": ("exponential", "repeated", None),
    "RR": ("rex", "repeated", None),
    "CT": ("cosine", "triangular", None),
    "LT": ("linear", "triangular", None),
    "ETV": ("exponential", "triangular", "vertical"),
    "ETH": ("exponential", "triangular", "horizontal"),
    "RTV": ("rex", "triangular", "vertical"),
    "RTH": ("rex", "triangular", "horizontal"),
}
NAMES = tuple(_FORMS)


class Cyclic(Schedule):
    """Widths that grow from q_min to q_max in every cycle (repeated), or alternately fall and grow (triangular).

    ``profile`` is "cosine", "linear", "exponential", "rex" or a callable that grows from 0 to 1 on [0, 1]. A
    triangular schedule starts at q_max; ``reflection`` says how an asymmetric profile falls: "vertical" turns it
    upside down, "horizontal" runs it backwards. ``q_grad`` is None (q_max), an int, or a (min, max) pair that
    cycles too. ``period`` is the number of steps in a cycle; by default cycles tile the run exactly, and
    ``cycles`` has no effect when it is given.
    """

    def __init__(
        self,
        *,
        profile: str | Growth,
        pattern: str = "repeated",
        reflection: str | None = None,
        q_min: int,
        q_max: int,
        total_steps: int,
        cycles: int = 8,
        q_grad: int | tuple[int, int] | None = None,
        period: float | None = None,
        eval_bits: EvalBits = None,
        rex_constant: float = REX_CONSTANT,
    ) -> None:
        super().__init__(check_int("total_steps", total_steps, 1), eval_bits)
        self.profile = profile
        self._curve = make_profile(profile, rex_constant)
        self.rex_constant = float(rex_constant)
        self.pattern = check_choice("pattern", pattern, ("repeated", "triangular"))
        self.reflection = self._check_reflection(reflection)
        self.q_min, self.q_max = check_range(q_min, q_max)
        self.q_grad = q_grad = _check_gradient(q_grad)
        self._grad_range = (
            q_grad if isinstance(q_grad, tuple) else (self.q_max, self.q_max) if q_grad is None else (q_grad, q_grad)
        )
        self.period = None if period is None else _check_period(period)
        self.cycles = check_int("cycles", cycles, 1)
        if self.period is None and self.cycles > total_steps:
            raise ValueError(f"cycles must not exceed total_steps, got cycles={cycles} and total_steps={total_steps}")
        self._warn_of_low_end(int(total_steps) - 1)

    @property
    def name(self) -> str | None:
        """The published short name, such as "CR", or None for any other form."""
        form = (self.profile, self.pattern, self.reflection)
        if self.rex_constant != REX_CONSTANT:
            return None
        return next((name for name, known in _FORMS.items() if known == form), None)

    def _positions(self, steps: IntArray) -> tuple[IntArray, FloatArray, FloatArray]:
        """Return the cycle of each step, the position t in it and 1 - t."""
        length: float
        if self.period is None:
            # In units of 1/cycles of a step, so that a cycle is an integer number of units although total_steps /
            # cycles need not be one. Where it is, all quotients below equal those of the integer period.
            assert self.total_steps is not None
            length, steps = self.total_steps, steps * self.cycles
        else:
            length = self.period
        cycle, passed = np.divmod(steps, length)
        return cycle.astype(np.int64), passed / length, (length - passed) / length

    def _values(self, steps: IntArray) -> FloatArray:
        cycle, t, u = self._positions(steps)
        decaying = (cycle % 2 == 0) & (self.pattern == "triangular")
        bounds = ((self.q_min, self.q_max), self._grad_range)
        forward, gradient = self._curve.widths(bounds, t, u, decaying, self.reflection == "horizontal")
        return np.stack([forward, forward, gradient], axis=1)

    def _widest(self) -> Bits:
        return Bits(self.q_max, self.q_max, self._grad_range[1])

    def _config(self) -> dict[str, object]:
        form = {"profile": self.profile, "pattern": self.pattern, "reflection": self.reflection}
        rex = {"rex_constant": self.rex_constant} if self.profile == "rex" else {}
        return form | self._range_config() | rex

    def _range_config(self) -> dict[str, object]:
        fields = ("q_min", "q_max", "total_steps", "cycles", "q_grad", "period", "eval_bits")
        return {field: getattr(self, field) for field in fields}

    def __repr__(self) -> str:
        if self.name is None:
            return super().__repr__()
        arguments = [f"{field}={show(value)}" for field, value in self._range_config().items() if value is not None]
        return f"named({', '.join([repr(self.name), *arguments])})"

    def _check_reflection(self, reflection: str | None) -> str | None:
        if reflection is not None:
            check_choice("reflection", reflection, ("vertical", "horizontal"))
        if self.pattern == "repeated" and reflection is not None:
            raise ValueError(f'reflection applies to pattern="triangular" only, got {reflection!r} with "repeated"')
        if self.pattern == "triangular" and reflection is None and not self._curve.symmetric:
            raise ValueError(
                f'reflection must be "vertical" or "horizontal" for a triangular schedule with the asymmetric '
                f"profile {show(self.profile)}, got None"
            )
        # Both reflections of a symmetric curve are the same curve, so they make equal schedules.
        return None if self._curve.symmetric else reflection

    def _warn_of_low_end(self, last: int) -> None:
        cycle = int(self._positions(np.array([last], dtype=np.int64))[0][0])
        width = self.bits(last).weight
        if self.pattern == "triangular" and cycle % 2 == 0 and width < self.q_max:
            warnings.warn(
                f"this triangular schedule ends at low precision ({width} bits): the last of its {cycle + 1} cycles "
                "is a falling one; use an even number of cycles to end at q_max",
                UserWarning,
                stacklevel=3,
            )


def named(
    name: str,
    *,
    q_min: int,
    q_max: int,
    total_steps: int,
    cycles: int = 8,
    q_grad: int | tuple[int, int] | None = None,
    period: float | None = None,
    eval_bits: EvalBits = None,
) -> Cyclic:
    """Return one of the ten published schedules; see ``NAMES``."""
    profile, pattern, reflection = _FORMS[check_choice("name", name, NAMES)]
    return Cyclic(
        profile=profile,
        pattern=pattern,
        reflection=reflection,
        q_min=q_min,
        q_max=q_max,
        total_steps=total_steps,
        cycles=cycles,
        q_grad=q_grad,
        period=period,
        eval_bits=eval_bits,
    )


def _check_gradient(q_grad: object) -> int | tuple[int, int] | None:
    if q_grad is None:
        return None
    if isinstance(q_grad, tuple | list):
        if len(q_grad) != 2:
            raise ValueError(f"q_grad must be None, an int or a (min, max) pair, got {q_grad!r}")
        return check_range(q_grad[0], q_grad[1], names=("q_grad[0]", "q_grad[1]"))
    return check_width("q_grad", q_grad)


def _check_period(period: object) -> float:
    expected = f"period must be a number of steps above 0, got {period!r}"
    if isinstance(period, bool) or not isinstance(period, int | float | np.integer | np.floating):
        raise TypeError(expected)
    number = period.item() if isinstance(period, np.generic) else period
    if not (math.isfinite(number) and number > 0):
        raise ValueError(expected)
    return number
