"""State lies where the tensors lie that it belongs to: moved parts, several devices, checkpoints of another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import cpt_fx
from cpt_fx.ir.result import sessions_in
from cpt_fx.quantizers.counters import COUNTER_LENGTH
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_LEARNED, FAKE_QUANTIZE_OBSERVED
from tests.ir.state.device_models import MODELS, RECIPES, Attending, Convolutional, Split, devices, transformed
from tests.ir.state.models import (
    Net,
    batch,
    buffers_of_ours,
    captures,
    copied,
    learned,
    net,
    plan,
    probe,
    ran,
)  # fmt: skip


def split_step(result: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for output in result(batch()):
        output.square().sum().backward()
    optimizer.step()


def halves(model: nn.Module) -> dict[str, set[str]]:
    """Return the devices found in each half."""
    found: dict[str, set[str]] = {}
    for name, device in devices(model).items():
        found.setdefault(name.partition(".")[0], set()).add(device)
    return found


MOVES: dict[str, Callable[[Split, Callable[[nn.Module], nn.Module]], nn.Module]] = {}


def move(function: Callable[[Split, Callable[[nn.Module], nn.Module]], nn.Module]) -> Any:
    MOVES[function.__name__] = function
    return function


@move
def before(model: Split, transform: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model.second.to("meta")
    return transform(model)


@move
def after(model: Split, transform: Callable[[nn.Module], nn.Module]) -> nn.Module:
    result = transform(model)
    result.get_submodule("second").to("meta")
    return result


@move
def after_a_call(model: Split, transform: Callable[[nn.Module], nn.Module]) -> nn.Module:
    result = transform(model)
    result(batch())
    result.get_submodule("second").to("meta")
    return result


@move
def layer_after_a_call(model: Split, transform: Callable[[nn.Module], nn.Module]) -> nn.Module:
    result = transform(model)
    result(batch())
    result.get_submodule("second.0").to(device="meta")
    return result


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("how", MOVES)
@captures
def test_parts_on_two_devices(capture: str, how: str, recipe: str) -> None:
    schedule = plan()
    result = MOVES[how](Split(), lambda model: transformed(model, schedule, capture=capture, recipe=recipe))
    optimizer = torch.optim.AdamW(result.parameters(), lr=0.01)
    for _ in range(3):
        split_step(result, optimizer)
        schedule.step()
    assert halves(result) == {"first": {"cpu"}, "second": {"meta"}}
    result.eval()
    one, two = result(batch())
    assert (one.device.type, two.device.type) == ("cpu", "meta")
    assert halves(result) == {"first": {"cpu"}, "second": {"meta"}}
    ((_, session),) = sessions_in(result)
    where = {name.partition("_")[0]: counters.device.type for name, counters in session.state.counters.named_buffers()}
    assert where == {"first": "cpu", "second": "meta"}


@captures
def test_widths_run_on_the_device_that_is_real(capture: str) -> None:
    """The half on the CPU is quantized as it would be if all lay there."""
    outputs = []
    for moved in (False, True):
        torch.manual_seed(0)
        schedule = plan()
        result = transformed(Split(), schedule, capture=capture)
        if moved:
            result.get_submodule("second").to("meta")
        for _ in range(5):
            outputs.append(result(batch())[0].detach())
            schedule.step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs[:5], outputs[5:], strict=True))
    assert not torch.equal(outputs[0], outputs[4])


@captures
def test_a_checkpoint_of_a_real_device_on_meta(capture: str) -> None:
    """Copied into meta tensors it leaves them where they are; assigned, it brings its own."""
    source = learned(plan(), capture)
    ran(source)
    result = probe(plan(), capture).to("meta")
    result(torch.zeros(3, 1, device="meta"))
    assert set(devices(result).values()) == {"meta"}
    state = copied(source.state_dict())
    result.load_state_dict(state, assign=True)
    ours = buffers_of_ours(result)
    assert {tensor.device.type for tensor in ours.values()} == {"cpu"}
    for key, tensor in buffers_of_ours(source).items():
        assert torch.equal(tensor, ours[key]) and ours[key].dtype is torch.float32
    assert ran(_with_eye(result).eval()) == (8, 8)


def _with_eye(result: nn.Module) -> nn.Module:
    """Put back the probe's constant, which is in no checkpoint."""
    result.eye = torch.eye(result.get_buffer("eye").shape[0])
    return result


@captures
@pytest.mark.parametrize("position", [0, 4])
@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter:UserWarning")
def test_loading_reads_nothing_of_a_device(capture: str, position: int) -> None:
    """The position in a checkpoint that lies on the CPU is taken by a model that lies elsewhere."""
    source_plan, schedule = plan(), plan()
    source = cpt_fx.transform(net(), source_plan, capture=capture)
    source(batch())
    source_plan.step(position)
    result = cpt_fx.transform(Net().to("meta"), schedule, capture=capture)
    result(batch().to("meta"))
    result.load_state_dict(copied(source.state_dict()))
    assert schedule.position == position
    assert set(devices(result).values()) == {"meta"}


