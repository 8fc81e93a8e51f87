"""What goes around a result: compilers, DDP, FSDP, torch.func, trace and export; right, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import cpt_fx
from tests.ir.result.models import (
    QUIET,
    Chain,
    Net,
    batch,
    check_ran,
    close,
    equal,
    far,
    made,
    quantized_or_refused,
    runs,
    ways,
)
from tests.ir.result.test_hooks import twice

pytestmark = QUIET


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@ways
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str, way: str) -> None:
    result, model = made(Chain(), way), Chain()
    expected = result(batch())
    compiled: Any = torch.compile(result, backend=backend)
    output = compiled(batch())
    assert close(output, expected) and far(output, model(batch()))
    torch.autograd.backward(output.sum())
    assert result.fc.weight.grad is not None
    with torch.no_grad():
        assert close(compiled(batch()), expected)
    exact: Any = torch.compile(made(Chain(), way, 32), backend=backend)
    assert close(exact(batch()), model(batch()))


@pytest.mark.slow
@ways
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_hooks_and_changes_after_compiling(backend: str, way: str) -> None:
    result = made(Net(), way)
    compiled: Any = torch.compile(result, backend=backend)
    expected = compiled(batch())
    seen: list[int] = []
    handle = result.fc.register_forward_hook(twice(seen))
    assert close(compiled(batch())[0], 2 * expected[0]) and len(seen) == 1
    handle.remove()
    assert close(compiled(batch()), expected)
    result.temperature = 2.0
    assert close(compiled(batch())[0], expected[0] / 2)
    torch.manual_seed(1)
    result.fc = nn.Linear(8, 7)
    torch.manual_seed(1)
    model = Net()
    torch.manual_seed(1)
    model.fc = nn.Linear(8, 7)
    model.temperature = 2.0
    assert close(compiled(batch()), made(model, "dynamo")(batch()))


@ways
def test_compiled_in_place_and_within_a_function(way: str) -> None:
    result, model = made(Chain(), way), Chain()
    expected = result(batch())

    @torch.compile(backend="eager")
    def step(x: Any) -> Any:
        return result(x) * 2

    assert close(step(batch()), 2 * expected)
    result.compile(backend="eager")
    assert close(result(batch()), expected) and far(expected, model(batch()))


@ways
def test_distributed(way: str, group: None) -> None:
    result = made(Chain(), way, example_inputs=(batch(),))
    wrapped = nn.parallel.DistributedDataParallel(result)
    before = runs(result)
    output = wrapped(batch())
    assert close(output, made(Chain(), "dynamo")(batch())) and far(output, Chain()(batch()))
    check_ran(result, before, "backbone.0", "fc")
    output.sum().backward()
    assert result.fc.weight.grad is not None and wrapped.module is result
    seen: list[int] = []
    result.fc.register_forward_hook(lambda module, args, output: seen.append(1))
    wrapped(batch()).sum().backward()
    assert seen == [1]


@ways
def test_fully_sharded(way: str, group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected = made(Chain(), "dynamo")(batch())
    result = made(Chain(), way, example_inputs=(batch(),))
    mesh = init_device_mesh("cpu", (1,))

    def run() -> Any:
        fully_shard(result.backbone, mesh=mesh)
        fully_shard(result, mesh=mesh)
        output = result(batch())
        output.sum().backward()
        return output

    quantized_or_refused(run, Chain()(batch()), expected)


@ways
def test_a_sharded_model_is_looked_at(way: str, group: None) -> None:
    """What was gathered for a pass is freed in the next: to put its values back would write to memory that is gone."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    result = made(Chain(), way, example_inputs=(batch(),))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(result.backbone, mesh=mesh)
    fully_shard(result, mesh=mesh)
    result(batch()).sum().backward()
    expected = result(batch())
    assert cpt_fx.inspect(result).verify(batch())
    assert equal(result(batch()), expected)
    assert all(bool(value.isfinite().all()) for value in map(torch.Tensor.detach, result.parameters()))


def test_functional_call_with_a_state_dict() -> None:
    result = made(Chain(), "symbolic")
    assert equal(torch.func.functional_call(result, result.state_dict(), (batch(),)), result(batch()))


