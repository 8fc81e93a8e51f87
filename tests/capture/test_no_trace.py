"""Looking at a model leaves nothing behind: transform with and without examples, cost, verify, one graph of it."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import cpt_fx
from cpt_fx.capture.dry_run import dry_run
from cpt_fx.capture.side_effects import unchanged
from cpt_fx.common.arrays import array_of
from cpt_fx.schedules import Static
from tests.selecting import mostly_slow

RICH = cpt_fx.cost, cpt_fx.inspect
"""Imported now: what these need draws from Python's generator when it is imported."""
CALLS = 0
REMEMBERED, HISTOGRAM = 0, numpy.zeros(2)
SEEN: dict[str, list[int]] = {"sizes": []}
CURRENT: ContextVar[int] = ContextVar("CURRENT", default=0)


class Meter:
    """A helper that counts."""

    total = 0

    def __init__(self) -> None:
        self.count = 0
        self.history: deque[int] = deque(maxlen=4)

    def note(self, size: int) -> None:
        self.count += 1
        Meter.total += 1
        self.history.append(size)


@dataclass(slots=True)
class Slots:
    """A helper without a dict."""

    count: int = 0


@functools.lru_cache
def table(size: int) -> list[int]:
    return list(range(size))


def counter() -> Callable[[], int]:
    count = 0

    def advance() -> int:
        nonlocal count
        count += 1
        return count

    return advance


class Base(nn.Module):
    """Two layers; what the subclasses do before each call is to be undone."""

    calls = 0
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.prepare()

    def prepare(self) -> None: ...

    def before(self, x: Tensor) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        self.before(x)
        y: Tensor = self.two(torch.relu(self.one(x)))
        return y


class Momentum(Base):
    """A second encoder that follows the first, written as momentum contrast is."""

    def prepare(self) -> None:
        self.key = nn.Linear(6, 6)
        for value in self.key.parameters():
            value.requires_grad = False

    def before(self, x: Tensor) -> None:
        for mine, theirs in zip(self.key.parameters(), self.one.parameters(), strict=True):
            mine.data = mine.data * 0.9 + theirs.data * 0.1


class InPlace(Momentum):
    def before(self, x: Tensor) -> None:
        for mine, theirs in zip(self.key.parameters(), self.one.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


class MaxNorm(Base):
    def before(self, x: Tensor) -> None:
        self.one.weight.data = torch.renorm(self.one.weight.data, 2, 0, 0.1)
        self.two.weight.data.renorm_(2, 0, 0.1)
        self.mean.data += 1.0


class Updated(Base):
    def before(self, x: Tensor) -> None:
        with torch.no_grad():
            self.one.weight.mul_(0.5)
            self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)


class HookedParameters(Base):
    """The gradient that goes to a parameter is halved once more at each call."""

    def before(self, x: Tensor) -> None:
        self.two.bias.register_hook(lambda gradient: gradient / 2)
        self.one.bias.register_post_accumulate_grad_hook(lambda parameter: None)


class Freezing(Base):
    def before(self, x: Tensor) -> None:
        self.one.weight.requires_grad = False
        self.two.weight.grad = torch.ones(3, 6)


class Counting(Base):
    def prepare(self) -> None:
        self.count, self.sizes, self.by_size = 0, [0], OrderedDict(a=[{"n": 0}])

    def before(self, x: Tensor) -> None:
        self.count += 1
        self.sizes.append(1)
        self.by_size["a"][0]["n"] += 1
        self.by_size.setdefault("b", []).append({"n": 1})
        type(self).calls += 1
        Base.calls += 1


class Helped(Base):
    def prepare(self) -> None:
        self.meter, self.slots, self.advance, self.steps = Meter(), Slots(), counter(), [Meter()]

    def before(self, x: Tensor) -> None:
        self.meter.note(1)
        self.steps[0].note(2)
        self.slots.count += 1
        self.advance()


