"""Copies and pickles of a transformed model are what it is, and train on alone."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import cpt_fx
from cpt_fx.capture.standalone import precision_of
from cpt_fx.schedules import Static
from tests.ir.result.copies import COPIES, through_save
from tests.ir.result.trained_results import Net, check_equal_state, schedule, steps
from tests.training import check_same, counters, same, train_step, widths
from tests.zoo import ZOO

OTHERS = ("tied_weights", "two_names", "dict_output", "namedtuple_output", "in_place", "einsums", "weight_normalised",
          "functional_conv", "optional_mask_left_out")  # fmt: skip
UNPICKLED = {("pickle", "weight_normalised")}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_trains_on_alone_and_alike(how: str) -> None:
    plan = schedule()
    result = cpt_fx.transform(Net(), plan)
    steps(result, plan)
    twin, twin_plan = COPIES[how]((result, plan))
    assert twin_plan is not plan
    owner: Any = precision_of(twin).schedule
    assert owner is twin_plan
    pointers = {t.data_ptr() for t in result.state_dict().values()}
    assert pointers.isdisjoint(t.data_ptr() for t in twin.state_dict().values())
    check_equal_state(twin, result)
    before = {key: value.clone() for key, value in result.state_dict().items()}
    theirs = steps(twin, twin_plan, first=2)
    assert all(same(result.state_dict()[key], value) for key, value in before.items())
    assert plan.position == 2 and twin_plan.position == 4
    for mine, its in zip(steps(result, plan, first=2), theirs, strict=True):
        check_same(mine, its)
    check_equal_state(twin, result)
    runs = [{name: int(tensor[0]) for name, tensor in counters(one).items()} for one in (twin, result)]
    assert runs[0] == runs[1]


def test_a_deep_copy_follows_the_same_schedule() -> None:
    plan = schedule()
    result = cpt_fx.transform(Net(), plan)
    twin = copy.deepcopy(result)
    plan.step(5)
    assert widths(result) == widths(twin) != widths(cpt_fx.transform(Net(), schedule()))
    plan.unbind(twin)
    plan.step(1)
    assert widths(result) != widths(twin)


def test_a_loaded_model_brings_its_schedule() -> None:
    plan = schedule()
    result = cpt_fx.transform(Net(), plan)
    plan.step(4)
    loaded = through_save(result)
    own = precision_of(loaded).schedule
    assert own == plan and own is not plan and own is not None and own.position == 4
    own.step()
    assert widths(loaded) != widths(result)
    plan.step()
    assert widths(loaded) == widths(result)


# torch itself does not pickle parametrized modules.
@pytest.mark.parametrize(
    ("how", "name"), [(how, name) for how in ("deepcopy", "pickle") for name in OTHERS if (how, name) not in UNPICKLED]
)
def test_copies_of_other_graphs(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args, kwargs = ZOO[name]()
    # As classes of a model that is to be pickled are: where its module says.
    monkeypatch.setattr(sys.modules[type(model).__module__], type(model).__qualname__, type(model), raising=False)
    result = cpt_fx.transform(model, Static(5), capture="symbolic")
    twin: Any = COPIES[how](result)
    graph = cast(fx.Graph, result.graph)
    assert str(twin.graph) == str(result.graph)
    assert set(twin.graph.nodes).isdisjoint(graph.nodes)
    for one in (result, twin):
        one.train()
    check_same(train_step(twin, args, kwargs), train_step(result, args, kwargs))
    tied = [name for name, _ in result.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in twin.named_parameters(remove_duplicate=False)] == tied
    assert len(list(twin.parameters())) == len(list(result.parameters()))
    assert isinstance(twin, type(model))


@pytest.mark.slow
def test_three_hundred_layers() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))
    result, x = cpt_fx.transform(model, Static(32)), torch.randn(2, 2)
    for twin in (copy.deepcopy(result), through_save(result)):
        assert torch.equal(twin(x), model(x))
        assert torch.equal(cpt_fx.revert(twin)(x), model(x))


@pytest.mark.parametrize("how", COPIES)
def test_revert_of_a_copy_is_a_copy(how: str) -> None:
    model, plan = Net(), schedule()
    result = cpt_fx.transform(model, plan)
    steps(result, plan)
    twin = COPIES[how](result)
    steps(twin, first=2)
    plain = cpt_fx.revert(twin)
    assert isinstance(plain, Net) and plain is not model
    assert plain.get_parameter("head.weight") is twin.get_parameter("head.weight")
    assert int(plain.steps) == 4 and int(model.steps) == 2
    first = cpt_fx.revert(result)
    assert first.get_parameter("head.weight") is model.head.weight is not plain.get_parameter("head.weight")
    again = cpt_fx.transform(plain, Static(6))
    assert widths(again)["weight"] == 6


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_max_pool2d(F.max_pool2d(x, 2), 1)


def test_functions_that_torch_makes_inside_others_pickle() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    model = cpt_fx.transform(nn.Sequential(net, Pooled()), Static(8))
    x = torch.randn(1, 3, 8, 8)
    model(x)
    model.eval()
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))


def test_operator_packets_pickle() -> None:
    class Packet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.aten.relu(self.fc(x))  # type: ignore[no-any-return]

    graph = cpt_fx.graphs(cpt_fx.transform(Packet(), Static(8)))[0]
    assert pickle.loads(pickle.dumps(graph.__reduce__()[2]["nodes"]))
