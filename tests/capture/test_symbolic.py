"""The symbolic frontend: what a trace would get wrong is repaired, or refused with the name of the place."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import cpt_fx
from cpt_fx import CaptureError
from cpt_fx.schedules import Static
from tests.training import check_same, check_same_output, snapshot, train_step
from tests.zoo import ZOO


def model_of(forward: Any, **attributes: Any) -> nn.Module:
    """Make a module of a forward function."""
    torch.manual_seed(0)
    model: nn.Module = type(forward.__name__, (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def captured(model: nn.Module, **options: Any) -> nn.Module:
    return cpt_fx.transform(model, Static(32), capture="symbolic", **options)


def refused(model: nn.Module, message: str, **options: Any) -> None:
    """The refusal says why, and leaves nothing behind."""
    before, zeros, random = snapshot(model), torch.zeros, torch.get_rng_state()
    with pytest.raises(CaptureError, match=message):
        cpt_fx.transform(model, Static(8), capture="symbolic", **options)
    assert snapshot(model) == before
    assert torch.zeros is zeros and not hasattr(fx.Proxy, "__iadd__")
    assert torch.equal(torch.get_rng_state(), random)


def test_a_flag_that_the_code_passes_on_is_read_at_run_time() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return F.dropout(self.fc(x), 0.5, self.training), F.dropout(x, 0.5, training=not self.training)

    model = model_of(forward, fc=nn.Linear(8, 8))
    result, x = captured(model), torch.randn(4, 8)
    assert torch.equal(result.eval()(x)[0], model.eval()(x)[0])
    assert int((result(x)[1] == 0).sum()) > 0
    trained = result.train()(x)
    assert int((trained[0] == 0).sum()) > 0
    assert torch.equal(trained[1], x)


def test_the_flag_is_that_of_the_module_whose_code_reads_it() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return F.dropout(self.fc(x), 0.5, self.training)

    inner = model_of(forward, fc=nn.Linear(8, 8))
    result, x = captured(nn.Sequential(inner, nn.Linear(8, 8))), torch.randn(4, 8)
    result.get_submodule("0").eval()
    assert torch.equal(result(x), result(x))
    result.train()
    assert not torch.equal(result(x), result(x))


def test_other_differences_between_the_modes_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(x) * 2 if self.training else self.fc(x)

    inner = model_of(forward, fc=nn.Linear(4, 4))
    refused(nn.Sequential(nn.Linear(4, 4), inner), "module '1' does something else in training than in evaluation")
    refused(inner, "the model's forward does something else in training than in evaluation")


def test_stochastic_depth_is_refused() -> None:
    def drop_path(self: Any, x: Tensor) -> Any:
        if not self.training or torch.rand(1).item() > 0.5:
            return x
        return x + self.fc(x)

    def branch(self: Any, x: Tensor) -> Any:
        return x + self.fc(x) if self.training and torch.rand(()) > 0.5 else x

    for forward in (drop_path, branch):
        model = nn.Sequential(nn.Linear(4, 4), model_of(forward, fc=nn.Linear(4, 4)))
        refused(model, r"module '1'|control flow|\.item\(\)|random")


def test_random_draws_stay_random() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        noise = torch.rand(x.shape), torch.randn(3), torch.randint(0, 10, (3,)), torch.randperm(5)
        return (self.fc(x), *noise, torch.rand_like(x), torch.bernoulli(torch.full((9,), 0.5)))

    model = model_of(forward, fc=nn.Linear(4, 4))
    result, x = captured(model), torch.randn(2, 4)
    torch.manual_seed(3)
    first, second = result(x), result(x)
    torch.manual_seed(3)
    check_same_output((first, second), (model(x), model(x)))
    assert not any(torch.equal(a, b) for a, b in zip(first[1:], second[1:], strict=True))


def test_sums_do_not_grow_from_call_to_call() -> None:
    def forward(self: Any, x: Tensor, index: Tensor) -> Any:
        total = torch.zeros(3, 4)
        total.index_add_(0, index, self.fc(x))
        other = x.new_zeros(3, 4)
        other += total
        other[0] = 1.0
        return total, other

    model = model_of(forward, fc=nn.Linear(4, 4))
    result, x, index = captured(model), torch.randn(2, 4), torch.tensor([0, 2])
    for _ in range(3):
        check_same_output(result(x, index), model(x, index))


def test_updates_of_a_constant_of_the_trace_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        total = torch.tensor([0.0, 0.0])
        total += self.fc(x).sum(0)
        return total

    refused(model_of(forward, fc=nn.Linear(2, 2)), "makes on every call, but that the trace holds as a constant")


def test_random_constants_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(x) + torch.tensor([next(self.calls)])

    refused(model_of(forward, fc=nn.Linear(2, 2), calls=iter(range(100))), "differs from trace to trace")


def test_draws_while_tracing_leave_the_generator_alone() -> None:
    def unused(self: Any, x: Tensor) -> Any:
        torch.normal(0.0, 1.0, (3,))
        return self.fc(x)

    def used(self: Any, x: Tensor) -> Any:
        return self.fc(x) + torch.normal(0.0, 1.0, (2,))

    model = model_of(unused, fc=nn.Linear(2, 2))
    before = torch.get_rng_state()
    captured(model)
    assert torch.equal(torch.get_rng_state(), before)
    refused(model_of(used, fc=nn.Linear(2, 2)), "differs from trace to trace: it is random")


def test_operators_with_assignment_update_shared_memory() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.fc(x)
        view = y.view(-1)
        view += 1
        view *= 2
        y[0] -= 3
        size = other = x.shape[0]
        other += 1
        z = y
        z @= self.w
        return y, z, size, other

    model = model_of(forward, fc=nn.Linear(4, 4), w=nn.Parameter(torch.randn(4, 4)))
    reference, x = copy.deepcopy(model), torch.randn(3, 4)
    result = captured(model)
    check_same(train_step(result, (x,), {}), train_step(reference, (x,), {}))
    check_same_output(copy.deepcopy(result)(x), result(x))


def test_state_that_forward_keeps_outside_of_buffers_is_refused() -> None:
    def attention(self: Any, x: Tensor) -> Any:
        self.last = self.fc(x)
        return self.last

    def counter(self: Any, x: Tensor) -> Any:
        self.calls += 1
        return self.fc(x)

    def rebound(self: Any, x: Tensor) -> Any:
        self.average = self.average * 0.9 + x.mean(0) * 0.1
        return self.fc(x - self.average)

    def frozen(self: Any, x: Tensor) -> Any:
        self.norm.eval()
        return self.norm(self.fc(x))

    fc = nn.Linear(4, 4)
    refused(model_of(attention, fc=fc, last=None), r"forward of attention stores a tensor in self\.last")
    refused(model_of(counter, fc=fc, calls=0), r"forward of counter stores 1 in self\.calls")
    refused(model_of(rebound, fc=fc, average=nn.Buffer(torch.zeros(4))), r"stores a tensor in self\.average")
    refused(model_of(frozen, fc=fc, norm=nn.BatchNorm1d(4)), r"forward of BatchNorm1d stores False in self\.training")


def _attend(self: Any, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Any:
    scores = self.fc(x)
    if mask is not None:
        scores = scores + mask
    if causal:
        scores = scores.tril()
    return scores


def test_an_optional_argument_is_the_one_of_the_example() -> None:
    model = model_of(_attend, fc=nn.Linear(4, 4))
    x, mask = torch.randn(4, 4), torch.randn(4, 4)
    without = captured(model)
    assert torch.equal(without(x), model(x))
    assert torch.equal(without(x, None), model(x))
    assert torch.equal(without(x, causal=False), model(x))
    with pytest.raises(ValueError, match=r"captured for mask=None, which its code branches on; got Tensor"):
        without(x, mask)
    with pytest.raises(ValueError, match=r"captured for causal=False, .* got True.*example_inputs"):
        without(x, causal=True)
    masked = captured(model, example_inputs=(x, mask))
    assert torch.equal(masked(x, mask), model(x, mask))
    assert torch.equal(masked(x, 2 * mask), model(x, 2 * mask))
    with pytest.raises(ValueError, match="captured for causal=False"):
        masked(x, mask, True)
    causal = captured(model, example_inputs=(x,), example_kwargs={"causal": True})
    assert torch.equal(causal(x, causal=True), model(x, causal=True))
    with pytest.raises(ValueError, match=r"captured for causal=True, .* got False"):
        causal(x, causal=False)


def test_a_changed_model_is_captured_for_the_same_arguments() -> None:
    def forward(self: Any, x: Tensor, deep: bool = True) -> Tensor:
        result: Tensor = self.fc(self.fc(x)) if deep else self.fc(x)
        return result

    fc, x = nn.Linear(4, 4), torch.randn(2, 4)
    model = model_of(forward, fc=fc)
    result = captured(model, example_inputs=(x,), example_kwargs={"deep": False})
    for layer in (fc, result.get_submodule("fc")):
        layer.register_parameter("bias", None)
    assert torch.equal(result(x, deep=False), model(x, deep=False))


def test_what_the_code_branches_on_is_told_with_its_place() -> None:
    result = cpt_fx.transform(model_of(_attend, fc=nn.Linear(4, 4)), Static(8))
    place = f"{__file__}:{_attend.__code__.co_firstlineno}"
    assert f"the code branches on mask, causal at {place}" in str(cpt_fx.inspect(result).capture)


def test_an_example_with_a_mask_refuses_to_run_without() -> None:
    model = model_of(_attend, fc=nn.Linear(4, 4))
    x = torch.randn(4, 4)
    masked = captured(model, example_inputs=(x, x))
    with pytest.raises((ValueError, TypeError), match=r"mask|NoneType"):
        masked(x)


def test_an_argument_that_is_only_passed_on_stays_open() -> None:
    def forward(self: Any, x: Tensor, slope: float = 0.5, bias: Tensor | None = None) -> Any:
        return F.leaky_relu(F.linear(x, self.w, bias), slope)

    model = model_of(forward, w=nn.Parameter(torch.randn(4, 4)))
    result, x, bias = captured(model), torch.randn(2, 4), torch.randn(4)
    assert torch.equal(result(x), model(x))
    assert torch.equal(result(x, 0.1), model(x, 0.1))
    assert torch.equal(result(x, bias=bias), model(x, bias=bias))


@pytest.mark.parametrize("examples", [False, True])
def test_an_argument_that_is_only_computed_with_stays_open(examples: bool) -> None:
    def forward(self: Any, x: Tensor, k: int = 0, scale: float = 1.0) -> Any:
        y = self.fc(x) * (k + 1) + math.sqrt(2 * scale)
        return y.roll(-k, 0)[k:] ** (2 - k)

    model, x = model_of(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4)
    options: dict[str, Any] = {"example_inputs": (x,)} if examples else {}
    for result in (captured(model, **options), cpt_fx.transform(model, Static(32), **options)):
        assert cpt_fx.inspect(result).capture.frontend == "symbolic"
        for given in ((), (0,), (1,), (2, 0.5)):
            assert torch.equal(result(x, *given), model(x, *given))


@pytest.mark.slow
def test_an_argument_that_is_asked_about_stays_fixed() -> None:
    def compared(self: Any, x: Tensor, k: int = 0) -> Any:
        return self.fc(x) * (k + 1) if k < 1 else self.fc(x)

    def typed(self: Any, x: Tensor, k: int = 0) -> Any:
        return self.fc(x) * (k + 1) if isinstance(k, int) else self.fc(x)

    def tested(self: Any, x: Tensor, k: int | None = 0) -> Any:
        k = 5 if k is None else k
        return self.fc(x) * (k + 1)

    for forward in (compared, typed, tested):
        model, x = model_of(forward, fc=nn.Linear(4, 4)), torch.randn(3, 4)
        result = captured(model)
        assert torch.equal(result(x), model(x))
        with pytest.raises(ValueError, match="captured for k=0"):
            result(x, 1)
        result = cpt_fx.transform(model, Static(32))
        assert torch.equal(result(x, 1), model(x, 1)) and torch.equal(result(x), model(x))


def test_examples_that_do_not_fit() -> None:
    model = model_of(_attend, fc=nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"example inputs do not fit _attend\.forward.*unexpected keyword.*musk"):
        captured(model, example_inputs=(torch.ones(4, 4),), example_kwargs={"musk": 1})
    with pytest.raises(TypeError, match="example_inputs must be a tuple of the model's arguments, got Tensor"):
        captured(model, example_inputs=torch.ones(4, 4))


def test_torchscript_is_refused() -> None:
    with pytest.warns(DeprecationWarning):
        script = torch.jit.script(nn.Linear(4, 4))
    for model in (script, nn.Sequential(nn.Linear(4, 4), script)):
        with pytest.raises(CaptureError, match=r"TorchScript.*Transform the Python module it was scripted from"):
            captured(model)


def test_control_flow_on_data_is_refused() -> None:
    def branch(self: Any, x: Tensor) -> Any:
        return self.fc(x) if x.sum() > 0 else x

    def loop(self: Any, x: Tensor) -> Any:
        return torch.stack([self.fc(row) for row in x])

    def number(self: Any, x: Tensor) -> Any:
        return self.fc(x) * float(x.max())

    for forward in (branch, loop, number):
        refused(
            model_of(forward, fc=nn.Linear(4, 4)),
            rf"cannot trace {forward.__name__} at .*test_symbolic.py:\d+ .*torch.where",
        )


def test_a_value_taken_apart_leaves_nothing_to_collect(monkeypatch: pytest.MonkeyPatch) -> None:
    """All objects of the process would be looked at for it, each time: half of what a capture took."""

    def forward(self: Any, x: Tensor) -> Tensor:
        first, (second, *rest) = x.chunk(2)[0], torch.split(self.fc(x), 2)
        values, places = torch.max(first, 1)
        return values.sum() + places.sum() + second.sum() + len(rest)

    def collect() -> None:
        raise AssertionError("garbage was collected")

    monkeypatch.setattr("cpt_fx.capture.symbolic.tracer.gc.collect", collect)
    refused(model_of(forward, fc=nn.Linear(8, 8)), "unpacks|iterat")

    def takes(self: Any, x: Tensor) -> Tensor:
        first, second = self.fc(x).chunk(2)
        values, places = torch.max(first, 1)
        (lowest, where), (again,) = torch.min(second, 1), x.chunk(1)
        result: Tensor = values.sum() + places.sum() + lowest.sum() + where.sum() + again.sum()
        return result

    model, x = model_of(takes, fc=nn.Linear(8, 8)), torch.randn(4, 8)
    check_same_output(captured(model)(x), model(x))


def test_a_given_graph_keeps_its_nodes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = fx.symbolic_trace(model)
    text, reference = str(graph.graph), copy.deepcopy(graph)
    result, x = captured(graph), torch.randn(3, 4)
    assert str(graph.graph) == text
    check_same(train_step(result, (x,), {}), train_step(reference, (x,), {}))
    assert result.get_parameter("0.weight") is model[0].weight
    plain = cpt_fx.revert(result)
    assert type(plain) is type(graph) and plain.state_dict().keys() == graph.state_dict().keys()
    assert all(tensor is dict(graph.named_parameters())[name] for name, tensor in plain.named_parameters())


def test_hooks_on_leaf_layers_run_every_time() -> None:
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[1].register_forward_hook(lambda module, args, output: output + 1)
    model[1].register_forward_pre_hook(lambda module, args: seen.append("relu"))
    reference, x = copy.deepcopy(model), torch.randn(2, 4)
    result = captured(model)
    seen.clear()
    check_same(train_step(result, (x,), {}), train_step(reference, (x,), {}))


@pytest.mark.parametrize("name", ["constants_made_in_forward", "plain_attributes", "weight_normalised"])
def test_tracing_leaves_nothing_in_the_original(name: str) -> None:
    model, _, _ = ZOO[name]()
    before = snapshot(model)
    captured(model)
    assert snapshot(model) == before
    assert [key for key in model.__dict__ if "constant" in key or "cpt" in key] == []


def test_a_module_reached_by_a_bound_method_is_found() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.step(x)

    model = model_of(forward, fc=nn.Linear(4, 4))
    model.step = model.fc.forward  # type: ignore[assignment, union-attr]
    x = torch.randn(2, 4)
    assert torch.equal(captured(model)(x), model(x))


@pytest.mark.parametrize("name", ["code", "graph"])
def test_a_plain_attribute_may_have_the_name_of_one_of_a_graph_modules(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x) * getattr(self, name)
        return result

    model = model_of(forward, fc=nn.Linear(3, 3), **{name: torch.arange(3.0)})
    x = torch.ones(2, 3)
    assert torch.equal(captured(model)(x), model(x))


def test_draws_of_python_and_numpy_are_refused() -> None:
    class Chooses(nn.Module):
        def __init__(self, draw: Callable[[], float]) -> None:
            super().__init__()
            self.fc, self.draw = nn.Linear(3, 3), draw

        def forward(self, x: Tensor) -> Any:
            return self.fc(x) if self.draw() >= 0 else x

    before = random.getstate()
    for draw in (random.random, numpy.random.rand):
        refused(Chooses(draw), "draws random numbers of Python or numpy")
    assert random.getstate() == before


def test_parameters_got_hold_of_by_other_ways_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            smaller = {name: value * 0.9 for name, value in self.fc.named_parameters()}
            return torch.func.functional_call(self.fc, smaller, (x,))

    model, x = Scaled(), torch.randn(2, 3)
    refused(model, "parameters that it did not take from an attribute")
    assert torch.equal(cpt_fx.transform(model, Static(32))(x), model(x))


def test_auto_leaves_a_choice_of_arguments_to_dynamo() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
            y = self.fc(x)
            return y if target is None else (y - target).square().mean()

    model, x = Optional(), torch.randn(2, 3)
    result = cpt_fx.transform(model, Static(32))
    assert torch.equal(result(x), model(x)) and torch.equal(result(x, x), model(x, x))
