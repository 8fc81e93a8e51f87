"""Whether a result is proven is said wherever it is shown, and holds as long as it is what was proven."""

from __future__ import annotations

import copy
import cProfile
import json
import pickle
import pstats
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx.errors import TransformError
from cpt_fx.inspection import VerificationError
from cpt_fx.inspection.table import as_text
from cpt_fx.ir.meta import QUANTIZER
from cpt_fx.ir.pass_base import Pass, Report
from cpt_fx.ir.subgraphs import state_of
from cpt_fx.passes.bind import Bind
from cpt_fx.pipeline import Pipeline
from cpt_fx.schedules import Static
from tests.capture.captures import captures
from tests.inspection.escapes import unseen
from tests.inspection.models import Net, cyclic, images
from tests.ir.result.models import forget_compiled_code

NOT_PROVEN = "captured, not proven: call `verify(*inputs)`"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield from forget_compiled_code()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))


def batch(rows: int = 4) -> Tensor:
    return torch.randn(rows, 6)


def state(model: nn.Module) -> str:
    return cpt_fx.inspect(model).state


# Where it is said.


@captures
def test_without_examples_nothing_is_run_and_that_is_said_everywhere(capture: str) -> None:
    inspection = cpt_fx.inspect(cpt_fx.transform(small(), cyclic(), capture=capture))
    shown = [str(inspection), repr(inspection), inspection._repr_html_(), inspection.html(), inspection.svg()]
    shown += [as_text(inspection.table(), 100), inspection.state, json.dumps(inspection.to_dict())]
    assert all(NOT_PROVEN in text for text in shown)


@captures
def test_examples_prove(capture: str) -> None:
    result = cpt_fx.transform(small(), cyclic(), example_inputs=(batch(),), capture=capture)
    assert state(result).startswith("proven: 8 quantizers keep to their levels; at 32 bits the same")
    assert state(result) in str(cpt_fx.inspect(result)).replace("\n", " ")
    assert all(view.times_run == 0 for view in cpt_fx.inspect(result).quantizers)
    asked = cpt_fx.transform(small(), cyclic(), example_inputs=(batch(),), capture=capture, prove=False)
    assert state(asked) == NOT_PROVEN
    cpt_fx.inspect(asked).verify(batch())
    assert state(asked).startswith("proven: ")


def test_records_alone_prove_no_sameness() -> None:
    result = cpt_fx.transform(small(), cyclic())
    result(batch()).sum().backward()
    assert cpt_fx.inspect(result).verify().proven
    assert state(result) == NOT_PROVEN


# What fails.


@dataclass(frozen=True)
class Doubling(Pass):
    """A pass that changes what the model computes."""

    name = "doubling"

    def run(self, module: fx.GraphModule) -> Report:
        node = next(iter(module.graph.find_nodes(op="output")))
        with module.graph.inserting_before(node):
            node.args = (module.graph.call_function(torch.mul, (node.args[0], 2)),)
        return Report(self.name, 1)


def test_transform_raises_where_the_proof_fails() -> None:
    wrong = Pipeline.standard().after("bind", Doubling())
    with pytest.raises(VerificationError, match=r"(?s)the output is off by.*prove=False") as caught:
        wrong.transform(small(), cyclic(), example_inputs=(batch(),))
    assert caught.type is cpt_fx.VerificationError
    wrong.transform(small(), cyclic(), example_inputs=(batch(),), prove=False)
    wrong.transform(small(), cyclic())


@captures
def test_no_quantizer_is_no_proof(capture: str) -> None:
    if capture == "dynamo":
        result = cpt_fx.transform(small(), cyclic(), capture=capture)
        proof = cpt_fx.inspect(result).verify()  # before its first call
    else:
        result = cpt_fx.transform(small(), cyclic())
        (module,) = cpt_fx.graphs(result)
        for node in [node for node in module.graph.nodes if QUANTIZER in node.meta]:
            del node.meta[QUANTIZER]
        with pytest.raises(VerificationError):
            cpt_fx.inspect(result).verify(batch())
        return
    assert not proof.proven and not proof.to_dict()["proven"]
    assert str(proof).endswith("not proven: there is no quantizer: nothing is quantized")


def test_all_excluded_is_no_proof() -> None:
    result = cpt_fx.transform(small(), cyclic(), capture="dynamo", exclude=["0", "2"])
    proof = cpt_fx.inspect(result).verify(batch())
    assert not proof.proven and "there is no quantizer" in str(proof)
    assert state(result) == NOT_PROVEN


