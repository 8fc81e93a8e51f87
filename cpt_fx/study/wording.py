"""Numbers of a study as text: rounded to what their spread supports, with true signs."""

from __future__ import annotations

import math
import re
from html import escape

from cpt_fx.study.analysis import Panel
from cpt_fx.study.statistics import Correlation, Estimate, Interval

NOTHING = "–"


def markdown(text: str) -> str:
    """Return text that stays text in Markdown: no tags, links or code, and on one line."""
    return re.sub(r"([\\`\[\]|])", r"\\\1", escape(" ".join(text.split()), quote=False))


def decimals(panel: Panel) -> int:
    """Return how many decimals show two digits of the usual standard deviation."""
    deviations = sorted(row.deviation for row in panel.rows if row.deviation)
    if deviations:
        typical = deviations[len(deviations) // 2]
    else:
        typical = max((abs(value) for row in panel.rows for value in row.values.values()), default=1.0) / 100
    return min(max(1 - math.floor(math.log10(typical)), 0), 8) if typical > 0 else 2


def without_value(panel: Panel) -> str:
    """Say how many runs of a panel have no value; empty where all have one."""
    gaps = sum(len(row.failed) + len(row.missing) for row in panel.rows)
    return f"{gaps} run{'s have' if gaps > 1 else ' has'} no value" if gaps else ""


def spread(estimate: Estimate | None, deviation: float | None, show: int) -> str:
    """Return "0.912 ± 0.004"."""
    if estimate is None:
        return NOTHING
    return f"{estimate.value:.{show}f}" + (f" ± {deviation:.{show}f}" if deviation is not None else "")


def signed(estimate: Estimate | None, show: int, *, interval: bool = True) -> str:
    """Return "−0.004 (−0.010 to +0.002)"."""
    if estimate is None:
        return NOTHING
    text = plus(estimate.value, show)
    if interval and estimate.interval is not None:
        text += f" ({plus(estimate.interval.low, show)} to {plus(estimate.interval.high, show)})"
    return text


def plus(value: float, show: int) -> str:
    """Return a number with its sign, and a minus as wide as the plus; zero has none."""
    text = f"{value:+.{show}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def number(value: float, show: int) -> str:
    """Return a number with a true minus."""
    return f"{value:.{show}f}".replace("-", "−")


def between(interval: Interval | None, show: int) -> str:
    """Return "0.908 to 0.916"."""
    return NOTHING if interval is None else f"{number(interval.low, show)} to {number(interval.high, show)}"


def estimated(estimate: Estimate | None, show: int) -> tuple[str, str, str]:
    """Return value, interval and number of seeds."""
    if estimate is None:
        return NOTHING, NOTHING, "0"
    return number(estimate.value, show), between(estimate.interval, show), str(estimate.n)


def correlated(found: Correlation) -> tuple[str, str, str, str]:
    """Return rho, its interval, tau-b and its interval."""

    def text(value: float | None) -> str:
        return NOTHING if value is None else plus(value, 2)

    def ends(interval: Interval | None) -> str:
        return f"{plus(interval.low, 2)} to {plus(interval.high, 2)}" if interval else (found.reason or NOTHING)

    return text(found.rho), ends(found.rho_interval), text(found.tau), ends(found.tau_interval)


def signed_ends(estimate: Estimate | None, show: int) -> tuple[str, str]:
    """Return the interval of a difference, and the number of seeds."""
    if estimate is None:
        return NOTHING, "0"
    ends = estimate.interval
    return (f"{plus(ends.low, show)} to {plus(ends.high, show)}" if ends else NOTHING), str(estimate.n)