@captures
def test_emptied_and_loaded(capture: str) -> None:
    """Large models are made on meta, given memory by `to_empty`, and loaded."""
    source = cpt_fx.transform(net(), plan(), capture=capture)
    source(batch())
    result = cpt_fx.transform(Net().to("meta"), plan(), capture=capture)
    result(batch().to("meta"))
    result = result.to_empty(device="cpu")
    result.load_state_dict(copied(source.state_dict()))
    assert set(devices(result).values()) == {"cpu"}
    assert torch.equal(result.eval()(batch(1)), source.eval()(batch(1)))


@captures
def test_emptied_without_ranges_in_the_checkpoint(capture: str) -> None:
    """What `to_empty` left is no range: a plain checkpoint says so, and evaluation uses the batch's own."""
    result = cpt_fx.transform(Net().to("meta"), plan(), capture=capture)
    result(batch().to("meta"))
    result = result.to_empty(device="cpu")
    result.load_state_dict(net().state_dict())
    with pytest.warns(UserWarning):
        output = result.eval()(batch(1))
    assert torch.equal(output, cpt_fx.transform(net(), cpt_fx.schedules.Static(8), capture=capture)(batch(1)))


@captures
def test_back_and_forth(capture: str) -> None:
    """`.to()` of the whole moves all of ours, and says where by the result of the next step."""
    schedule = plan()
    result = cpt_fx.transform(net(), schedule, capture=capture)
    result(batch())
    for device in ("meta", "cpu", "meta"):
        result = result.to(device) if device == "meta" else result.to_empty(device=device)
        assert set(devices(result).values()) == {device}
        assert result(batch().to(device)).device.type == device
        schedule.step()
    assert {tensor.dtype for tensor in buffers_of_ours(result).values()} == {torch.float32}


@captures
def test_under_a_default_device(capture: str) -> None:
    """What is made by `transform` follows the layers, not `torch.device` as a context."""
    with torch.device("meta"):
        result = cpt_fx.transform(net_on_cpu(), plan(), capture=capture)
    result(batch()).sum().backward()
    assert set(devices(result).values()) == {"cpu"}


@pytest.mark.parametrize("op", [FAKE_QUANTIZE_OBSERVED, FAKE_QUANTIZE_LEARNED])
@pytest.mark.parametrize("training", [True, False])
def test_a_range_on_another_device_than_the_tensor(op: Any, training: bool) -> None:
    """A product without a layer may be made where its module is not. A CPU build goes this way only."""
    with FakeTensorMode(), torch.no_grad():
        running = [torch.empty(()) for _ in range(3)]
        x, bits = torch.empty(4, 6, device="cuda"), torch.tensor(3)
        assert op(x, bits, *running, training).device.type == "cuda"
        assert {tensor.device.type for tensor in running} == {"cpu"}


def test_a_record_on_another_device_than_the_tensor() -> None:
    """No kernel is given memory that it cannot write."""
    x, counters = torch.randn(8, 6), torch.zeros(COUNTER_LENGTH, dtype=torch.int64, device="meta")
    quantized = FAKE_QUANTIZE(x, torch.tensor(3), counters=counters)
    assert torch.equal(quantized, FAKE_QUANTIZE(x, torch.tensor(3)))
    assert not torch.equal(quantized, x)


def net_on_cpu() -> Net:
    with torch.device("cpu"):
        return Net()


def fake_cuda(value: Any, mode: FakeTensorMode) -> Any:
    """Turn tensors of a module, or one tensor, into fake ones that say they lie on a GPU."""

    def convert(tensor: Tensor) -> Tensor:
        with mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake

    if isinstance(value, Tensor):
        return convert(value)
    for module in value.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = convert(parameter)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = convert(buffer)
    return value


# A build without CUDA knows no `copy_`, indexing and `.to("cuda")` of fake tensors; what it does not know is left out.
FAKE: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "conv": (lambda: Convolutional(bare=True), MODELS["conv"][1]),
    "attention": (lambda: Attending(fused=False), MODELS["attention"][1]),
    "linear": (Net, batch),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("capture", ["symbolic", "auto"])
@pytest.mark.parametrize("name", FAKE)
@pytest.mark.parametrize("mode_of_model", ["training", "evaluation"])
@pytest.mark.filterwarnings("ignore")  # evaluation before anything was learned says so
def test_fake_cuda(name: str, capture: str, recipe: str, mode_of_model: str) -> None:
    """Fake tensors refuse to be mixed with others, or read; their backward pass needs a build with CUDA."""
    make, inputs = FAKE[name]
    mode = FakeTensorMode()
    schedule, model = plan(), fake_cuda(make(), mode)
    x = fake_cuda(inputs(), mode)
    with mode, torch.no_grad():
        assert model(x).device.type == "cuda"  # as far as this build goes, the plain model runs
    result = transformed(model, schedule, capture=capture, recipe=recipe)
    result.train(mode_of_model == "training")
    with mode, torch.no_grad():
        for _ in range(3):
            assert result(x).device.type == "cuda"
            schedule.step()
    assert set(devices(result).values()) == {"cuda"}
