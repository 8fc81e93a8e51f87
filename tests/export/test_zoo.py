"""A dozen whole models in ONNX Runtime; all of them by `python -m tests.export.zoo`."""

from importlib.util import find_spec

import pytest

pytest.importorskip("onnxruntime")

from tests.export.idioms import IDIOMS
from tests.export.zoo import SHORT, models, verdict_of
from tests.zoo import ZOO


@pytest.mark.parametrize("name", SHORT)
def test_a_model_is_right_in_every_form(name: str) -> None:
    """Trained as PyTorch trains it, and with the same outputs at every width."""
    package = name.partition(":")[0]
    if ":" in name and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    verdict = verdict_of(name)
    assert verdict.verdict == "right", verdict.remark


def test_the_zoo_is_large() -> None:
    """At least sixty models, of all domains."""
    assert len(models()) >= 60
    assert set(SHORT) <= set(models())
    assert ZOO.keys().isdisjoint(IDIOMS)
