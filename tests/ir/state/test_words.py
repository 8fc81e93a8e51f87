"""`schedule.current`, `.position` and `.reset()`, overrides of one role or with a schedule of their own, `to_dict`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import cpt_fx
from cpt_fx.schedules import Bits, Custom, Deficit, Delayed, Piecewise, Schedule, Sequence, Static
from tests.ir.state.models import captures, learned, plan, probe, ran, ran_backward, shown

SCHEDULES: list[Schedule] = [
    plan(),
    Static(5),
    Static(Bits(4, 6, 8)),
    Piecewise({0: 8, 3: 4}),
    Deficit(q_min=3, q_max=8, steps=3, total_steps=9),
    Delayed(plan(), start=2),
    Sequence([plan(), Static(4, total_steps=3)]),
    Custom(lambda step: 3 + step % 4, total_steps=20),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: type(schedule).__name__)
def test_current(schedule: Schedule) -> None:
    schedule.position = 0
    for position in range(6):
        assert schedule.current == schedule.bits(position)
        assert isinstance(schedule.current, Bits)
        schedule.step()
    schedule.reset()
    assert schedule.position == 0 and schedule.current == schedule.bits(0)


@captures
def test_the_position_can_be_set(capture: str) -> None:
    schedule = plan()
    result = learned(schedule, capture)
    for position in (4, 1, 0, 5, 11):
        schedule.position = position
        assert schedule.position == position
        assert schedule.current[:2] == ran(result) == schedule.bits(position)[:2]
    schedule.step()
    assert schedule.position == 12
    schedule.reset()
    assert ran(result) == (3, 3)


@pytest.mark.parametrize("value", [-1, 1.0, "3", None, True])
def test_bad_positions(value: Any) -> None:
    schedule = plan()
    schedule.step(2)
    with pytest.raises((TypeError, ValueError), match="position"):
        schedule.position = value
    assert schedule.position == 2


def test_reset_allows_a_second_run() -> None:
    """Two runs in a row, as a notebook has them: the end of the second is where that of the first was."""
    schedule = plan()
    schedule.step(12)
    schedule.reset()
    schedule.step(12)
    assert schedule.position == 12
    with pytest.warns(UserWarning, match="past the end"):
        schedule.step()


def test_a_saved_schedule_after_the_position_was_set() -> None:
    schedule, other = plan(), plan()
    schedule.position = 7
    other.load_state_dict(schedule.state_dict())
    assert other.position == 7


@captures
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"weight": 6}, (6, 3, 5)),
        ({"input": 6}, (3, 6, 5)),
        ({"gradient": 7}, (3, 3, 7)),
        ({"weight": 6, "gradient": 7}, (6, 3, 7)),
        ({"weight": 32}, (32, 3, 5)),
    ],
)
def test_one_role_is_fixed(capture: str, override: dict[str, int], expected: tuple[int, int, int]) -> None:
    """The others go on with the schedule."""
    schedule = plan()
    result = probe(schedule, capture, overrides={"*": override})
    assert ran_backward(result) == expected
    schedule.step(5)
    names = {"weight": 0, "input": 1, "gradient": 2}
    later = list(schedule.current)
    for role, width in override.items():
        later[names[role]] = width
    assert ran_backward(result) == tuple(later)
    result.eval()
    later[:2] = [override.get("weight", 8), override.get("input", 8)]
    assert ran(result) == tuple(later[:2])


@captures
def test_one_role_of_one_layer(capture: str) -> None:
    result = learned(plan(), capture, overrides={"wgt": {"weight": 4}})
    widths = shown(result)
    assert widths["wgt", "weight"] == 4
    assert {key: bits for key, bits in widths.items() if key != ("wgt", "weight") and key[1] != "gradient"} == {
        ("act", "weight"): 3,
        ("act", "activation"): 3,
        ("wgt", "activation"): 3,
    }
    assert ran(result) == (4, 3)


@captures
def test_a_role_beside_a_format(capture: str) -> None:
    formats = {"weight": 6, "input": {"scheme": "symmetric"}}
    result = learned(plan(), capture, overrides={"act": formats, "wgt": {"weight": 5}})
    assert ran(result) == (5, 3)
    kinds = {(one.layer, one.role): str(one.format) for one in cpt_fx.inspect(result).quantizers}
    assert kinds["act", "activation"].startswith("symmetric")
    assert shown(result)["act", "weight"] == 6


@captures
@pytest.mark.parametrize("value", [-1, 33, 4.5, True])
def test_bad_widths_of_a_role(capture: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError, cpt_fx.TransformError), match="weight"):
        probe(plan(), capture, overrides={"act": {"weight": value}})


@captures
def test_a_part_with_a_schedule_of_its_own(capture: str) -> None:
    """It is asked at the model's position, and nobody steps it."""
    schedule, own = plan(), Piecewise({0: 8, 2: Bits(5, 6, 7), 4: 2})
    result = probe(schedule, capture, overrides={"wgt": own, "act": Piecewise({0: 7, 3: 4})})
    assert ran(result) == (8, 7)
    schedule.step(2)
    assert ran(result) == (5, 7)
    schedule.step()
    assert ran(result) == (5, 4)
    schedule.position = 5
    assert ran(result) == (2, 4)
    schedule.reset()
    assert ran(result) == (8, 7)
    assert own.position == 0


