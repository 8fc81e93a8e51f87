"""Planning must work, and start quickly, where torch and matplotlib are missing."""

import subprocess
import sys
from types import ModuleType

import pytest

from cpt_fx import schedules

PLAN = """
import sys
from cpt_fx.schedules import *
s = named("CR", q_min=3, q_max=8, total_steps=100)
s.bits(3), s.trajectory(), s.state_dict(), relative_cost(s), recommend()
import cpt_fx.schedules.learning_rates
print(sorted({"torch", "matplotlib"} & set(sys.modules)))
"""
PLOT = """
import sys
sys.modules["matplotlib"] = None
from cpt_fx.schedules import Static
try:
    Static(8).plot(length=3)
except ImportError as error:
    print(error)
"""


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_planning_needs_neither_torch_nor_matplotlib() -> None:
    assert run(PLAN) == "[]"


def test_plot_without_matplotlib_names_the_extra() -> None:
    assert run(PLOT) == 'plotting needs matplotlib: pip install "cpt_fx[viz]"'


def test_public_names_exist() -> None:
    assert all(hasattr(schedules, name) for name in schedules.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nmaed'"):
        _ = schedules.nmaed


@pytest.mark.parametrize("name", ["range_test", "RangeTest"])
def test_range_test_is_loaded_when_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cpt_fx.study.range_test")
    monkeypatch.setattr(module, name, object(), raising=False)
    monkeypatch.setitem(sys.modules, "cpt_fx.study.range_test", module)
    assert name not in schedules.__all__
    assert getattr(schedules, name) is getattr(module, name)
