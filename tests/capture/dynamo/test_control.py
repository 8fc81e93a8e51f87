"""Control flow in a graph: the branch that is taken and every step of a loop are quantized, in training too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as _map

import cpt_fx
from cpt_fx.schedules import Static
from tests.capture.dynamo.models import EXACT
from tests.training import check_same, train_step

map_rows: Any = _map
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7)).abs()


# Of the plain model: torch.cond compiles itself, and looks at what it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Choice(nn.Module):
    """One of two layers, chosen by a number; `eager` says it in Python, which is the same as long as it is true."""

    def __init__(self, *, eager: bool = False, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.one, self.two, self.after = (nn.Linear(4, 4) for _ in range(4))
        self.eager, self.breaks = eager, breaks

    def forward(self, x: Tensor) -> Any:
        y = self.before(x)
        if self.breaks:
            torch._dynamo.graph_break()
        if self.eager:
            z = self.one(y).relu() * 2
        else:
            z = torch.cond(x.sum() > 0, lambda y: self.one(y).relu(), lambda y: (self.two(y) @ y.t() @ y).tanh(), (y,))
            z.mul_(2)  # what an operator returns may be changed in place
        return self.after(z)


def transformed(model: nn.Module, bits: int) -> nn.Module:
    return cpt_fx.transform(model, Static(bits), capture="dynamo", recipe=EXACT)


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_choice_trains_like_the_original_at_full_width(sign: int, breaks: bool) -> None:
    plain = train_step(Choice(breaks=breaks), (sign * X,), {})
    result = transformed(Choice(breaks=breaks), 32)
    check_same(train_step(result, (sign * X,), {}), plain)
    idle = "two" if sign > 0 else "one"
    # torch's operator has a gradient for what it did not need, and optimizers treat zeros otherwise than None.
    assert torch.equal(plain.gradients[f"{idle}.weight"], torch.zeros(4, 4))  # type: ignore[arg-type]


def test_both_branches_are_quantized_and_a_branch_is_what_it_would_be_alone() -> None:
    model = Choice()
    result = transformed(model, 4)
    step = train_step(result, (X,), {}, lr=0.0)
    straight = train_step(transformed(Choice(eager=True), 4), (X,), {})
    assert torch.equal(step.output, straight.output)
    assert not torch.equal(step.output, model(X))
    for name in ("before", "one", "after"):
        assert torch.equal(step.gradients[f"{name}.weight"], straight.gradients[f"{name}.weight"])  # type: ignore[arg-type]
    inspection = cpt_fx.inspect(result)
    assert not inspection.uncovered
    assert {one.layers[0] for one in inspection.quantizers if one.times_run == 0} == {"two", "matmul", "matmul_1"}
    train_step(result, (-X,), {})
    assert all(one.times_run for one in cpt_fx.inspect(result).quantizers)
    assert cpt_fx.inspect(result).verify()


def test_a_choice_of_constants_has_a_gradient_where_the_original_has_one() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda x: torch.zeros_like(x), lambda x: self.fc(x), (x,))

    model = Constant()
    result = transformed(model, 8)
    check_same(train_step(result, (X,), {}, lr=0.0), train_step(model, (X,), {}, lr=0.0))
    with torch.no_grad():
        assert not result(X).requires_grad


class Loop(nn.Module):
    """Runs one layer several times, in one of torch's loops or in Python's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.kind = kind

    def step(self, state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(self.fc(state.unsqueeze(0)) + row)
        return new.squeeze(0), new.squeeze(0) * 2

    def forward(self, x: Tensor) -> Any:
        return LOOPS[self.kind](self, x)


def python_scan(model: Loop, x: Tensor) -> Tensor:
    state, results = x.new_zeros(4), []
    for row in x:
        state, out = model.step(state, row)
        results.append(out)
    return torch.stack(results) + state


def python_while(model: Loop, x: Tensor) -> Tensor:
    for _ in range(3):
        x = model.fc(x).tanh()
    return x


def torch_scan(model: Loop, x: Tensor) -> Any:
    state, results = scan(model.step, x.new_zeros(4), x)
    return results + state


def torch_while(model: Loop, x: Tensor) -> Any:
    start = torch.tensor(0)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, model.fc(y).tanh()), (start, x))[1]


LOOPS: dict[str, Callable[[Loop, Tensor], Any]] = {
    "scan": torch_scan,
    "python scan": python_scan,
    "while": torch_while,
    "python while": python_while,
    "map": lambda model, x: map_rows(lambda row: model.fc(row.unsqueeze(0)).tanh(), x),
    "python map": lambda model, x: torch.stack([model.fc(row.unsqueeze(0)).tanh() for row in x]),
}


@pytest.mark.parametrize("kind", ["scan", "while", "map"])
def test_loops_train_like_python_and_every_step_is_quantized(kind: str) -> None:
    def close(ours: Tensor | None, theirs: Tensor | None) -> bool:
        assert ours is not None and theirs is not None
        return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)

    check_same(train_step(transformed(Loop(kind), 32), (X,), {}), train_step(Loop(f"python {kind}"), (X,), {}), close)
    result = transformed(Loop(kind), 4)
    step = train_step(result, (X,), {})
    assert not torch.allclose(step.output, Loop(f"python {kind}")(X), atol=1e-3)
    inspection = cpt_fx.inspect(result)
    assert inspection.verify() and not inspection.uncovered
    assert {one.times_run for one in inspection.quantizers if one.role != "weight"} == {3}
    with torch.no_grad():
        assert result.eval()(X).shape == step.output.shape


@pytest.mark.slow
def test_a_loop_that_does_not_run_returns_what_went_in() -> None:
    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, times: Tensor) -> Any:
            return while_loop(lambda i, y: i > 0, lambda i, y: (i - 1, self.fc(y)), (times, x))[1].mul_(2)

    result = transformed(Never(), 8)
    x = X.clone()
    for given in (x, x.clone().requires_grad_()):
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                assert torch.equal(result(given, torch.tensor(0)), 2 * X) and torch.equal(given, X)
    assert result(x, torch.tensor(2)).requires_grad


def test_a_compiler_gets_no_graph_that_decides_by_its_values() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    result = transformed(Choice(), 4)
    compiled: Any = torch.compile(result, backend=counter)
    for sign in (1, -1):
        ours, theirs = (
            train_step(compiled, (sign * X,), {}, lr=0.0),
            train_step(transformed(Choice(), 4), (sign * X,), {}),
        )
        assert torch.equal(ours.output, theirs.output)
    assert counter.frame_count == 0
    assert cpt_fx.inspect(result).verify()
