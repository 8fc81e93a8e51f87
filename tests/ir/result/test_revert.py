"""`revert`: a plain tree of the user's classes, with the modules and tensors that the result holds now."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import cpt_fx
from tests.ir.result.models import (
    QUIET,
    Block,
    Chain,
    Config,
    Images,
    Mixer,
    Net,
    Pretrained,
    batch,
    close,
    equal,
    far,
    made,
    ours,
    runs,
    ways,
)
from tests.training import check_same, snapshot, train_step

pytestmark = QUIET


@ways
@pytest.mark.parametrize("make", [Net, Chain, Images])
def test_classes_are_exactly_the_users(make: type[nn.Module], way: str) -> None:
    result = made(make(), way)
    x = torch.randn(4, 3, 8, 8) if make is Images else batch()
    for called in (False, True):
        if called:
            result(x)
        plain = cpt_fx.revert(result)
        assert type(plain) is make
        names = [(name, type(module)) for name, module in plain.named_modules()]
        assert names == [(name, type(module)) for name, module in make().named_modules()]
        assert ours(plain.state_dict()) == [] and list(plain.state_dict()) == list(make().state_dict())
        assert ours(key for module in plain.modules() for key in vars(module)) == []


@ways
def test_modules_and_tensors_are_those_that_the_result_holds_now(way: str) -> None:
    result = made(Net(), way)
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    result(batch())[0].sum().backward()
    optimizer.step()
    head: Any = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    result.fc = head
    result.blocks.append(Block(8))
    result.heads["b"] = nn.Linear(8, 3)
    result.temperature = 5.0
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    result(batch())[0].square().sum().backward()
    optimizer.step()
    plain: Any = cpt_fx.revert(result)
    ours_, theirs = dict(result.named_parameters()), dict(plain.named_parameters())
    assert list(theirs) == list(ours_) and all(theirs[name] is ours_[name] for name in theirs)
    assert [type(module) for module in plain.fc] == [nn.Linear, nn.ReLU, nn.Linear]
    assert plain.temperature == 5.0 and len(plain.blocks) == 3 and list(plain.heads) == ["a", "b"]
    outputs = plain(batch())
    assert [output.shape[1] for output in outputs] == [2, 3, 3] and far(result(batch()), outputs)
    expected = torch.nn.functional.relu(plain.encode(batch()) @ head[0].weight.t() + head[0].bias)
    assert torch.allclose(outputs[0], (expected @ head[2].weight.t() + head[2].bias) / 5.0, atol=1e-5)


@ways
def test_neither_model_is_changed(way: str) -> None:
    model = Net()
    before = snapshot(model)
    result = made(model, way)
    result(batch())
    result.fc = nn.Linear(8, 7)
    expected, keys = result(batch()), list(result.state_dict())
    count = runs(result)
    plain: Any = cpt_fx.revert(result)
    plain.eval()
    assert runs(result) == count and list(result.state_dict()) == keys and result.training
    assert close(result(batch()), expected) and isinstance(result, Net)
    assert snapshot(model) == before
    assert model.fc.out_features == 4 and type(model) is Net
    plain.fc = nn.Identity()
    assert result(batch())[0].shape == (5, 7) and model(batch())[0].shape == (5, 4)


@ways
def test_what_is_reverted_trains_as_a_plain_model(way: str) -> None:
    result = made(Images(), way)
    x = torch.randn(4, 3, 8, 8)
    for seed in range(2):
        train_step(result, (x,), {}, seed=seed)
    plain = cpt_fx.revert(result)
    reference = Images()
    reference.load_state_dict(plain.state_dict())
    check_same(train_step(plain, (x,), {}), train_step(reference, (x,), {}))
    assert int(result.bn.num_batches_tracked) == 3  # buffers are shared, too


@ways
def test_modes_devices_and_dtypes(way: str) -> None:
    result = made(Chain(), way)
    result.eval()
    result.fc.train()
    result.double()
    plain: Any = cpt_fx.revert(result)
    assert not plain.training and plain.fc.training and plain.fc.weight.dtype is torch.float64
    assert plain(batch().double()).dtype is torch.float64


@ways
def test_hooks_are_kept(way: str) -> None:
    """Those of the given model and those that the result was given."""
    seen: list[str] = []
    model = Chain()
    model.backbone.register_forward_hook(lambda module, args, output: seen.append("old"))
    result = made(model, way)
    result.fc.register_forward_hook(lambda module, args, output: seen.append("new"))
    result(batch())
    assert seen == ["old", "new"]
    seen.clear()
    plain = cpt_fx.revert(result)
    plain(batch())
    assert seen == ["old", "new"]
    seen.clear()
    model(batch())
    assert seen == ["old"]


@ways
def test_ties_sharing_and_helpers(way: str) -> None:
    result = made(Pretrained(Config(width=8)), way)
    plain: Any = cpt_fx.revert(result)
    assert plain.lm_head.weight is plain.embed.weight is result.embed.weight
    assert plain.get_input_embeddings() is plain.embed and type(plain.embed) is nn.Embedding
    layer = nn.Linear(6, 6)
    shared: Any = cpt_fx.revert(made(nn.Sequential(layer, nn.Tanh(), layer), way))
    assert shared[0] is shared[2] and type(shared) is nn.Sequential

    class Holding(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.listed = [self.fc]

    held: Any = cpt_fx.revert(made(Holding(), way))
    assert held.listed[0] is held.fc and type(held.fc) is nn.Linear


@ways
def test_revert_of_copies(way: str) -> None:
    result = made(Net(), way)
    result(batch())
    result.fc = nn.Linear(8, 2)
    for twin in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        plain: Any = cpt_fx.revert(twin)
        assert type(plain) is Net and plain.fc.weight is twin.fc.weight is not result.fc.weight
        assert plain.fc.out_features == 2 and type(plain.blocks[1].mix) is Mixer
        assert equal(plain(batch()), cpt_fx.revert(result)(batch()))


@ways
def test_there_and_back_again(way: str) -> None:
    result = made(Net(), way)
    result(batch())
    result.fc = nn.Linear(8, 2)
    plain = cpt_fx.revert(result)
    again = made(plain, way)
    assert close(again(batch()), result(batch())) and far(again(batch()), plain(batch()))
    assert type(cpt_fx.revert(again)) is Net
    with pytest.raises(cpt_fx.TransformError):
        cpt_fx.revert(plain)
    with pytest.raises(cpt_fx.TransformError):
        made(result, way)


@ways
def test_a_reverted_part(way: str) -> None:
    """A part of a result becomes plain alone, or is refused; the result goes on."""
    result = made(Chain(), way)
    expected = result(batch())
    try:
        part: Any = cpt_fx.revert(result.backbone)
    except cpt_fx.TransformError:
        part = None
    if part is not None:
        assert type(part) is nn.Sequential and type(part[0]) is nn.Linear
        assert equal(part(batch()), Chain().backbone(batch()))
    assert close(result(batch()), expected)
