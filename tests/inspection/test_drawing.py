"""Drawings: well-formed, complete, the same every time, nothing fetched, readable for small and large models."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cpt_fx
from cpt_fx.inspection.boxes import Box, shortened
from cpt_fx.inspection.html import page
from cpt_fx.inspection.layout import Placed, place, plan
from cpt_fx.inspection.svg import DARK, LIGHT, READABLE, levels_of, resource
from cpt_fx.inspection.tree import CROWD, IN, OUT, Item, build
from tests.inspection.models import Net, TakingTurns, images, train_step, trained, transformed
from tests.zoo import ZOO, Build

VOID = {"meta", "input", "br"}


class Parser(HTMLParser):
    """Checks that what is opened is closed, and keeps scripts and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: set[str | None] = set()
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        self.ids |= {value for name, value in attrs if name == "id"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


def parsed(text: str) -> Parser:
    parser = Parser()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    loaded: dict[str, Any] = json.loads(found[1])
    return loaded


def tree_of(model: nn.Module) -> Item:
    inspection = cpt_fx.inspect(model)
    return build(inspection.graphs, inspection.quantizers, inspection.name)


def boxes_in(svg: str) -> list[str]:
    return [str(g.get("class")) for g in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}g")]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return trained(overrides={"head": "+1"})


@pytest.fixture(scope="module")
def large() -> nn.Module:
    """More than a thousand nodes, all at the top level of the model."""
    torch.manual_seed(0)
    return trained(TakingTurns(100), torch.randn(2, 8))


def test_the_svg_is_complete(model: nn.Module, tmp_path: Path) -> None:
    inspection = cpt_fx.inspect(model)
    text = inspection.svg(tmp_path / "graph.svg", depth=9)
    assert (tmp_path / "graph.svg").read_text(encoding="utf-8") == text
    root = ET.fromstring(text)
    titles = [str(title.text) for title in root.iter("{http://www.w3.org/2000/svg}title")]
    for view in inspection.quantizers:
        assert f"{view}, {view.bits} bits" in titles
        assert f"box quantizer {view.role}" in boxes_in(text)
    assert sum(kind.startswith("box quantizer") for kind in boxes_in(text)) == len(inspection.quantizers) + 4  # legend
    assert "_cpt_fx" not in text and "training" not in titles


def test_the_page_is_complete(model: nn.Module, tmp_path: Path) -> None:
    inspection = cpt_fx.inspect(model)
    text = inspection.html(str(tmp_path / "graph.html"))
    assert (tmp_path / "graph.html").read_text(encoding="utf-8") == text
    parser = parsed(text)
    assert {"search", "found", "stage", "panel", "fit", "fold", "unfold", "theme"} <= parser.ids
    items = data_of(text)["items"]
    for view in inspection.quantizers:
        facts = dict(items[f"0.{view.node}"]["f"])
        assert (facts["bits now"], facts["node"], facts["times run"]) == (str(view.bits), view.node, "1")
        assert facts["format"] == str(view.format).replace("/", " · ")
        assert f"{view.levels[view.bits]} of {2**view.bits} levels" in facts[f"at {view.bits} bits"]
    assert " to " in dict(items["0.stem_input_q"]["f"])["running range"]
    assert dict(items["0.head_weight_q"]["f"])["follows"] == "weight bits +1"
    for report in inspection.passes:
        assert report.name in text


def test_uncovered_operators_are_listed() -> None:
    text = cpt_fx.inspect(transformed(exclude=["head"])).html()
    assert "excluded by &#x27;head&#x27;" in text
    assert "Everything that multiplies is quantized" not in text
    assert "Everything that multiplies is quantized" in cpt_fx.inspect(transformed()).html()


def test_nothing_is_fetched(model: nn.Module) -> None:
    for text in (cpt_fx.inspect(model).svg(), cpt_fx.inspect(model).html()):
        assert set(re.findall(r"\w+://[^\s\"'<>`]*", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bsrc=|\bhref=|<link", text)


def test_drawings_repeat_themselves() -> None:
    texts = set()
    for _ in range(2):
        torch.manual_seed(0)
        inspection = cpt_fx.inspect(trained())
        texts |= {inspection.svg(), inspection.html(), str(inspection), inspection._repr_html_()}
    assert len(texts) == 3  # a notebook shows the SVG


def test_labels_are_escaped() -> None:
    model = transformed(nn.Sequential(nn.Linear(4, 4)))
    inspection = cpt_fx.inspect(model)
    (module,) = cpt_fx.graphs(model)
    next(iter(module.graph.nodes)).target = "</script><b a='\"&"
    ET.fromstring(inspection.svg())
    text = page(inspection)
    parsed(text)
    assert "</script><b" not in text


@pytest.mark.parametrize("build_model", ZOO.values(), ids=ZOO.keys())
def test_the_whole_zoo_can_be_drawn(build_model: Build) -> None:
    model, args, kwargs = build_model()
    result = cpt_fx.transform(model, cpt_fx.schedules.Static(8), example_inputs=args, example_kwargs=kwargs)
    inspection = cpt_fx.inspect(result)
    ET.fromstring(inspection.svg(depth=9))
    text = inspection.html()
    parsed(text)
    items = data_of(text)["items"]
    assert {f"{view.graph}.{view.node}" for view in inspection.quantizers} <= items.keys()
    for item in items.values():
        check_item(item)


def check_item(item: dict[str, Any]) -> None:
    """Every child stands in one row, which is in order, and every edge runs downwards, one row at a time."""
    if "rows" not in item:
        return
    rows = {node: place for place, row in enumerate(item["rows"]) for node in row}
    assert sum(map(len, item["rows"])) == len(rows)
    assert {node for node in rows if ".." not in node} - {IN, OUT} == set(item["kids"])
    assert item["x"].keys() == rows.keys()
    for row in item["rows"]:
        assert all(item["x"][left] < item["x"][right] for left, right in pairwise(row))
    assert len(item["asides"]) == len(item["chains"])
    for chain in item["chains"]:
        assert [rows[node] - rows[chain[0]] for node in chain] == list(range(len(chain)))


# Folding.


def test_depth_opens_levels_of_modules(model: nn.Module) -> None:
    inspection = cpt_fx.inspect(model)
    counts = [
        sum(kind.startswith("box quantizer") for kind in boxes_in(inspection.svg(depth=depth))) for depth in range(5)
    ]
    assert counts == sorted(counts)
    assert counts[0] == 4  # the legend's
    assert counts[-1] == 4 + len(inspection.quantizers)
    assert [frame for frame in boxes_in(inspection.svg(depth=0)) if frame == "frame"] == []
    with pytest.raises(ValueError, match="depth"):
        inspection.svg(depth=-1)
    with pytest.raises(TypeError, match="depth"):
        inspection.svg(depth=1.5)  # type: ignore[arg-type]


def test_a_folded_module_shows_its_widths(model: nn.Module) -> None:
    text = cpt_fx.inspect(model).svg(depth=0)
    assert ">W 3<" in text and ">A 3<" in text and ">G 8<" in text
    assert ">W 4<" in text  # the head has an offset of its own
    assert "Sequential · 14 quantizers" in text


def test_members_that_take_turns_are_not_folded_together() -> None:
    root = tree_of(transformed(TakingTurns(4)))
    assert [child.title for child in root.children if child.kind == "module"] == [f"layers.{i}" for i in range(4)]
    arranged = plan(root)
    assert arranged.back == []


def test_a_module_called_twice_is_drawn_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(torch.relu(self.layer(x)))
            return result

    root = tree_of(transformed(Twice()))
    assert [child.title for child in root.children if child.kind == "module"] == ["layer", "layer (call 2)"]
    assert plan(root).back == []


def test_a_large_model_starts_folded(large: nn.Module) -> None:
    inspection = cpt_fx.inspect(large)
    assert len(cpt_fx.graphs(large)[0].graph.nodes) > 1000
    boxes = [kind for kind in boxes_in(inspection.svg()) if kind.startswith("box")]
    assert 5 < len(boxes) <= READABLE
    data = data_of(inspection.html())
    assert len(data["items"]) > 1000
    shown = [key for key in data["items"] if data["items"][key]["p"] in data["open"]]
    assert 5 < len(shown) <= 60
    assert {f"0.{view.node}" for view in inspection.quantizers} <= data["items"].keys()
    for item in data["items"].values():
        check_item(item)
        assert len(item.get("kids", ())) <= CROWD


def test_levels_of_counts_what_shows(large: nn.Module) -> None:
    root = tree_of(large)
    for limit in (1, 20, 100, 500):
        opened = levels_of(root, limit)[-1]
        shown = [item for item in root.walk() if item.parent is not None and item.parent.id in opened]
        closed = [item for item in shown if item.id not in opened]
        assert len(closed) <= limit or opened == {root.id}


# Coordinates.


def overlaps(placed: Placed, boxes: dict[str, Box]) -> list[tuple[str, str]]:
    found = []
    nodes = list(boxes)
    for spot, first in enumerate(nodes):
        for second in nodes[spot + 1 :]:
            apart_x = abs(placed.x[first] - placed.x[second]) >= (boxes[first].width + boxes[second].width) / 2
            above, below = sorted((first, second), key=placed.top.__getitem__)
            if not apart_x and placed.top[above] + boxes[above].height > placed.top[below]:
                found.append((first, second))
    return found


@pytest.mark.parametrize("name", ["bert_layer", "gat", "lstm", "einsums", "several_inputs_and_outputs"])
def test_boxes_do_not_overlap(name: str) -> None:
    model, args, kwargs = ZOO[name]()
    result = cpt_fx.transform(model, cpt_fx.schedules.Static(8), example_inputs=args, example_kwargs=kwargs)
    for item in tree_of(result).walk():
        if item.children:
            boxes = {
                child.id: Box(20.0 + 13 * (spot % 7), 20.0 + 9 * (spot % 4)) for spot, child in enumerate(item.children)
            }
            placed = place(plan(item), boxes)
            assert overlaps(placed, boxes) == []
            assert min(placed.x[node] - box.width / 2 for node, box in boxes.items()) >= -1e-6
            assert max(placed.x[node] + box.width / 2 for node, box in boxes.items()) <= placed.width + 1e-6


def test_a_chain_is_a_straight_line() -> None:
    root = tree_of(transformed(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))))
    placed = place(plan(root), {child.id: Box(60.0, 20.0) for child in root.children})
    assert max(placed.x.values()) - min(placed.x.values()) < 1e-6


def test_a_skip_has_a_lane_of_its_own(model: nn.Module) -> None:
    block = next(item for item in tree_of(model).walk() if item.path == "blocks.0" and item.kind == "module")
    arranged = plan(block)
    lanes = [chain for chain in arranged.chains if any(".." in node for node in chain)]
    assert lanes and all(chain[0] == IN for chain in lanes)


def test_names_of_modules_do_not_move_them() -> None:
    class Named(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, *others = self.layers.values()
            result: torch.Tensor = sum((layer(x) for layer in others), first(x))
            return result

    found = []
    for names in (("a", "b", "c"), ("a~1", "a~2", "b ~")):
        root = tree_of(transformed(Named(*names)))
        found.append([*place(plan(root), {child.id: Box(60.0, 20.0) for child in root.children}).x.values()])
    assert found[0] == found[1]


# The look.


def test_both_themes_have_every_colour() -> None:
    used = set(re.findall(r"var\(--([a-z-]+)\)", resource("graph.css") + resource("page.css")))
    assert LIGHT.keys() == DARK.keys()
    assert used <= LIGHT.keys()


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    ("front", "back"),
    [("ink", "bg"), ("muted", "bg"), ("muted", "frame"), ("ink", "value"), ("end-ink", "end"),
     *((f, f"{r}-soft") for r in ("weight", "activation", "bias", "gradient") for f in ("ink", "muted", r)),
     *(("on-role", r) for r in ("weight", "activation", "bias", "gradient"))],
)  # fmt: skip
def test_text_can_be_read(palette: dict[str, str], front: str, back: str) -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(palette[front]), luminance(palette[back])), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_long_names_keep_their_ends() -> None:
    assert shortened("short") == "short"
    assert shortened("a" * 40 + "z") == "a" * 16 + "…" + "a" * 16 + "z"
    assert len(shortened("x" * 100, 34)) == 34


@pytest.mark.filterwarnings("ignore:.* learned anything:UserWarning")
def test_a_page_of_an_evaluated_model() -> None:
    model = Net()
    result = transformed(model).eval()
    result(images())
    text = cpt_fx.inspect(result).html()
    assert "<b>6</b><span>never ran</span>" in text
    result.train()
    train_step(result)
    assert "<b>0</b><span>never ran</span>" in cpt_fx.inspect(result).html()
