"""Copies: deep ones, of parts, pickled into a fresh process, saved whole; all of them quantize."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cpt_fx
from cpt_fx.schedules import Static, named
from tests.ir.result import copies
from tests.ir.result.models import (
    QUIET,
    Chain,
    Config,
    Net,
    Pretrained,
    batch,
    close,
    equal,
    far,
    learned,
    made,
    quantized_or_refused,
    runs,
    ways,
)

pytestmark = QUIET
ROOT = Path(__file__).parents[3]


COPIES = copies.COPIES | {"twice": lambda value: copy.deepcopy(copies.through_save(value))}
hows = pytest.mark.parametrize("how", COPIES)


@ways
@hows
def test_a_copy_is_of_the_users_class_and_quantizes(how: str, way: str) -> None:
    result = made(Net(), way)
    expected = result(batch())
    twin = COPIES[how](result)
    assert isinstance(twin, Net) and type(twin) is type(result) and isinstance(twin.stem, nn.Linear)
    assert twin.config == result.config
    before = runs(twin)
    output = twin(batch())
    assert close(output, expected) and far(output, Net()(batch()))
    assert sum(runs(twin).values()) > sum(before.values())
    assert far(twin.encode(batch()), Net().encode(batch()))
    shared = {id(p) for p in result.parameters()} & {id(p) for p in twin.parameters()}
    assert shared == set()


@ways
@hows
def test_a_copy_keeps_replaced_layers_hooks_and_values(how: str, way: str) -> None:
    result = made(Net(), way)
    result(batch())
    result.fc = nn.Sequential(nn.Linear(8, 5), nn.Tanh())
    result.temperature = 3.0
    result.scales[0] = 2.0
    if how == "deepcopy":
        result.stem.register_forward_hook(lambda module, args, output: 2 * output)
    expected = result(batch())
    twin = COPIES[how](result)
    assert close(twin(batch()), expected)
    twin.temperature = 1.0
    twin.scales[0] = -1.0
    twin.fc = nn.Identity()
    assert close(result(batch()), expected) and far(twin(batch()), expected)
    assert far(twin(batch()), cpt_fx.revert(twin)(batch()))


@ways
@hows
def test_ties_survive(how: str, way: str) -> None:
    ids = torch.tensor([[1, 2, 3]])
    result = made(Pretrained(Config(width=8)), way)
    result(ids)
    twin = COPIES[how](result)
    assert twin.lm_head.weight is twin.embed.weight is not result.embed.weight
    assert close(twin(ids), result(ids))


@ways
@hows
def test_a_copy_of_a_part(how: str, way: str) -> None:
    """`copy.deepcopy(t.backbone)`, and a part that is saved alone."""
    result = made(Chain(), way)
    result(batch())
    plain = Chain().backbone(batch())
    part = COPIES[how](result.backbone)
    assert isinstance(part, nn.Sequential) and isinstance(part[0], nn.Linear)
    quantized_or_refused(lambda: part(batch()), plain)


@ways
def test_a_schedule_drives_the_copy_that_was_copied_with_it(way: str) -> None:
    plan = named("LR", q_min=3, q_max=8, total_steps=12, cycles=2)
    result = made(Chain(), way, schedule=plan)
    result(batch())
    twin, its_plan = copy.deepcopy((result, plan))
    its_plan.step(5)
    twin(batch())
    result(batch())

    def widths(model: nn.Module) -> set[int]:
        return {v.bits for v in cpt_fx.inspect(model).quantizers if v.role in ("weight", "activation")}

    assert widths(twin) == {its_plan.bits(5).weight} != widths(result) == {3}


@ways
def test_learned_ranges_go_with_a_copy(way: str) -> None:
    result = made(Chain(), way, 8)
    for seed in range(3):
        result(batch(seed))
    result.eval()
    for how in COPIES.values():
        twin = how(result)
        assert not twin.training and learned(twin) == learned(result)
        assert close(twin(batch()), result(batch()))


FRESH = """
import sys
import warnings
warnings.simplefilter("ignore")
import torch
result = torch.load(sys.argv[1], weights_only=False)
from tests.ir.result.models import Net, batch, runs
import cpt_fx
assert isinstance(result, Net), type(result).__mro__
before = sum(runs(result).values())
with torch.no_grad():
    outputs = [result.eval()(batch())[0], result.encode(batch()), result.train()(batch())[0]]
