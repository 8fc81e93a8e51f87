"""What copies, averages or overwrites the model's tensors changes no width: EMA, SWA, checkpoints loaded in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import cpt_fx
from cpt_fx.schedules import Static
from tests.ir.state.models import (
    DYNAMIC,
    Probe,
    batch,
    buffers_of_ours,
    captures,
    copied,
    learned,
    net,
    plan,
    probe,
    ramp,
    ran,
    ran_backward,
    state_of_ours,
)  # fmt: skip

AVERAGES = {
    "default": {},
    "use_buffers": {"use_buffers": True},
    "multi_avg": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "multi_avg with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "avg_fn with buffers": {"avg_fn": lambda old, new, _: 0.9 * old + 0.1 * new, "use_buffers": True},
}


@captures
@pytest.mark.parametrize("how", AVERAGES)
def test_an_average_evaluates_at_the_evaluation_width(capture: str, how: str) -> None:
    schedule = plan()
    result = learned(schedule, capture, example_inputs=(ramp(),))
    average = AveragedModel(result, **AVERAGES[how])
    for step in range(6):
        average.update_parameters(result)
        assert ran(average.eval()) == (8, 8), step
        assert ran(result) == schedule.bits(step)[:2]
        schedule.step()
    assert ran(average.train()) == (3, 3) == schedule.bits(6)[:2]


@captures
@pytest.mark.parametrize("how", AVERAGES)
def test_an_average_never_switched_by_a_call(capture: str, how: str) -> None:
    """The average is made while training and put into evaluation mode by attribute."""
    schedule = plan()
    result = learned(schedule, capture, example_inputs=(ramp(),))
    average = AveragedModel(result, **AVERAGES[how])
    for module in average.modules():
        module.training = False
    for _ in range(3):
        average.update_parameters(result)
        schedule.step()
    assert ran(average) == (8, 8)


@captures
def test_an_average_of_equal_models_is_that_model(capture: str) -> None:
    """Averages of parameters and ranges, at no other width: what is averaged is what ran."""
    schedule = plan()
    result = cpt_fx.transform(net(), schedule, capture=capture, example_inputs=(batch(),))
    result(batch())
    average = AveragedModel(result, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(4):
        average.update_parameters(result)
        schedule.step()
    assert torch.equal(average.eval()(batch(1)), result.eval()(batch(1)))


@captures
def test_update_bn(capture: str) -> None:
    """`update_bn` puts an average into training mode for a while, and back."""
    schedule = plan()
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    result = cpt_fx.transform(model, schedule, capture=capture, recipe=DYNAMIC, example_inputs=(batch(),))
    average = AveragedModel(result)
    average.update_parameters(result)
    update_bn([batch(seed) for seed in range(3)], average)
    reference = cpt_fx.transform(copy.deepcopy(model), Static(8), capture=capture, recipe=DYNAMIC)
    reference.load_state_dict({key: value for key, value in average.module.state_dict().items() if "cpt_fx" not in key})
    assert torch.equal(average.eval()(batch(9)), reference.eval()(batch(9)))


@captures
def test_buffers_copied_by_hand(capture: str) -> None:
    schedule, other = plan(), plan()
    student, teacher = learned(schedule, capture), learned(other, capture)
    teacher.eval()
    schedule.step(4)
    ran(student)
    with torch.no_grad():
        for mine, its in zip(teacher.buffers(), student.buffers(), strict=True):
            mine.copy_(its)
    assert ran(teacher) == (8, 8)
    assert ran(student) == (6, 6)
    assert ran(teacher.train()) == (3, 3)
    assert other.position == 0


@captures
@pytest.mark.parametrize("value", ["zeros", "ones", "saved"])
def test_state_overwritten_in_place(capture: str, value: str) -> None:
    """`dcp.load` writes into the tensors of a state_dict. Position and width are not read from there."""
    saved_plan, schedule = plan(), Static(4)
    source = learned(saved_plan, capture)
    saved_plan.step(4)
    ran(source.eval())
    saved = copied(source.state_dict())
    result = learned(schedule, capture)
    state = result.state_dict()
    assert list(state) == list(saved)
    with torch.no_grad():
        for key, tensor in state_of_ours(result).items():
            assert isinstance(tensor, Tensor), key
            if value == "saved":
                tensor.copy_(saved[key])
            elif tensor.is_floating_point():
                tensor.fill_(0.0 if value == "zeros" else 1.0)
            else:
                tensor.fill_(0 if value == "zeros" else 1)
    assert ran(result) == (4, 4)
    schedule.step()
    assert ran(result) == (4, 4)
    assert ran_backward(result) == (4, 4, 4)
    assert schedule.position == 1


@captures
def test_cyclic_state_overwritten_in_place(capture: str) -> None:
    source_plan, schedule = plan(), plan()
    source, result = learned(source_plan, capture), learned(schedule, capture)
    source_plan.step(5)
    ran(source)
    with torch.no_grad():
        for tensor, saved in zip(result.state_dict().values(), source.state_dict().values(), strict=True):
            tensor.copy_(saved)
    assert (ran(result), schedule.position) == ((3, 3), 0)
    schedule.step()
    assert ran(result) == (4, 4)
    assert ran(result.eval()) == (8, 8)


@captures
@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoint(capture: str, tmp_path: Path) -> None:
    """Saved and loaded by torch.distributed.checkpoint, and then given to `load_state_dict`: the run goes on."""
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    source_plan, schedule = plan(), plan()
    source = learned(source_plan, capture)
    source_plan.step(4)
    ran(source)
    dcp.save(source.state_dict(), checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    result = probe(schedule, capture, example_inputs=(ramp(),))
    state = result.state_dict()
    dcp.load(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    assert (ran(result), schedule.position) == ((3, 3), 0)
    result.load_state_dict(state)
    assert (ran(result), schedule.position) == ((6, 6), 4)
    assert ran(result.eval()) == (8, 8)


@captures
def test_what_is_among_the_buffers(capture: str) -> None:
    """Ranges are: EMA averages them. Position, widths and records are not: nothing but a forward changes a buffer."""
    schedule = plan()
    result = learned(schedule, capture, example_inputs=(ramp(),))
    ours = buffers_of_ours(result)
    assert any("act" in key for key in ours)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    assert len(list(result.buffers())) == len(ours) + len(list(Probe().buffers()))
    before = copied(ours)
    schedule.step(5)
    result.eval()
    ran(result)
    result.train()
    schedule.step()
    assert {key for key, tensor in buffers_of_ours(result).items() if not torch.equal(tensor, before[key])} == set()
    result(2 * ramp())
    changed = {key for key, tensor in buffers_of_ours(result).items() if not torch.equal(tensor, before[key])}
    assert any("act" in key for key in changed)


@captures
def test_no_buffers_without_ranges(capture: str) -> None:
    result = probe(plan(), capture, recipe=DYNAMIC, example_inputs=(ramp(),))
    ran_backward(result)
    assert [name for name, _ in result.named_buffers()] == ["eye"]
    assert len(list(result.parameters())) == 2


@pytest.mark.parametrize("capture", ["dynamo", "auto"])
def test_state_is_there_before_the_first_call(capture: str) -> None:
    """With example inputs `dcp`, EMA and DDP find all there is, and in the same order, as after a call."""
    schedule = plan()
    result = cpt_fx.transform(Probe(), schedule, capture=capture, example_inputs=(ramp(),))
    names = [list(result.state_dict()), [name for name, _ in result.named_buffers()]]
    assert any("act" in key for key in buffers_of_ours(result))
    average = AveragedModel(result, use_buffers=True)
    twin = copy.deepcopy(result)
    ran_backward(result)
    ran(result.eval())
    ran(result.train())
    assert names == [list(result.state_dict()), [name for name, _ in result.named_buffers()]]
    average.update_parameters(result)
    twin.load_state_dict(result.state_dict())
    assert ran(average.eval()) == ran(twin.eval()) == (8, 8)
    for key, tensor in buffers_of_ours(twin).items():
        assert torch.equal(tensor, buffers_of_ours(result)[key])


@captures
def test_one_filter_strips_what_is_ours(capture: str) -> None:
    result = learned(plan(), capture)
    plain = [key for key in result.state_dict() if "cpt_fx" not in key]
    assert plain == list(Probe().state_dict())
    assert all(isinstance(value, Tensor) for value in result.state_dict().values())


@pytest.mark.slow
@captures
@pytest.mark.parametrize("wrap", [lambda one: one, nn.Sequential])
def test_the_state_dict_of_distributed_checkpoints(capture: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """`get_model_state_dict` looks at the model for every key, also where something is around it."""
    tools = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    source_plan, schedule = plan(), plan()
    source = wrap(learned(source_plan, capture))
    source_plan.step(4)
    state = copied(tools.get_model_state_dict(source))
    tools.set_model_state_dict(wrap(learned(schedule, capture)), state)
    assert schedule.position == 4
    compiled = tools.get_model_state_dict(torch.compile(source, backend="eager"))
    assert compiled.keys() == state.keys()


@captures
def test_keys_that_a_hook_renames_while_they_are_loaded(capture: str) -> None:
    source_plan, schedule = plan(), plan()
    source, result = learned(source_plan, capture), learned(schedule, capture)
    source_plan.step(4)

    def rename(module: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        for key in [key for key in state if key.startswith("old.")]:
            state[key.removeprefix("old.")] = state.pop(key)

    result.register_load_state_dict_pre_hook(rename)
    result.load_state_dict({f"old.{key}": value for key, value in source.state_dict().items()})
    assert schedule.position == 4


@captures
@pytest.mark.parametrize("change", [lambda value: 0.9 * value + 0.1 * value, lambda value: value.half()])
def test_numbers_that_were_averaged_or_cast_are_no_position(capture: str, change: Callable[[Tensor], Tensor]) -> None:
    source_plan, schedule = plan(), plan()
    source, result = learned(source_plan, capture), learned(schedule, capture)
    source_plan.step(4)
    with pytest.warns(UserWarning, match=r"was averaged or cast, its position too \(about 4\)"):
        result.load_state_dict({key: change(value) for key, value in source.state_dict().items()})
    assert schedule.position == 0