def test_what_stands_at_32_bits_is_no_proof() -> None:
    result = cpt_fx.transform(small(), Static(32))
    result(batch()).sum().backward()
    proof = cpt_fx.inspect(result).verify()
    assert not proof.proven and "no quantizer has rounded anything yet" in str(proof)
    assert cpt_fx.inspect(result).verify(batch()).proven


@captures
def test_a_part_outside_is_named(capture: str, tmp_path: Any) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    whole = nn.Sequential(cpt_fx.transform(small(), cyclic(), capture=capture), nn.Linear(6, 6), nn.ReLU(), Head())
    inspection = cpt_fx.inspect(whole)
    proof = inspection.verify(batch())
    for name in ("1: Linear", "3: Head"):
        assert f"outside of what was transformed: {name}" in str(proof)
        assert name.split(": ")[1] in str(inspection) and name.split(": ")[1] in inspection.html()
    assert "outside of what was transformed: 1, 3" in inspection.state


# How long it holds.


def edited(result: Any) -> None:
    (module,) = cpt_fx.graphs(result)
    Doubling().run(module)


def replaced(result: Any) -> None:
    result[2] = nn.Linear(6, 6)


def hooked(result: Any) -> None:
    result[0].register_forward_hook(lambda module, given, output: output * 2)


def given_a_forward(result: Any) -> None:
    result[0].forward = lambda x: x


def cast(result: Any) -> None:
    result[2].double()


def with_a_graph_that_does_something_else(result: Any) -> None:
    cpt_fx.graphs(result)[0].forward = lambda *given: given[0]


def unbound(result: Any) -> None:
    result_schedule = cpt_fx.capture.standalone.the_one_in(result, "").state.schedule
    assert result_schedule is not None
    result_schedule.unbind(result)


def driven_by_another(result: Any) -> None:
    Static(5).bind(result)


def called_in_parts(result: Any) -> None:
    result[0](batch())


