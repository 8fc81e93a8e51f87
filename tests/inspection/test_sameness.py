"""A result at 32 bits is compared with the plain model: nothing that differs gets through, and nothing else is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx.api import history_of
from cpt_fx.inspection import VerificationError
from cpt_fx.inspection.sameness import Sameness, compare
from cpt_fx.ir.history import History
from cpt_fx.ir.result import PART
from cpt_fx.schedules import Static
from tests.inspection.faults import PAIRS, model
from tests.inspection.models import Net, images, trained
from tests.ir.result.models import forget_compiled_code

TOLD = "at 32 bits, in "


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield from forget_compiled_code()


def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(3)).requires_grad_()


def compared(result: nn.Module, source: nn.Module | None, *args: Any, gradients: bool = True) -> Sameness:
    return compare(result, args or (x(),), {}, gradients, partial(history, result), source)


def history(net: nn.Module) -> History:
    # Two plain models can be compared, too.
    return history_of(net) if PART in net.__dict__ else History("", (), (), "", "")


def transformed(net: nn.Module, **options: Any) -> nn.Module:
    return cpt_fx.transform(net, Static(4), **options)


@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_is_told(name: str) -> None:
    right, wrong, said = PAIRS[name]
    found = compared(model(wrong), model(right))
    assert any(said in problem for problem in found.problems), found
    assert all(problem.startswith("at 32 bits") for problem in found.problems)


@pytest.mark.parametrize("name", PAIRS)
def test_a_model_is_what_it_is(name: str) -> None:
    found = compared(model(PAIRS[name][0]), model(PAIRS[name][0]))
    assert found.problems == () and found.modes, found


@pytest.mark.parametrize("name", [name for place, name in enumerate(PAIRS) if place % 6 == 0])
def test_a_result_is_the_model(name: str) -> None:
    right = model(PAIRS[name][0])
    found = compared(transformed(right), right)
    assert found.problems == () and found.modes, found


# Edited graphs.


def _drop(graph: fx.Graph, name: str) -> None:
    node = next(node for node in graph.nodes if name in node.name)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _with_constant(graph: fx.Graph, name: str, place: int, value: Any) -> None:
    node = next(node for node in graph.nodes if name in node.name)
    node.args = (*node.args[:place], value, *node.args[place + 1 :])


EDITS: dict[str, Callable[[fx.Graph], None]] = {
    "an activation is gone": lambda graph: _drop(graph, "relu"),
    "the mean is over other dims": lambda graph: _with_constant(graph, "mean", 1, (3, 2, 0)),
    "dropout is gone": lambda graph: _drop(graph, "dropout"),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_graph_is_told(name: str) -> None:
    result = trained()
    (module,) = cpt_fx.graphs(result)
    EDITS[name](module.graph)
    module.recompile()
    with pytest.raises(VerificationError, match=TOLD):
        cpt_fx.inspect(result).verify(images())


def test_a_hook_that_is_lost_is_told() -> None:
    net = Net()
    result = cpt_fx.transform(net, Static(4))
    net.get_submodule("stem").register_forward_hook(lambda *given: given[-1] * 2)
    assert any("the output" in problem for problem in compared(result, net, images()).problems)
    assert compared(result, None, images()).problems == ()


# What is not told.


def test_what_two_runs_of_the_model_do_not_agree_in_is_a_note() -> None:
    net = model(lambda self, given: (self.fc(given), time.perf_counter()))
    found = compared(net, net)
    assert found.problems == ()
    assert found.notes == ("two runs of the plain model itself differ: the output[1] could not be compared",)


def test_what_no_two_runs_agree_in_may_not_be_farther_off_than_they_are() -> None:
    right = model(lambda self, given: self.fc(given) + 1e-6 * (time.perf_counter_ns() % 97))
    wrong = model(lambda self, given: self.fc(given) + 1e-6 * (time.perf_counter_ns() % 97) + 1)
    assert compared(right, right).problems == ()
    assert any("the output is off by" in problem for problem in compared(wrong, right).problems)


def test_a_nan_is_a_nan() -> None:
    net = model(lambda self, given: self.fc(given) * float("nan"))
    assert compared(transformed(net), net).problems == ()


def test_without_gradients_there_are_two_modes() -> None:
    found = compared(trained(), None, images(), gradients=False)
    assert found.modes == ("in evaluation without gradients", "in training without gradients")


def test_opened_operators_are_compared_up_to_rounding() -> None:
    lstm = nn.LSTM(6, 6)
    result = cpt_fx.transform(lstm, Static(4))
    found = compared(result, lstm)
    assert found.problems == () and "up to float rounding" in found.notes[0]
    with torch.no_grad():
        for weight in (other := nn.LSTM(6, 6)).parameters():
            weight.copy_(lstm.get_parameter(next(n for n, p in other.named_parameters() if p is weight)) * (1 + 1e-3))
    assert compared(result, other).problems


class Halved(nn.Module):
    """Attends in half precision, between parameters in single precision."""

    def __init__(self, dtype: torch.dtype, autocast: bool) -> None:
        super().__init__()
        self.first, self.last, self.dtype, self.autocast = nn.Linear(6, 6), nn.Linear(6, 6), dtype, autocast

    def forward(self, given: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.autocast):
            rows = self.first(given).to(self.dtype)
            attended = nn.functional.scaled_dot_product_attention(rows, rows, rows)
            result: Tensor = self.last(attended if self.autocast else attended.float())
            return result.float()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_what_the_fused_operator_keeps(dtype: torch.dtype, autocast: bool) -> None:
    torch.manual_seed(0)
    net = Halved(dtype, autocast)
    given = torch.randn(2, 4, 6).requires_grad_()
    result = cpt_fx.transform(net, Static(4), example_inputs=(given,))
    found = compared(result, net, given)
    assert found.problems == () and "up to float rounding" in found.notes[0]
    with torch.no_grad():
        (other := Halved(dtype, autocast)).load_state_dict({k: v * 1.1 for k, v in net.state_dict().items()})
    assert compared(result, other, given).problems


class Normal(nn.Module):
    """Returns what a function makes of normalized rows, whose sum is nothing but rounding."""

    def __init__(self, of: Callable[[Tensor], Tensor], lstm: nn.LSTM) -> None:
        super().__init__()
        self.of, self.lstm = of, lstm

    def forward(self, given: Tensor) -> Tensor:
        rows: Tensor = self.lstm(given)[0]
        return self.of(nn.functional.layer_norm(rows, rows.shape[-1:]))


def small(rows: Tensor) -> Tensor:
    return rows.square().sum() * 1e-9


SUMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any], bool]] = {
    "a sum of rounding": (torch.sum, torch.sum, True),
    "another loss": (torch.sum, lambda rows: rows.sum() + 1e-3, False),
    "a small number": (small, lambda rows: small(rows) * 1.01, False),
    "what rounding decides": (lambda rows: (rows * 1e6).sin(), lambda rows: (rows * 1e6).sin() + 0.1, False),
    "a small number among others": (lambda rows: (rows, small(rows)), lambda rows: (rows, small(rows) * 1.01), False),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_number_that_is_nothing_but_rounding_is_compared_with_what_rounding_does(name: str) -> None:
    right, wrong, same = SUMS[name]
    for seed in range(2):
        torch.manual_seed(seed)
        lstm = nn.LSTM(6, 8)
        result = transformed(Normal(right, lstm))
        found = compared(result, Normal(wrong, lstm))
        assert (found.problems == ()) == same, found


class Bare(nn.Module):
    """Has nothing that could be trained."""

    def __init__(self, more: float = 0.0) -> None:
        super().__init__()
        self.more = more

    def forward(self, given: Tensor) -> Tensor:
        attended = nn.functional.scaled_dot_product_attention(given, given, given)
        return nn.functional.layer_norm(attended, (24,)).sum() + self.more


def test_a_number_that_is_nothing_but_rounding_needs_no_parameter() -> None:
    given = torch.randn(2, 3, 33, 24, generator=torch.Generator().manual_seed(0))
    result = transformed(Bare())
    assert compared(result, Bare(), given).problems == ()
    assert compared(result, Bare(1e-2), given).problems


def test_what_no_mode_can_run_is_an_error_of_the_model() -> None:
    with pytest.raises(ValueError, match=r"^the model does not run on the inputs given to verify"):
        compared(transformed(nn.Linear(6, 6)), None, torch.randn(2, 3))


def test_a_mode_in_which_the_model_does_not_run_is_a_note() -> None:
    net = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).eval()
    proof = cpt_fx.inspect(transformed(net)).verify(torch.randn(1, 6))
    assert any("in training neither the plain model nor the result runs on these inputs" in n for n in proof.notes)
    assert proof.compared == ("in evaluation without gradients", "in evaluation")


def test_a_backward_pass_that_the_plain_model_cannot_make_is_a_note() -> None:
    def forward(self: Any, given: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.fc, given, use_reentrant=True)
        return y

    found = compared(model(lambda self, given: self.fc(given)), model(forward))
    assert found.problems == ()
    assert "in training gradients could not be compared: the plain model raises" in found.notes[0]
    assert "the backward pass of the result raises" in compared(model(forward), model(plainly)).problems[0]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_where_the_plain_model_is_stuck_nobody_runs_a_layer_once_more() -> None:
    def forward(self: Any, given: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.norm, self.fc(given), use_reentrant=True)
        return cast(Tensor, checkpoint(self.norm, y, use_reentrant=False))

    net = model(forward)
    found = compared(cpt_fx.transform(net, Static(4), capture="dynamo"), net)
    assert found.problems == () and found.stuck
    assert "in training gradients could not be compared" in found.notes[0]
    wrong = model(lambda self, given: self.norm(self.norm(self.fc(given)) * 1.01))
    assert any("buffer norm.running_mean" in problem for problem in compared(wrong, net).problems)


def plainly(self: Any, given: Tensor) -> Tensor:
    y: Tensor = self.fc(given)
    return y


def test_nothing_is_left_behind() -> None:
    def forward(self: Any, given: Tensor) -> Tensor:
        given.detach().add_(1)
        self.count.add_(1)
        self.scale.detach().mul_(2)
        self.last = self.fc(given)
        self.calls += 1
        y: Tensor = self.last * self.scale
        return y

    net = model(forward)
    result, given = transformed(net), x()
    before = [given.clone(), *(tensor.clone() for tensor in net.state_dict().values()), torch.get_rng_state()]
    assert compared(result, net, given).problems == ()
    after = [given, *net.state_dict().values(), torch.get_rng_state()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    models: list[Any] = [net, result]
    for one in models:
        assert one.calls == 0 and one.last is None and one.training
        assert all(parameter.grad is None for parameter in one.parameters())
