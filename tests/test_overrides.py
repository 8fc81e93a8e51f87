"""Widths of single roles, schedules of a part's own, and modules that have several names."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx import Format, recipes
from cpt_fx.api import history_of
from cpt_fx.ir.meta import WidthSource
from cpt_fx.ir.state import width_of
from cpt_fx.overrides import Override
from cpt_fx.schedules import Bits, Custom, Delayed, Schedule, Static, named
from tests.training import show_widths, train_step

CAPTURES = pytest.mark.parametrize("capture", ["symbolic", "dynamo"])


class Net(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.fc, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.fc(torch.relu(self.stem(x)))))
        return y


def batch() -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(1))


def changed(overrides: Any, schedule: Schedule | None = None, capture: str = "symbolic", **options: Any) -> nn.Module:
    return cpt_fx.transform(
        Net(), schedule or Static(5), overrides=overrides, capture=capture, example_inputs=(batch(),), **options
    )


def widths(model: nn.Module, layer: str) -> dict[str, int]:
    return {view.role: view.bits for view in cpt_fx.inspect(model).quantizers if view.layer == layer}


def notes(model: nn.Module) -> list[str]:
    history = history_of(model)
    return [*history.notes, *(note for report in history.reports for note in report.notes)]


AS_SCHEDULED = {"weight": 5, "bias": 5, "activation": 5, "gradient": 5}


@CAPTURES
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ({"weight": 4}, {"weight": 4, "bias": 4}),
        ({"bias": 8}, {"bias": 8}),
        ({"bias": "+1"}, {"bias": 6}),
        ({"weight": 4, "bias": "+2"}, {"weight": 4, "bias": 7}),
        ({"input": 8}, {"activation": 8}),
        ({"activation": 8}, {"activation": 8}),
        ({"gradient": 6}, {"gradient": 6}),
        ({"gradient": "-2"}, {"gradient": 3}),
        ({"weight": 4, "gradient": "+1"}, {"weight": 4, "bias": 4, "gradient": 6}),
        ({"bits": 7, "weight": "+1"}, {"weight": 6, "bias": 6, "activation": 7, "gradient": 7}),
        ({"bits": Bits(3, 6, 7), "activation": 2}, {"weight": 3, "bias": 3, "activation": 2, "gradient": 7}),
        ({"offset": 2, "gradient": 32}, {"weight": 7, "bias": 7, "activation": 7, "gradient": 32}),
        ({"offset": "+2", "bias": 0}, {"weight": 7, "bias": 0, "activation": 7, "gradient": 7}),
        (Override(widths=(("weight", 4),)), {"weight": 4, "bias": 4}),
    ],
)
def test_the_width_of_one_role(override: Any, expected: dict[str, int], capture: str) -> None:
    model = changed({"fc": override}, capture=capture)
    assert widths(model, "fc") == AS_SCHEDULED | expected
    assert widths(model, "head") == AS_SCHEDULED
    train_step(model, (batch(),), {})
    cpt_fx.inspect(model).verify()


def test_widths_and_formats_mix() -> None:
    row = Format(scheme="symmetric", group="row")  # type: ignore[arg-type]
    model = changed({"fc": {"weight": row, "gradient": None, "activation": 7}, "head": {"activation": None}})
    found = {(view.layer, view.role): str(view.format) for view in cpt_fx.inspect(model).quantizers}
    assert found["fc", "weight"] == "symmetric/row"
    assert ("fc", "gradient") not in found and ("head", "activation") not in found
    assert widths(model, "fc") == {"weight": 5, "bias": 5, "activation": 7}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({nn.Linear: {"weight": 4}, "fc": {"gradient": 6}}, {"weight": 4, "bias": 4, "gradient": 6}),
        ({nn.Linear: {"weight": 4}, "fc": {"weight": 6}}, {"weight": 6, "bias": 6}),
        ({nn.Linear: {"bias": 8}, "fc": {"weight": 4}}, {"bias": 8, "weight": 4}),
        ({nn.Linear: {"bias": 8}, "f*": 4, "fc": {"weight": 6}},
         {"weight": 6, "bias": 6, "activation": 4, "gradient": 4}),
        ({nn.Linear: {"bias": 8}, "fc": 4}, {"weight": 4, "bias": 4, "activation": 4, "gradient": 4}),
        ({nn.Linear: {"weight": 4}, "fc": "+1"}, {"weight": 6, "bias": 6, "activation": 6, "gradient": 6}),
        ({nn.Linear: Static(3), "fc": "+1"}, {"weight": 4, "bias": 4, "activation": 4, "gradient": 4}),
        ({nn.Linear: Static(3), "fc": 7}, {"weight": 7, "bias": 7, "activation": 7, "gradient": 7}),
        ({nn.Linear: 7, "fc": Static(3)}, {"weight": 3, "bias": 3, "activation": 3, "gradient": 3}),
        ({"fc": {"schedule": Static(3), "offset": 1, "bias": "+2", "gradient": 8}},
         {"weight": 4, "bias": 5, "activation": 4, "gradient": 8}),
    ],
)  # fmt: skip
def test_several_patterns_add_up(overrides: Any, expected: dict[str, int]) -> None:
    assert widths(changed(overrides), "fc") == AS_SCHEDULED | expected


def test_a_width_without_a_quantizer_is_noted() -> None:
    model = changed({"fc": {"bias": 8, "weight": 4}, "head": {"bias": 8}}, recipe=recipes.integer())
    expected = "overrides {!r} sets the bits of the bias, and nothing that it selects has a quantized bias: no effect"
    assert [note for note in notes(model) if "no effect" in note] == [expected.format("fc"), expected.format("head")]
    assert not [note for note in notes(changed({nn.Linear: {"bias": 8, "weight": 4}})) if "no effect" in note]


OWN = named("LR", q_min=2, q_max=6, total_steps=8, cycles=1, eval_bits=7)


@CAPTURES
@pytest.mark.parametrize("form", [OWN, {"schedule": OWN}, Override(schedule=OWN)])
def test_a_schedule_of_its_own(form: Any, capture: str) -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=12)
    model = changed({"head": form, "fc": {"schedule": OWN, "weight": "+1"}}, schedule, capture)
    seen = set()
    for step in range(12):
        own, bits = OWN.bits(step), schedule.current
        seen.add(own)
        assert widths(model, "head") == {"weight": own.weight, "bias": own.weight, "activation": own.activation,
                                         "gradient": own.gradient}  # fmt: skip
        assert widths(model, "fc")["weight"] == own.weight + 1 and widths(model, "fc")["activation"] == own.activation
        assert widths(model, "stem")["weight"] == bits.weight
        schedule.step()
    assert len(seen) > 3
    assert OWN.position == 0
    schedule.position = 3
    model.eval()
    assert widths(model, "head") == {"weight": 7, "bias": 7, "activation": 7, "gradient": OWN.bits(3).gradient}
    assert widths(model, "stem")["weight"] == 8
    model.train()
    assert widths(model, "head")["weight"] == OWN.bits(3).weight
    train_step(model, (batch(),), {})
    cpt_fx.inspect(model).verify()


def test_it_is_shown_what_is_followed() -> None:
    page = cpt_fx.inspect(changed({"head": {"schedule": Static(3), "offset": 1}})).html()
    assert "weight bits of Static(bits=3) +1" in page


def test_verify_knows_the_width_of_a_schedule_of_its_own() -> None:
    model = changed({"head": OWN})
    train_step(model, (batch(),), {})
    (name,) = {
        view.width_source.name
        for view in cpt_fx.inspect(model).quantizers
        if (view.layer, view.role) == ("head", "weight")
    }
    show_widths(model, **{name: 5})
    with pytest.raises(ValueError, match="is at 5 bits; for training at step 0 it should be at 2"):
        cpt_fx.inspect(model).verify()


def test_copies_keep_a_schedule_of_a_part() -> None:
    schedule = Static(5)
    model = changed({"head": OWN, "fc": Custom(lambda step: 3 + step)}, schedule)
    clone = copy.deepcopy(model)
    schedule.step(2)
    for each in (model, clone):
        assert widths(each, "head")["weight"] == OWN.bits(2).weight
        assert widths(each, "fc")["weight"] == 5
        train_step(each, (batch(),), {})
        cpt_fx.inspect(each).verify()
    loaded = pickle.loads(pickle.dumps(changed({"head": OWN}, schedule)))
    assert widths(loaded, "head")["weight"] == OWN.bits(2).weight


def source_of(overrides: dict[Any, Any], layer: str = "fc") -> WidthSource:
    return Override.all(overrides)[layer].width_sources({"weight": WidthSource("weight")})["weight"]


def by_step(step: int) -> int:
    return 4


@pytest.mark.parametrize(
    "schedule",
    [
        OWN,
        Static(8),
        Static(Bits(3, 4, 5)),
        Custom(by_step),
        Custom(lambda step: 4),
        Delayed(OWN, 3),
    ],
)
def test_dials_of_schedules_are_plain_values(schedule: Schedule) -> None:
    source = source_of({"fc": schedule})
    assert source.name.isidentifier() and source.name.startswith("weight_own_")
    assert source == source_of({"fc": schedule}) == copy.deepcopy(source) and hash(source) == hash(
        copy.deepcopy(source)
    )
    assert source != WidthSource("weight") and source.name != WidthSource("activation", schedule=schedule).name
    assert source.name == source_of({"head": 8, "fc": schedule}).name == WidthSource("weight", schedule=schedule).name


def test_equal_schedules_share_a_dial_and_others_do_not() -> None:
    again = named("LR", q_min=2, q_max=6, total_steps=8, cycles=1, eval_bits=7)
    again.step(3)
    assert source_of({"fc": OWN}) == source_of({"fc": again})
    assert pickle.loads(pickle.dumps(source_of({"fc": OWN}))) == source_of({"fc": again})
    three, four = Custom(lambda step: 3), Custom(lambda step: 4)
    assert repr(three) == repr(four)
    overrides = {"fc": three, "head": four, "stem": {"schedule": three}}
    names = [source_of(overrides, layer).name for layer in overrides]
    assert names[0] == names[2] != names[1]
    model = changed(overrides)
    assert [widths(model, layer)["weight"] for layer in overrides] == [3, 4, 3]
    assert len({source_of({"fc": each}).name for each in (Static(8), Static(7), Static(8, eval_bits=3), OWN)}) == 4


def test_width_of() -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=8, cycles=1)
    assert width_of(WidthSource("weight"), schedule, 0, training=True) == 3
    assert width_of(WidthSource("weight"), schedule, 0, training=False) == 8
    assert width_of(WidthSource("weight", offset=1, schedule=OWN), schedule, 0, training=True) == 3
    assert width_of(WidthSource("weight", schedule=OWN), schedule, 0, training=False) == 7
    assert width_of(WidthSource("weight", fixed=5, schedule=OWN), schedule, 0, training=False) == 5
    off = Static(Bits(0, 0, 8))
    assert width_of(WidthSource("gradient", with_forward=True, schedule=off), schedule, 0, training=True) == 0


def test_a_gradient_that_follows_the_forward_width_has_a_dial_of_its_own_when_fixed() -> None:
    assert WidthSource("gradient", fixed=8, with_forward=True).name != WidthSource("gradient", fixed=8).name


# Modules with several names.


class Block(nn.Module):
    """Two layers and a product with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.mix = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(x))) @ self.mix
        return y


