"""For all tests of results."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.ir.result.models import Heard, forget_compiled_code


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield from forget_compiled_code()


@pytest.fixture
def heard(recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture) -> Heard:
    caplog.set_level(logging.INFO, "cpt_fx")
    return Heard(recwarn, caplog)
