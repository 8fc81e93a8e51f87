"""`exclude` and `overrides`: which layers a pattern selects, and the widths they then run at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx import Format, TransformError, recipes
from cpt_fx.api import history_of
from cpt_fx.formats import Group, Scheme
from cpt_fx.recipes import Rule
from cpt_fx.schedules import Bits, Schedule, Static, named
from tests.training import counters, same, train_step, widths


class Block(nn.Module):
    """A part of a model with its own type."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


class Net(nn.Module):
    """Two blocks between a stem and a head, and a product in its own code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv1d(3, 4, 1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x @ x.transpose(1, 2) @ x)
        return y


LAYERS = {"stem", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head", "matmul", "matmul_1"}


def result_of(schedule: Schedule | None = None, **options: Any) -> nn.Module:
    return cpt_fx.transform(Net(), schedule or Static(4), **options)


def quantized(result: nn.Module) -> set[str]:
    (graph,) = cpt_fx.graphs(result)
    return {layer for node in graph.graph.nodes if "cpt_fx_quantizer" in node.meta
            for layer in node.meta["cpt_fx_quantizer"].layers}  # fmt: skip


def widths_of(result: nn.Module, layer: str) -> dict[str, int]:
    """Return the widths that the quantizers of a layer read, by role."""
    (graph,) = cpt_fx.graphs(result)
    found = {}
    for node in graph.graph.nodes:
        quantizer = node.meta.get("cpt_fx_quantizer")
        if quantizer is not None and layer in quantizer.layers:
            found[quantizer.role] = widths(result)[str(node.args[1].target).rpartition(".")[2]]
    return found


@pytest.mark.parametrize(
    ("exclude", "left_out"),
    [
        (("head",), {"head"}),
        ("head", {"head"}),
        (("blocks.0",), {"blocks.0.up", "blocks.0.down"}),
        (("blocks",), {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}),
        (["blocks.*.up"], {"blocks.0.up", "blocks.1.up"}),
        (("blocks.[1]*", "stem"), {"blocks.1.up", "blocks.1.down", "stem"}),
        ((nn.Conv1d,), {"stem"}),
        (nn.Linear, {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head"}),
        (Block, {"blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"}),
        ((nn.modules.conv._ConvNd, "head"), {"stem", "head"}),
        ({"matmul"}, {"matmul"}),
        ("matmul*", {"matmul", "matmul_1"}),
        ((), set()),
    ],
)
def test_exclude(exclude: Any, left_out: set[str]) -> None:
    result = result_of(exclude=exclude)
    assert quantized(result) == LAYERS - left_out
    uncovered = [item for item in history_of(result).uncovered if item.by_choice]
    assert {item.layer for item in uncovered} == left_out
    assert all("excluded by" in item.reason for item in uncovered)


def test_excluded_layers_run_in_full_precision() -> None:
    x = torch.randn(2, 3, 5)
    everything = (nn.Conv1d, nn.Linear, "matmul")
    result, plain = result_of(exclude=everything), Net()
    ours, theirs = train_step(result, (x,), {}), train_step(plain, (x,), {})
    assert not same(ours.output, theirs.output)  # matmul_1 is left
    assert all(name.startswith("matmul_1") for name in counters(result))
    with pytest.raises(TransformError, match="there is nothing to quantize in Net"):
        result_of(exclude=(*everything, "matmul_1"))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("haed", r"exclude: 'haed' matches no module\. Did you mean \"head\"\? Modules: .*blocks\.0\.up"),
        ("blocks.2", r"'blocks\.2' matches no module\. Did you mean \"blocks\.[01]\"\?"),
        ("stem.*", r"'stem\.\*' matches no module"),
        ("", r"'' matches no module"),
        (nn.Conv2d, r"exclude: no module is a Conv2d\. Did you mean \"Conv1d\"\? Types: Block, Conv1d, Linear"),
        (nn.LSTM, r"no module is a LSTM\."),
    ],
)
@pytest.mark.parametrize("argument", ["exclude", "overrides"])
def test_patterns_that_match_nothing(argument: str, pattern: Any, message: str) -> None:
    options = {"exclude": ("head", pattern)} if argument == "exclude" else {"overrides": {"head": 8, pattern: 8}}
    with pytest.raises(ValueError, match=message.replace("exclude", argument)):
        result_of(**options)


@pytest.mark.parametrize("patterns", [3, (3,), (None,), ("head", 3.5), None])
def test_patterns_of_the_wrong_type(patterns: Any) -> None:
    with pytest.raises(TypeError, match="exclude takes module names, globs and module types, got"):
        result_of(exclude=patterns)


def test_patterns_without_an_effect_are_noted() -> None:
    class WithNorm(nn.Sequential):
        pass

    model = WithNorm(nn.Linear(4, 4), nn.LayerNorm(4))
    result = cpt_fx.transform(model, Static(4), exclude=(nn.LayerNorm, "1"), overrides={"1": 8})
    notes = [note for note in cpt_fx.inspect(result).capture.notes if "no effect" in note]
    assert len(notes) == 3
    assert notes[0] == "exclude 'LayerNorm' selects modules in which nothing is quantized: no effect"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (8, {2: (8, 8, 8), 4: (8, 8, 8), 6: (8, 8, 8)}),
        (Bits(8, 7, 6), {2: (8, 7, 6), 6: (8, 7, 6)}),
        (32, {2: (32, 32, 32)}),
        ("+2", {2: (4, 4, 8), 6: (8, 8, 8)}),
        ("-1", {2: (1, 1, 5), 6: (5, 5, 5)}),
        ("-9", {2: (1, 1, 1), 6: (1, 1, 1)}),
        ({"bits": 8}, {2: (8, 8, 8)}),
        ({"bits": Bits(8, 7, 6)}, {2: (8, 7, 6)}),
        ({"offset": 1}, {2: (3, 3, 7), 6: (7, 7, 7)}),
        ({"offset": Bits(1, 0, -2)}, {2: (3, 2, 4), 6: (7, 6, 4)}),
        (cpt_fx.Override(bits=5), {2: (5, 5, 5)}),
    ],
)
def test_overrides_under_a_schedule(value: Any, expected: dict[int, tuple[int, int, int]]) -> None:
    schedule = named("LR", q_min=2, q_max=6, total_steps=8, cycles=1)
    result = result_of(schedule, overrides={"head": value})
    seen = set()
    for _ in range(8):
        bits = schedule.bits(schedule.position)
        at = widths_of(result, "head")
        if bits.weight in expected:
            seen.add(bits.weight)
            assert (at["weight"], at["activation"], at["gradient"]) == expected[bits.weight]
        assert widths_of(result, "stem") == {"weight": bits.weight, "bias": bits.weight, "activation": bits.activation,
                                             "gradient": bits.gradient}  # fmt: skip
        schedule.step()
    assert seen == set(expected)


def test_overrides_in_evaluation() -> None:
    schedule = named("LR", q_min=2, q_max=6, total_steps=8, cycles=1, eval_bits=5)
    result = result_of(schedule, overrides={"head": 8, "stem": "+2"})
    assert widths_of(result.eval(), "head")["weight"] == 8
    assert widths_of(result, "stem")["weight"] == 7
    assert widths_of(result, "blocks.0.up")["weight"] == 5
    assert widths_of(result.train(), "stem")["weight"] == 4
    assert widths_of(result, "blocks.0.up")["weight"] == 2


def test_an_override_runs_at_its_width() -> None:
    result = result_of(Static(3), overrides={"head": 6})
    train_step(result, (torch.randn(2, 3, 50),), {})
    for name, record in counters(result).items():
        assert int(record[6 if name.startswith("head") else 3]) > 0, name


def test_offsets_leave_off_and_full_precision_alone() -> None:
    for bits in (0, 32):
        result = result_of(Static(bits), overrides={"head": "+2"})
        assert set(widths_of(result, "head").values()) == {bits}


def test_patterns_of_overrides() -> None:
    result = result_of(overrides={nn.Linear: 8, "blocks.*": 6, "blocks.1.*": "+1", "matmul": 7})
    found = {layer: widths_of(result, layer)["activation"] for layer in LAYERS}
    assert found == {"stem": 4, "head": 8, "blocks.0.up": 6, "blocks.0.down": 6, "blocks.1.up": 5, "blocks.1.down": 5,
                     "matmul": 7, "matmul_1": 4}  # fmt: skip


def test_later_overrides_win() -> None:
    assert widths_of(result_of(overrides={"head": 6, nn.Linear: 8}), "head")["weight"] == 8
    assert widths_of(result_of(overrides={nn.Linear: 8, "head": 6}), "head")["weight"] == 6


def test_overrides_of_formats_and_widths_add_up() -> None:
    row = Format(scheme=Scheme.SYMMETRIC, group=Group.ROW)
    result = result_of(
        overrides={nn.Linear: {"weight": row, "gradient": None}, "head": 6, "blocks.0.*": {"input": None}}
    )
    (graph,) = cpt_fx.graphs(result)
    formats = {(layer, node.meta["cpt_fx_quantizer"].role): node.meta["cpt_fx_quantizer"].format
               for node in graph.graph.nodes if "cpt_fx_quantizer" in node.meta
               for layer in node.meta["cpt_fx_quantizer"].layers}  # fmt: skip
    assert formats["head", "weight"] == formats["blocks.0.up", "weight"] == row
    assert formats["stem", "weight"] != row
    assert ("head", "gradient") not in formats and ("stem", "gradient") in formats
    assert ("blocks.0.up", "activation") not in formats and ("blocks.1.up", "activation") in formats
    assert widths_of(result, "head") == {"weight": 6, "bias": 6, "activation": 6}


def test_an_excluded_layer_stays_excluded() -> None:
    assert quantized(result_of(exclude="head", overrides={nn.Linear: 8})) == LAYERS - {"head"}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (33, ValueError, "override must be an integer from 0 to 32, got 33"),
        (-1, ValueError, "override must be an integer from 0 to 32, got -1"),
        (4.5, TypeError, "override must be an integer from 0 to 32, got 4.5"),
        (True, TypeError, "got True"),
        ("8", ValueError, r"an override given as text is an offset such as \"\+2\" or \"-1\", got '8'"),
        ("+x", ValueError, "is an offset"),
        ("", ValueError, "is an offset"),
        (Bits(8, 8, 40), ValueError, "got 40"),
        ({"bist": 8}, ValueError, r"an override has fields .*, got 'bist'\. Did you mean \"bits\"\?"),
        (
            {"weight": 8.0},
            TypeError,
            "override field 'weight' must be a width such as 8, an offset such as .*, got 8.0",
        ),
        ({"weight": True}, TypeError, "override field 'weight' must be a width .*, got True"),
        ({"gradient": 33}, ValueError, "override field 'gradient' must be an integer from 0 to 32, got 33"),
        ({"input": "8"}, ValueError, "override field 'input' given as text is an offset such as .*, got '8'"),
        ({"activation": "+"}, ValueError, "override field 'activation' given as text is an offset"),
        ({"activatoin": 8}, ValueError, r"got 'activatoin'\. Did you mean \"activation\"\?"),
        ({"input": 8, "activation": 8}, ValueError, "input and activation are two names for one field"),
        ({"weight": Static(4)}, TypeError, "override field 'weight' must be a width such as 8"),
        ({"schedule": 8}, TypeError, r"override field 'schedule' must be a schedule such as Static\(8\), got 8"),
        ({"bits": 8, "schedule": Static(4)}, ValueError, "bits or a schedule, not both"),
        (named, TypeError, "an override is .* a schedule, .* mapping of bits, offset, schedule, input, .*; got"),
        ({"bits": 8, "offset": 1}, ValueError, "bits or an offset, not both: got bits=8, offset=1"),
        ({"offset": "up"}, TypeError, "override offset must be an integer, got 'up'"),
        (None, TypeError, "an override is fixed bits .*; got None"),
    ],
)
def test_values_that_are_no_override(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        result_of(overrides={"head": value})


class Hidden(nn.Module):
    """A linear layer beside operators that no rule covers."""

    def __init__(self, *, recurrent: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.core = nn.LSTM(4, 4, batch_first=True) if recurrent else nn.Identity()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if self.recurrent:
            y: Tensor = self.core(x)[0]
            return y
        return nn.functional.scaled_dot_product_attention(x, x, x)


WITHOUT_ATTENTION = replace(recipes.default(), attention=None)


def test_strict_wants_everything_covered() -> None:
    with pytest.raises(TransformError, match=r"strict=True, but 1 operators.*\n  core: LSTM: .* inside it: LSTM"):
        cpt_fx.transform(Hidden(recurrent=True), Static(4), strict=True, capture="symbolic")
    with pytest.raises(
        TransformError, match=r"strict=True, but 1 .*\n.*scaled_dot_product_attention: recipe 'default'"
    ):
        cpt_fx.transform(Hidden(recurrent=False), Static(4), strict=True, recipe=WITHOUT_ATTENTION)
    assert quantized(cpt_fx.transform(Net(), Static(4), strict=True)) == LAYERS


def test_what_is_left_is_said_without_strict(caplog: pytest.LogCaptureFixture) -> None:
    for recurrent in (True, False):
        caplog.clear()
        result = cpt_fx.transform(Hidden(recurrent=recurrent), Static(4), recipe=WITHOUT_ATTENTION, capture="symbolic")
        assert [item.by_choice for item in history_of(result).uncovered] == [False]
        assert "in full precision: " in caplog.text


@pytest.mark.parametrize("exclude", ["core", nn.LSTM])
def test_strict_accepts_what_was_excluded(exclude: Any) -> None:
    result = cpt_fx.transform(Hidden(recurrent=True), Static(4), strict=True, exclude=exclude, capture="symbolic")
    assert [item.by_choice for item in history_of(result).uncovered] == [True]


def test_strict_accepts_excluded_attention() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Hidden(recurrent=False))
    result = cpt_fx.transform(model, Static(4), strict=True, exclude=Hidden)
    assert quantized(result) == {"0"}


@pytest.mark.slow
def test_overrides_take_rules_recipes_and_plain_values() -> None:
    def formats(value: Any) -> dict[str, str]:
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model = cpt_fx.transform(net, Static(4), overrides={"1": value})
        return {view.role: str(view.format) for view in cpt_fx.inspect(model).quantizers if view.layer == "1"}

    assert formats(Rule(weight=Format(group="row"))) == {"weight": "affine/row"}  # type: ignore[arg-type]
    assert formats(recipes.fp8())["gradient"] == "e5ieee/tensor/stochastic"
    assert formats({"weight": {"scheme": "affine"}})["weight"] == "affine/tensor"
    assert formats((8, 8, 4)) == formats(8)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ({"bits": "+2"}, TypeError, "override field 'bits' must be a width such as 8"),
        ({"bits": Rule()}, TypeError, "override field 'bits' must be a width"),
        ({"offset": (1, "x", 1)}, TypeError, "override offset must be an integer"),
        (
            {"weight": {"grp": 1}},
            ValueError,
            r"a format in an override has fields .*, got 'grp'\. Did you mean \"group\"",
        ),
    ],
)
def test_nested_values_that_are_no_override(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cpt_fx.transform(nn.Sequential(nn.Linear(3, 3)), Static(8), overrides={"0": value})


@pytest.mark.parametrize("value", [[7, 7, 6], {"bits": [7, 7, 6]}, {"offset": (2, 2, 1)}, {"offset": "+2"}])
def test_widths_may_be_lists_and_offsets_text(value: Any) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model = cpt_fx.transform(net, Static(Bits(5, 5, 5)), overrides={"1": value})
    found = {view.role: view.bits for view in cpt_fx.inspect(model).quantizers if view.layer == "1"}
    assert found == {"weight": 7, "activation": 7, "bias": 7, "gradient": 7 if value == {"offset": "+2"} else 6}


def test_a_program_knows_the_types_of_its_layers() -> None:
    program = torch.export.export(nn.Sequential(nn.Conv1d(2, 2, 1), nn.Linear(4, 4)), (torch.randn(3, 2, 4),))
    result = cpt_fx.transform(program, Static(4), exclude="0", overrides={nn.Conv1d: 6})
    assert quantized(result) == {"1"}
    note = "overrides 'Conv1d' selects modules in which nothing is quantized: no effect"
    assert note in history_of(result).notes
    with pytest.raises(ValueError, match=r"exclude: no module is a LSTM\. Types: Conv1d, GraphModuleImpl, Linear"):
        cpt_fx.transform(program, Static(4), exclude=nn.LSTM)
