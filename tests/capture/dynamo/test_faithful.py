"""Ways in which Python code reaches its modules and tensors, and users theirs: all lead to the quantized model."""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.formats import Range
from cpt_fx.ir.result import part_of
from cpt_fx.schedules import Static
from tests.capture.dynamo.models import EXACT, Modes, seeded
from tests.training import check_same, check_same_output, train_step


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))


def captured(model: nn.Module, bits: int = 4, **options: Any) -> Any:
    return cpt_fx.transform(model, Static(bits), capture="dynamo", **options)


def layers(result: nn.Module) -> list[str]:
    return sorted({quantizer.layer for quantizer in cpt_fx.inspect(result).quantizers})


def model_of(forward: Callable[..., Any], **parts: Any) -> Any:
    """Return a module of a class of its own with this forward and these attributes."""
    torch.manual_seed(0)
    model: Any = type("Model", (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(model, name, part() if callable(part) and not isinstance(part, nn.Module) else part)
    return model


def linear(outputs: int = 4) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(4, outputs)


def stop() -> None:
    torch._dynamo.graph_break()


def test_two_tensors_at_one_place_between_graphs() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        for weight in (self.first, self.second, self.third):
            stop()
            x = torch.tanh(x @ weight)
        return x

    def make() -> Any:
        torch.manual_seed(0)
        model = model_of(forward)
        model.register_buffer("first", torch.randn(4, 4))
        model.register_buffer("second", torch.randn(4, 4))
        model.third = nn.Parameter(torch.randn(4, 4))
        return model

    with torch._dynamo.config.patch(disable=True):  # all in the net
        result, reference = captured(make(), bits=32), make()
        for seed in range(2):
            check_same(train_step(result, (X,), {}, seed=seed), train_step(reference, (X,), {}, seed=seed))


@pytest.mark.slow
def test_parts_that_are_replaced_are_the_ones_that_run() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.head(self.body(x)) * self.scale

    model = model_of(forward, body=linear(), head=linear(2), scale=1.0)
    result = captured(model, bits=32)
    result(X)
    result.scale = 2.0
    assert torch.equal(result(X), model(X) * 2) and model.scale == 1.0
    result.head = nn.Linear(4, 5)
    assert result(X).shape == (3, 5) and model.head.out_features == 2
    assert dict(result.named_parameters())["head.weight"].shape == (5, 4)
    result.body = nn.Linear(4, 4)  # as large as the one before: no shape tells
    expected = result.head(result.body(X)) * 2.0
    assert torch.equal(result(X), expected) and torch.equal(result(X), expected)
    assert layers(result) == ["body", "head"]
    del result.scale
    with pytest.raises(AttributeError):
        _ = result.scale


def test_helpers_lead_to_the_copy() -> None:
    """Objects, closures and default arguments that hold modules of the model follow its mode, not the original's."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.helper.run(self.by_default(self.by_closure(x))) + self.listed[0](x)

    model = model_of(forward, drop=nn.Dropout(0.5), fc=linear())
    model.helper = SimpleNamespace(run=model.drop, calls=[])
    model.by_default = lambda x, layer=model.drop: layer(x)
    fc = model.fc
    model.by_closure = lambda x: fc(x)
    model.listed = [model.fc]
    reference = copy.deepcopy(model).eval()
    result = captured(model, bits=32).eval()
    expected = reference.fc(X) + reference.fc(X)
    assert torch.equal(result(X), expected) and torch.equal(result(X), expected)
    assert model.training and model.drop.training
    assert layers(result) == ["fc"]


def test_closures_share_what_is_not_the_models() -> None:
    seen: list[int] = []

    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(x)

    model = model_of(forward, fc=linear())
    model.fc.register_forward_hook(lambda module, args, output: seen.append(len(seen)))
    result = captured(model)
    result(X)
    result(X)
    assert len(seen) == 2


@pytest.mark.parametrize("parameters", [True, False])
def test_modules_in_a_container_have_ranges_of_their_own(parameters: bool) -> None:
    def helper(holder: list[Any], x: Tensor) -> Any:
        y = holder[0](x)
        stop()
        return torch.relu(y)

    def forward(self: Any, x: Tensor) -> Any:
        return helper([self.one], x) + helper([self.two], x * 3)

    def part() -> nn.Module:
        return nn.Linear(4, 4) if parameters else model_of(lambda self, x: x @ x.t() @ x)

    model = model_of(forward, one=part, two=part)
    reference = copy.deepcopy(model)
    result = captured(model, bits=32, recipe=EXACT)
    for seed in range(2):
        check_same(train_step(result, (X.requires_grad_(),), {}, seed=seed), train_step(reference, (X,), {}, seed=seed))
    names = {name.partition(".")[0] for name in layers(result)}
    assert names == {"one", "two"}
    ranges = {name: value for name, value in result.state_dict().items() if name.endswith("input_range_size")}
    assert len({float(value) for value in ranges.values()}) == len(ranges)
    assert len(ranges) == (2 if parameters else 0)  # products of activations have dynamic ranges in this recipe


def test_a_layer_has_one_name_in_parts_and_as_a_whole() -> None:
    def attend(self: Any, x: Tensor) -> Any:
        if self.breaks:
            stop()
        return x @ x.t() @ x

    def forward(self: Any, x: Tensor) -> Any:
        return self.attend(self.fc(x)) @ self.fc(x).t()

    model = model_of(forward, fc=linear(), breaks=True)
    type(model).attend = attend
    result = captured(model)
    result(X)
    in_parts = layers(result)
    result.breaks = False
    result(X)
    assert "cannot be one graph" not in str(cpt_fx.inspect(result).capture)
    assert layers(result) == in_parts == ["fc", "matmul", "matmul_1", "matmul_2"]


def test_a_transformed_model_inside_another_keeps_its_own_widths() -> None:
    teacher = captured(seeded(Modes), bits=32)
    expected = teacher.eval()(X)["y"]

    def forward(self: Any, x: Tensor) -> Any:
        with torch.no_grad():
            target = self.teacher[0](x)["y"]
        return self.fc(x), target

    student = captured(model_of(forward, fc=linear(), teacher=lambda: [teacher]), bits=2)
    assert torch.equal(student(X)[1], expected)
    assert layers(student) == ["fc"] and layers(teacher) == ["fc", "matmul"]


def test_ever_new_numbers_do_not_make_ever_new_graphs() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.step += 1
        stop()
        return torch.addmm(x, x, self.fc.weight, alpha=1.0 / self.step)

    model = model_of(forward, fc=linear(), step=0)
    with torch._dynamo.config.patch(disable=True):
        result = captured(model, bits=32)
        for step in range(1, 60):
            expected = torch.addmm(X, X, model.fc.weight, alpha=1.0 / step)
            assert torch.equal(result(X), expected)
    assert len(cpt_fx.graphs(result)) <= 32


def test_a_module_that_counts_is_captured_twice_at_most() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.calls += 1
        return self.fc(x) * (1 + self.calls % 2)

    result = captured(model_of(forward, fc=linear(), calls=0), bits=32)
    for _ in range(8):
        result(X)
    assert result.calls == 8 and len(cpt_fx.graphs(result)) <= 3


def test_code_may_ask_for_the_arguments() -> None:
    result = captured(seeded(Modes))
    expected = inspect.signature(Modes().forward)
    assert inspect.signature(result.forward) == expected
    found: list[Any] = []
    type(result.fc)
    model = seeded(Modes)
    type(model).arguments = lambda self: inspect.signature(self.forward)  # type: ignore[attr-defined]
    found.append(captured(model).arguments())
    assert found == [expected]
    del type(model).arguments  # type: ignore[attr-defined]


def test_what_methods_multiply_is_quantized_too() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(x)

    model = model_of(forward, fc=linear(), other=linear(2))
    type(model).encode = lambda self, x: self.other(self(x)) @ self.other.weight
    result = captured(model, bits=2)
    result.encode(X)
    assert {"fc", "other"} <= set(layers(result)) and len(layers(result)) == 3


def test_threads_take_turns() -> None:
    result = captured(seeded(Modes), bits=3).eval()
    expected = result(X)["y"]
    equal: list[bool] = []
    threads = [threading.Thread(target=lambda: equal.append(torch.equal(result(X)["y"], expected))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 6


def test_hooks_that_come_later_run() -> None:
    result = captured(seeded(Modes), bits=32).eval()
    before = result(X)["y"]
    handle = result.fc.register_forward_hook(lambda module, args, output: output * 2)
    assert not torch.equal(result(X)["y"], before)
    handle.remove()
    assert torch.equal(result(X)["y"], before)


def test_weights_that_are_untied_later() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.a(x)
        stop()
        return self.b(torch.tanh(y))

    def make() -> Any:
        model = model_of(forward, a=linear(), b=linear())
        model.b.weight = model.a.weight
        return model

    result, reference = captured(make(), bits=32), make()
    check_same(train_step(result, (X,), {}), train_step(reference, (X,), {}))
    for model in (result, reference):
        model.b.weight = nn.Parameter(model.a.weight.detach() * 2)
    for seed in range(2):
        check_same(train_step(result, (X,), {}, seed=seed), train_step(reference, (X,), {}, seed=seed))


@pytest.mark.parametrize("capture", ["auto", "dynamo"])
def test_a_sparse_factor_is_passed_on(capture: str) -> None:
    def forward(self: Any, adjacency: Tensor, x: Tensor) -> Any:
        return adjacency @ self.fc(x)

    adjacency = torch.eye(3).to_sparse()
    model = model_of(forward, fc=linear())
    reference = copy.deepcopy(model)
    exact = cpt_fx.transform(model, Static(32), capture=capture)
    check_same_output(exact(adjacency, X), reference(adjacency, X))
    result = cpt_fx.transform(reference, Static(4), capture=capture)
    result(adjacency, X).sum().backward()
    (item,) = cpt_fx.inspect(result).uncovered
    assert "a sparse operand is passed on as it is" in item.reason


def test_a_product_added_in_place() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.fc(x)
        return torch.zeros(3, 3).addmm_(y, y.t()) * 2

    model = model_of(forward, fc=linear())
    check_same(
        train_step(captured(copy.deepcopy(model), bits=32), (X,), {}), train_step(copy.deepcopy(model), (X,), {})
    )
    assert layers(cpt_fx.transform(model, Static(4), capture="symbolic")) == ["addmm_", "fc"]


def test_torchscript_functions_are_looked_into_or_named() -> None:
    @torch.jit.script
    def product(x: Tensor) -> Tensor:
        return x @ x.t()

    def forward(self: Any, x: Tensor) -> Any:
        return product(self.fc(x))

    model = model_of(forward, fc=linear())
    result = captured(model)
    result(X)
    assert "matmul" in layers(result)
    with torch._dynamo.config.patch(disable=True):
        blind = captured(model)
        blind(X)
    (left,) = cpt_fx.inspect(blind).uncovered
    assert "TorchScript" in left.reason and left.op == "product"


def test_what_the_model_switches_itself() -> None:
    """`predict` calls `self.eval()`: widths, ranges and the mode that is shown follow."""

    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(x) @ x.t()

    model = model_of(forward, fc=linear())
    type(model).predict = lambda self, x: self.eval()(x)
    result = cpt_fx.transform(model, Static(3, eval_bits=8), capture="dynamo", recipe=EXACT)
    train_step(result, (X,), {})
    learned = {name: value.clone() for name, value in result.state_dict().items() if "ranges" in name}
    result.predict(X * 100)  # type: ignore[operator]
    assert not result.training
    assert {quantizer.bits for quantizer in cpt_fx.inspect(result).quantizers if quantizer.role != "gradient"} == {8}
    assert all(torch.equal(result.state_dict()[name], value) for name, value in learned.items())


def test_a_model_with_breaks_is_tried_twice_as_a_whole() -> None:
    tries: list[int] = []

    def forward(self: Any, x: Tensor) -> Any:
        if torch.compiler.is_dynamo_compiling():
            tries.append(1)
        y = self.fc(x)
        stop()
        return y

    result = captured(model_of(forward, fc=linear()))
    for _ in range(6):
        result(X)
    assert part_of(result).session.engine.attempts == {id(result): 0}


@pytest.mark.slow
def test_nothing_of_a_batch_is_kept() -> None:
    import gc
    import weakref

    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(torch.tanh(self.fc(x)))

    with torch._dynamo.config.patch(disable=True):
        result = captured(model_of(forward, fc=linear()))
        x = torch.randn(3, 4, requires_grad=True) * 1
        watch = weakref.ref(x)
        result(x).sum().backward()
    del x
    gc.collect()
    assert watch() is None


def test_examples_leave_no_trace_in_python_either() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        self.calls += 1
        self.outputs.append(self.calls)
        self.table.add_(1)
        self.last = x
        return self.fc(x)

    model = model_of(forward, fc=linear(), calls=0)
    model.outputs, model.table = [], torch.zeros(3)
    result = captured(model, example_inputs=(X,))
    assert result.calls == 0 and result.outputs == [] and not hasattr(result, "last")
    assert torch.equal(result.table, torch.zeros(3))
    result(X)
    assert result.calls == 1 and result.outputs == [1] and model.outputs == []


def test_a_first_call_that_takes_a_short_way(caplog: pytest.LogCaptureFixture) -> None:
    def forward(self: Any, x: Tensor, ready: bool = True) -> Any:
        return self.fc(x) if ready else x * 1

    result = captured(model_of(forward, fc=linear()))
    result(X, ready=False)
    assert "in this call there is nothing to quantize" in caplog.text
    result(X)
    assert layers(result) == ["fc"]


def test_learned_ranges_that_come_late_are_told(caplog: pytest.LogCaptureFixture) -> None:
    learned = cpt_fx.recipes.default().with_rule("linear", input=cpt_fx.Format(range=Range.LEARNED))
    captured(seeded(Modes), recipe=learned, example_inputs=(X,))
    assert "optimizer" not in caplog.text
    captured(seeded(Modes), recipe=learned)(X)
    assert "pass example_inputs to cpt_fx.transform before EMA, DDP or an optimizer is made" in caplog.text


def test_lazy_layers_are_refused() -> None:
    with pytest.raises(cpt_fx.CaptureError, match="does not know the shapes of its parameters yet: run the model once"):
        captured(nn.Sequential(nn.LazyLinear(3)))


def test_transforms_of_functions_between_graphs_are_reported() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(torch.vmap(lambda row: self.fc.weight @ row)(x))

    model = model_of(forward, fc=linear())
    with torch._dynamo.config.patch(disable=True):
        result = captured(model, bits=32)
        assert torch.equal(result(X), model(X))
    assert ["torch.vmap" in item.reason for item in cpt_fx.inspect(result).uncovered] == [True]


def test_extra_state_of_the_model_is_kept() -> None:
    class WithExtra(Modes):
        def get_extra_state(self) -> Any:
            return {"seen": 3}

        def set_extra_state(self, state: Any) -> None:
            self.restored = state

    model = seeded(WithExtra)
    result = captured(model)
    assert result.state_dict()["_extra_state"] == {"seen": 3}
    result(X)
    result.load_state_dict(model.state_dict())
    assert result.restored == {"seen": 3}
    again = captured(seeded(WithExtra))
    again.load_state_dict(result.state_dict())
