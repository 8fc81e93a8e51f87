"""Schedules without cycles: constant, low in a window, given by a table, given by a function."""

from collections.abc import Callable, Mapping

import numpy as np

from cpt_fx.errors import check_int
from cpt_fx.schedules.base import EvalBits, FloatArray, IntArray, Schedule
from cpt_fx.schedules.bits import Bits, as_bits, check_range, check_width, plain, widest


class Static(Schedule):
    """The same widths throughout; one int serves weights, activations and, unless given, gradients."""

    def __init__(
        self,
        bits: int | Bits,
        gradient: int | None = None,
        *,
        total_steps: int | None = None,
        eval_bits: EvalBits = None,
    ) -> None:
        super().__init__(total_steps, eval_bits)
        self._bits = as_bits("bits", bits)
        if gradient is not None:
            if isinstance(bits, tuple):
                raise ValueError(f"gradient is already part of {bits!r}, got gradient={gradient!r} as well")
            self._bits = self._bits._replace(gradient=check_width("gradient", gradient, zero=True))

    def _values(self, steps: IntArray) -> FloatArray:
        return np.tile(np.array(self._bits, dtype=np.float64), (len(steps), 1))

    def _widest(self) -> Bits:
        return self._bits

    def _config(self) -> dict[str, object]:
        return {"bits": plain(self._bits), "total_steps": self.total_steps, "eval_bits": self.eval_bits}


class Deficit(Schedule):
    """q_min while ``start <= step < end`` and q_max otherwise, to probe critical learning periods.

    Give ``end`` or the length of the window, ``steps``. ``inclusive=True`` keeps q_min at step ``end`` too, as
    the published CIFAR runs do.
    """

    def __init__(
        self,
        *,
        q_min: int,
        q_max: int,
        steps: int | None = None,
        start: int = 0,
        end: int | None = None,
        total_steps: int | None = None,
        q_grad: int | None = None,
        inclusive: bool = False,
        eval_bits: EvalBits = None,
    ) -> None:
        super().__init__(total_steps, eval_bits)
        self.q_min, self.q_max = check_range(q_min, q_max)
        self.q_grad = self.q_max if q_grad is None else check_width("q_grad", q_grad)
        self.start = check_int("start", start, 0)
        if steps is not None and end is None:
            end = self.start + check_int("steps", steps, 0)
        elif steps is not None or end is None:
            raise ValueError(f"give either steps or end of the deficit, got steps={steps!r} and end={end!r}")
        self.end = check_int("end", end, 0)
        if self.end < self.start:
            raise ValueError(f"end must not lie before start, got start={self.start} and end={self.end}")
        if not isinstance(inclusive, bool):
            raise TypeError(f"inclusive must be True or False, got {inclusive!r}")
        self.inclusive = inclusive

    def _values(self, steps: IntArray) -> FloatArray:
        low = (steps >= self.start) & (steps < self.end + self.inclusive)
        forward = np.where(low, float(self.q_min), float(self.q_max))
        return np.stack([forward, forward, np.full_like(forward, self.q_grad)], axis=1)

    def _widest(self) -> Bits:
        return Bits(self.q_max, self.q_max, self.q_grad)

    def _config(self) -> dict[str, object]:
        fields = ("q_min", "q_max", "start", "end", "total_steps", "q_grad", "inclusive", "eval_bits")
        return {field: getattr(self, field) for field in fields}


class Piecewise(Schedule):
    """Widths by table: ``{first step: bits}``, each entry in force until the next."""

    def __init__(
        self, pieces: Mapping[int, int | Bits], *, total_steps: int | None = None, eval_bits: EvalBits = None
    ) -> None:
        super().__init__(total_steps, eval_bits)
        if not isinstance(pieces, Mapping):
            raise TypeError(f"pieces must map steps to bits, as in {{0: 3, 1000: 8}}, got {pieces!r}")
        checked = {check_int("a step of pieces", step, 0): as_bits(f"pieces[{step}]", b) for step, b in pieces.items()}
        if 0 not in checked:
            raise ValueError(f"pieces must say what holds from step 0, got steps {sorted(checked)}")
        self._pieces = dict(sorted(checked.items()))
        self._starts = np.array(list(self._pieces), dtype=np.int64)
        self._rows = np.array(list(self._pieces.values()), dtype=np.float64)

    def _values(self, steps: IntArray) -> FloatArray:
        rows: FloatArray = self._rows[np.searchsorted(self._starts, steps, side="right") - 1]
        return rows

    def _widest(self) -> Bits:
        reached = [bits for start, bits in self._pieces.items() if self.total_steps is None or start < self.total_steps]
        return widest(reached)

    def _config(self) -> dict[str, object]:
        pieces = {start: plain(bits) for start, bits in self._pieces.items()}
        return {"pieces": pieces, "total_steps": self.total_steps, "eval_bits": self.eval_bits}


class Custom(Schedule):
    """Widths from a function of the step that returns an int or ``Bits``.

    The function may keep state, in an object or a closure: it is called once for each step that runs, and its state is
    saved in the state_dict. Evaluation runs at the largest width that was planned or ran; without ``total_steps`` that
    is unknown, and evaluation runs at the current width. ``eval_bits`` overrides both.
    """

    def __init__(
        self, fn: Callable[[int], int | Bits], *, total_steps: int | None = None, eval_bits: EvalBits = None
    ) -> None:
        super().__init__(total_steps, eval_bits)
        if not callable(fn):
            raise TypeError(f"fn must be a function of the step, got {fn!r} ({type(fn).__name__})")
        self.fn = fn
        self.bits(0)  # an unsuitable function should fail here, not at the first training step

    def _values(self, steps: IntArray) -> FloatArray:
        rows = [as_bits(f"fn({step})", self.fn(step)) for step in steps.tolist()]
        return np.array(rows, dtype=np.float64).reshape(-1, 3)

    def _widest(self) -> Bits | None:
        if self._best is None and self.total_steps is not None:
            distinct = np.unique(self.trajectory(), axis=0).tolist()
            self._best = widest([*(Bits(*row) for row in distinct), *(bits for bits, _ in self._ran if bits)])
        if self._best is not None:
            self._best = widest([self._best, self.current])
        return self._best

    def _config(self) -> dict[str, object]:
        return {"fn": self.fn, "total_steps": self.total_steps, "eval_bits": self.eval_bits}
