"""`torch.compile` of a transformed model: the same numbers, no graph breaks, and nothing is compiled again."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import cpt_fx
from cpt_fx.formats import Format, Group, Scheme
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Bits, Custom, Static, named
from tests.capture.programs import PROGRAM, taken
from tests.training import check_same, counters, same, train_step
from tests.zoo import ZOO


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_whole(model: nn.Module, backend: Any) -> nn.Module:
    compiled: Any = torch.compile(model, fullgraph=True, backend=backend)
    assert isinstance(compiled, nn.Module)
    return compiled


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))


@pytest.mark.slow
def test_every_width_without_compiling_again() -> None:
    plan = Custom(lambda step: Bits(step + 1, step + 1, 32), total_steps=32)
    eager = cpt_fx.transform(small(), plan)
    traced = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compile_whole(traced, counter)
    x = torch.randn(4, 3, 6, 6)
    for _ in range(32):
        ours, theirs = train_step(compiled, (x,), {}), train_step(eager, (x,), {})
        assert torch.equal(ours.output, theirs.output), plan.position
        for name, gradient in theirs.gradients.items():
            assert same(ours.gradients[f"_orig_mod.{name}"], gradient), (plan.position, name)
        plan.step()
    assert counter.frame_count == 1
    for name, record in counters(traced).items():
        assert int(record[0]) == 32, name
    ranges = {key: value for key, value in eager.state_dict().items() if "cpt_fx_" in key and "_range_" in key}
    assert ranges and all(same(traced.state_dict()[key], value) for key, value in ranges.items())


@pytest.mark.slow
def test_modes_compile_once_each() -> None:
    plan = named("CR", q_min=3, q_max=8, total_steps=8, cycles=2)
    eager = cpt_fx.transform(small(), plan)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compile_whole(eager, counter)
    x = torch.randn(4, 3, 6, 6)
    for _ in range(3):
        compiled.train()
        compiled(x)
        compiled.eval()
        with torch.no_grad():
            expected: Tensor = eager(x)
            assert torch.equal(compiled(x), expected)
        plan.step()
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vision_transformer", "in_place", "tied_weights", "lora", "residual_net", "frozen"])
def test_other_models(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    eager = cpt_fx.transform(model.eval(), Static(Bits(4, 4, 32)))
    compiled = compile_whole(copy.deepcopy(eager), "aot_eager")
    ours, theirs = train_step(compiled, args, kwargs), train_step(eager, args, kwargs)
    ours.gradients = {key.removeprefix("_orig_mod."): value for key, value in ours.gradients.items()}
    ours.parameters = {key.removeprefix("_orig_mod."): value for key, value in ours.parameters.items()}
    ours.buffers = {key.removeprefix("_orig_mod."): value for key, value in ours.buffers.items()}
    check_same(ours, theirs)


@pytest.mark.slow
def test_inductor() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    eager = cpt_fx.transform(model, Static(Bits(6, 6, 32)))
    compiled = compile_whole(copy.deepcopy(eager), "inductor")
    x = torch.randn(4, 8)
    ours, theirs = train_step(compiled, (x,), {}), train_step(eager, (x,), {})
    torch.testing.assert_close(ours.output, theirs.output)
    for name, gradient in theirs.gradients.items():
        torch.testing.assert_close(ours.gradients[f"_orig_mod.{name}"], gradient)


class Attending(nn.Module):
    """Fused attention, which is decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return result


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["symbolic", PROGRAM, "dynamo"])
def test_a_cycle_over_opened_attention(capture: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every width from 3 to 8 for weights, activations and gradients, in training and in evaluation."""
    plan = Custom(lambda step: Bits(3 + step % 6, 3 + step % 6, 3 + step % 6), total_steps=12)
    x = torch.randn(2, 5, 16)
    model = taken(Attending(), plan, capture, (x,))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compile_whole(model, counter)
    torch._dynamo.utils.counters.clear()
    for step in range(12):
        compiled.train()
        compiled(x).square().mean().backward()
        with torch.no_grad():
            compiled.eval()(x)
        plan.step()
        if step == 1:
            seen = counter.frame_count
    assert counter.frame_count == seen <= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert not torch._dynamo.utils.counters["recompiles"]
    assert "captured again" not in caplog.text


class Residual(nn.Module):
    """Two layers and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm1(self.conv1(x)).relu()
        result: Tensor = (self.norm2(self.conv2(hidden)) + x).relu()
        return result


@pytest.mark.slow
def test_compiled_code_keeps_no_quantized_copies() -> None:
    """Left to itself the compiler saves what convolutions read, and for each ReLU a mask of the source beside it."""
    plain, x = nn.Sequential(Residual(), Residual()), torch.randn(4, 8, 16, 16, requires_grad=True)
    quantized = cpt_fx.transform(copy.deepcopy(plain), Static(4))
    kept = []
    for model in (plain, quantized):
        # Inductor's partition of a graph into forward and backward, without its code.
        compiled = compile_whole(model, "aot_eager_decomp_partition")
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = compiled(x).square().mean()
        loss.backward()
        kept.append(sum(sizes.values()))
    # The layers of the plain model save their own inputs; those of the quantized one compute them from the norm's.
    assert kept[1] < 0.8 * kept[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", ["quantizers/numerics.py", "quantizers/ops.py", "integer/products.py", "ir/recurrence.py"]
)
def test_compilers_do_not_take_the_code_of_another_version_from_their_caches(changed: str, tmp_path: Path) -> None:
    package = Path(str(cpt_fx.__file__)).parent
    shutil.copytree(package, tmp_path / "cpt_fx", ignore=shutil.ignore_patterns("__pycache__"))
    keys = [torch.compiler.config.cache_key_tag]
    for text in ("", "# another version"):
        with (tmp_path / "cpt_fx" / changed).open("a", encoding="utf-8") as file:
            file.write(text)
        code = "import torch, cpt_fx.quantizers.ops; print(torch.compiler.config.cache_key_tag)"
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        keys.append(run.stdout.strip())
    assert "cpt_fx:" in keys[0]
    assert keys[0].strip() == keys[1] != keys[2]


@pytest.mark.slow
def test_inductor_reads_the_scales_of_vectors_as_it_has_stored_them() -> None:
    """It lays out what a convolution reads with the channels last, whatever the trace said."""
    rule = Rule(input=Format(scheme=Scheme.AFFINE, group=Group.VECTOR))
    plain = nn.Conv2d(5, 9, 1)
    results: list[nn.Module] = [
        cpt_fx.transform(copy.deepcopy(plain), Static(8), recipe=Recipe(name="vectors", conv=rule)) for _ in range(2)
    ]
    x = torch.randn(2, 5, 6, 8)
    compiled: Any = torch.compile(results[1])
    for run in (results[0], compiled):
        run(x).square().mean().backward()
    for one, other in zip(results[0].parameters(), results[1].parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert float((one.grad - other.grad).abs().max()) < 1e-5 * float(one.grad.abs().max())
