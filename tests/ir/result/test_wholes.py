"""A module that contains transformed ones is a whole: everything speaks of all parts, with prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.schedules import Static, named
from tests.ir.result.models import LOW, QUIET, Chain, Heard, Net, batch, close, equal, far, made, runs, ways

pytestmark = QUIET


class Whole(nn.Module):
    """Two parts that are transformed, and a plain head."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        torch.manual_seed(5)
        self.head = nn.Linear(8, 2)
        self.uses_second = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(x) if self.uses_second else torch.zeros_like(y)
        out: Tensor = self.head(torch.cat((y, z), -1))
        return out


def whole(way: str, bits: Any = LOW, **options: Any) -> Any:
    return Whole(made(Chain(), way, bits, **options), made(Chain(), way, bits, **options))


def layers(model: nn.Module) -> set[str]:
    return {view.layer for view in cpt_fx.inspect(model).quantizers}


@ways
def test_inspect_names_all_parts(way: str) -> None:
    model = whole(way)
    model(batch())
    found = layers(model)
    for part in ("first", "second"):
        assert {f"{part}.backbone.0", f"{part}.backbone.2", f"{part}.fc"} <= found
        assert not layers(getattr(model, part)) & found
    counts = runs(model)
    assert counts["first.fc"] == counts["second.fc"] == runs(model.first)["fc"] > 0
    text = str(cpt_fx.inspect(model))
    assert "head" in {item.layer for item in cpt_fx.inspect(model).uncovered} or "head" in text


@ways
def test_graphs_are_those_of_all_parts(way: str) -> None:
    model = whole(way)
    model(batch())
    of_parts = [graph for part in (model.first, model.second) for graph in cpt_fx.graphs(part)]
    assert len(of_parts) >= 2
    assert {id(graph) for graph in cpt_fx.graphs(model)} == {id(graph) for graph in of_parts}
    views = cpt_fx.inspect(model).quantizers
    assert max(view.graph for view in views) < len(of_parts)
    assert len(views) == sum(len(cpt_fx.inspect(part).quantizers) for part in (model.first, model.second))


@ways
def test_verify_does_not_pass_while_a_part_never_ran(way: str) -> None:
    model = whole(way, example_inputs=(batch(),))
    model.uses_second = False
    model(batch()).sum().backward()
    try:
        proof = cpt_fx.inspect(model).verify()
    except cpt_fx.TransformError as error:
        assert "second" in str(error)
        return
    assert not proof.proven and "second" in str(proof)


@ways
def test_verify_speaks_of_both(way: str) -> None:
    model = whole(way, 4)
    for seed in range(2):
        model(batch(seed)).sum().backward()
    proof = cpt_fx.inspect(model).verify()
    assert proof.quantizers == len(cpt_fx.inspect(model).quantizers)
    assert proof.quantizers == 2 * len(cpt_fx.inspect(model.first).quantizers)
    assert cpt_fx.inspect(model).verify(batch()).quantizers == proof.quantizers


@ways
def test_revert_gives_the_whole(way: str) -> None:
    model = whole(way)
    model(batch())
    model.first.fc = nn.Linear(8, 4)
    plain: Any = cpt_fx.revert(model)
    assert type(plain) is Whole and type(plain.first) is Chain and type(plain.second) is Chain
    assert type(plain.head) is nn.Linear and plain.head.weight is model.head.weight
    assert plain.first.fc.weight is model.first.fc.weight and plain.second.fc.weight is model.second.fc.weight
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert not [key for key in plain.state_dict() if "cpt_fx" in key]
    assert far(model(batch()), plain(batch()))
    assert isinstance(model.first, Chain) and runs(model)["first.fc"] > 0
    with pytest.raises(cpt_fx.TransformError):
        cpt_fx.inspect(plain)


@ways
def test_bind_drives_all_parts(way: str) -> None:
    model = whole(way)
    plan = named("LR", q_min=3, q_max=8, total_steps=12, cycles=2)
    plan.bind(model)
    for position in (0, 4):
        plan.step(position)
        model(batch())
        views = [view for view in cpt_fx.inspect(model).quantizers if view.role in ("weight", "activation")]
        assert {view.bits for view in views} == {plan.bits(position).weight}
        assert {view.layer.partition(".")[0] for view in views} == {"first", "second"}
    Static(32).bind(model)
    assert equal(model(batch()), cpt_fx.revert(model)(batch()))


@ways
def test_cost_counts_all_parts_and_the_plain_rest(way: str) -> None:
    model = whole(way)
    model(batch())
    plan = Static(4)
    costs = {layer.name: layer for layer in cpt_fx.cost(model, plan, (batch(),)).layers}
    assert {"first.fc", "second.fc", "first.backbone.0", "second.backbone.2", "head"} <= set(costs)
    expected = {layer.name: layer.flops for layer in cpt_fx.cost(Whole(Chain(), Chain()), plan, (batch(),)).layers}
    assert all(costs[name].flops == expected[name] for name in ("first.fc", "second.backbone.0", "head"))
    covered = {layer.name: layer for layer in cpt_fx.cost(model, plan, (batch(),), count="covered").layers}
    assert covered["first.fc"].quantized and covered["second.fc"].quantized and not covered["head"].quantized