class Lazy(Base):
    cached: Tensor | None = None

    def before(self, x: Tensor) -> None:
        if not hasattr(self, "ready"):
            self.ready = True
            self.register_buffer("mask", torch.ones(6))
            self.late = nn.Linear(2, 2)
            self.register_parameter("scale", nn.Parameter(torch.ones(1)))
            self.one.register_forward_hook(double)
            self.register_forward_pre_hook(lambda module, args: None)
            self.cached = torch.arange(6.0)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class Hooked(Base):
    """As a library does that marks what it has hooked."""

    def before(self, x: Tensor) -> None:
        if not getattr(self, "hooked", False):
            for module in self.children():
                module.register_forward_hook(double)
            self.hooked = True


class Outside(Base):
    def before(self, x: Tensor) -> None:
        global CALLS
        CALLS += 1
        SEEN["sizes"].append(1)
        remember()
        table(7)
        CURRENT.set(CURRENT.get() + 1)


def remember() -> None:
    """What a method calls knows globals of its own."""
    global REMEMBERED
    REMEMBERED += 1
    HISTOGRAM[0] += 1


class Drawing(Base):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.numbers, self.python = numpy.random.default_rng(3), random.Random(3)

    def before(self, x: Tensor) -> None:
        torch.rand(2, generator=self.generator)
        self.numbers.random()
        self.python.random()
        random.random()
        numpy.random.rand()
        torch.rand(1)


MODELS = [
    Momentum,
    InPlace,
    MaxNorm,
    Updated,
    HookedParameters,
    Freezing,
    Counting,
    Helped,
    Lazy,
    Hooked,
    Outside,
    Drawing,
]


def shown(value: Any, seen: frozenset[int] = frozenset()) -> Any:
    """Everything a value holds, written as plain data."""
    if id(value) in seen:
        return "again"
    seen |= {id(value)}
    if isinstance(value, Tensor):
        grad = None if not value.is_leaf else value.grad
        return (value.tolist(), value.requires_grad, value.data_ptr(), shown(grad, seen))
    if isinstance(value, dict):
        return [(key, shown(item, seen)) for key, item in value.items() if "cpt_fx" not in str(key)]
    if isinstance(value, (list, tuple, set, deque)):
        return [shown(item, seen) for item in value]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, Slots):
        return value.count
    if isinstance(value, (UserDict, ChainMap, Optimizer)):
        return shown(value.state if isinstance(value, Optimizer) else dict(value), seen)
    if isinstance(value, numpy.ndarray):
        return value.tolist()
    if isinstance(value, (SimpleNamespace, Namespace)):
        return shown(vars(value), seen)
    if callable(value) and getattr(value, "__closure__", None):
        return [cell.cell_contents for cell in value.__closure__ if isinstance(cell.cell_contents, int)]
    if isinstance(value, functools.partial):
        return shown(value.func, seen)
    if isinstance(value, MethodType):
        return shown(value.__self__, seen)
    if isinstance(value, (nn.Module, Meter)):
        return (type(value).__name__, shown(vars(value), seen))
    return value if isinstance(value, (int, float, str)) else type(value).__name__


def world(model: nn.Module) -> Any:
    """All that can change."""
    classes = [base for base in type(model).__mro__ if hasattr(base, "calls")]
    return (
        shown(model),
        [(base.__name__, vars(base).get("calls"), vars(base).get("cached")) for base in classes],
        (
            CALLS,
            REMEMBERED,
            HISTOGRAM.tolist(),
            Meter.total,
            copy.deepcopy(SEEN),
            CURRENT.get(),
            table.cache_info().currsize,
        ),
        (random.getstate(), shown(list(numpy.random.get_state()[1])), torch.random.get_rng_state().tolist()),  # type: ignore[index]
    )


def x() -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(4, 6)


def made(kind: type[Base]) -> Base:
    torch.manual_seed(1)
    return kind()


CAPTURES = ("auto", "dynamo")


@pytest.mark.parametrize("kind", mostly_slow(MODELS, every=3))
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("examples", [False, True])
def test_transform(kind: type[Base], capture: str, examples: bool) -> None:
    """The given model is as it was, and the result at 32 bits does what the model does, in every call."""
    torch._dynamo.reset()
    model, reference = made(kind), made(kind)
    before = world(model)
    given: Any = {"example_inputs": (x(),)} if examples else {}
    result = cpt_fx.transform(model, Static(32), capture=capture, **given)
    assert world(model) == before
    assert result.training
    for _ in range(3):
        torch.manual_seed(2)
        wanted = reference(x())
        torch.manual_seed(2)
        found = result(x())
        assert torch.equal(found, wanted)
        (one,) = torch.autograd.grad(found.sum(), [result.get_parameter("two.bias")])
        (other,) = torch.autograd.grad(wanted.sum(), [reference.two.bias])
        assert torch.equal(one, other)
    assert {key for key in result.state_dict() if "cpt_fx" not in key} == set(reference.state_dict())
    for key, value in reference.state_dict().items():
        assert torch.equal(result.state_dict()[key], value), key