CHANGES: list[tuple[Callable[[Any], None], str]] = [
    (edited, "graph 0 was edited since"),
    (replaced, "'2' was replaced since"),
    (hooked, "'0' was changed since"),
    (given_a_forward, "'0' was changed since"),
    (cast, "'2' was changed since"),
    (with_a_graph_that_does_something_else, "graph 0 was edited since"),
    (unbound, "the schedule was unbound since"),
    (driven_by_another, "another schedule was bound since"),
    (called_in_parts, "graph 1 was no part of the proof"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=lambda each: getattr(each, "__name__", ""))
def test_what_is_changed_is_proven_no_more(change: Callable[[Any], None], said: str) -> None:
    result = cpt_fx.transform(small(), cyclic(), example_inputs=(batch(),))
    change(result)
    assert state(result) == f"proven no more: {said}: call `verify(*inputs)`"
    if change in (replaced, driven_by_another, called_in_parts):
        result(batch())
        if change is not called_in_parts:
            cpt_fx.inspect(result).verify(batch())
            assert state(result).startswith("proven: ")


def test_a_graph_that_comes_later_is_named() -> None:
    result = cpt_fx.transform(small(), cyclic(), capture="dynamo", example_inputs=(batch(),))
    known = len(cpt_fx.graphs(result))
    result(torch.randn(2, 3, 6))
    assert f"graph {known} was no part of the proof" in state(result)


def test_steps_and_states_do_not_unprove() -> None:
    schedule = cyclic()
    result = cpt_fx.transform(small(), schedule, example_inputs=(batch(),))
    optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
    for _ in range(3):
        result(batch()).sum().backward()
        optimizer.step()
        schedule.step()
    result.load_state_dict(result.state_dict())
    result.eval()(batch())
    assert state(result).startswith("proven: ")


def test_a_copy_is_to_be_proven_itself() -> None:
    result = cpt_fx.transform(small(), cyclic(), example_inputs=(batch(),))
    assert state(copy.deepcopy(result)) == state(pickle.loads(pickle.dumps(result))) == NOT_PROVEN
    assert state(result).startswith("proven: ")
    graph = cpt_fx.single_graph(result)
    assert state(graph) == NOT_PROVEN
    assert "stands alone" in str(cpt_fx.inspect(graph).verify(batch()))


# What drives it.


class Rebinding(Bind):
    """A subclass that does the same."""


@dataclass(frozen=True)
class Fixed(Pass):
    """A pass in the place of bind that writes a width of its own."""

    name = "bind"

    def run(self, module: fx.GraphModule) -> Report:
        return Report(self.name, 0)


@captures
def test_a_schedule_drives_or_the_proof_says_that_none_does(capture: str) -> None:
    standard = Pipeline.standard()
    given: dict[str, Any] = {"capture": capture, "prove": False, "example_inputs": (batch(),)}
    for pipeline in (standard.drop("bind"), standard.replace("bind", Fixed())):
        result = pipeline.transform(small(), cyclic(), **given)
        with pytest.raises(VerificationError, match="no schedule drives Sequential"):
            cpt_fx.inspect(result).verify(batch())
        with pytest.raises(VerificationError, match="no schedule drives Sequential"):
            pipeline.transform(small(), cyclic(), **{**given, "prove": True})
    schedule = cyclic()
    result = standard.replace("bind", Rebinding()).transform(small(), schedule, **{**given, "prove": True})
    assert state(result).startswith("proven: ")
    schedule.unbind(result)
    with pytest.raises(VerificationError, match="no schedule drives Sequential: it was unbound"):
        cpt_fx.inspect(result).verify(batch())


@dataclass(frozen=True)
class Taking(Pass):
    """A pass that binds a schedule of its own."""

    name = "bind"

    def run(self, module: fx.GraphModule) -> Report:
        OWN.bind(state_of(module))
        return Report(self.name, 0)


OWN = Static(8)


@captures
def test_a_pass_does_not_take_over_from_the_schedule(capture: str) -> None:
    given: dict[str, Any] = {"capture": capture, "example_inputs": (batch(),)}
    with pytest.raises(TransformError, match="no schedule that was given to transform drives anything"):
        Pipeline.standard().replace("bind", Taking()).transform(small(), cyclic(), **given)
    schedule = cyclic()
    result = Pipeline.standard().after("bind", Taking()).transform(small(), schedule, **given)
    assert {view.bits for view in cpt_fx.inspect(result).quantizers if view.role == "weight"} == {3}
    assert state(result).startswith("proven: ")


def test_widths_that_are_held_are_told() -> None:
    result = cpt_fx.transform(small(), cyclic())
    with cpt_fx.at_bits(result, 4):
        assert "`at_bits` holds the widths of Sequential" in str(cpt_fx.inspect(result).verify(batch()))


@pytest.mark.parametrize("name", ["weight", "input", "gradient"])
def test_a_range_for_every_element_is_no_quantizer(name: str) -> None:
    result = cpt_fx.transform(small(), cyclic())
    (module,) = cpt_fx.graphs(result)
    node = next(node for node in module.graph.nodes if node.name == f"_0_{name}_q")
    node.kwargs = {**{key: one for key, one in node.kwargs.items() if key != "over"}, "keep": [0, 1]}
    module.recompile()
    with pytest.raises(VerificationError, match="is rounded on another grid than that of"):
        cpt_fx.inspect(result).verify(batch())


def test_a_width_that_no_schedule_reaches() -> None:
    result = cpt_fx.transform(small(), cyclic())
    (module,) = cpt_fx.graphs(result)
    node = next(node for node in module.graph.nodes if QUANTIZER in node.meta and "weight" in node.name)
    with module.graph.inserting_before(node):
        node.update_arg(1, module.graph.call_function(torch.tensor, (8,)))
    module.recompile()
    with pytest.raises(VerificationError, match="ran at 8 bits when 2 were asked for: no schedule drives it"):
        cpt_fx.inspect(result).verify(batch())


# Examples of all kinds.


@pytest.mark.parametrize("rows", [0, 1, 3])
@captures
def test_examples_may_be_empty_and_ask_for_gradients(capture: str, rows: int) -> None:
    given = batch(rows).requires_grad_()
    result = cpt_fx.transform(small(), cyclic(), example_inputs=(given,), capture=capture, prove=rows > 0)
    assert given.grad is None
    if rows:
        assert state(result).startswith("proven: ")
    else:
        assert cpt_fx.inspect(result)


def test_a_model_with_statistics_is_left_as_it_was() -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    chance = torch.get_rng_state()
    examples = images()
    chance = torch.get_rng_state()
    result = cpt_fx.transform(net, cyclic(), example_inputs=(examples,))
    assert state(result).startswith("proven: ")
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


# Models whose quantizers cannot all run in one pass.


class TwoWays(nn.Module):
    """Multiplies by one layer in training, by another in evaluation, where it can go around the quantizers."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.trained, self.evaluated, self.hidden = nn.Linear(6, 6), nn.Linear(6, 6), hidden

    def forward(self, x: Tensor) -> Tensor:
        layer = self.trained if self.training else self.evaluated
        result: Tensor = layer(x)
        if self.hidden and not self.training:
            result = result + unseen(lambda: x @ layer.weight)
        return result


def test_both_modes_are_looked_at() -> None:
    result = cpt_fx.transform(TwoWays(), cyclic(), capture="dynamo", example_inputs=(batch(),))
    assert cpt_fx.inspect(result.eval()).verify(batch()).proven
    result = cpt_fx.transform(TwoWays(hidden=True), cyclic(), capture="dynamo")
    with pytest.raises(VerificationError, match="mm of 4x6 and 6x6 in the forward pass"):
        cpt_fx.inspect(result).verify(batch())


class ByNumbers(nn.Module):
    """Takes another layer where there are few levels than where there are many."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.first, self.many, self.few, self.last = (nn.Linear(6, 6) for _ in range(4))
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if len(h.detach().unique()) > 9:
            h = self.many(h)
        else:
            h = self.few(h) + (unseen(lambda: h @ h.t() @ h) if self.hidden else 0)
        result: Tensor = self.last(h)
        return result


@pytest.mark.slow
def test_a_branch_that_two_bits_do_not_take_is_no_part_of_the_proof() -> None:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    result = cpt_fx.transform(ByNumbers(), Static(8), capture="dynamo", example_inputs=(x,))
    result(x).sum().backward()
    proof = cpt_fx.inspect(result).verify(x)
    assert "4 quantizers left out, since these inputs do not reach them: of many" in str(proof)
    assert proof.proven and len(proof.idle) == 4 and len(proof.views) == proof.quantizers == 16
    assert state(result).startswith("proven no more: graph")
    hiding = cpt_fx.transform(ByNumbers(hidden=True), Static(8), capture="dynamo")
    with pytest.raises(VerificationError, match="mm of 4x4 and 4x6 in the forward pass"):
        cpt_fx.inspect(hiding).verify(x)


def test_a_quantizer_of_a_graph_that_ran_has_to_run() -> None:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    result = cpt_fx.transform(ByNumbers(), Static(8), capture="dynamo", example_inputs=(x,))
    for module in cpt_fx.graphs(result):
        for node in module.graph.nodes:
            if QUANTIZER in node.meta and "bias" in node.name:
                node.target = lambda value, *rest, **options: value.clone()
        module.recompile()
    with pytest.raises(VerificationError, match=r"few: bias quantizer .* never ran") as caught:
        cpt_fx.inspect(result).verify(x)
    assert "first: bias" in str(caught.value) and "last: bias" in str(caught.value)
    assert "many: bias" not in str(caught.value)


@captures
def test_a_layer_called_by_itself_is_no_part_of_a_proof_of_the_model(capture: str) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.one(x)
            return result

    result: Any = cpt_fx.transform(Heads(), cyclic(), capture=capture)
    result.other(batch())
    proof = cpt_fx.inspect(result).verify(batch())
    assert proof.proven and "do not reach them: of other" in str(proof)


class Experts(nn.Module):
    """Sends all rows to the first of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x[place * len(x) :]) for place, layer in enumerate(self.layers)])


def test_an_expert_that_nothing_is_sent_to_is_idle() -> None:
    result = cpt_fx.transform(Experts(), cyclic(), example_inputs=(batch(),))
    assert state(result).startswith("proven: ")
    proof = cpt_fx.inspect(result).verify(batch())
    assert proof.proven and "do not reach them: of layers.1" in str(proof)
    assert not cpt_fx.inspect(result).verify(batch(0)).proven


class AroundIt(nn.Module):
    """Lets gradients go around its only layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.fc(x).detach()
        return result


def test_a_layer_that_no_gradient_comes_to_is_idle() -> None:
    result = cpt_fx.transform(AroundIt(), cyclic())
    proof = cpt_fx.inspect(result).verify(batch().requires_grad_())
    assert proof.proven and len(proof.idle) == 1


def test_a_float_format_has_two_bits() -> None:
    result = cpt_fx.transform(small(), Static(1), recipe="fp8")
    result(batch()).sum().backward()
    assert cpt_fx.inspect(result).verify(batch()).proven


class Reentrant(nn.Module):
    """Recomputes in a way that refuses to be asked for gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.fc, x, use_reentrant=True)
        return result


def test_a_backward_pass_that_cannot_be_asked_for_gradients_is_told() -> None:
    result = cpt_fx.transform(Reentrant(), cyclic())
    proof = cpt_fx.inspect(result).verify(batch().requires_grad_())
    assert "gradients could not be compared" in str(proof) and "use_reentrant" in str(proof)


def test_a_profiler_of_the_users_goes_on() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        proof = cpt_fx.inspect(cpt_fx.transform(small(), cyclic())).verify(batch())
    finally:
        profiler.disable()
    assert len(proof.compared) == 4  # who asks for a mode was not to be seen
    stats: Any = pstats.Stats(profiler)
    profiled = {name for _, _, name in stats.stats}
    assert {"verify", "_seed"} <= profiled  # before the runs, and after the first of them
