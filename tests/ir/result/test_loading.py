"""Checkpoints: plain ones and ours, strict both ways, assigned, from `meta`; what is learned goes with its layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from tests.ir.result.models import (
    QUIET,
    Chain,
    Heard,
    batch,
    close,
    equal,
    far,
    learned,
    made,
    ours,
    ranges,
    trained,
    ways,
    without_ours,
)

pytestmark = QUIET


@ways
def test_keys(way: str) -> None:
    result, plain = trained(way), Chain()
    state = result.state_dict()
    assert list(without_ours(state)) == list(plain.state_dict())
    assert set(ours(state)) == set(state) - set(plain.state_dict())
    plain.load_state_dict(without_ours(state), strict=True)
    result.load_state_dict(plain.state_dict(), strict=True)
    made(Chain(), way, 8).load_state_dict(state, strict=True)
    assert list(without_ours(result.fc.state_dict())) == ["weight", "bias"]


@ways
def test_a_plain_checkpoint_resets_ranges(way: str, heard: Heard) -> None:
    """Accuracy 1.0, not 0.5: what was learned of small values does not cut those of the loaded weights."""
    result = trained(way, 8, scale=0.001)
    teacher = Chain()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3)
        x = 10 * batch(rows=64)
        labels = teacher(x).argmax(1)
        result.load_state_dict(teacher.state_dict())
        result.eval()
        heard.clear()
        accuracy = float((result(x).argmax(1) == labels).float().mean())
    assert accuracy > 0.9
    assert "range" in heard.text()


@ways
def test_a_plain_checkpoint_of_a_part_resets_the_ranges_of_the_part(way: str) -> None:
    result = trained(way)
    before = learned(result)
    result.fc.load_state_dict(nn.Linear(8, 4).state_dict())
    after = learned(result)
    assert after.get("fc.input") != before["fc.input"]
    assert after["backbone.0.input"] == before["backbone.0.input"]
    result.load_state_dict({"fc.weight": torch.zeros(4, 8)}, strict=False)
    assert learned(result)["backbone.0.input"] == before["backbone.0.input"]


@ways
def test_a_checkpoint_with_ranges_brings_them(way: str) -> None:
    saved = trained(way, scale=2.0)
    for first in (True, False):
        result = made(Chain(), way, 8)
        if not first:
            result(batch())
        result.load_state_dict(saved.state_dict())
        assert close(result.eval()(batch()), saved.eval()(batch()))
        assert ranges(result).keys() == ranges(saved).keys()
        assert all(torch.equal(value, ranges(saved)[key]) for key, value in ranges(result).items())


@ways
def test_evaluation_before_anything_is_learned(way: str, heard: Heard) -> None:
    """The batch's own range, and a warning, for the published recipe too."""
    for recipe in ("paper", None):
        expected = made(Chain(), way, 8, recipe=recipe)(batch())
        result = made(Chain(), way, 8, recipe=recipe).eval()
        heard.clear()
        assert close(result(batch()), expected)
        assert "range" in heard.text()


@ways
def test_assign(way: str) -> None:
    result, other = trained(way), trained(way, scale=3.0)
    expected = other.eval()(batch())
    result.load_state_dict(other.state_dict(), assign=True)
    assert close(result.eval()(batch()), expected) and not equal(expected, Chain()(batch()))
    assert all(value.dtype is torch.float32 for value in ranges(result).values())
    result.load_state_dict(Chain().half().state_dict(), assign=True)
    assert result.fc.weight.dtype is torch.float16
    assert result.train()(batch().half()).dtype is torch.float16
    assert all(value.dtype is torch.float32 for value in ranges(result).values())


@ways
def test_from_meta_to_real(way: str) -> None:
    """A model that is built on `meta`, transformed there and then loaded."""
    with torch.device("meta"):
        model = Chain()
    result = made(model, way)
    result.to_empty(device="cpu")
    source = Chain()
    result.load_state_dict(source.state_dict())
    output = result(batch())
    assert far(output, source(batch())) and close(output, made(Chain(), "dynamo")(batch()))
    assert all(value.device.type == "cpu" for value in result.state_dict().values() if isinstance(value, torch.Tensor))


@ways
def test_to_empty_after_training(way: str) -> None:
    result = trained(way)
    state = {key: value.clone() for key, value in result.state_dict().items()}
    expected = result.eval()(batch())
    result.to_empty(device="cpu")
    result.load_state_dict(state)
    assert close(result(batch()), expected)
    result.train()
    assert torch.isfinite(result(batch())).all()


@ways
def test_a_dict_of_tensors_as_safetensors_wants_it(way: str) -> None:
    """Only tensors, contiguous, no two of them over one storage unless the plain model ties them."""
    result = trained(way)
    state = result.state_dict()
    assert all(isinstance(value, torch.Tensor) and value.is_contiguous() for value in state.values())
    pointers = [value.untyped_storage().data_ptr() for value in state.values() if value.numel()]
    assert len(pointers) == len(set(pointers))
    again = made(Chain(), way, 8)
    again.load_state_dict({key: value.clone() for key, value in state.items()})
    assert close(again.eval()(batch()), result.eval()(batch()))


class Twice(nn.Module):
    """A layer under two names, of which such files keep one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(6, 6)
        self.again = self.one

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(self.one(x))
        return y


@ways
@pytest.mark.parametrize("plain", [True, False])
def test_safetensors_of_a_layer_with_two_names(plain: bool, way: str, tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    result, again = made(Twice(), way, 8), made(Twice(), way, 8)
    result(batch()), again(100 * batch())
    files.save_model(cpt_fx.revert(result) if plain else result, tmp_path / "model.safetensors")
    assert files.load_model(again, tmp_path / "model.safetensors") == (set(), [])
    if plain:
        assert not learned(again)
    else:
        assert close(again.eval()(batch()), result.eval()(batch()))
