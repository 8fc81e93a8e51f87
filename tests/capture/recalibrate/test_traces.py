"""Nothing else stays changed: a run that validates inside `recalibrate` ends with the bits of one that does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

import cpt_fx
from cpt_fx.capture.standalone import precision_of
from cpt_fx.recipes import Recipe, default, integer, paper
from cpt_fx.schedules import named
from tests.capture.recalibrate.models import captures, few, images, transformed
from tests.ir.state.models import OBSERVED


class Busy(nn.Module):
    """Draws random numbers, counts its calls, keeps what it saw, and averages in a buffer of its own."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.again, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.detach().mean())
        y = F.relu(self.norm(self.conv(x + 0.1 * torch.rand_like(x))))
        result: Tensor = self.head(self.drop(F.relu(self.last(self.again(y)) + y).mean((2, 3))))
        return result


class Counting(Busy):
    """The same with Python attributes that change at each call; torch.fx leaves it to Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Noisy(Dataset[tuple[Tensor, int]]):
    """Augments what it gives, with the random numbers of Python, of numpy, of torch and of its own."""

    def __init__(self) -> None:
        self.own, self.other = np.random.default_rng(0), random.Random(0)

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = random.random() + np.random.rand() + self.own.random() + self.other.random() + torch.rand(2, 6, 6)
        return images(1, index)[0] + 0.1 * noise, index % 3


def loader(own: bool = False) -> DataLoader[Any]:
    data = Noisy()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(4)) if own else None
    generator = torch.Generator().manual_seed(5) if own else None
    return DataLoader(data, batch_size=6, shuffle=None if own else True, sampler=sampler, generator=generator)


def fingerprint(model: nn.Module, data: DataLoader[Any], schedule: Any) -> dict[str, Any]:
    """Return everything that the next step may depend on."""
    own: Any = data.dataset
    found: dict[str, Any] = {key: value.clone() for key, value in model.state_dict().items()}
    found |= {f"gradient {name}": value.grad for name, value in model.named_parameters()}
    found |= {f"mode {name}": module.training for name, module in model.named_modules()}
    found |= {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": str(np.random.get_state())}
    found |= {"own": str(own.own.bit_generator.state), "other": own.other.getstate(), "position": schedule.position}
    found |= {"loader": data.generator and data.generator.get_state()}
    found |= {"sampler": getattr(data.sampler, "generator", None) and data.sampler.generator.get_state()}  # type: ignore[attr-defined]
    found |= {"calls": getattr(model, "calls", None)}
    quantizers = cpt_fx.inspect(model).quantizers
    found |= {f"run {one.layer} {one.operand}": one.times_run for one in quantizers}
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return [key for key in one if key not in other or not equal(one[key], other[key])] + [*(other.keys() - one.keys())]


def trained(
    recalibrates: bool, capture: str, execution: str, recipe: Recipe, compiled: bool = False, cls: type[Busy] = Busy,
    own: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Train, validating every other step, inside of `recalibrate` or not; return all that is left."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1)
    schedule = named("CR", q_min=3, q_max=8, total_steps=8, cycles=2)
    example = (images(6),) if capture == "dynamo" else None
    model = cpt_fx.transform(
        cls(), schedule, capture=capture, execution=execution, recipe=recipe, example_inputs=example
    )
    call: Callable[..., Any] = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = loader(own)
    for step, (x, y) in enumerate([pair for _ in range(2) for pair in data][:6]):
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        if step % 2:
            # With gradients at hand, and the loader of the training.
            given = data if step % 4 == 1 else [*few(), images(1)]
            with cpt_fx.recalibrate(model, given, 8) if recalibrates else nullcontext():
                model.eval()
                with torch.no_grad(), torch.random.fork_rng():
                    call(images(5, step))
                model.train()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return fingerprint(model, data, schedule)


@pytest.mark.slow
@captures
@pytest.mark.parametrize(
    ("execution", "recipe", "options"),
    [
        ("simulated", paper(), {}),
        ("simulated", default(), {"own": True}),
        ("integer", integer(), {}),
        ("simulated", paper(), {"compiled": True}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*recalibrate.*:UserWarning")
def test_two_runs_end_with_the_same_bits(capture: str, execution: str, recipe: Recipe, options: dict[str, Any]) -> None:
    one, other = (trained(recalibrates, capture, execution, recipe, **options) for recalibrates in (False, True))
    assert differing(one, other) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*recalibrate.*:UserWarning")
def test_python_attributes_that_count() -> None:
    one, other = (trained(recalibrates, "auto", "simulated", paper(), cls=Counting) for recalibrates in (False, True))
    assert one["calls"] == other["calls"] == 9
    assert differing(one, other) == []


@captures
def test_one_call_changes_nothing_but_the_statistics(capture: str) -> None:
    """In a mode that no call of `train` or `eval` makes."""
    result: Any = transformed(capture, Busy())
    result(images())
    result.norm.eval()
    result.head.eval()
    data, schedule = loader(), result  # a schedule that is not looked at
    schedule = type("Still", (), {"position": 0})()
    before = fingerprint(result, data, schedule)
    handle = cpt_fx.recalibrate(result, data)
    changed = {"norm.running_mean", "norm.running_var", "last.running_mean", "last.running_var"}
    assert set(differing(before, fingerprint(result, data, schedule))) == changed
    handle.restore()
    assert differing(before, fingerprint(result, data, schedule)) == []


@captures
def test_an_exception_leaves_nothing(capture: str) -> None:
    def broken() -> Iterator[Any]:
        yield images(8, 1)
        torch.rand(3), random.random()
        raise KeyError("the data ended badly")

    result: Any = transformed(capture, Busy())
    result(images())
    data, schedule = loader(), type("Still", (), {"position": 0})()
    before = fingerprint(result, data, schedule)
    with pytest.raises(KeyError, match="ended badly"):
        cpt_fx.recalibrate(result, broken(), 4)
    with pytest.raises(ZeroDivisionError):
        cpt_fx.recalibrate(result, few(), 4, call=lambda model, batch: model(batch) / 0 + 1 // 0)
    assert differing(before, fingerprint(result, data, schedule)) == []
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with cpt_fx.at_bits(result, 8):
        pass
    assert {one.bits for one in cpt_fx.inspect(result).quantizers} <= {3, 5}


@pytest.mark.slow
@captures
def test_nothing_is_traced_again(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    result = transformed(capture, Busy())
    data = [images(8, seed) for seed in range(6)]
    cpt_fx.recalibrate(result, data).restore()
    count, caught = len(cpt_fx.graphs(result)), len(caplog.records)
    for _ in range(3):
        cpt_fx.recalibrate(result, data).restore()
    assert len(cpt_fx.graphs(result)) == count
    assert len(caplog.records) == caught
    result(images(5))
    momenta = {
        node.args[6]
        for graph in cpt_fx.graphs(result)
        for node in graph.graph.nodes
        if "batch_norm" in str(node.target)
    }
    assert momenta <= {0.1, 0.4}  # still constants of the graphs that come later


@captures
def test_in_inference_mode_and_out_again(capture: str) -> None:
    result = transformed(capture, Busy(), recipe=OBSERVED)
    other = transformed(capture, Busy(), recipe=OBSERVED)
    other.load_state_dict(result.state_dict())
    with torch.inference_mode():
        handle = cpt_fx.recalibrate(result, few(), 8)
    cpt_fx.recalibrate(other, few(), 8)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in result.state_dict().items())
    handle.restore()
    result(images()).sum().backward()  # its buffers are those of a model that trains
    state = precision_of(result)
    widths = [value for value in vars(state.in_training).values() if isinstance(value, Tensor)]
    assert widths and not any(value.is_inference() for value in [*result.buffers(), *widths])


@captures
def test_autocast_goes_on_with_weights_that_learn(capture: str) -> None:
    """It keeps weights that it has cast: cast without gradients, they would have none."""

    def gradients(recalibrates: bool) -> list[Tensor | None]:
        torch.manual_seed(2)
        result = transformed(capture, Busy())
        with torch.autocast("cpu", torch.bfloat16):
            if recalibrates:
                cpt_fx.recalibrate(result, few(), 32).restore()
            with cpt_fx.at_bits(result, 32):
                loss = result(images()).float().square().sum()
        loss.backward()
        return [parameter.grad for parameter in result.parameters()]

    for one, other in zip(gradients(False), gradients(True), strict=True):
        assert one is not None and other is not None
        assert torch.equal(one, other)


def test_autocast_statistics_are_as_fine_as_without() -> None:
    result: Any = transformed("symbolic", Busy())
    with torch.autocast("cpu", torch.bfloat16):
        cpt_fx.recalibrate(result, few())
    assert result.norm.running_mean.dtype == torch.float32
    coarse = result.norm.running_mean.clone()
    cpt_fx.recalibrate(result, few())
    torch.testing.assert_close(coarse, result.norm.running_mean, rtol=0.1, atol=0.05)


@captures
def test_what_torch_compile_returned(capture: str) -> None:
    result = transformed(capture, Busy())
    torch.manual_seed(0)
    cpt_fx.recalibrate(torch.compile(result, backend="eager"), few())  # type: ignore[arg-type]
    new = {key: value.clone() for key, value in result.state_dict().items()}
    torch.manual_seed(0)
    cpt_fx.recalibrate(result, few())
    assert all(torch.equal(new[key], value) for key, value in result.state_dict().items())


def test_a_graph_that_stands_alone() -> None:
    result = transformed("symbolic", Busy())
    torch.manual_seed(0)
    cpt_fx.recalibrate(result, few())
    new = {key: value.clone() for key, value in result.state_dict().items()}
    alone = cpt_fx.single_graph(transformed("symbolic", Busy()))
    alone.load_state_dict(result.state_dict(), strict=False)
    for norm in ("norm", "last"):
        alone.get_submodule(norm).reset_running_stats()  # type: ignore[operator]
    torch.manual_seed(0)
    cpt_fx.recalibrate(alone, few())
    assert all(torch.equal(new[key], value) for key, value in alone.state_dict().items() if "running" in key)


def test_what_a_model_caches_in_inference_mode_serves_training() -> None:
    tables: dict[int, Tensor] = {}

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            table = tables.setdefault(len(x), torch.linspace(0, 1, len(x)).unsqueeze(1))
            result: Tensor = self.norm(self.linear(x)) * table
            return result

    model = Cached()
    with torch.inference_mode():
        cpt_fx.recalibrate(model, [torch.randn(4, 3)])
    model(torch.randn(4, 3)).sum().backward()
    assert tables and model.linear.weight.grad is not None
