"""What `transform` refuses: the error names the value and what was expected, and the model is as it was."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx import Format, TransformError
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Static, named
from tests.training import check_same, snapshot, train_step, widths


class Net(nn.Module):
    """Something to transform."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return y


def refused(error: type[Exception], message: str, model: Any = None, schedule: Any = None, **options: Any) -> None:
    """The call raises, and the model trains on as if it had not been made."""
    model = Net() if model is None else model
    schedule = Static(4) if schedule is None else schedule
    with torch.inference_mode(False):
        twin = copy.deepcopy(model)
    before, random = snapshot(model), torch.get_rng_state()
    with pytest.raises(error, match=message):
        cpt_fx.transform(model, schedule, **options)
    assert snapshot(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.randn(2, 3, 5, 5)
        if isinstance(model, Net):
            check_same(train_step(model, (x,), {}), train_step(twin, (x,), {}))


@pytest.mark.parametrize("model", [None, 3, "resnet18", Net, torch.relu, {"model": 1}])
def test_something_else_than_a_module(model: Any) -> None:
    kind = type(model).__name__
    with pytest.raises(TypeError, match=rf"model must be a torch\.nn\.Module, got {kind}"):
        cpt_fx.transform(model, Static(4))


@pytest.mark.parametrize("schedule", [8, "CR", (3, 8), Static])
def test_something_else_than_a_schedule(schedule: Any) -> None:
    kind = type(schedule).__name__
    refused(TypeError, rf"schedule must be a schedule such as cpt_fx\.schedules\.named\(\.\.\.\), got {kind}",
            schedule=schedule)  # fmt: skip


def test_no_schedule() -> None:
    with pytest.raises(TypeError, match="schedule"):
        cpt_fx.transform(Net(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        ("papre", ValueError, r"unknown recipe 'papre'; presets are .*'paper'.*Did you mean \"paper\"\?"),
        ("FP8", ValueError, r"unknown recipe 'FP8'.*Did you mean \"fp8\"\?"),
        ("", ValueError, "unknown recipe ''; presets are"),
        (8, TypeError, "recipe must be a Recipe, the name of a preset or None, got 8"),
        (Rule(), TypeError, r"recipe must be a Recipe.*got Rule\("),
        (cpt_fx.recipes.paper, TypeError, "recipe must be a Recipe.*got <function paper"),
    ],
)
def test_recipes(recipe: Any, error: type[Exception], message: str) -> None:
    refused(error, message, recipe=recipe)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("capture", "symbolc", r"capture must be one of .*\"symbolic\".*, got 'symbolc'\. Did you mean \"symbolic\"\?"),
        ("capture", None, r"capture must be one of .*, got None"),
        ("execution", "simulate", r"execution must be one of .*, got 'simulate'\. Did you mean \"simulated\"\?"),
        ("execution", 8, "execution must be one of .*, got 8"),
    ],
)
def test_choices(field: str, value: Any, message: str) -> None:
    refused(ValueError, message, **{field: value})


@pytest.mark.parametrize("value", [torch.ones(2, 3, 5, 5), [torch.ones(1)], {"x": 1}])
def test_examples_of_the_wrong_type(value: Any) -> None:
    message = f"example_inputs must be a tuple of the model's arguments, got {type(value).__name__}"
    refused(TypeError, message, example_inputs=value)


def test_examples_that_do_not_fit() -> None:
    x = torch.ones(2, 3, 5, 5)
    refused(TypeError, r"example inputs do not fit Net\.forward.*too many positional", example_inputs=(x, x))
    refused(TypeError, r"example inputs do not fit Net\.forward.*'y'", example_inputs=(x,), example_kwargs={"y": 1})
    refused(TypeError, r"example inputs do not fit Net\.forward.*missing.*'x'", example_inputs=())


@pytest.mark.parametrize("overrides", [["head"], "head", 8, ("head", 8)])
def test_overrides_that_are_no_mapping(overrides: Any) -> None:
    refused(TypeError, "overrides must map module names, globs or types to .*, got", overrides=overrides)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exclude": "haed"}, r"exclude: 'haed' matches no module\. Did you mean \"head\"\?"),
        ({"overrides": {"heda": 8}}, r"overrides: 'heda' matches no module\. Did you mean \"head\"\?"),
        ({"exclude": (nn.Conv1d,)}, r"exclude: no module is a Conv1d\. Did you mean \"Conv2d\"\?"),
        ({"exclude": ("*",)}, r"there is nothing to quantize in Net"),
    ],
)
def test_selections(options: dict[str, Any], message: str) -> None:
    refused(ValueError, message, **options)


def test_twice() -> None:
    result = cpt_fx.transform(Net(), Static(4))
    text = str(result.graph)
    for model in (result, nn.Sequential(result)):
        with pytest.raises(TransformError, match=r"is transformed already\. Take cpt_fx\.revert\(model\)"):
            cpt_fx.transform(model, Static(6))
    assert str(result.graph) == text
    assert widths(result)["weight"] == 4
    assert widths(cpt_fx.transform(cpt_fx.revert(result), Static(6)))["weight"] == 6


