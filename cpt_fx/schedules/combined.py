"""Schedules composed of other schedules."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from cpt_fx.errors import check_int
from cpt_fx.schedules.base import EvalBits, FloatArray, IntArray, Schedule
from cpt_fx.schedules.basic import Static
from cpt_fx.schedules.bits import Bits, widest


class Sequence(Schedule):
    """One schedule after another, each counted from its own first step.

    Without ``eval_bits``, the members must agree on theirs, and that value is used; if it is None, evaluation runs at
    the largest width of all members.
    """

    def __init__(self, schedules: SequenceOf[Schedule], *, eval_bits: EvalBits = None) -> None:
        members = [_check_schedule(f"schedules[{index}]", member) for index, member in enumerate(schedules)]
        if not members:
            raise ValueError("schedules must hold at least one schedule, got none")
        self._lengths = [member.total_steps for member in members]
        self._starts = [0]
        for index, length in enumerate(self._lengths[:-1]):
            if length is None:
                raise ValueError(f"schedules[{index}] must have total_steps, since another follows: {members[index]!r}")
            self._starts.append(self._starts[-1] + length)
        last = self._lengths[-1]
        super().__init__(
            None if last is None else self._starts[-1] + last, _agreed(members) if eval_bits is None else eval_bits
        )
        self.schedules = tuple(members)

    def _values(self, steps: IntArray) -> FloatArray:
        values = np.empty((len(steps), 3), dtype=np.float64)
        member_of = np.searchsorted(np.array(self._starts, dtype=np.int64), steps, side="right") - 1
        for index, member in enumerate(self.schedules):
            mine = member_of == index
            if mine.any():
                values[mine] = member._values(steps[mine] - self._starts[index])
        return values

    def _widest(self) -> Bits | None:
        best = [bits for bits in (member._widest() for member in self.schedules) if bits is not None]
        return widest(best) if len(best) == len(self.schedules) else None

    def _config(self) -> dict[str, object]:
        return {"schedules": list(self.schedules), "eval_bits": self.eval_bits}


class Delayed(Sequence):
    """The schedule's largest widths until ``start``, then the schedule, counted from there.

    Avoids low precision in a critical learning period. Evaluation follows the schedule's own ``eval_bits``.
    """

    def __init__(self, schedule: Schedule, start: int) -> None:
        self.schedule = _check_schedule("schedule", schedule)
        self.start = check_int("start", start, 0)
        best = schedule._widest()
        if best is None:
            raise ValueError(f"a delayed schedule starts at its largest width, and that of {schedule!r} is not known")
        before = [Static(best, total_steps=self.start, eval_bits=schedule.eval_bits)] if self.start else []
        super().__init__([*before, schedule])

    def _config(self) -> dict[str, object]:
        return {"schedule": self.schedule, "start": self.start}


def _check_schedule(field: str, value: object) -> Schedule:
    if not isinstance(value, Schedule):
        raise TypeError(f"{field} must be a schedule, got {value!r} ({type(value).__name__})")
    return value


def _agreed(members: list[Schedule]) -> EvalBits:
    choices = [member.eval_bits for member in members]
    if any(choice != choices[0] for choice in choices):
        raise ValueError(f"eval_bits must be given, since the schedules differ in theirs: {choices}")
    return choices[0]
