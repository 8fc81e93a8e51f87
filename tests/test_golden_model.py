"""The small conv net that was trained for 20 steps with the published code, trained again from its initial state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.recipes import paper
from cpt_fx.schedules import Bits, Static, named
from tests.golden_data import arrays, load

TOLERANCE = 1e-6
DATA = {name: torch.tensor(value) for name, value in arrays("model").items()}


def plain_net(prefix: str = "init.", index: int | None = None) -> nn.Sequential:
    """Build the net in a stored state."""
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    state = {name.removeprefix(prefix): value for name, value in DATA.items() if name.startswith(prefix)}
    net.load_state_dict({name: value if index is None else value[index] for name, value in state.items()})
    return net


def transformed(net: nn.Module, schedule: cpt_fx.schedules.Schedule) -> nn.Module:
    return cpt_fx.transform(net, schedule, recipe=paper(gradient_rounding="nearest"), exclude=("8",))


PARTS = {"min": "running_zero_point", "size": "running_range"}
"""What we keep of a running range, and what the reference calls it."""


def schedule() -> cpt_fx.schedules.Schedule:
    about = load("model")
    return named("CR", q_min=about["q_min"], q_max=about["q_max"], total_steps=about["total"],
                 cycles=about["cycles"], period=about["period"], eval_bits="current")  # fmt: skip


def close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_twenty_steps_from_the_initial_state() -> None:
    plan = schedule()
    net = plain_net()
    model = transformed(net, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=load("model")["optimizer"]["lr"])
    for step, (x, y) in enumerate(zip(DATA["train_x"], DATA["train_y"], strict=True)):
        assert plan.bits(step) == (load("model")["bits"][step],) * 2 + (8,)
        optimizer.zero_grad()
        logits = model(x)
        close(logits, DATA["train_logits"][step])
        loss = F.cross_entropy(logits, y)
        close(loss, DATA["loss"][step].to(loss))
        loss.backward()
        if step == 0:
            for name, parameter in net.named_parameters():
                assert parameter.grad is not None
                close(parameter.grad, DATA[f"grad_step0.{name}"])
        optimizer.step()
        plan.step()
        state = model.state_dict()
        for name in net.state_dict():
            close(state[name], DATA[f"after_step.{name}"][step])
        for layer in ("0", "3"):
            for part, name in PARTS.items():
                ours = state[f"{layer}.cpt_fx_input_range_{part}"]
                close(ours.reshape(()), DATA[f"after_step_ranges.{layer}.{name}"][step].reshape(()))


@pytest.mark.parametrize("bits", [3, 7, 8])
def test_evaluation_of_the_trained_net(bits: int) -> None:
    model = transformed(plain_net("final."), Static(Bits(bits, bits, 8)))
    ranges = {
        f"{layer}.cpt_fx_input_range_{part}": DATA[f"ranges.{layer}.{name}"].reshape(())
        for layer in ("0", "3")
        for part, name in PARTS.items()
    }
    # A range without weight has learned nothing: evaluation would not use it.
    ranges |= {f"{layer}.cpt_fx_input_range_weight": torch.ones(()) for layer in ("0", "3")}
    model.load_state_dict(model.state_dict() | ranges)
    model.eval()
    close(model(DATA["held_x"]), DATA[f"eval_logits_{bits}"])


def test_evaluation_without_quantization() -> None:
    model = transformed(plain_net("final."), Static(32))
    model.eval()
    close(model(DATA["held_x"]), DATA["eval_logits_full"])
