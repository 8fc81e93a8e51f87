"""What is done to a result counts, as if it had been done to the plain model before it was transformed."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrizations

from tests.ir.result.changes import CHANGES, changed
from tests.ir.result.models import QUIET, Net, batch, close, far, learned, made, runs, ways
from tests.selecting import mostly_slow
from tests.training import check_same, train_step

pytestmark = QUIET


@ways
@pytest.mark.parametrize("name", mostly_slow(CHANGES, every=3))
def test_a_change_is_exact_at_full_precision(name: str, way: str) -> None:
    result = made(Net(), way, 32)
    result(batch())
    changed(CHANGES[name], result)
    reference = changed(CHANGES[name], Net())
    for seed in range(2):
        check_same(train_step(result, (batch(seed),), {}), train_step(reference, (batch(seed),), {}))


@functools.cache
def outputs_of_the_changed_model(name: str) -> tuple[list[Tensor], list[Tensor]]:
    """Plain, and transformed."""
    reference = changed(CHANGES[name], Net())
    plain, quantized = reference(batch()), made(reference, "dynamo")(batch())
    return [tensor.detach() for tensor in plain], [tensor.detach() for tensor in quantized]


@ways
@pytest.mark.parametrize("name", mostly_slow(CHANGES, every=3))
def test_a_change_is_quantized(name: str, way: str) -> None:
    """What comes out is what comes out of the changed model when that is transformed, called before or not."""
    plain, expected = outputs_of_the_changed_model(name)
    for called in (True, False):
        result = made(Net(), way)
        if called:
            result(batch())
        changed(CHANGES[name], result)
        output = result(batch())
        assert far(output, plain)
        assert close(output, expected)
        assert sum(runs(result).values()) > 0


@ways
def test_a_change_in_evaluation(way: str) -> None:
    result = made(Net(), way, example_inputs=(batch(),))
    result(batch())
    result.eval()
    with torch.no_grad():
        before = result(batch())
        result.temperature = 4.0
        assert close(result(batch())[0], before[0] / 4)
        result.temperature = 1.0
        assert close(result(batch()), before)


@ways
def test_what_was_learned_survives_a_change(way: str) -> None:
    result = made(Net(), way)
    for seed in range(3):
        result(batch(seed))
    before = learned(result)
    result.temperature = 2.0
    result.eval()
    result(batch())
    assert before and {key: value for key, value in learned(result).items() if key in before} == before


@pytest.mark.slow
@ways
def test_spectral_norm_after_the_transform(way: str) -> None:
    result, reference = made(Net(), way, 32), Net()
    for model in (result, reference):
        torch.manual_seed(3)
        parametrizations.spectral_norm(model.fc)
    check_same(train_step(result, (batch(),), {}), train_step(reference, (batch(),), {}))
    low = made(Net(), way)
    parametrizations.spectral_norm(low.fc)
    assert far(low(batch()), reference(batch()))