@captures
def test_the_position_of_a_parts_schedule_does_not_count(capture: str) -> None:
    schedule, own = plan(), plan()
    result = probe(schedule, capture, overrides={"wgt": own})
    own.step(5)
    assert ran(result) == (3, 3)


@captures
def test_a_parts_schedule_in_evaluation(capture: str) -> None:
    schedule = plan()
    own = plan(q_min=2, q_max=6, eval_bits=5)
    result = learned(schedule, capture, overrides={"wgt": own})
    assert ran(result) == (2, 3)
    assert ran(result.eval()) == (5, 8)
    result.training = True
    assert ran(result) == (2, 3)


@captures
def test_a_parts_schedule_goes_on_after_loading(capture: str) -> None:
    schedule, other = plan(), plan()

    def make(main: Schedule) -> nn.Module:
        return learned(main, capture, overrides={"wgt": Piecewise({0: 8, 2: 5})})

    result, fresh = make(schedule), make(other)
    schedule.step(3)
    fresh.load_state_dict({key: value.clone() for key, value in result.state_dict().items()})
    assert other.position == 3 and ran(fresh) == (5, schedule.current.activation)


@captures
def test_to_dict(capture: str) -> None:
    result = learned(plan(), capture, exclude="act")
    inspection = cpt_fx.inspect(result)
    data = inspection.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    entries = data["quantizers"]
    assert {(one["layer"], one["role"], one["bits"]) for one in entries} == {
        (one.layer, one.role, one.bits) for one in inspection.quantizers
    }
    assert len(entries) == len(inspection.quantizers)
    assert "act" in {one["layer"] for one in data["uncovered"]}


@captures
def test_to_dict_shows_the_widths_of_now(capture: str) -> None:
    schedule = plan()
    result = learned(schedule, capture)
    schedule.step(4)
    widths = {one["bits"] for one in cpt_fx.inspect(result).to_dict()["quantizers"] if one["role"] == "weight"}
    assert widths == {6}
    result.training = False
    widths = {one["bits"] for one in cpt_fx.inspect(result).to_dict()["quantizers"] if one["role"] == "weight"}
    assert widths == {8}


def test_current_of_a_schedule_without_a_model() -> None:
    """Planning needs no torch: none of this asks for a model."""
    schedule = plan()
    schedule.position = 4
    assert schedule.current == (6, 6, 7)
    assert torch.tensor(schedule.current).tolist() == [6, 6, 7]