LOOKS: dict[str, Callable[[nn.Module], object]] = {
    "cost": lambda model: cpt_fx.cost(model, Static(4), (x(),)),
    "verify": lambda model: cpt_fx.inspect(model).verify(x()),
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("look", mostly_slow(["cost of a plain one", *LOOKS], every=3))
@pytest.mark.parametrize("called", [False, True])
def test_looking(kind: type[Base], look: str, called: bool) -> None:
    torch._dynamo.reset()
    model: nn.Module = made(kind)
    if look in LOOKS:
        model = cpt_fx.transform(model, Static(4), example_inputs=(x(),))
    if called:
        model(x())
    before, ours = world(model), set(model.state_dict())
    graphs = len(cpt_fx.graphs(model)) if look in LOOKS else 0
    try:
        LOOKS.get(look, LOOKS["cost"])(model)
    except cpt_fx.VerificationError as error:
        assert kind is Freezing, error
    assert world(model) == before
    assert set(model.state_dict()) == ours
    assert look != "cost" or len(cpt_fx.graphs(model)) == graphs
    assert bool(model(x()).isfinite().all())


@pytest.mark.slow
def test_a_backward_pass_that_is_to_come() -> None:
    """What an earlier forward pass has saved is not touched, not even to write the same values."""
    for kind in (InPlace, MaxNorm, Momentum):
        model = cpt_fx.transform(made(kind), Static(4), example_inputs=(x(),))
        loss = model(x()).square().sum()
        cpt_fx.inspect(model).verify(x())
        cpt_fx.cost(model, Static(4), (x(),))
        loss.backward()


class Entering(Base):
    """Enters a context by hand; a trace that ends inside of it does not come to its end."""

    def forward(self, x: Tensor) -> Tensor:
        context = torch.no_grad()
        context.__enter__()
        torch.set_default_dtype(torch.float64)
        y: Tensor = self.one(x)
        return y


@pytest.mark.parametrize("capture", ["symbolic", *CAPTURES])
@pytest.mark.parametrize("examples", [False, True])
def test_modes_of_the_process(capture: str, examples: bool) -> None:
    torch._dynamo.reset()
    try:
        with contextlib.suppress(cpt_fx.CaptureError):
            cpt_fx.transform(made(Entering), Static(4), capture=capture, example_inputs=(x(),) if examples else None)
        assert torch.is_grad_enabled() and torch.get_default_dtype() is torch.float32
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)


def test_an_error_leaves_nothing_either() -> None:
    class Failing(Counting):
        def before(self, x: Tensor) -> None:
            super().before(x)
            self.one.weight.data.zero_()
            raise RuntimeError("too late")

    model = made(Failing)
    before = world(model)
    with pytest.raises(RuntimeError, match="too late"), dry_run(model):
        model(x())
    assert world(model) == before
    for capture in CAPTURES:
        with pytest.raises((RuntimeError, ValueError), match="too late"):
            cpt_fx.transform(model, Static(4), capture=capture, example_inputs=(x(),))
    assert world(model) == before


