"""The curves a cycle can follow, and their reflections.

The published bits contain true ties (3.5, 4.5, ...), so the last bit of every intermediate result counts. Two rules
preserve it: the order of operations below is the published one, and the transcendental functions come from ``math``
instead of NumPy, whose vectorised versions may differ in the last place from machine to machine.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cpt_fx.errors import check_choice

FloatArray = NDArray[np.float64]
Growth = Callable[[float], float]
Range = tuple[int, int]

PROFILES = ("cosine", "linear", "exponential", "rex")
REX_CONSTANT = 0.9


@dataclass(frozen=True)
class Profile:
    """A curve as the distance travelled from one end: from q_min, or from q_max when ``from_top``.

    ``distance(t, u)`` gets the position t in the cycle and u = 1 - t, each computed with one rounding.
    """

    distance: Callable[[FloatArray, FloatArray], FloatArray]
    from_top: bool = False
    symmetric: bool = False

    def widths(
        self, bounds: Iterable[Range], t: FloatArray, u: FloatArray, decaying: NDArray[np.bool_], horizontal: bool
    ) -> list[FloatArray]:
        """Return the widths at the given positions, for each pair of bounds; where ``decaying``, reflected."""
        # Turned upside down, the same distance is travelled from the other end.
        from_top = decaying != self.from_top
        if horizontal and bool(decaying.any()):
            # Run the curve backwards: u is the position, and the rest is 1 - u. This rounds differently from
            # t, and one published tie depends on it.
            t, u = np.where(decaying, u, t), np.where(decaying, 1.0 - u, u)
            from_top = np.full(decaying.shape, self.from_top)
        distance = self.distance(t, u)
        spans = [(low, high, (high - low) * distance) for low, high in bounds]
        return [np.where(from_top, high - travelled, low + travelled) for low, high, travelled in spans]


def make_profile(profile: str | Growth, rex_constant: float = REX_CONSTANT) -> Profile:
    """Return the named profile, or wrap a callable that grows from 0 to 1 on [0, 1]."""
    if rex_constant != REX_CONSTANT and profile != "rex":
        raise ValueError(f'rex_constant applies to profile="rex" only, got {rex_constant!r} with profile {profile!r}')
    if not isinstance(profile, str) and callable(profile):
        sample = np.array([0.0, 0.5, 1.0])
        _callable(profile, sample, 1.0 - sample)  # a curve that leaves the range should fail here, not during a run
        return Profile(partial(_callable, profile))
    if check_choice("profile", profile, PROFILES) != "rex":
        return _PLAIN[str(profile)]
    # Written so that NaN is refused too; at 1 the curve would divide 0 by 0.
    if isinstance(rex_constant, bool) or not isinstance(rex_constant, float | int) or not 0 <= rex_constant < 1:
        raise ValueError(f"rex_constant must be a number c with 0 <= c < 1, got {rex_constant!r}")
    return Profile(partial(_rex, rex_constant), from_top=True)


# Module-level functions, and partials of them, so that schedules can be pickled.


def _cosine(t: FloatArray, u: FloatArray) -> FloatArray:
    return (1 - _each(math.cos, math.pi * t)) / 2


def _linear(t: FloatArray, u: FloatArray) -> FloatArray:
    return t


def _exponential(t: FloatArray, u: FloatArray) -> FloatArray:
    return _each(math.exp, -4 * t)


def _rex(constant: float, t: FloatArray, u: FloatArray) -> FloatArray:
    return u / ((1 - constant) + constant * u)


def _callable(growth: Growth, t: FloatArray, u: FloatArray) -> FloatArray:
    values = _each(growth, t)
    outside = ~((values >= 0) & (values <= 1))  # catches NaN as well
    if bool(outside.any()):
        worst = int(np.argmax(outside))
        name = getattr(growth, "__name__", repr(growth))
        raise ValueError(f"profile must map [0, 1] into [0, 1], but {name} returned {values[worst]} at {t[worst]}")
    return values


def _each(function: Callable[[float], float], values: FloatArray) -> FloatArray:
    results: Iterable[float] = map(function, values.tolist())
    return np.fromiter(results, dtype=np.float64, count=values.size)


_PLAIN = {
    "cosine": Profile(_cosine, symmetric=True),
    "linear": Profile(_linear, symmetric=True),
    "exponential": Profile(_exponential, from_top=True),
}