class Nothing(nn.Module):
    """No operator that multiplies."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) + 1


def test_nothing_to_quantize() -> None:
    refused(TransformError, "there is nothing to quantize in Nothing", Nothing())
    refused(
        TransformError, r"there is nothing to quantize in Sequential:\n  0: LSTM", nn.Sequential(nn.LSTM(2, 2)),
        capture="symbolic",
    )  # fmt: skip
    refused(TransformError, "there is nothing to quantize in Net:\n.*leaves conv", recipe=Recipe(name="empty"))
    refused(TransformError, "there is nothing to quantize in Embedding", nn.Embedding(3, 4))


def test_without_gradients() -> None:
    model = Net()
    with torch.no_grad():
        refused(TransformError, r"transform was called under torch\.no_grad\(\): leave it", model)
    with torch.inference_mode():
        refused(TransformError, r"transform was called under torch\.inference_mode\(\)", model)


def test_a_name_that_is_ours() -> None:
    model = Net()
    model.add_module("_cpt_fx", nn.Linear(2, 2))
    refused(TransformError, "_cpt_fx", model)
    model = Net()
    model.register_buffer("_cpt_fx", torch.zeros(1))
    refused(TransformError, "_cpt_fx", model)


@pytest.mark.parametrize("name", ["graph", "code", "meta", "recompile", "training_step"])
def test_names_of_graph_modules(name: str) -> None:
    """A submodule may be called what torch.fx calls its own things: it works, or the error names it."""

    def forward(self: Any, x: Tensor) -> Any:
        return getattr(self, name)(x)

    torch.manual_seed(0)
    model = type("Named", (nn.Module,), {"forward": forward})()
    model.add_module(name, nn.Linear(3, 3))
    x = torch.randn(2, 3)
    try:
        result = cpt_fx.transform(model, Static(32))
    except TransformError as error:
        assert repr(name) in str(error)
    else:
        assert torch.equal(result(x), model(x))


def test_not_transformed() -> None:
    message = r"Net is not transformed: call cpt_fx\.transform\(model, schedule\) first"
    for function in (cpt_fx.revert, cpt_fx.graphs):
        with pytest.raises(TransformError, match=message):
            function(Net())
    with pytest.raises(ValueError, match="not transformed"):
        Static(4).bind(Net())


def test_state_of_another_model() -> None:
    result = cpt_fx.transform(Net(), Static(4))
    other = cpt_fx.transform(nn.Sequential(nn.Linear(3, 3)), Static(4))
    before = {key: value.clone() for key, value in result.state_dict().items()}
    with pytest.raises(
        RuntimeError,
        match=r"(?s)Missing key.*\"conv\.weight\".*Unexpected key.*\"0\.cpt_fx_input_range_min\"",
    ):
        result.load_state_dict(other.state_dict())
    assert all(torch.equal(before[key], value) for key, value in result.state_dict().items())
    excluded = cpt_fx.transform(Net(), Static(4), exclude="head")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*\"head\.cpt_fx_input_range_min"):
        excluded.load_state_dict(result.state_dict())
    result.get_buffer("head.cpt_fx_input_range_weight").fill_(1)
    result.get_buffer("conv.cpt_fx_input_range_weight").fill_(1)
    excluded.get_buffer("conv.cpt_fx_input_range_weight").fill_(0.5)
    # A checkpoint without ranges of a layer is a plain one to that layer: what it learned with other weights goes.
    result.load_state_dict(excluded.state_dict())
    assert result.get_buffer("head.cpt_fx_input_range_weight") == 0
    assert result.get_buffer("conv.cpt_fx_input_range_weight") == 0.5
    keys = result.load_state_dict(excluded.state_dict(), strict=False)
    assert not keys.missing_keys and not keys.unexpected_keys


def test_state_of_another_schedule() -> None:
    plan = named("CR", q_min=3, q_max=8, total_steps=100)
    plan.step(3)
    other = named("CR", q_min=2, q_max=8, total_steps=100)
    with pytest.raises(ValueError, match="this state is of another schedule: q_min is 3 there and 2 here"):
        other.load_state_dict(plan.state_dict())
    assert other.position == 0


def test_past_the_end_the_last_bits_hold() -> None:
    plan = named("LR", q_min=3, q_max=8, total_steps=4, cycles=1)
    result = cpt_fx.transform(Net(), plan)
    plan.step(4)
    last = widths(result)
    with pytest.warns(UserWarning, match=r"step 5 is past the end of a schedule of total_steps=4; its last bits"):
        plan.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.step(10)
    assert widths(result) == last == plan.bits(3)._asdict()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_in_a_range_are_reported(value: float) -> None:
    """One bad batch is not learned from, and the report names the layer; a range out of a file may be bad, too."""
    result = cpt_fx.transform(Net(), Static(4))
    x = torch.randn(2, 3, 5, 5)
    result(x)
    x[0, 0, 0, 0] = value
    result(x)
    assert "conv" in str(cpt_fx.inspect(result).verify(gradients=False))
    with torch.no_grad():
        result.get_buffer("conv.cpt_fx_input_range_size").fill_(value)
    with pytest.raises(ValueError, match="conv"):
        cpt_fx.inspect(result).verify()


def test_a_format_that_has_no_meaning() -> None:
    with pytest.raises(ValueError, match=r"Format\.range='observer' keeps one .*range per tensor"):
        Format(range="observer", group="channel")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Rule\.weight must be a Format or None, got 8"):
        Rule(weight=8)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"Format\.scheme must be one of .*, got 'symetric'\. Did you mean \"symmetric\"\?"
    ):
        Format(scheme="symetric")  # type: ignore[arg-type]


@pytest.mark.parametrize("capture", ["symbolic", "dynamo", "auto"])
def test_a_part_named_by_a_word_of_python(capture: str) -> None:
    """As a dict of heads may have it: the code of a graph cannot read such a name."""
    model = nn.Sequential(nn.ModuleDict({"class": nn.Linear(2, 2)}))
    with pytest.raises(cpt_fx.TransformError, match=r"part '0\.class': 'class' is a word of Python's"):
        cpt_fx.transform(model, Static(8), capture=capture)
