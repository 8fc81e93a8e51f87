"""What a graph would lose is refused while the model is captured, with the name of the place."""

from __future__ import annotations

import subprocess
import sys
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx.schedules import Static
from tests.capture.test_symbolic import captured, model_of, refused


class Contexts(nn.Module):
    """Runs a layer inside something that a graph does not record."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "no_grad":
            with torch.no_grad():
                return self.inner(x)  # type: ignore[no-any-return]
        if self.kind == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.inner(x)  # type: ignore[no-any-return]
        if self.kind == "function":
            return Doubled.apply(self.inner(x))  # type: ignore[no-any-return, no-untyped-call]
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Doubled(torch.autograd.Function):
    """Its backward is not the derivative of its forward: a trace of the forward would lose that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


@pytest.mark.parametrize(("kind", "name"), [
    ("no_grad", "'inner' runs .* inside torch.no_grad"),
    ("autocast", "forward enters torch.autocast"),
    ("function", "forward calls the autograd.Function Doubled"),
])  # fmt: skip
def test_contexts_that_a_graph_would_lose_are_refused(kind: str, name: str) -> None:
    with pytest.raises(cpt_fx.CaptureError, match=name):
        cpt_fx.transform(Contexts(kind), Static(8), capture="symbolic")


def test_a_checkpoint_inside_forward_is_dropped_and_told(caplog: pytest.LogCaptureFixture) -> None:
    plain, x = Contexts("checkpoint"), torch.randn(2, 3)
    model = cpt_fx.transform(plain, Static(32), capture="symbolic")
    assert "torch.utils.checkpoint inside forward is not kept" in caplog.text
    assert torch.equal(model(x), plain(x))


class Updating(nn.Module):
    """Updates a buffer inside of a checkpoint: torch runs that part twice in each step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.norm, self.kind = nn.Linear(3, 3), nn.BatchNorm1d(3), kind
        self.register_buffer("mean", torch.zeros(3))

    def part(self, h: Tensor) -> Tensor:
        if self.kind == "norm":
            y: Tensor = self.norm(h)
            return y
        self.get_buffer("mean").mul_(0.9).add_(h.detach().mean(0))
        return torch.relu(h)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.part, self.fc(x), use_reentrant=False)
        return y


@pytest.mark.parametrize("kind", ["norm", "in place"])
def test_a_checkpoint_that_updates_a_buffer_is_left_to_dynamo(kind: str) -> None:
    with pytest.raises(cpt_fx.CaptureError, match=r"updates a buffer inside torch\.utils\.checkpoint"):
        cpt_fx.transform(Updating(kind), Static(8), capture="symbolic")
    x = torch.randn(4, 3)
    result = cpt_fx.transform(Updating(kind), Static(8), example_inputs=(x,))
    assert cpt_fx.inspect(result).state.startswith("proven")


AFTERWARDS = """
import torch, cpt_fx
from torch import nn
from torch.utils.checkpoint import checkpoint
from cpt_fx.schedules import Static

class Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)

cpt_fx.transform(Checkpointed(4, 4), Static(8), capture="symbolic")
made = torch.compile(lambda x: x + torch.zeros(3) + torch.full((3,), 2.0), backend="eager", fullgraph=True)
assert made(torch.ones(3)).tolist() == [3.0] * 3
asked = torch.compile(lambda x, y: x * (2 if y is not None and y is not x else 3), backend="eager", fullgraph=True)
assert asked(torch.ones(3), torch.ones(3)).tolist() == [2.0] * 3
"""


@pytest.mark.slow
def test_a_trace_that_imports_the_compiler_leaves_it_as_it_is() -> None:
    """Dynamo makes tables of functions when it is imported and first asked: a checkpoint in a trace does both."""
    subprocess.run([sys.executable, "-c", AFTERWARDS], check=True)


def test_a_backward_hook_on_a_layer_runs_where_it_was() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    seen: list[Tensor] = []
    net[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))  # type: ignore[index]
    x = torch.randn(2, 3, requires_grad=True)
    for model in (net, cpt_fx.transform(net, Static(32), capture="symbolic")):
        model(x).square().sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
    low = cpt_fx.transform(net, Static(4), capture="symbolic")
    low(x).sum().backward()
    assert len(seen) == 3
    assert {quantizer.layer for quantizer in cpt_fx.inspect(low).quantizers if quantizer.times_run} == {"0", "2"}


def test_hooks_on_the_whole_model_move_to_the_result() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    net.register_forward_hook(lambda module, inputs, output: output * 2)
    x = torch.randn(2, 3)
    assert torch.equal(cpt_fx.transform(net, Static(32), capture="symbolic")(x), net(x))


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_what_forward_puts_into_containers_is_refused(kind: str) -> None:
    def to_list(self: Any, x: Tensor) -> Any:
        self.outputs.append(self.fc(x))
        return self.outputs[-1]

    def to_dict(self: Any, x: Tensor) -> Any:
        self.outputs["last"] = self.fc(x)
        return self.outputs["last"]

    empty: Any = [] if kind == "list" else {}
    model = model_of(to_list if kind == "list" else to_dict, fc=nn.Linear(4, 4), outputs=empty)
    refused(model, "changes self.outputs")
    assert not empty


class Reversal(torch.autograd.Function):
    """Its forward leaves no operator behind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


bound = Reversal.apply


def test_a_bound_apply_is_refused_too() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return bound(self.fc(x))  # type: ignore[no-untyped-call]

    refused(model_of(forward, fc=nn.Linear(4, 4)), "forward calls the autograd.Function Reversal")
    x = torch.ones(2, requires_grad=True)
    bound(x).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, -torch.ones(2))  # type: ignore[arg-type]


def test_state_in_a_tuple_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = self.fc(x) if self.state is None else self.fc(x) + self.state[0]
        self.state = (h.detach(),)
        return h

    refused(model_of(forward, fc=nn.Linear(4, 4), state=None), "stores a tensor in self.state")


def test_private_and_nested_containers_are_watched_and_put_back() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        y = self.fc(x)
        self._seen["outputs"].append(y)
        return y

    model = model_of(forward, fc=nn.Linear(4, 4), _seen={"outputs": [1, 2]})
    refused(model, "forward changes self._seen")
    assert model._seen == {"outputs": [1, 2]}


def test_a_cache_that_is_filled_already_is_fine() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        if 4 not in self.cache:
            self.cache[4] = torch.ones(4)
        return self.fc(x) * self.cache[4]

    model = model_of(forward, fc=nn.Linear(4, 4), cache={})
    refused(model, "a cache that one call of the model fills is fine")
    x = torch.randn(2, 4)
    expected = model(x)
    assert torch.equal(captured(model)(x), expected)


def test_other_threads_go_on_with_torch_as_it_is() -> None:
    kinds: SimpleQueue[type] = SimpleQueue()

    def forward(self: Any, x: Tensor) -> Any:
        thread = Thread(target=lambda: kinds.put(type(torch.zeros(1))))
        thread.start()
        thread.join()
        return self.fc(x)

    captured(model_of(forward, fc=nn.Linear(4, 4)))
    assert {kinds.get() for _ in range(kinds.qsize())} == {Tensor}
    assert type(torch.zeros(1)) is Tensor
