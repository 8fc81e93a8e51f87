"""What can be done with a transformed model: everything that can be done with the plain one."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import cpt_fx
from cpt_fx.ir.layer_state import PARTS
from cpt_fx.schedules import Bits, Schedule, Static
from tests.ir.result.copies import through_save
from tests.ir.result.trained_results import Net, batch, check_equal_state, schedule, steps
from tests.training import check_same_output, counters, same, train_step, widths
from tests.zoo import ZOO, Residual


def test_resume_in_the_middle() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer, Schedule]:
        plan = schedule()
        result = cpt_fx.transform(Net(), plan)
        return result, torch.optim.AdamW(result.parameters(), lr=0.01), plan

    def run(result: nn.Module, optimizer: torch.optim.Optimizer, plan: Schedule, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            F.mse_loss(result(*batch(step)), torch.eye(4)).backward()
            optimizer.step()
            plan.step()

    torch.manual_seed(5)
    whole = start()
    run(*whole, 0, 9)
    torch.manual_seed(5)
    begun = start()
    run(*begun, 0, 4)
    saved = through_save({"states": [part.state_dict() for part in begun], "rng": torch.get_rng_state()})
    resumed = start()
    parts: tuple[Any, ...] = resumed
    for part, state in zip(parts, saved["states"], strict=True):
        part.load_state_dict(state)
    assert widths(resumed[0]) == widths(begun[0])
    torch.set_rng_state(saved["rng"])
    run(*resumed, 4, 9)
    check_equal_state(resumed[0], whole[0])
    check_same_output(resumed[0].eval()(*batch()), whole[0].eval()(*batch()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_casts(dtype: torch.dtype) -> None:
    plan = schedule()
    model = Net()
    result = cpt_fx.transform(model, plan)
    steps(result, plan)
    result = result.half() if dtype is torch.float16 else result.to(dtype)
    for name, tensor in result.state_dict().items():
        kind = torch.float32 if "_range_" in name else torch.int64 if name.endswith(
            ("num_batches_tracked", "steps", "cpt_fx_position")) else dtype  # fmt: skip
        assert tensor.dtype is kind, name
    assert all(record.dtype is torch.int64 for record in counters(result).values())
    plan.step()
    assert widths(result)["weight"] == plan.bits(plan.position).weight
    output = result(batch()[0].to(dtype))
    assert output.dtype is dtype
    output.float().sum().backward()
    assert all(p.grad is None or p.grad.dtype is dtype for p in result.parameters())
    assert cpt_fx.revert(result).get_parameter("head.weight").dtype is dtype


def test_requires_grad_and_zero_grad() -> None:
    model = Net()
    result = cpt_fx.transform(model, Static(4))
    result.get_submodule("block").requires_grad_(False)
    assert not model.block.conv1.weight.requires_grad and model.head.weight.requires_grad
    step = train_step(result, batch(), {})
    assert step.gradients["block.conv1.weight"] is None and step.gradients["head.weight"] is not None
    result.zero_grad()
    assert model.head.weight.grad is None
    result.requires_grad_(True)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_optimizer_of_the_plain_model_goes_on() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(*batch()).sum().backward()
    optimizer.step()
    result = cpt_fx.transform(model, Static(4))
    assert [id(parameter) for parameter in result.parameters()] == [id(parameter) for parameter in model.parameters()]
    other = torch.optim.SGD(result.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    momentum = other.state[model.head.weight]["momentum_buffer"]
    assert torch.equal(momentum, optimizer.state[model.head.weight]["momentum_buffer"])
    result.zero_grad()
    before = model.head.weight.detach().clone()
    result(*batch()).sum().backward()
    optimizer.step()
    assert not torch.equal(before, result.get_parameter("head.weight"))


def test_checkpointing() -> None:
    """Recomputed quantizers see the same values; running ranges would count twice, so the model has none."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    result = cpt_fx.transform(model, Static(Bits(4, 4, 32)), recipe="integer")
    x = torch.randn(3, 6, requires_grad=True)
    result(x).square().sum().backward()
    expected = [x.grad, *(parameter.grad for parameter in model.parameters())]
    result.zero_grad()
    x.grad = None
    torch.utils.checkpoint.checkpoint(result, x, use_reentrant=False).square().sum().backward()
    for ours, theirs in zip([x.grad, *(parameter.grad for parameter in model.parameters())], expected, strict=True):
        assert same(ours, theirs)


