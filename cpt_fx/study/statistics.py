"""Statistics of few seeds: bootstrap intervals, ranks and rank correlations, with numpy only and deterministic.

The seeds are what a study samples, so everything here resamples seeds. Two corrections make that work for the three
to ten seeds that a study has. Means of n values resampled from n values vary less than means of n new values, so
deviations are stretched by sqrt(n / (n - 1)). And the spread itself is estimated from n values, so the interval is
widened by t / z, Student's quantile over the normal one. Without both, an interval of three seeds would reach from the
worst seed to the best, and contain the true mean three times in four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
DRAWS = 10_000
SEED = 240302243
"""The seed of the resampling: the same records give the same intervals."""
_Z = 1.959963984540054
# Student's 97.5 % quantiles for 1 to 9 degrees of freedom. From 10 on a series in 1 / freedom is exact to 1e-5.
_T = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float

    def covers(self, value: float) -> bool:
        """Return whether a value lies in the interval, ends included."""
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its interval, from `n` seeds; without an interval where there are fewer than two."""

    value: float
    interval: Interval | None
    n: int
    paired: bool = False

    @property
    def told_apart(self) -> bool:
        """Whether the interval excludes zero."""
        return self.interval is not None and not self.interval.covers(0.0)


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Spearman's rho and Kendall's tau-b, None if a side is constant; `reason` says why there is no interval."""

    points: int
    runs: int
    rho: float | None = None
    rho_interval: Interval | None = None
    tau: float | None = None
    tau_interval: Interval | None = None
    reason: str = ""


def t_quantile(freedom: int) -> float:
    """Return Student's 97.5 % quantile, which a two-sided 95 % interval needs."""
    if freedom < 1:
        raise ValueError(f"freedom must be at least 1, got {freedom}")
    if freedom <= len(_T):
        return _T[freedom - 1]
    # The Cornish-Fisher expansion around the normal quantile.
    z, f = _Z, float(freedom)
    terms = (
        (z**3 + z) / (4 * f),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * f**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * f**3),
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * f**4),
    )
    return z + sum(terms)


def mean(values: ArrayLike) -> Estimate:
    """Return the mean of independent values with its interval."""
    sample = _sample("values", values)
    return _estimate(float(sample.mean()), len(sample), lambda random: _resampled(sample, random, DRAWS))


def difference(first: ArrayLike, second: ArrayLike, *, paired: bool) -> Estimate:
    """Return the mean of `first` minus the mean of `second`; `paired` values correspond one to one.

    Unpaired samples are resampled separately, with the degrees of freedom of the smaller one, which is conservative.
    """
    one, two = _sample("first", first), _sample("second", second)
    if paired:
        if len(one) != len(two):
            raise ValueError(f"paired samples must be of one length, got {len(one)} and {len(two)} values")
        return replace(mean(one - two), paired=True)
    centre, least = float(one.mean() - two.mean()), min(len(one), len(two))
    return _estimate(centre, least, lambda random: _resampled(one, random, DRAWS) - _resampled(two, random, DRAWS))


def rank_correlation(x: ArrayLike, values: Sequence[ArrayLike], *, draws: int = DRAWS) -> Correlation:
    """Correlate the ranks of `x`, one number per point, with those of the points' means.

    `values[i]` are the runs of point i. For the interval the runs within each point are resampled and every point is
    kept: the schedules are fixed, the seeds are a sample. Resampled means are noisier than the real ones, and noise
    hides order, so their percentiles are biased towards zero; mirrored at the estimate they are biased away from it.
    The interval covers both.
    """
    places = _sample("x", x)
    runs = [_sample(f"values[{index}]", one) for index, one in enumerate(values)]
    if len(runs) != len(places):
        raise ValueError(f"x and values must be of one length, got {len(places)} and {len(runs)}")
    correlation = partial(Correlation, points=len(runs), runs=sum(map(len, runs)))
    if len(runs) < 3:
        return correlation(reason=f"{len(runs)} points have no rank correlation worth the name")
    means = np.array([[one.mean() for one in runs]])
    rho, tau = (float(measure(places, means)[0]) for measure in (spearman, kendall))
    if not math.isfinite(rho):  # nor is tau: one side is constant
        return correlation(reason="all points are equal")
    if any(len(one) < 2 for one in runs):
        return correlation(rho=rho, tau=tau, reason="some points have a single run")
    random = np.random.default_rng(SEED)
    drawn = np.stack([_resampled(one, random, draws) for one in runs], axis=1)
    rhos, taus = _mirrored(rho, spearman(places, drawn)), _mirrored(tau, kendall(places, drawn))
    return correlation(rho=rho, rho_interval=rhos, tau=tau, tau_interval=taus)