class Shared(nn.Module):
    """A block that is run three times, and a linear layer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = Block()
        self.encode = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([block, block, block])
        self.layers = self.blocks
        self.decode = self.encode
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.decode(x))
        return y


class Broken(Shared):
    """The same, in more than one graph where Dynamo captures it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.encode(x)
        torch._dynamo.graph_break()
        for block in self.blocks:
            x = block(x)
        torch._dynamo.graph_break()
        y: Tensor = self.head(self.decode(x))
        return y


INSIDE = {"blocks.0.up", "blocks.0.down", "blocks.0.matmul"}
ALIASES = [
    ("blocks.1", INSIDE, "blocks.0", "module"),
    ("blocks.[12]", INSIDE, "blocks.0", "module"),
    ("layers", INSIDE, "blocks", "module"),
    ("layers.2", INSIDE, "blocks.0", "module"),
    ("blocks.2.up", {"blocks.0.up"}, "blocks.0.up", "module"),
    ("*.2.d*", {"blocks.0.down"}, "blocks.0.down", "module"),
    ("decode", {"encode"}, "encode", "module"),
]


def shared(kind: type[Shared], capture: str, **options: Any) -> nn.Module:
    return cpt_fx.transform(kind(), Static(5), capture=capture, example_inputs=(batch(),), **options)


