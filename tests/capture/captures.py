"""The frontends that tests of results run under."""

import os

import pytest

EVERY = os.environ.get("CPT_FX_ALL_CAPTURES") == "1"
"""Whether to run all of it under `"auto"`, too, which is one of the others: the run of record."""
CAPTURES = ("symbolic", "dynamo", "auto") if EVERY else ("symbolic", "dynamo")

captures = pytest.mark.parametrize("capture", CAPTURES)