assert sum(runs(result).values()) > before
plain = cpt_fx.revert(result)
assert type(plain) is Net
torch.save([*outputs, plain(batch())[0].detach()], sys.argv[2])
"""


@pytest.mark.slow
@ways
@pytest.mark.parametrize("called", [True, False])
def test_into_a_fresh_process(called: bool, way: str, tmp_path: Path) -> None:
    result = made(Net(), way)
    if called:
        for seed in range(2):
            result(batch(seed))
    result.temperature = 2.0
    torch.save(result, tmp_path / "result.pt")
    command = [sys.executable, "-c", FRESH, str(tmp_path / "result.pt"), str(tmp_path / "out.pt")]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded = torch.load(tmp_path / "out.pt")
    with torch.no_grad():
        expected = [result.eval()(batch())[0], result.encode(batch()), result.train()(batch())[0]]
        plain = cpt_fx.revert(result)(batch())[0]
    assert equal(loaded[-1], plain)
    assert all(close(ours, theirs) for ours, theirs in zip(loaded, expected, strict=False))
    assert far(loaded[0], plain)


def test_a_pickle_names_the_users_class(tmp_path: Path) -> None:
    """And no class of ours that only lives in this process."""
    result = made(Net(), "auto")
    text = pickle.dumps(result)
    assert b"tests.ir.result.models" in text and b"Net" in text


def _hook(model: Net) -> None:
    model.stem.register_forward_hook(lambda module, args, output: output * 2)


def _hook_first(model: Net) -> None:
    model.heads["a"].register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def _temperature(model: Net) -> None:
    model.temperature = 0.5


def _option(model: Net) -> None:
    model.options["residual"] = False


def _scale(model: Net) -> None:
    model.scales[1] = 2.0


def _head(model: Net) -> None:
    torch.manual_seed(3)
    model.fc = nn.Linear(8, 2)


def _adapter(model: Net) -> None:
    torch.manual_seed(3)
    model.adapter = nn.Linear(8, 8)


CHANGES = [_hook, _hook_first, _temperature, _option, _scale, _head, _adapter]


@pytest.mark.slow
@ways
@pytest.mark.parametrize("called", [False, True], ids=["fresh", "called"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_copy_count_from_its_first_call_on(change: Callable[[Net], None], called: bool, way: str) -> None:
    result = made(Net(), way, 32)
    plain = Net()
    if called:
        result(batch())
    change(plain)
    for copied in COPIES.values():
        twin = copied(result)
        change(twin)
        assert equal(twin(batch()), plain(batch()))
    assert equal(result(batch()), Net()(batch()))


class Saving(Chain):
    """Pickles what it was made of, and its tensors."""

    def __getstate__(self) -> Any:
        return {key: value for key, value in self.state_dict().items() if "cpt_fx" not in key}

    def __setstate__(self, state: Any) -> None:
        self.__init__()  # type: ignore[misc]
        self.load_state_dict(state)


class Reducing(Chain):
    """Pickles nothing but its class."""

    def __reduce__(self) -> Any:
        return type(self), ()


@ways
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("make", [Saving, Reducing])
def test_a_users_own_way_of_pickling(make: Any, how: str, way: str) -> None:
    result = made(make(), way)
    expected = result(batch())
    twin = copy.deepcopy(result) if how == "deepcopy" else pickle.loads(pickle.dumps(result))
    assert isinstance(twin, make) and close(twin(batch()), expected)
    assert cpt_fx.inspect(twin).quantizers


class OwnWay(nn.Linear):
    """Copies itself with all that it holds."""

    def __deepcopy__(self, memo: dict[int, object]) -> OwnWay:
        new = OwnWay(self.in_features, self.out_features)
        new.__dict__.update({key: copy.copy(value) for key, value in self.__dict__.items()})
        return new


def test_a_layer_that_another_result_takes_runs_inside_of_that_one() -> None:
    """The graph that the first had of it is not used any more: the layer follows the widths of its new model."""
    x = torch.randn(2, 4)
    net = nn.Sequential(nn.Linear(4, 4), OwnWay(4, 4))
    first: Any = cpt_fx.transform(net, Static(4), capture="dynamo", example_inputs=(x,), prove=False)
    second: Any = copy.deepcopy(first)
    before = second(x)
    with cpt_fx.at_bits(first, 2):
        assert torch.equal(second(x), before)
    first.append(second[0])
    assert torch.equal(second(x), before)
    with cpt_fx.at_bits(first, 2):
        assert not torch.equal(second(x), before)
