"""What an inspection says: quantizers, what is left, how it came about, tables, the networkx graph."""

from __future__ import annotations

import math
import pickle

import networkx as nx
import pytest
import torch
from rich.console import Console
from torch import nn

import cpt_fx
from cpt_fx.ir.meta import QUANTIZER
from cpt_fx.schedules import Static
from tests.inspection.models import Net, TakingTurns, images, train_step, trained, transformed


def test_every_quantize_node_has_a_view() -> None:
    model = transformed()
    views = cpt_fx.inspect(model).quantizers
    nodes = [node for module in cpt_fx.graphs(model) for node in module.graph.nodes if QUANTIZER in node.meta]
    assert [view.node for view in views] == [node.name for node in nodes]
    assert len(views) == 6 * 3 + 4
    assert {view.role for view in views} == {"weight", "activation", "bias", "gradient"}


def test_a_view_tells_what_the_quantizer_is() -> None:
    views = {view.node: view for view in cpt_fx.inspect(transformed(overrides={"head": 5})).quantizers}
    weight = views["blocks_0_conv1_weight_q"]
    assert (weight.layer, weight.layers, weight.role) == ("blocks.0.conv1", ("blocks.0.conv1",), "weight")
    assert (weight.op, weight.operand, weight.group) == ("conv2d", "weight", "channel")
    assert (weight.bits, weight.times_run) == (3, 0)
    assert (weight.levels, weight.error, weight.range, weight.graph) == ({}, {}, None, 0)
    assert views["head_weight_q"].bits == 5
    assert views["head_weight_q"].width_source.fixed == 5


def test_a_view_tells_what_the_quantizer_did() -> None:
    model = trained(recipe="default")
    view = next(view for view in cpt_fx.inspect(model).quantizers if view.node == "stem_input_q")
    assert view.times_run == 1
    assert 2 < view.levels[3] <= 8
    assert 0.05 < view.error[3] < 0.6
    assert view.range is not None
    low, high = view.range
    assert -6 < low < -1.5 < 1.5 < high < 6


def test_an_inspection_is_live() -> None:
    model = transformed()
    inspection = cpt_fx.inspect(model)
    assert all(view.times_run == 0 for view in inspection.quantizers)
    train_step(model)
    assert all(view.times_run == 1 for view in inspection.quantizers)
    model.eval()
    assert {view.bits for view in inspection.quantizers} == {8}


def test_a_range_without_correction_is_shown_as_it_is_used() -> None:
    model = trained(recipe="paper")
    view = next(view for view in cpt_fx.inspect(model).quantizers if view.node == "stem_input_q")
    assert view.range is not None
    # A tenth of one batch: this is the range that evaluation would take.
    assert view.range[1] - view.range[0] < 1.0


def test_a_shared_quantizer_names_every_layer() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.left(x) + self.right(x)
            return result

    shared = [view for view in cpt_fx.inspect(transformed(Fork())).quantizers if len(view.layers) > 1]
    assert [view.layers for view in shared] == [("left", "right")]
    assert shared[0].layer == "left"


def test_uncovered_passes_and_capture() -> None:
    inspection = cpt_fx.inspect(transformed(exclude=["head"]))
    assert [(item.layer, item.op, item.by_choice) for item in inspection.uncovered] == [("head", "linear", True)]
    assert [report.name for report in inspection.passes] == [
        "normalize",
        "decompose",
        "annotate",
        "insert",
        "share",
        "bind",
    ]
    assert inspection.capture.frontend == "symbolic"
    assert str(inspection.capture).startswith("symbolic")


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_is_readable(width: int) -> None:
    model = trained()
    console = Console(width=width, color_system=None, record=True, legacy_windows=False)
    with console.capture() as capture:
        console.print(cpt_fx.inspect(model).table())
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    (row,) = [line for line in lines if line.startswith("blocks.0.conv1")]
    assert "activation" in row and "affine_integer" in row
    assert sum("/8 " in line for line in lines) == 6 + 6 + 4  # all but the gradients, which are at 8 bits
    assert sum("/256 " in line for line in lines) == 6