@pytest.mark.parametrize("bits", [4, 32])
def test_functional_call(bits: int) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    result, x = cpt_fx.transform(model, Static(Bits(bits, bits, 32))), torch.randn(3, 6)
    state = {name: tensor.detach().clone() for name, tensor in result.named_parameters()}
    doubled = {name: 2 * tensor for name, tensor in state.items()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = copy.deepcopy(result)
    twin.load_state_dict(doubled, strict=False)
    assert torch.equal(torch.func.functional_call(result, doubled, (x,)), twin(x))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    # As with batch norm: running statistics are changed in training, so torch.func wants them as arguments too.
    buffers = {name: tensor.clone() for name, tensor in result.named_buffers()}

    def loss(parameters: dict[str, Tensor], *others: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(result, (parameters, *others), (x,))
        return output.square().sum()

    for mode, others in ((True, (buffers,)), (False, ())):
        result.train(mode)
        gradients = torch.func.grad(loss)(state, *others)
        result.zero_grad()
        result(x).square().sum().backward()
        for name, parameter in result.named_parameters():
            assert same(gradients[name], parameter.grad), (name, mode)


def test_modes_switch_widths() -> None:
    for eval_bits, expected in ((None, 8), (5, 5), ("current", 3)):
        plan = schedule(eval_bits=eval_bits)
        result = cpt_fx.transform(Net(), plan)
        assert widths(result)["weight"] == 3
        assert widths(result.eval())["weight"] == expected
        assert widths(result)["activation"] == expected
        plan.step(3)  # in evaluation mode: what a cycle says is taken up by train()
        current = plan.bits(3).weight
        assert current not in (3, 8)
        assert widths(result)["weight"] == (current if eval_bits == "current" else expected)
        assert widths(result.train())["weight"] == current


def test_one_schedule_drives_two_models() -> None:
    plan = schedule()
    first, second = cpt_fx.transform(Net(), plan), cpt_fx.transform(nn.Sequential(nn.Linear(2, 2)), plan)
    second.eval()
    plan.step(2)
    assert widths(first)["weight"] == plan.bits(2).weight != widths(second)["weight"] == 8
    assert widths(second.train())["weight"] == plan.bits(2).weight


def test_a_checkpoint_does_not_bring_the_widths_of_another_time() -> None:
    """The schedule that drives a model, and its mode, decide: not those under which the checkpoint was written."""
    plan = schedule()
    saved = cpt_fx.transform(Net(), plan).state_dict()
    plan.step(3)
    saved = {key: value.clone() for key, value in saved.items()}
    later, evaluated = cpt_fx.transform(Net(), schedule()), cpt_fx.transform(Net(), schedule(eval_bits=7)).eval()
    later.load_state_dict(saved)
    evaluated.load_state_dict(saved)
    assert (widths(later)["weight"], widths(evaluated)["weight"]) == (3, 7)
    evaluated.load_state_dict(Net().state_dict())
    assert widths(evaluated)["weight"] == 7


def test_another_schedule_takes_over() -> None:
    plan, other = schedule(), Static(5)
    result = cpt_fx.transform(Net(), plan)
    other.bind(result)
    assert widths(result)["weight"] == 5
    plan.step(5)
    assert widths(result)["weight"] == 5


def test_another_schedule_is_followed_by_graphs_that_come_later() -> None:
    plan, other = schedule(), Static(5)
    result = cpt_fx.transform(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), plan, capture="dynamo")
    other.bind(result)
    result(torch.randn(2, 4))
    assert widths(result)["weight"] == 5
    result[1] = nn.Linear(4, 4)  # type: ignore[operator]
    result(torch.randn(2, 4))
    plan.step()
    assert widths(result)["weight"] == 5


def test_a_part_in_evaluation_mode_keeps_its_ranges() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    result = cpt_fx.transform(model, Static(4))
    result(torch.randn(8, 4))
    result.get_submodule("0").eval()
    before = {name: tensor.clone() for name, tensor in result.named_buffers()}
    assert set(before) == {f"{layer}.cpt_fx_input_range_{part}" for layer in "02" for part in PARTS}
    result(5 * torch.randn(8, 4))
    changed = {name.partition(".")[0] for name, tensor in result.named_buffers() if not same(tensor, before[name])}
    assert changed == {"2"}


def test_revert_gives_the_trained_model() -> None:
    model = Net()
    plan = schedule()
    result = cpt_fx.transform(model, plan)
    steps(result, plan)
    plain = cpt_fx.revert(result)
    assert type(plain) is Net and plain is not model and type(plain.block) is Residual
    assert all(plain.get_parameter(name) is parameter for name, parameter in model.named_parameters())
    assert int(plain.steps) == 2 and int(plain.block.bn1.num_batches_tracked) == 2  # type: ignore[arg-type]
    moved = result.to(torch.float64)
    moved.eval()
    again = cpt_fx.revert(moved)
    assert isinstance(again, Net) and not again.training and not again.block.bn1.training
    assert plain.training and result is moved, "what was taken back before stays in its mode"
    assert again.block.bn1.running_mean is moved.get_buffer("block.bn1.running_mean")
    assert again.head.weight.dtype is torch.float64
    assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
    assert list(again.state_dict()) == list(model.state_dict())
    assert not [name for name, _ in again.named_modules() if "cpt" in name]
    assert not [key for key in again.state_dict() if "cpt" in key]
    assert "cpt_fx_position" in moved.state_dict(), "the result stays what it is"
    Static(32).bind(moved)
    assert torch.equal(again(batch()[0].double()), moved(batch()[0].double()))


def test_graphs_and_fx_tools() -> None:
    model, args, _ = ZOO["in_place_modules"]()
    result = cpt_fx.transform(model, Static(4))
    (graph,) = cpt_fx.graphs(nn.Sequential(result))
    assert isinstance(graph, fx.GraphModule) and graph.graph is cast(Any, result).graph
    assert type(result).__name__ == type(model).__name__ and isinstance(result, type(model))
    result.eval()
    graph.graph.lint()
    assert torch.equal(fx.Interpreter(graph).run(*args), result(*args))
    text = graph.print_readable(print_output=False)
    assert "torch.ops.cpt_fx.fake_quantize" in text and "torch.ops.cpt_fx.quantize_gradient" in text
    graph.recompile()
    assert "fc.weight" in dict(graph.named_parameters())
    layer = result.get_submodule("fc")
    assert isinstance(layer, nn.Linear)
    x = torch.randn(2, layer.in_features)
    assert not torch.equal(layer(x), F.linear(x, layer.weight, layer.bias)), "a layer called by itself is quantized"


def test_a_checkpointed_step_teaches_the_ranges_once() -> None:
    x = torch.randn(4, 6)
    ranges = []
    for reentrant in (None, False, True):
        model = cpt_fx.transform(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)), Static(8))
        inputs = x.clone().requires_grad_()
        if reentrant is None:
            model(inputs).sum().backward()
        else:
            checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()
        ranges.append(model.state_dict()["0.cpt_fx_input_range_size"])
        assert model.state_dict()["0.cpt_fx_input_range_weight"] == pytest.approx(0.1)
    assert torch.equal(ranges[0], ranges[1])
    assert torch.equal(ranges[0], ranges[2])


def test_a_nan_in_training_is_shown_with_the_layers_name() -> None:
    model = cpt_fx.transform(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), Static(8))
    model(torch.full((2, 3), torch.nan))
    model.eval()
    assert model(torch.ones(2, 3)).isfinite().all()
    skipped = {view.layer: view.skipped for view in cpt_fx.inspect(model).quantizers if view.role == "activation"}
    assert skipped == {"0": 1, "2": 1}


def test_what_goes_around_a_model_is_put_on_afterwards() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    for wrapped in (torch.compile(net, backend="eager"), nn.DataParallel(net)):
        with pytest.raises(TypeError, match="transform the model first and wrap the result"):
            cpt_fx.transform(cast(nn.Module, wrapped), Static(8))