@ways
def test_parts_in_lists_and_deeper(way: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ModuleList([made(Chain(), way), made(Net(), way)]))
    parts: Any = model[1]
    for part in parts:
        part(batch())
    assert {"1.0.fc", "1.1.fc", "1.1.blocks.0.one"} <= layers(model)
    plain: Any = cpt_fx.revert(model)
    assert type(plain) is nn.Sequential and type(plain[1]) is nn.ModuleList
    assert type(plain[1][0]) is Chain and type(plain[1][1]) is Net


@ways
def test_one_part_and_a_plain_rest(way: str) -> None:
    model = nn.Sequential(made(Chain(), way), nn.Linear(4, 2))
    model(batch())
    assert {"fc", "backbone.0"} <= layers(model)  # of one part alone names are its own, as inside a wrapper
    plain: Any = cpt_fx.revert(model)
    assert type(plain[0]) is Chain and far(model(batch()), plain(batch()))
    uncovered = str(cpt_fx.inspect(model)) + str(cpt_fx.inspect(model).uncovered)
    assert "1" in {item.layer for item in cpt_fx.inspect(model).uncovered} or "1" in uncovered
    assert len(plain) == len(model) == 2


@ways
def test_a_shared_part_is_named_once(way: str) -> None:
    part = made(Chain(), way)
    model = Whole(part, part)
    model(batch())
    plain: Any = cpt_fx.revert(model)
    assert plain.first is plain.second
    count = runs(model)
    assert sum(count.values()) == sum(runs(part).values())


@ways
def test_parts_keep_their_own_schedules(way: str) -> None:
    model = Whole(made(Chain(), way, 4), made(Chain(), way, 7))
    model(batch())
    widths = {
        view.layer.partition(".")[0]: view.bits for view in cpt_fx.inspect(model).quantizers if view.role == "weight"
    }
    assert widths == {"first": 4, "second": 7}


@ways
def test_a_schedule_of_a_parts_own(way: str) -> None:
    """In `overrides`, asked at the model's position: nobody steps it."""
    plan = named("LR", q_min=3, q_max=8, total_steps=12, cycles=2)
    own = named("RR", q_min=2, q_max=6, total_steps=12, cycles=1)
    result = cpt_fx.transform(Chain(), plan, capture=way, overrides={"fc": own})
    for position in range(6):
        result(batch()).sum().backward()
        weights = {view.layer: view.bits for view in cpt_fx.inspect(result).quantizers if view.role == "weight"}
        assert weights["fc"] == own.bits(position).weight
        assert weights["backbone.0"] == plan.bits(position).weight
        plan.step()
    assert own.position == 0


class Repeated(nn.Module):
    """One block under three names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.blocks = nn.ModuleList([block, block, block])
        self.fc = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.fc(x)
        return y


def says_why_not(heard: Heard, alias: str) -> bool:
    """It names the alias and the module it stands for, and does not say that nothing there is quantized."""
    text = heard.text()
    return alias in text and "blocks.0" in text and "nothing is quantized" not in text


@ways
@pytest.mark.parametrize("alias", ["blocks.1", "blocks.2.0", "blocks.[12]", "blocks.0"])
def test_an_alias_of_a_shared_module_excludes_or_says_why_not(alias: str, way: str, heard: Heard) -> None:
    try:
        result = made(Repeated(), way, 3, exclude=alias)
        result(batch())
    except (cpt_fx.TransformError, ValueError) as error:
        assert "blocks" in str(error) and "no module" not in str(error)
        return
    if {view.layer for view in cpt_fx.inspect(result).quantizers} != {"fc"}:
        assert says_why_not(heard, alias)
        return
    plain = Repeated()
    h = plain.blocks[0](plain.blocks[0](plain.blocks[0](batch())))
    assert close(result(batch()), made(plain.fc, "dynamo", 3)(h))


@ways
@pytest.mark.parametrize("alias", ["blocks.2", "blocks.1.0", "blocks.0"])
def test_an_alias_of_a_shared_module_is_overridden_or_says_why_not(alias: str, way: str, heard: Heard) -> None:
    try:
        result = made(Repeated(), way, 3, overrides={alias: 8})
        result(batch())
    except (cpt_fx.TransformError, ValueError) as error:
        assert "blocks" in str(error) and "no module" not in str(error)
        return
    widths = {view.layer: view.bits for view in cpt_fx.inspect(result).quantizers if view.role == "weight"}
    assert widths.pop("fc") == 3 and len(widths) >= 1
    assert set(widths.values()) == {8} or says_why_not(heard, alias)


class Listed(nn.Module):
    """Layers with names, and a list of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.fc = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.layers = nn.ModuleList([self.one, self.two])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.fc(x)
        return y


@ways
def test_a_list_of_layers_that_have_names_selects_them(way: str) -> None:
    result = made(Listed(), way, 3, exclude="layers")
    result(batch())
    assert {view.layer for view in cpt_fx.inspect(result).quantizers} == {"fc"}
    result = made(Listed(), way, 3, overrides={"layers": 8})
    result(batch())
    widths = {view.layer: view.bits for view in cpt_fx.inspect(result).quantizers if view.role == "weight"}
    assert widths == {"one": 8, "two": 8, "fc": 3}