@ways
def test_functional_call(way: str) -> None:
    result, model = made(Chain(), way), Chain()
    result(batch())
    state = {name: 2 * value.detach() for name, value in result.named_parameters()}
    twin = copy.deepcopy(model)
    twin.load_state_dict(state)
    quantized_or_refused(
        lambda: torch.func.functional_call(result, state, (batch(),)),
        twin(batch()),
        made(twin, "dynamo")(batch()),
    )
    if way != "dynamo":  # refused by name
        exact = made(Chain(), way, 32)
        exact(batch())
        assert equal(torch.func.functional_call(exact, state, (batch(),)), twin(batch()))
    assert equal(model(batch()), Chain()(batch()))


@ways
def test_gradients_by_torch_func(way: str) -> None:
    result = made(Chain(), way)
    result(batch()).square().sum().backward()
    expected = {name: value.grad.clone() for name, value in result.named_parameters()}
    result.eval()
    state = {name: value.detach() for name, value in result.named_parameters()}

    def loss(state: Any) -> Any:
        return torch.func.functional_call(result, state, (batch(),)).square().sum()

    def plain(state: Any) -> Any:
        return torch.func.functional_call(Chain(), state, (batch(),)).square().sum()

    left = torch.func.grad(plain)(state)
    quantized_or_refused(lambda: list(torch.func.grad(loss)(state).values()), list(left.values()))
    assert far(list(expected.values()), list(left.values()))


@ways
@pytest.mark.parametrize("training", [True, False])
def test_traced(training: bool, way: str) -> None:
    result = made(Chain(), way).train(training)
    result(batch())
    other = batch(9)
    quantized_or_refused(lambda: torch.jit.trace(result, (batch(),), check_trace=False)(other), Chain()(other))


@ways
def test_scripted(way: str) -> None:
    result = made(Chain(), way)
    result(batch())

    def run() -> Any:
        try:
            scripted = torch.jit.script(result)
        except (RuntimeError, NotImplementedError) as error:  # TorchScript's own refusal
            raise RuntimeError(f"cpt_fx: {error}") from error
        return scripted(batch())

    quantized_or_refused(run, Chain()(batch()))


@ways
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_exported(training: bool, strict: bool, way: str) -> None:
    """A program of the quantized model, or a refusal by name; never the plain one."""
    result = made(Chain(), way).train(training)
    result(batch())
    other = batch(9)

    def run() -> Any:
        return torch.export.export(result, (batch(),), strict=strict).module()(other)

    quantized_or_refused(run, Chain()(other))


@ways
def test_symbolic_trace_of_a_result(way: str) -> None:
    """Somebody else's torch.fx tool over our result."""
    result = made(Chain(), way)
    result(batch())
    quantized_or_refused(lambda: torch.fx.symbolic_trace(result)(batch()), Chain()(batch()))


@pytest.mark.slow
@ways
def test_checkpointed_blocks(way: str) -> None:
    """`checkpoint` around a block of the result, as training scripts write it."""
    from torch.utils.checkpoint import checkpoint

    class Saving(Net):
        def encode(self, x: Any) -> Any:
            h = self.act(self.stem(x))
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=False)
            return h

    result = made(Saving(), way)
    reference = made(Saving(), "dynamo")
    for model in (result, reference):
        model(batch())[0].square().sum().backward()
    grads = [[p.grad for _, p in model.named_parameters() if p.grad is not None] for model in (result, reference)]
    assert close(*grads) and far(result(batch()), Saving()(batch()))
    exact, plain = made(Saving(), way, 32), Saving()
    assert equal(exact(batch()), plain(batch()))


@ways
def test_autocast_and_inference_mode(way: str) -> None:
    result, model = made(Chain(), way), Chain()
    result(batch())
    with torch.autocast("cpu", torch.bfloat16):
        output = result(batch())
        assert output.dtype is torch.bfloat16 and far(output, model(batch()))
    with torch.inference_mode():
        assert far(result(batch()), model(batch()))
    assert far(result.eval()(batch()), model(batch()))