def test_text_names_what_never_ran() -> None:
    model = transformed(exclude=["head"])
    text = str(cpt_fx.inspect(model))
    assert text.count("never") == len(cpt_fx.inspect(model).quantizers)
    assert "in full precision: 0, excluded by choice: 1" in text
    assert "head: linear: excluded by 'head'" in text
    assert "bind: " in text
    train_step(model)
    assert "never" not in str(cpt_fx.inspect(model))
    assert repr(cpt_fx.inspect(model)) == (
        "<Inspection of Net: 18 quantizers, 1 uncovered; captured, not proven: call `verify(*inputs)`>"
    )


def test_markup_in_names_is_text() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("[red]x[/red]<b>", nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.get_submodule("[red]x[/red]<b>")(x)
            return result

    inspection = cpt_fx.inspect(transformed(Named()))
    assert "[red]x[/red]<b>" in str(inspection)
    assert "&lt;b&gt;" in inspection.svg() and "<b>" not in inspection.svg()
    page = inspection.html()
    assert "x[/red]<b>" not in page


def test_networkx_is_the_graph() -> None:
    model = trained()
    (module,) = cpt_fx.graphs(model)
    graph = cpt_fx.inspect(model).networkx()
    assert isinstance(graph, nx.DiGraph)
    assert nx.is_directed_acyclic_graph(graph)
    assert list(graph) == [node.name for node in module.graph.nodes]
    assert graph.number_of_edges() == sum(len(node.all_input_nodes) for node in module.graph.nodes)
    weight = graph.nodes["blocks_0_conv1_weight_q"]
    assert weight == {
        "op": "call_function", "target": "fake_quantize", "kind": "quantizer", "role": "weight",
        "layer": "blocks.0.conv1", "bits": 3, "module": "blocks.0.conv1", "made_by": "insert",
    }  # fmt: skip
    assert graph.nodes["blocks_0_conv1_weight"]["kind"] == "parameter"
    assert graph.nodes["conv2d"]["layer"] == "stem"
    assert graph.nodes["x"]["kind"] == "input"
    assert graph.nodes["output"]["kind"] == "output"
    kinds = {name: data["kind"] for name, data in graph.nodes(data=True)}
    assert {kind for name, kind in kinds.items() if name.startswith("_cpt_fx")} == {"state"}


def test_it_survives_a_pickle() -> None:
    """Traces of modules do not; names then come from layers and parameters."""
    model = pickle.loads(pickle.dumps(trained()))
    inspection = cpt_fx.inspect(model)
    assert inspection.networkx().nodes["blocks_0_conv1_weight_q"]["module"] == "blocks.0.conv1"
    assert "blocks_0_conv1_weight_q" in inspection.svg(depth=9)


def test_wrapped_models_are_found() -> None:
    model = trained()
    wrapped = nn.Sequential(nn.Identity(), model)
    assert cpt_fx.inspect(wrapped).quantizers == cpt_fx.inspect(model).quantizers
    cpt_fx.inspect(wrapped).verify(images())


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(cpt_fx.TransformError, match=r"Net is not transformed: call cpt_fx\.transform"):
        cpt_fx.inspect(Net())
    with pytest.raises(TypeError, match="got str"):
        cpt_fx.inspect("model")  # type: ignore[arg-type]


def test_full_precision_has_no_levels() -> None:
    model = cpt_fx.transform(TakingTurns(2), Static(32))
    train_step(model, torch.randn(4, 8))
    views = cpt_fx.inspect(model).quantizers
    assert all(view.times_run == 1 and not view.levels and view.seen is None for view in views)
    assert all(view.range is None or all(map(math.isfinite, view.range)) for view in views)