def layers_at(model: nn.Module, width: int) -> set[str]:
    """Return the layers at a width; the numbers of products in blocks say where they were captured."""
    views = cpt_fx.inspect(model).quantizers
    return {
        view.layer.rstrip("_0123456789") if "matmul" in view.layer else view.layer
        for view in views
        if view.bits == width
    }


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "capture"), [(Shared, "symbolic"), (Shared, "dynamo"), (Broken, "dynamo")])
@pytest.mark.parametrize(("pattern", "selected", "first", "what"), ALIASES)
def test_any_name_of_a_shared_module_selects_it(
    kind: type[Shared], capture: str, pattern: str, selected: set[str], first: str, what: str
) -> None:
    expected = f"overrides {pattern!r} selects {first}, which is the same {what}"
    model = shared(kind, capture, overrides={pattern: 8})
    assert layers_at(model, 8) == selected
    assert layers_at(model, 5) == {*INSIDE, "encode", "head"} - selected
    assert [note for note in notes(model) if note.startswith("overrides")] == [expected]
    model = shared(kind, capture, exclude=pattern)
    assert layers_at(model, 5) == {*INSIDE, "encode", "head"} - selected
    assert [note for note in notes(model) if note.startswith("exclude")] == [expected.replace("overrides", "exclude")]