def ranks(rows: Array) -> Array:
    """Return the ranks from 1 in each row; equal values share the mean of their ranks."""
    rounded = _without_noise(rows)
    # Column by column: all comparisons at once would be rows x values x values.
    above = [np.sign(column[:, None] - rounded).sum(axis=1) for column in rounded.T]
    result: Array = (np.stack(above, axis=1) + len(above) + 1) / 2
    return result


def spearman(x: Array, rows: Array) -> Array:
    """Return Spearman's rho of `x` with each row, ties included; nan where either is constant."""
    one, two = ranks(x[None, :]), ranks(rows)
    return _cosine(one - one.mean(axis=1, keepdims=True), two - two.mean(axis=1, keepdims=True))


def kendall(x: Array, rows: Array) -> Array:
    """Return Kendall's tau-b of `x` with each row, ties included; nan where either is constant."""
    first, second = np.triu_indices(len(x), k=1)
    one, two = _without_noise(x[None, :]), _without_noise(rows)
    return _cosine(np.sign(one[:, first] - one[:, second]), np.sign(two[:, first] - two[:, second]))


def deviation(values: ArrayLike) -> float | None:
    """Return the standard deviation of a sample (n - 1), or None for a single value."""
    sample = _sample("values", values)
    return float(sample.std(ddof=1)) if len(sample) > 1 else None


def _sample(name: str, values: ArrayLike) -> Array:
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or not len(sample) or not np.isfinite(sample).all():
        raise ValueError(f"{name} must be one row of finite numbers, at least one, got {values!r}")
    return sample


def _resampled(sample: Array, random: np.random.Generator, draws: int) -> Array:
    """Return means of resampled values, with deviations stretched to those of means of new values."""
    n, centre = len(sample), sample.mean()
    means = sample[random.integers(n, size=(draws, n))].mean(axis=1)
    stretched: Array = centre + math.sqrt(n / (n - 1)) * (means - centre)
    return stretched


def _estimate(centre: float, n: int, draw: Callable[[np.random.Generator], Array]) -> Estimate:
    """Return an estimate from `n` seeds, with an interval from draws where there are two or more."""
    if n < 2:
        return Estimate(value=centre, interval=None, n=n)
    low, high = (float(end) for end in np.quantile(draw(np.random.default_rng(SEED)), _TAILS))
    wider = t_quantile(n - 1) / _Z
    interval = Interval(centre + wider * (low - centre), centre + wider * (high - centre))
    return Estimate(value=centre, interval=interval, n=n)


def _mirrored(centre: float, drawn: Array) -> Interval | None:
    # A draw in which all means are equal has no correlation; it occurs only if runs agree to the last digit.
    defined = drawn[np.isfinite(drawn)]
    if not len(defined):
        return None
    low, high = (float(end) for end in np.quantile(defined, _TAILS))
    return Interval(max(min(low, 2 * centre - high), -1.0), min(max(high, 2 * centre - low), 1.0))


def _without_noise(rows: Array) -> Array:
    """Round to 12 digits of the largest value: equal means differ in the last bits when summed in another order."""
    largest = float(np.abs(rows).max(initial=0.0))
    return rows if largest == 0 else np.round(rows / largest, 12)


def _cosine(one: Array, two: Array) -> Array:
    above: Array = (one * two).sum(axis=1)
    below: Array = np.sqrt((one**2).sum(axis=1) * (two**2).sum(axis=1))
    return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)
