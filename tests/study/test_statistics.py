"""Intervals hold what they promise, ranks and correlations equal scipy's."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cpt_fx.study import statistics
from cpt_fx.study.statistics import Estimate, Interval

# Few distinct values: ties are the point.
tied = st.lists(st.integers(0, 6).map(float), min_size=3, max_size=14)
samples = st.lists(st.floats(-1e3, 1e3).map(lambda value: round(value, 6)), min_size=2, max_size=12)


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 9, 10, 11, 20, 50, 1000])
def test_t_quantile(freedom: int) -> None:
    assert statistics.t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-5)


@given(tied)
def test_ranks_share_ties(values: list[float]) -> None:
    assert statistics.ranks(np.array([values]))[0].tolist() == stats.rankdata(values).tolist()


@given(tied)
def test_correlations_equal_scipy(values: list[float]) -> None:
    x = np.array(values)
    y = np.array(values)[::-1] * np.array([1.0, -2.0] * 7)[: len(values)]
    rho, tau = statistics.spearman(x, y[None, :])[0], statistics.kendall(x, y[None, :])[0]
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert math.isnan(rho) and math.isnan(tau)
        return
    assert rho == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    assert tau == pytest.approx(stats.kendalltau(x, y).statistic, abs=1e-12)


def test_many_rows_at_once_equal_one_by_one() -> None:
    random = np.random.default_rng(0)
    x, rows = random.normal(size=9), random.integers(0, 5, size=(2_500, 9)).astype(np.float64)
    for function in (statistics.spearman, statistics.kendall):
        together = function(x, rows)
        assert np.array_equal(together, np.concatenate([function(x, row[None, :]) for row in rows]), equal_nan=True)


@given(samples)
@settings(max_examples=50)
def test_an_interval_holds_the_mean_and_moves_with_the_values(values: list[float]) -> None:
    found = statistics.mean(values)
    assert found.value == pytest.approx(np.mean(values), abs=1e-9)
    assert found.interval is not None
    assert found.interval.low <= found.value + 1e-9 and found.value - 1e-9 <= found.interval.high
    moved = statistics.mean([2 * value + 10 for value in values]).interval
    assert moved is not None
    assert moved.low == pytest.approx(2 * found.interval.low + 10, abs=1e-6)
    assert moved.high == pytest.approx(2 * found.interval.high + 10, abs=1e-6)


def coverage(n: int, rounds: int = 600) -> float:
    random = np.random.default_rng(1)
    held = 0
    for _ in range(rounds):
        interval = statistics.mean(random.normal(size=n)).interval
        assert interval is not None
        held += interval.covers(0.0)
    return held / rounds


@pytest.mark.parametrize("n", [3, 5, 8])
def test_intervals_of_few_seeds_hold_the_true_mean_as_often_as_they_say(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "DRAWS", 1_000)
    assert coverage(n) == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize(("values", "half"), [([0.0, 1.0], 0.5), ([-1.0, 0.0, 1.0], 1.0)])
def test_both_corrections_to_the_digit(values: list[float], half: float) -> None:
    """With two or three values the percentiles are the extremes, so that the interval is known exactly."""
    n, found = len(values), statistics.mean(values)
    expected = half * math.sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1) / stats.norm.ppf(0.975)
    assert found.interval is not None
    assert found.interval.high - found.value == pytest.approx(expected, rel=1e-5)
    assert found.value - found.interval.low == pytest.approx(expected, rel=1e-5)


def test_the_plain_bootstrap_would_not() -> None:
    """Why there are corrections: from three seeds, percentiles of resampled means reach from the worst to the best."""
    random = np.random.default_rng(1)
    held = 0
    for _ in range(500):
        seeds = random.normal(size=3)
        low, high = np.quantile(seeds[random.integers(3, size=(500, 3))].mean(axis=1), [0.025, 0.975])
        held += low <= 0 <= high
    assert held / 500 < 0.8


def test_differences_that_are_not_there_stand_out_as_rarely_as_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "DRAWS", 1_000)
    random = np.random.default_rng(2)
    pairs = [(random.normal(size=4), random.normal(size=4)) for _ in range(400)]
    paired = np.mean([statistics.difference(a, b, paired=True).told_apart for a, b in pairs])
    unpaired = np.mean([statistics.difference(a, b, paired=False).told_apart for a, b in pairs])
    assert 0.02 < paired < 0.09
    assert unpaired < 0.05  # the smaller sample's degrees of freedom are the cautious choice


def test_a_large_sample_has_the_interval_of_the_textbook() -> None:
    values = np.random.default_rng(3).normal(5, 2, size=400)
    found = statistics.mean(values)
    assert found.interval is not None
    half = 1.96 * values.std(ddof=1) / 20
    assert found.interval.low == pytest.approx(found.value - half, abs=0.02)
    assert found.interval.high == pytest.approx(found.value + half, abs=0.02)


def test_pairs_take_out_what_seeds_share() -> None:
    """Runs of one seed start alike: a seed that is good for one schedule is good for the other."""
    luck = np.array([0.0, 5.0, -5.0, 2.0])
    one, two = luck + np.array([1.0, 1.1, 0.9, 1.05]), luck
    assert statistics.difference(one, two, paired=True).told_apart
    assert not statistics.difference(one, two, paired=False).told_apart
    assert statistics.difference(one, two, paired=True).paired


def test_the_same_values_give_the_same_interval() -> None:
    values = [0.1, 0.4, 0.2]
    assert statistics.mean(values) == statistics.mean(values)
    points = [[1.0, 2.0], [2.0, 3.0], [0.0, 4.0]]
    assert statistics.rank_correlation([1, 2, 3], points) == statistics.rank_correlation([1, 2, 3], points)


def test_one_seed_has_no_interval() -> None:
    assert statistics.mean([0.5]) == Estimate(value=0.5, interval=None, n=1)
    assert statistics.difference([0.5], [0.25, 0.5], paired=False).interval is None
    assert statistics.deviation([0.5]) is None
    assert not statistics.mean([0.5]).told_apart


def test_equal_values_have_a_point_as_interval() -> None:
    found = statistics.difference([1.0, 1.0], [0.5, 0.5], paired=True)
    assert found.interval == Interval(0.5, 0.5) and found.told_apart
    assert not statistics.difference([1.0, 1.0], [1.0, 1.0], paired=True).told_apart


def test_a_known_order_is_found() -> None:
    random = np.random.default_rng(4)
    x = np.arange(10.0)
    found = statistics.rank_correlation(x, [value + 0.01 * random.normal(size=3) for value in x])
    assert found.rho == found.tau == pytest.approx(1.0)
    assert found.rho_interval == found.tau_interval == Interval(1.0, 1.0)
    assert (found.points, found.runs) == (10, 30)


def test_no_order_is_not_found() -> None:
    random = np.random.default_rng(5)
    found = statistics.rank_correlation(range(10), [random.normal(size=3) for _ in range(10)])
    assert found.rho_interval is not None and found.rho_interval.covers(0.0)
    assert found.tau_interval is not None and found.tau_interval.covers(0.0)


def test_noise_widens_the_interval() -> None:
    x = np.arange(10.0)
    widths = []
    for noise in (0.5, 2.0, 8.0):
        # The means are in order; only the spread of the runs grows.
        found = statistics.rank_correlation(x, [value + noise * np.array([-1.0, 0.0, 1.0]) for value in x])
        assert found.rho == pytest.approx(1.0) and found.rho_interval is not None
        widths.append(found.rho_interval.high - found.rho_interval.low)
        assert found.rho_interval.high == 1.0
    assert widths == sorted(widths) and widths[0] < widths[-1]


def held(slope: float, noise: float, rounds: int = 60) -> tuple[float, float]:
    """How often the interval holds the rank correlation of the true means, and how often it excludes zero."""
    random = np.random.default_rng(6)
    x = np.arange(10.0) / 10
    holds = excludes = 0
    for _ in range(rounds):
        true = slope * x + 0.3 * random.normal(size=10)
        found = statistics.rank_correlation(x, [value + noise * random.normal(size=4) for value in true], draws=200)
        assert found.rho_interval is not None
        holds += found.rho_interval.covers(stats.spearmanr(x, true).statistic)
        excludes += not found.rho_interval.covers(0.0)
    return holds / rounds, excludes / rounds


@pytest.mark.parametrize("slope", [0.0, 1.0, 3.0])
def test_the_interval_of_a_correlation_holds_the_true_one(slope: float) -> None:
    """Percentiles alone do so in three cases of four, where there is an order that noise hides."""
    holds, excludes = held(slope, noise=0.5)
    assert holds > 0.84
    assert slope < 3 or excludes > 0.9


def test_without_any_order_the_interval_rarely_excludes_zero() -> None:
    random = np.random.default_rng(7)
    found = [
        statistics.rank_correlation(range(10), [random.normal(size=4) for _ in range(10)], draws=200)
        for _ in range(100)
    ]
    assert np.mean([one.rho_interval is not None and not one.rho_interval.covers(0.0) for one in found]) < 0.13


def test_the_runs_are_resampled_and_the_points_are_kept() -> None:
    """With runs that do not vary there is nothing to resample, however weak the order of the points is."""
    found = statistics.rank_correlation([1, 2, 3, 4], [[2.0, 2.0], [1.0, 1.0], [4.0, 4.0], [3.0, 3.0]])
    assert found.rho is not None and found.rho == pytest.approx(0.6)
    assert found.rho_interval == Interval(found.rho, found.rho)


@pytest.mark.parametrize(
    ("x", "values", "reason"),
    [
        ([1, 2], [[1.0, 2.0], [2.0, 3.0]], "2 points have no rank correlation worth the name"),
        ([1, 1, 1], [[1.0, 2.0], [2.0, 3.0], [4.0, 5.0]], "all points are equal"),
        ([1, 2, 3], [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]], "all points are equal"),
        ([1, 2, 3], [[1.0, 2.0], [2.0, 3.0], [4.0]], "some points have a single run"),
    ],
)
def test_no_interval_has_a_reason(x: list[float], values: list[list[float]], reason: str) -> None:
    found = statistics.rank_correlation(x, values)
    assert found.rho_interval is None and found.tau_interval is None
    assert found.reason == reason
    assert (found.rho is None) == (reason != "some points have a single run")


def test_means_that_differ_in_the_last_bit_are_tied() -> None:
    rows = np.array([[0.1 + 0.2, 0.3, 0.5]])
    assert rows[0, 0] != rows[0, 1]
    assert statistics.ranks(rows).tolist() == [[1.5, 1.5, 3.0]]
    assert statistics.kendall(np.array([1.0, 2.0, 3.0]), rows)[0] == pytest.approx(
        stats.kendalltau([1, 2, 3], [1, 1, 2]).statistic
    )


@given(samples)
@settings(max_examples=30)
def test_a_difference_turned_around_changes_its_sign(one: list[float]) -> None:
    two = sorted(one)
    there, back = statistics.difference(one, two, paired=True), statistics.difference(two, one, paired=True)
    assert there.value == pytest.approx(-back.value, abs=1e-9)
    there, back = statistics.difference(one, two[:2], paired=False), statistics.difference(two[:2], one, paired=False)
    assert there.value == pytest.approx(-back.value, abs=1e-9)


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, 1.0], [[1.0, 2.0]]])
def test_what_is_no_sample_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="values must be one row of finite numbers"):
        statistics.mean(values)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="paired samples must be of one length, got 2 and 3 values"):
        statistics.difference([1.0, 2.0], [1.0, 2.0, 3.0], paired=True)
    with pytest.raises(ValueError, match="x and values must be of one length, got 3 and 1"):
        statistics.rank_correlation([1, 2, 3], [[1.0]])
    with pytest.raises(ValueError, match="freedom must be at least 1, got 0"):
        statistics.t_quantile(0)