def parts() -> Iterator[tuple[Any, Callable[[Any], object]]]:
    """Things that a module may hold, each with a change."""
    loop: list[Any] = [1]
    loop.append(loop)
    yield loop, lambda it: it.append(2)
    yield {1: {2: {3: [set()]}}}, lambda it: it[1][2][3][0].add(1)
    yield deque([1, 2], maxlen=2), lambda it: it.append(3)
    yield {"b": 1, "a": 2}, lambda it: it.update(b=it.pop("b"))
    yield OrderedDict(b=1, a=2), lambda it: it.move_to_end("b")
    yield [torch.ones(2)], lambda it: it[0].add_(1)
    yield [torch.ones(2)], lambda it: it.__setitem__(0, torch.zeros(2))
    yield (Meter(),), lambda it: setattr(it[0], "other", 1)
    yield functools.partial(counter()), lambda it: it()
    yield Meter().note, lambda it: it(3)
    yield list(range(5000)), lambda it: it.clear()
    yield SimpleNamespace(a=1, inner=Namespace(b=[2])), lambda it: it.inner.b.append(3)
    yield [list[int], Meter, print, object(), range(3), iter([1])], lambda it: it.append(1)
    yield nn.ParameterDict({"a": torch.ones(1)}), lambda it: it.__setitem__("b", torch.ones(2))
    yield numpy.zeros(2), lambda it: it.fill(1)
    yield UserDict(a=1), lambda it: it.update(a=2)
    yield ChainMap({"a": 1}), lambda it: it.update(b=2)
    yield torch.optim.Adam([torch.ones(2, requires_grad=True)]), lambda it: it.state.update(a=[1])


@pytest.mark.parametrize(("place", "how"), list(itertools.product(range(18), ["attribute", "nested"])))
def test_whatever_a_module_holds(place: int, how: str) -> None:
    value, change = list(parts())[place]
    module: Any = nn.Linear(2, 2)
    module.thing = value if how == "attribute" else [{"inner": value}]
    before, held = repr(shown(value)), module.thing
    with unchanged(module, values=True):
        change(value)
        assert repr(shown(value)) != before
        module.thing = None
    assert repr(shown(value)) == before and module.thing is held


SMALL: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attn_implementation": "eager",
}  # fmt: skip
ASKED = {"output_hidden_states": True, "output_attentions": True}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "asked"), [("Bert", "call"), ("Llama", "configuration"), ("GPT2", "call")])
def test_libraries_that_hook_themselves(name: str, asked: str) -> None:
    """All hidden states and attentions come once, in the first call and later, whoever has looked before."""
    library = pytest.importorskip("transformers")
    options = {**SMALL, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16} if name == "GPT2" else SMALL
    options, words = {**options, **(ASKED if asked == "configuration" else {})}, torch.arange(3, 13).reshape(2, 5)
    given = {"input_ids": words, **(ASKED if asked == "call" else {})}
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind = getattr(library, f"{name}Model")
    plain = kind(getattr(library, f"{name}Config")(**options)).eval()
    wanted = copy.deepcopy(plain)(**given)
    model: Any = cpt_fx.transform(plain, Static(32), example_kwargs=given)
    cpt_fx.cost(model, Static(4), (), example_kwargs=given)
    cpt_fx.inspect(model).verify(**given, gradients=False)
    for called in (model, model, plain):
        found = called(**given)
        for part in ("hidden_states", "attentions"):
            assert len(found[part]) == len(wanted[part]) == (2 if part == "hidden_states" else 1)
            assert all(torch.equal(one, other) for one, other in zip(found[part], wanted[part], strict=True))
        assert torch.equal(found[0], wanted[0])


@pytest.mark.parametrize("capture", ["symbolic", "dynamo"])
def test_memory_can_be_resized_as_before(capture: str) -> None:
    """`Tensor.numpy` forbids it for ever, and sharded models free what they gathered by it."""
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(3, 4)
    result = cpt_fx.transform(model, Static(4), capture=capture, example_inputs=(x,))
    result(x).sum().backward()
    cpt_fx.inspect(result).verify(x)
    cpt_fx.cost(model, Static(4), (x,))
    held = (x, *model.parameters(), *model.buffers(), *(one.grad for one in model.parameters() if one.grad is not None))
    assert all(tensor.untyped_storage().resizable() for tensor in held)


@pytest.mark.parametrize("negative", [False, True])
def test_numbers_read_by_numpy_have_their_sign(negative: bool) -> None:
    x = torch.complex(torch.randn(3), torch.randn(3))
    part = x.conj().imag if negative else x.imag
    assert part.is_neg() == negative
    assert array_of(part).tolist() == part.tolist()
    assert array_of(x.conj()).tolist() == x.conj().tolist()
    assert array_of(nn.Parameter(torch.ones(2, 3).T)).shape == (3, 2)
