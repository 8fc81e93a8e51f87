"""`torch.compile` around a result that Dynamo captured: the rewritten graphs are compiled, never the plain code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.testing import CompileCounterWithBackend

import cpt_fx
from cpt_fx import Format
from cpt_fx.formats import Range, Scheme
from cpt_fx.quantizers.ops import QUANTIZERS
from cpt_fx.schedules import named
from tests.capture.dynamo.models import EXACT, Blocks, Checkpointed, Modes, seeded
from tests.training import train_step
from tests.zoo import ANY_MODEL
from tests.zoo.any_model import missing


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(7))
SHAPES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "modes": (lambda: seeded(Modes), X),
    "broken": (lambda: seeded(Blocks, breaks=True), X),
    "sequential": (lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LSTM(4, 3)), X),
    "checkpointed": (lambda: seeded(Checkpointed, reentrant=False, breaks=False), torch.randn(5, 6)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_compiler_gets_the_rewritten_graphs(name: str) -> None:
    make, x = SHAPES[name]
    torch.manual_seed(0)
    model = make()
    schedule = named("CR", q_min=3, q_max=8, total_steps=16, cycles=2)
    result = cpt_fx.transform(model, schedule, capture="dynamo", recipe=EXACT)
    counter = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(result, backend=counter)
    counts, widths = [], set()
    for _ in range(6):
        train_step(compiled, (x,), {})
        schedule.step()
        counts.append(counter.frame_count)
        widths.add(cpt_fx.inspect(result).quantizers[0].bits)
    assert counts[0] >= 1 and counts == counts[:1] * 6, f"a change of bits compiled something: {counts}"
    assert len(widths) > 2
    for graph in counter.graphs:
        quantizers = [node for module in graph.modules() if isinstance(module, fx.GraphModule)
                      for node in module.graph.nodes if node.target in QUANTIZERS]  # fmt: skip
        assert quantizers, "a graph without a quantizer was compiled"
    compiled.eval()
    with torch.no_grad():
        compiled(x)
        once = counter.frame_count
        for _ in range(2):
            compiled(x)
    train_step(compiled.train(), (x,), {})
    assert counter.frame_count == once, "a switch of modes compiled more than once"


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_compiled_numbers_are_the_eager_ones(name: str) -> None:
    make, x = SHAPES[name]
    steps = []
    for backend in ("eager", "aot_eager"):
        torch.manual_seed(0)
        model = make()
        schedule = named("CR", q_min=3, q_max=8, total_steps=8, cycles=2, q_grad=32)
        result = cpt_fx.transform(model, schedule, capture="dynamo", recipe=EXACT)
        module: Any = result if backend == "eager" else torch.compile(result, backend=backend)
        for seed in range(3):
            taken = train_step(module, (x,), {}, seed=seed, lr=0.0)
            schedule.step()
        evaluated = result.eval()(x)
        steps.append((taken, evaluated, result.state_dict()))
    (eager, _, state), (compiled, _, other) = steps

    def close(ours: Tensor | None, theirs: Tensor | None) -> bool:
        if ours is None or theirs is None:
            return ours is theirs
        # Where a model breaks, gradients that cross a border between graphs are added in another order. Quantized
        # gradients would turn such a last bit into a step of their grid.
        return float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max()) + 1e-6

    renamed = {name.removeprefix("_orig_mod."): value for name, value in compiled.gradients.items()}
    assert all(close(renamed[name], value) for name, value in eager.gradients.items())
    assert all(close(other[name], value) for name, value in state.items() if value.is_floating_point())


@pytest.mark.slow
def test_a_compiler_that_wants_one_graph_gets_one_or_an_error() -> None:
    counter = CompileCounterWithBackend("eager")
    whole = cpt_fx.transform(
        seeded(Blocks, breaks=False), named("CR", q_min=3, q_max=8, total_steps=8), capture="dynamo"
    )
    torch.compile(whole, backend=counter, fullgraph=True)(X)
    assert counter.frame_count == 1
    broken = cpt_fx.transform(
        seeded(Blocks, breaks=True), named("CR", q_min=3, q_max=8, total_steps=8), capture="dynamo"
    )
    for _ in range(3):  # also once the model is known to break
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            torch.compile(broken, backend="eager", fullgraph=True)(X)
        for _ in range(3):
            broken(X)


def test_in_place_compilation_and_models_around_it() -> None:
    counter = CompileCounterWithBackend("eager")
    result = cpt_fx.transform(seeded(Modes), named("CR", q_min=3, q_max=8, total_steps=8), capture="dynamo")
    result.compile(backend=counter)
    result(X)
    assert counter.frame_count == 1 and cpt_fx.inspect(result).quantizers[0].times_run == 1

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.before, self.inner = nn.Linear(4, 4), inner

        def forward(self, x: Tensor) -> Any:
            return self.inner(torch.relu(self.before(x)))

    counter = CompileCounterWithBackend("eager")
    inner = cpt_fx.transform(seeded(Modes), named("CR", q_min=3, q_max=8, total_steps=8), capture="dynamo")
    torch.compile(Around(inner), backend=counter)(X)
    assert counter.frame_count == 2 and cpt_fx.inspect(inner).quantizers[0].times_run == 1


# All of the zoo: benchmarks/compiled_zoo.py.
INDUCTOR = ("gcn", "sdpa_causal_dropout")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_compiles_once_for_a_whole_schedule(name: str) -> None:
    entry = ANY_MODEL[name]
    reason = missing(entry.needs)
    if reason is not None:
        pytest.skip(reason)
    model, args, kwargs = entry.build()
    schedule = named("CR", q_min=3, q_max=8, total_steps=12, cycles=2)
    result = cpt_fx.transform(model, schedule, capture="dynamo")
    counter = CompileCounterWithBackend("inductor")
    compiled: Any = torch.compile(result, backend=counter)
    counts = []
    for step in range(12):
        train_step(compiled, args, kwargs, seed=step)
        schedule.step()
        counts.append(counter.frame_count)
    # A model of transformers may fill in its configuration in the first call, which is a second capture of its own.
    assert counts[0] >= 1 and len(set(counts[1:])) == 1, counts
    compiled.eval()
    with torch.no_grad():
        compiled(*args, **kwargs)
        once = counter.frame_count
        compiled(*args, **kwargs)
    train_step(compiled.train(), args, kwargs)
    assert counter.frame_count == once
    assert all(quantizer.times_run for quantizer in cpt_fx.inspect(result).quantizers if quantizer.role == "weight")


class Teacher(nn.Module):
    """A part that nobody trains runs in inference mode: there operators that write are not taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            wanted = self.teacher(x)
        return self.student(x) - wanted.clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize("range", [Range.OBSERVER, Range.LEARNED])
def test_a_region_in_inference_mode(range: Range) -> None:
    input = Format(scheme=Scheme.AFFINE, range=range)
    recipe = cpt_fx.recipes.default().with_rule("linear", input=input, gradient=None)
    result = cpt_fx.transform(seeded(Teacher), cpt_fx.schedules.Static(4), capture="dynamo", recipe=recipe)
    found = []
    compiled: Any = torch.compile(result, backend="aot_eager")
    for module in (copy.deepcopy(result), compiled):
        for _ in (1, 2):
            module.train()(X)
        found.append(module.eval()(X))
    assert torch.equal(*found)
