"""Bit-widths over a training run, planned without torch."""

from importlib import import_module
from typing import Any

from cpt_fx.schedules.base import Schedule
from cpt_fx.schedules.basic import Custom, Deficit, Piecewise, Static
from cpt_fx.schedules.bits import FULL_PRECISION, Bits
from cpt_fx.schedules.combined import Delayed, Sequence
from cpt_fx.schedules.cyclic import NAMES, Cyclic, named
from cpt_fx.schedules.measured import Recommendation, recommend
from cpt_fx.schedules.savings import StepCost, mean_costs, relative_cost, savings_group

# range_test and RangeTest are left out: listing them would make `import *` load torch.
__all__ = [
    "FULL_PRECISION",
    "NAMES",
    "Bits",
    "Custom",
    "Cyclic",
    "Deficit",
    "Delayed",
    "Piecewise",
    "Recommendation",
    "Schedule",
    "Sequence",
    "Static",
    "StepCost",
    "mean_costs",
    "named",
    "recommend",
    "relative_cost",
    "savings_group",
]


def __getattr__(name: str) -> Any:
    # The range test trains a model, so it needs torch; planning does not.
    if name in ("range_test", "RangeTest"):
        return getattr(import_module("cpt_fx.study.range_test"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
