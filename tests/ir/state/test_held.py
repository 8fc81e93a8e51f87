"""The widths of a forward pass hold for its backward pass and its recomputation, whatever happens in between."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx.schedules import Bits, Schedule, Static
from tests.ir.state.models import CAPTURES, DYNAMIC, OBSERVED, batch, captures, net, plan, probe, ran, ran_backward
from tests.selecting import mostly_slow

EAGER: list[tuple[str, str | None]] = [(capture, None) for capture in CAPTURES]
COMPILED: list[tuple[str, str | None]] = [(capture, "aot_eager") for capture in CAPTURES]
engines = pytest.mark.parametrize(("capture", "backend"), [*EAGER, *mostly_slow(COMPILED, every=2)])

Between = Callable[[nn.Module, Callable[[Tensor], Any], Schedule, Tensor], None]


def _eval(result: nn.Module, call: Any, schedule: Schedule, x: Tensor) -> None:
    result.eval()


def _validate(result: nn.Module, call: Any, schedule: Schedule, x: Tensor) -> None:
    result.eval()
    with torch.no_grad():
        call(x)
    result.train()


def _validate_by_attribute(result: nn.Module, call: Any, schedule: Schedule, x: Tensor) -> None:
    result.training = False
    with torch.no_grad():
        call(x)
    result.training = True


def _at_bits(result: nn.Module, call: Any, schedule: Schedule, x: Tensor) -> None:
    with cpt_fx.at_bits(result, Bits(2, 2, 2)), torch.no_grad():
        call(x)


def _forward(result: nn.Module, call: Any, schedule: Schedule, x: Tensor) -> None:
    schedule.step(4)
    call(x)


def _step_back(result: nn.Module, call: Any, schedule: Schedule, x: Tensor) -> None:
    schedule.step(3)
    with torch.no_grad():
        call(x)
    schedule.position = 0


def _other_schedule(result: nn.Module, call: Any, schedule: Schedule, x: Tensor) -> None:
    cpt_fx.schedules.Static(2).bind(result)
    with torch.no_grad():
        call(x)


BETWEEN: dict[str, Between] = {
    "step": lambda result, call, schedule, x: schedule.step(5),
    "eval": _eval,
    "validate": _validate,
    "validate by attribute": _validate_by_attribute,
    "at_bits": _at_bits,
    "step and forward": _forward,
    "position set": _step_back,
    "other schedule": _other_schedule,
}
between = pytest.mark.parametrize("what", BETWEEN)
few = pytest.mark.parametrize("what", ["step", "eval", "validate", "at_bits", "step and forward"])


def gradients(
    capture: str, backend: str | None, what: str | None, *, reentrant: bool | None = None, inside: bool = False,
    recipe: Any = DYNAMIC,
) -> list[Tensor]:  # fmt: skip
    """Return the output and all gradients of one step, with something between its two halves."""
    torch._dynamo.reset()
    schedule, model = plan(), net()
    model.reentrant = reentrant if inside else None
    result = cpt_fx.transform(model, schedule, capture=capture, recipe=recipe)
    compiled: Any = torch.compile(result, backend=backend) if backend else result
    call = compiled
    if reentrant is not None and not inside:

        def call(x: Tensor) -> Any:
            return checkpoint(compiled, x, use_reentrant=reentrant)

    x = batch().requires_grad_()
    y = call(x)
    if what is not None:
        BETWEEN[what](result, compiled, schedule, batch(7))
    y.square().sum().backward()
    assert x.grad is not None
    found = [y.detach(), x.grad]
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad)
    return found


@functools.cache
def undisturbed(capture: str, backend: str | None, **options: Any) -> list[Tensor]:
    return gradients(capture, backend, None, **options)


def check_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert [index for index, pair in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(*pair)] == []


@engines
@between
def test_backward(capture: str, backend: str | None, what: str) -> None:
    check_equal(gradients(capture, backend, what), undisturbed(capture, backend))


@captures
@few
def test_backward_with_running_ranges(capture: str, what: str) -> None:
    check_equal(gradients(capture, None, what, recipe=OBSERVED), undisturbed(capture, None, recipe=OBSERVED))


@engines
@few
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])
def test_checkpoint_around_the_result(capture: str, backend: str | None, what: str, reentrant: bool) -> None:
    """What is computed again is what was computed; and all of it what would have been kept."""
    ours = gradients(capture, backend, what, reentrant=reentrant)
    check_equal(ours, undisturbed(capture, backend, reentrant=reentrant))
    check_equal(ours, undisturbed(capture, backend))


@pytest.mark.parametrize(("capture", "backend"), [("dynamo", None), ("auto", None), ("dynamo", "aot_eager")])
@few
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "saved"])
@pytest.mark.filterwarnings("ignore")
def test_checkpoint_inside_the_model(capture: str, backend: str | None, what: str, reentrant: bool) -> None:
    ours = gradients(capture, backend, what, reentrant=reentrant, inside=True)
    check_equal(ours, undisturbed(capture, backend, reentrant=reentrant, inside=True))


@captures
def test_the_width_of_the_gradient_by_its_levels(capture: str) -> None:
    schedule = plan()
    result = probe(schedule, capture, recipe=DYNAMIC)
    assert ran_backward(result, lambda: schedule.step(5)) == (3, 3, 5)
    assert ran_backward(result, lambda: result.eval()) == (7, 7, 8)
    result.train()
    schedule.position = 0

    def narrow() -> None:
        with cpt_fx.at_bits(result, Bits(2, 2, 2)):
            ran(result)

    assert ran_backward(result, narrow) == (3, 3, 5)
    with cpt_fx.at_bits(result, Bits(4, 4, 4)):
        assert ran_backward(result, lambda: schedule.step(5)) == (4, 4, 4)


@captures
def test_the_width_of_the_gradient_when_at_bits_ends_before_backward(capture: str) -> None:
    result = probe(plan(), capture, recipe=DYNAMIC)
    context = cpt_fx.at_bits(result, Bits(4, 4, 4))
    context.__enter__()
    assert ran_backward(result, lambda: context.__exit__(None, None, None)) == (4, 4, 4)
    assert ran_backward(result) == (3, 3, 5)


@engines
def test_two_forwards_before_one_backward(capture: str, backend: str | None) -> None:
    """Each has its own widths: the sum of losses at two positions gives the sum of both gradients."""

    def run(together: bool) -> list[Tensor]:
        torch._dynamo.reset()
        schedule, model = plan(), net()
        result = cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC)
        call: Any = torch.compile(result, backend=backend) if backend else result
        losses = []
        for seed in range(2):
            losses.append(call(batch(seed)).square().sum())
            if not together:
                losses.pop().backward()
            schedule.step(4)
        if together:
            for loss in losses:
                loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    check_equal(run(True), run(False))


@captures
def test_backward_twice(capture: str) -> None:
    """A retained graph gives the same gradient again, however far the schedule went meanwhile."""
    schedule, model = plan(), net()
    result = cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC)
    loss = result(batch()).square().sum()
    first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    schedule.step(5)
    result.eval()
    check_equal(list(torch.autograd.grad(loss, list(model.parameters()))), list(first))


@captures
def test_accumulated_gradients_with_validation_between(capture: str) -> None:
    def run(validate: bool) -> list[Tensor]:
        schedule, model = plan(), net()
        result = cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC)
        for seed in range(4):
            loss = result(batch(seed)).square().sum()
            if validate:
                _validate(result, result, schedule, batch(9))
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    check_equal(run(True), run(False))


@captures
def test_what_follows_is_at_the_new_width(capture: str) -> None:
    """Holding on to widths for one backward pass holds up nothing else, and nothing stays held."""
    schedule = plan()
    result = probe(schedule, capture, recipe=DYNAMIC)
    for step in range(6):
        expected = schedule.bits(step)
        assert ran_backward(result, schedule.step) == expected
        assert ran(result) == schedule.bits(step + 1)[:2]


# After a graph break torch asks tensors for their gradient, and warns itself that they have none.
resumed = pytest.mark.filterwarnings("ignore:The .grad attribute")


@pytest.mark.slow
@captures
@few
@resumed
def test_checkpoint_around_a_larger_compiled_function(capture: str, what: str) -> None:
    """The function is compiled up to the result and after it; what is checkpointed is computed again as it was."""

    def run(what: str | None) -> list[Tensor]:
        torch._dynamo.reset()
        schedule, model = plan(), net()
        result = cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC)

        @torch.compile(backend="aot_eager")
        def call(x: Tensor) -> Any:
            return result(x + 1) * 2

        x = batch().requires_grad_()
        y = checkpoint(call, x, use_reentrant=False)
        if what is not None:
            BETWEEN[what](result, call, schedule, batch(7))
        y.square().sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]

    check_equal(run(what), run(None))


class Scaled(nn.Module):
    """A product whose result is multiplied by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.scale
        return y


@captures
@resumed
def test_a_larger_compiled_function_follows_the_model(capture: str) -> None:
    torch._dynamo.reset()
    result: Any = cpt_fx.transform(Scaled(), Static(8), capture=capture, recipe=DYNAMIC)

    @torch.compile(backend="eager")
    def call(x: Tensor) -> Any:
        return result(x) + 0.0

    x = torch.randn(4, 8)
    assert torch.equal(call(x), result(x))
    result.scale = 3.0
    assert torch.equal(call(x), result(x))
    assert not torch.equal(call(x), (result(x) * 2 / 3))


@pytest.mark.slow
@captures
def test_a_hook_that_copies_the_model_keeps_no_widths(capture: str) -> None:
    schedule, model = plan(), net()
    result = cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC)
    copies: list[nn.Module] = []
    result.register_forward_hook(lambda module, args, output: copies.append(copy.deepcopy(module)))
    torch.compile(result, backend="eager")(batch())
    copied, x = copies[0], batch()
    schedule.step(4)
    assert torch.equal(copied(x), result(x))
