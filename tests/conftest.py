"""What every test gets: a fixed seed, one torch thread per worker, and the golden data."""

import os
from types import ModuleType

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib
# What is worth running on integers is measured and kept in the user's cache; tests want neither.
os.environ["CPT_FX_INTEGER"] = "always"

import hypothesis
import pytest
import torch

from tests import golden_data

# No deadline: the first example pays for imports and tracing. In CI the same examples every time.
hypothesis.settings.register_profile("cpt_fx", deadline=None, derandomize="CI" in os.environ, print_blob=True)
hypothesis.settings.load_profile("cpt_fx")


def pytest_configure(config: pytest.Config) -> None:
    """The workers of pytest-xdist share the cores: more than one torch thread each would only make them wait."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def golden() -> ModuleType:
    """The module tests.golden_data; parametrized tests import it directly."""
    return golden_data
