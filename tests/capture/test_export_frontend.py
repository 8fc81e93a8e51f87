"""`capture="export"`: one graph from example inputs, right at 32 bits, or an error that names every break."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx import CaptureError
from cpt_fx.schedules import Static
from tests.capture.faithful import stages
from tests.capture.test_symbolic import model_of
from tests.training import check_same, counters, snapshot, train_step
from tests.zoo import ANY_MODEL

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def one_graph(model: nn.Module, *args: Any, bits: int = 32, prove: bool = True, **kwargs: Any) -> nn.Module:
    return cpt_fx.transform(
        model, Static(bits), capture="export", example_inputs=args or (X,), example_kwargs=kwargs or None, prove=prove
    )


def pair(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a model as one graph, and a plain copy of it."""
    reference = copy.deepcopy(model)
    return one_graph(model), reference


def check(result: nn.Module, reference: nn.Module, x: Tensor = X) -> None:
    """Compare a training step, and one in evaluation mode."""
    for mode in (True, False):
        result.train(mode)
        reference.train(mode)
        check_same(train_step(result, (x,), {}), train_step(reference, (x,), {}))


def refusal(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """Return what an error says, which leaves nothing behind."""
    before, state = snapshot(model), torch.get_rng_state()
    with pytest.raises(CaptureError) as caught:
        one_graph(model, *args, **kwargs)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    return str(caught.value)


class Seen(nn.Module):
    """A layer that keeps a running sum in a buffer, by assignment."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + x.detach().mean(0)
        result: Tensor = self.fc(x)
        return result


def test_a_buffer_of_a_layer_is_updated() -> None:
    result, reference = pair(nn.Sequential(Seen(), nn.Linear(4, 4)))
    check(result, reference)
    assert torch.equal(result.get_buffer("0.seen"), reference.get_buffer("0.seen"))
    assert bool(result.get_buffer("0.seen").any())


REACHED: dict[str, Callable[[nn.Module], Any]] = {
    "list": lambda layer: [layer],
    "partial": lambda layer: functools.partial(lambda one, x: one(x), layer),
    "closure": lambda layer: lambda x: layer(x),
    "bound": lambda layer: layer.forward,
}
"""Ways by which code gets at a layer that are no attribute of the module tree."""


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("way", REACHED)
def test_a_layer_reached_in_another_way_learns(way: str, registered: bool) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        call = self.reach[0] if way == "list" else self.reach
        return self.head(call(x))

    (layer, model), (twin, reference) = (
        (layer, model_of(forward, head=head, reach=REACHED[way](layer), **({"layer": layer} if registered else {})))
        for layer, head in [_two_layers(), _two_layers()]
    )
    result = one_graph(model)
    check_same(train_step(result, (X,), {}), train_step(reference, (X,), {}))
    assert layer.weight.grad is not None and twin.weight.grad is not None
    assert torch.equal(layer.weight.grad, twin.weight.grad)


def _two_layers() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(4, 4), nn.Linear(4, 4)


def of_its_parameters(self: Any, x: Tensor) -> Any:
    return self.head(self.fc(x)) * (2 if self.fc.weight.requires_grad else 3)


def of_its_values(self: Any, x: Tensor) -> Any:
    y = self.fc(x.detach())
    return self.head(y) * (2 if y.requires_grad else 3)


@pytest.mark.parametrize("forward", [of_its_parameters, of_its_values])
def test_freezing_a_layer_later_counts(forward: Any) -> None:
    result, reference = pair(model_of(forward, fc=nn.Linear(4, 4), head=nn.Linear(4, 4)))
    check(result, reference)
    for model in (result, reference):
        model.get_submodule("fc").requires_grad_(False)
    check(result, reference)


def test_code_may_ask_how_a_tensor_lies_in_memory() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(x) * (2 if x.is_contiguous() else 3)

    result, reference = pair(model_of(forward, fc=nn.Linear(4, 4)))
    strided = torch.randn(4, 3).t()
    with torch.no_grad():
        for x in (X, strided, X):
            expected: Tensor = reference(x)
            assert torch.equal(result(x), expected)


def test_code_may_ask_whether_gradients_are_on() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(x) * (2 if torch.is_grad_enabled() else 3)

    result, reference = pair(model_of(forward, fc=nn.Linear(4, 4)))
    check(result, reference)
    with torch.no_grad():
        expected: Tensor = reference(X)
        assert torch.equal(result(X), expected)


def test_hooks_on_tensors_run() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.fc(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return self.head(F.relu(y))

    check(*pair(model_of(forward, fc=nn.Linear(4, 4), head=nn.Linear(4, 4))))


def test_both_modes_need_not_be_alike() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.fc(x) * torch.rand(len(x), 1) if self.training else self.head(x)

    check(*pair(model_of(forward, fc=nn.Linear(4, 4), head=nn.Linear(4, 4))))


def test_what_torch_export_cannot_trace() -> None:
    """An attribute that is stored, a list that grows: the code runs as it is."""

    def forward(self: Any, x: Tensor) -> Any:
        self.calls += 1
        self.last = self.fc(x)
        return self.last * self.calls

    result, reference = pair(model_of(forward, fc=nn.Linear(4, 4), calls=0))
    check(result, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lstm_two_layers", "bert", "vit", "gcn", "straight_through", "dataclass_output"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_real_models(name: str) -> None:
    entry = ANY_MODEL[name]
    pytest.importorskip(entry.needs or "torch")
    for _ in stages(entry, "export"):
        pass


def test_the_graph_is_there_at_once() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2))
    before, state = snapshot(model), torch.get_rng_state()
    result = one_graph(model, bits=4, prove=False)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert len(cpt_fx.graphs(result)) == 1
    assert len(cpt_fx.inspect(result).quantizers) == 8
    train_step(result, (X,), {})
    assert all(int(record[0]) == 1 and 0 < int(record[4]) <= 2**4 for record in counters(result).values())
    assert cpt_fx.inspect(result).capture.notes == ('one graph for the example inputs, as capture="export" asks',)


def test_a_call_of_another_kind_is_another_graph() -> None:
    def forward(self: Any, x: Tensor, twice: bool = False) -> Any:
        return self.fc(self.fc(x)) if twice else self.fc(x)

    model = model_of(forward, fc=nn.Linear(4, 4))
    result = one_graph(model, twice=True, prove=False)
    assert torch.equal(result(X), model(X))
    assert torch.equal(result(X, twice=True), model(X, twice=True))
    assert len(cpt_fx.graphs(result)) == 2


def test_every_break_is_named() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.fc(x)
        if y.sum() > 0:
            y = y + 1
        print("between")
        return self.fc(y)

    text = refusal(model_of(forward, fc=nn.Linear(4, 4)))
    line = forward.__code__.co_firstlineno
    assert text.startswith("forward is not one graph. Its code breaks at:\n")
    assert f"{__file__}:{line + 2} (if y.sum() > 0:)" in text
    assert f'{__file__}:{line + 4} (print("between"))' in text
    assert "capture with 'dynamo': it runs in several graphs" in text


@pytest.mark.slow
def test_a_model_that_sets_itself_up_in_its_first_call() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if self.scale is None:
            self.scale = float(x.abs().max().item())
            print("set up")
        return self.fc(x) * self.scale

    result, reference = pair(model_of(forward, fc=nn.Linear(4, 4), scale=None))
    check(result, reference)


@pytest.mark.parametrize("capture", ["export", "dynamo"])
def test_hooks_that_the_first_call_installs_are_installed_once(capture: str) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if not self.ready:
            self.fc.register_forward_hook(lambda _, args, output: output * 3)
            self.ready = True
        return self.fc(x)

    model = model_of(forward, fc=nn.Linear(4, 4), ready=False)
    result, reference = cpt_fx.transform(model, Static(32), capture=capture, example_inputs=(X,)), copy.deepcopy(model)
    check(result, reference)
    check(result, reference)
    assert not model.ready and not model.get_submodule("fc")._forward_hooks


def test_examples_are_needed() -> None:
    with pytest.raises(CaptureError, match="one graph of a run of Linear: pass example_inputs, a tuple"):
        cpt_fx.transform(nn.Linear(2, 2), Static(4), capture="export")


def test_a_graph_that_is_given_is_one_graph() -> None:
    model = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    check(*pair(model))
