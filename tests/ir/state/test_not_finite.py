"""A batch that is not finite teaches no running range anything, and is no part of what is averaged."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx import Format, native, recipes
from cpt_fx.formats import Range
from cpt_fx.quantizers import ops
from cpt_fx.quantizers.counters import COUNTER_LENGTH, SKIPPED
from cpt_fx.recipes import Recipe
from cpt_fx.schedules import Static
from tests.ir.state.models import CAPTURES, batch, buffers_of_ours, copied, net

BAD = [math.nan, math.inf, -math.inf]
OBSERVED: dict[str, Callable[[], Recipe]] = {
    "paper": lambda: recipes.paper(gradient_rounding="nearest"),
    "default": recipes.default,
    "percentile": lambda: recipes.default().with_rule("linear", input=Format(range=Range.PERCENTILE, percentile=80.0)),
    "learned": lambda: recipes.default().with_rule("linear", input=Format(range=Range.LEARNED)),
}
RECIPES = {**OBSERVED, "integer": recipes.integer, "fp8": recipes.fp8, "mx": recipes.mx}


def ends(kind: str, training: bool, x: Tensor, running: tuple[Tensor, ...], counters: Tensor, bits: int) -> Tensor:
    """Run one operator with a range of its own."""
    width = torch.tensor(bits)
    made: Tensor
    if kind == "learned":
        made = ops.FAKE_QUANTIZE_LEARNED(x, width, *running, training, counters=counters)
        return made
    options = {"percentile": 80.0} if kind == "percentile" else {"scheme": kind}
    made = ops.FAKE_QUANTIZE_OBSERVED(x, width, *running, training, counters=counters, **options)
    return made


@pytest.mark.parametrize("kind", ["affine", "affine_integer", "symmetric", "percentile", "learned"])
@pytest.mark.parametrize(
    ("way", "dtype"),
    [("kernel", torch.float32), ("compiled", torch.float32)]
    + [("torch", dtype) for dtype in (torch.float32, torch.float16, torch.float64)],
)
def test_the_operators(kind: str, way: str, dtype: torch.dtype) -> None:
    function: Any = torch.compile(ends, backend="aot_eager") if way == "compiled" else ends
    learned = kind == "learned"
    bads = [*BAD, 1e300] if dtype is torch.float64 else BAD  # no number of the state's own dtype
    bads = BAD if learned or kind == "percentile" else bads  # in a tail it counts for nothing
    for value in bads:
        for place in (0, 20, 39, slice(None)):
            x = torch.randn(40).to(dtype)
            x[place] = value
            running = tuple(torch.tensor(number) for number in (-0.5, 1.25, 0.0 if learned else 0.7))
            before, counters = copied(dict(enumerate(running))), torch.zeros(COUNTER_LENGTH, dtype=torch.int64)  # type: ignore[arg-type]
            with native.disabled() if way == "torch" else torch.enable_grad():
                result = function(kind, True, x, running, counters, 4)
            assert all(torch.equal(now, before[place]) for place, now in enumerate(running)), (value, place)  # type: ignore[index]
            assert int(counters[SKIPPED]) == 1
            assert value == 1e300 or not bool(result.isfinite().any()), "what is not finite stays visible"


def test_the_largest_numbers_are_numbers() -> None:
    """What is at the end of float32 is learned, as long as its range is a number."""
    for way in (torch.enable_grad, native.disabled):
        running, counters = [torch.zeros(()) for _ in range(3)], torch.zeros(COUNTER_LENGTH, dtype=torch.int64)
        with way():
            ops.FAKE_QUANTIZE_OBSERVED(torch.tensor([0.0, 3e38]), torch.tensor(8), *running, True)
            seen = float(running[1])
            wide = torch.tensor([-3e38, 3e38])
            ops.FAKE_QUANTIZE_OBSERVED(wide, torch.tensor(8), *running, True, counters=counters)
        assert seen > 2e37 and float(running[1]) == seen and int(counters[SKIPPED]) == 1


def bad_batches() -> list[Tensor]:
    """Batches with numbers that are none: everywhere, and in one place."""
    every, one, negative = batch(7), batch(8), batch(9)
    every[:], one[3, 2], negative[0, 0] = math.nan, math.inf, -math.inf
    return [every, one, negative]


def stepped(result: Any, plain: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    """Train one step, as a loop does that skips batches with a NaN in the loss."""
    optimizer.zero_grad()
    torch.manual_seed(5)
    loss = result(x).square().mean()
    loss.backward()
    if loss.isfinite():
        optimizer.step()


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in RECIPES), ("default", True), ("percentile", True)]
)
def test_a_skipped_batch_leaves_no_trace(capture: str, name: str, compiled: bool) -> None:
    ran = []
    for hurt in (False, True):
        torch._dynamo.reset()
        schedule = Static(4)
        model = cpt_fx.transform(net(), schedule, recipe=RECIPES[name](), capture=capture)
        called: Any = torch.compile(model, backend="aot_eager") if compiled else model
        if hurt and not compiled:
            called(bad_batches()[1])  # also the first one that it ever sees
        called(batch(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(4):
            # A learned range is a parameter by then: infinities are clamped to it, and train like anything else.
            for bad in bad_batches()[: 1 if name == "learned" else 3] if hurt and seed == 2 else []:
                stepped(called, model, optimizer, bad)
            stepped(called, model, optimizer, batch(seed))
        with torch.no_grad():
            ran.append((model.eval()(batch(20)), copied(model.state_dict())))
    (clean, clean_state), (other, other_state) = ran
    assert torch.equal(clean, other)
    for key, tensor in clean_state.items():
        assert torch.equal(tensor, other_state[key]), key


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_real_grad_scaler(capture: str) -> None:
    """float16 overflows between two layers: the scaler skips the step, and evaluation is as if it had not been."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.two(self.one(x))
            return y

    torch.manual_seed(2)
    schedule = Static(6)
    model = cpt_fx.transform(Deep(), schedule, capture=capture)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    skipped = 0
    for step in range(6):
        optimizer.zero_grad()
        x = batch(step) * (6e4 if step == 3 else 1)
        before = copied(model.state_dict())
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if torch.equal(model.state_dict()["one.weight"], before["one.weight"]):
            skipped += 1
            ranges = {key: value for key, value in before.items() if "two.cpt_fx" in key}
            assert ranges and all(torch.equal(model.state_dict()[key], value) for key, value in ranges.items())
    assert skipped == 1
    assert all(bool(tensor.isfinite().all()) for tensor in buffers_of_ours(model).values())
    assert bool(model.eval()(batch(9)).isfinite().all())
    views = [view for view in cpt_fx.inspect(model).quantizers if view.skipped]
    assert [(view.layer, view.operand, view.skipped) for view in views] == [("two", "input", 1)]
    assert "came to two (input, 1)" in str(cpt_fx.inspect(model).verify(gradients=False))


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("name", OBSERVED)
def test_raise_names_layer_and_step(capture: str, name: str) -> None:
    schedule = Static(4)
    model = cpt_fx.transform(net(), schedule, recipe=replace(OBSERVED[name](), not_finite="raise"), capture=capture)
    model(bad_batches()[0])
    with pytest.raises(FloatingPointError, match=r"step 0: .* came to 'one', 'two', 'three'"):
        schedule.step()
    assert schedule.position == 1
    model(batch())
    schedule.step()
    copied_model, copied_schedule = copy.deepcopy((model, schedule))
    copied_model(batch())
    for one, plan, step in ((model, schedule, 2), (copied_model, copied_schedule, 2)):
        hook = one.get_submodule("two").register_forward_pre_hook(lambda module, args: (args[0] / 0.0,))
        one(batch())
        if name == "learned":
            plan.step()  # it has its range by now, and nothing is learned by looking
        else:
            with pytest.raises(FloatingPointError, match=rf"step {step}: .* came to 'two', 'three'"):
                plan.step()
        hook.remove()
        one(batch())
        plan.step()
    assert all(bool(tensor.isfinite().all()) for tensor in buffers_of_ours(model).values())


def test_a_sparse_tensor_in_the_same_step_hides_nothing() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, self.weight)

    schedule, x = Static(4), torch.randn(4, 4)
    model = cpt_fx.transform(Product(), schedule, recipe=replace(recipes.default(), not_finite="raise"))
    model(x)
    schedule.step()
    model(x.to_sparse())
    schedule.step()
    model(x.to_sparse())
    model(x / 0.0)
    with pytest.raises(FloatingPointError, match="step 2"):
        schedule.step()


def test_skip_is_the_default_and_says_nothing() -> None:
    schedule = Static(4)
    model = cpt_fx.transform(net(), schedule)
    model(bad_batches()[0])
    schedule.step()
    assert recipes.default().not_finite == recipes.paper().not_finite == "skip"
    with pytest.raises(ValueError, match=r'Recipe\.not_finite must be one of "skip", "raise"'):
        replace(recipes.default(), not_finite="warn")


def test_reading_back_is_no_part_of_a_trace() -> None:
    """Neither the skip nor the count looks at a value: on a device that is not there, a look would raise."""
    model = cpt_fx.transform(net().to("meta"), Static(4), recipe=replace(recipes.default(), not_finite="skip"))
    model(batch().to("meta"))