@pytest.mark.slow
@CAPTURES
def test_an_operator_of_a_shared_module_has_its_names_too(capture: str) -> None:
    model = shared(Shared, capture, overrides={"blocks.1.matmul*": 8})
    assert layers_at(model, 8) == {"blocks.0.matmul"}
    (note, *_) = [note for note in notes(model) if note.startswith("overrides")]
    assert note == "overrides 'blocks.1.matmul*' selects blocks.0.matmul, which is the same operator"


@CAPTURES
def test_first_names_need_no_note(capture: str) -> None:
    model = shared(Shared, capture, overrides={"blocks.*": 8, "encode": 7, nn.Linear: "+0"}, exclude="head")
    assert not [note for note in notes(model) if "the same" in note or "no effect" in note]


@CAPTURES
@pytest.mark.parametrize("pattern", ["blocks.3", "decoder", "layers.1.upp"])
def test_a_name_that_is_none_is_refused(pattern: str, capture: str) -> None:
    with pytest.raises(ValueError, match=rf"overrides: '{pattern}' matches no module\. Did you mean"):
        shared(Shared, capture, overrides={pattern: 8})


class Recurrent(nn.Module):
    """A fused operator under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(4, 4, batch_first=True)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x)[0])[0]
        return y


@pytest.mark.slow
def test_opening_knows_every_name() -> None:
    model = nn.Sequential(Recurrent(), nn.Linear(4, 2))
    x = torch.randn(2, 3, 4)
    plain = recipes.default().with_rule("linear")
    closed = cpt_fx.transform(model, Static(5), exclude="0.second", example_inputs=(x,), recipe=plain)
    assert {view.layer for view in cpt_fx.inspect(closed).quantizers} == {"1"}
    assert not [note for note in notes(closed) if "decomposed into" in note]
    without = recipes.Recipe(name="without", linear=recipes.default().linear)
    rule = recipes.default().recurrent
    opened = cpt_fx.transform(model, Static(5), overrides={"0.second": rule}, example_inputs=(x,), recipe=without)
    assert any(view.layer.startswith("0.first") for view in cpt_fx.inspect(opened).quantizers)
