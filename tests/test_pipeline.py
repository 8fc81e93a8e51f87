"""The list of passes: its order, its record, its edits, and the graph behind each pass against a text on file.

`CPT_FX_REGENERATE=1 pytest tests/test_pipeline.py` writes the texts anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import cpt_fx
from cpt_fx import api
from cpt_fx.ir.meta import DECISION
from cpt_fx.ir.pass_base import Pass, Report
from cpt_fx.passes.annotate import Annotate
from cpt_fx.passes.bind import Bind
from cpt_fx.passes.decompose import Decompose
from cpt_fx.passes.insert import Insert
from cpt_fx.passes.normalize import Normalize
from cpt_fx.passes.share import Share
from cpt_fx.passes.verify import Verify
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import Recipe, default, integer, paper
from cpt_fx.schedules import Bits, Static
from tests.decompose.fused_graphs import recurrent
from tests.graph_text import graph_text
from tests.paper_models import GraphConv, SelfAttention
from tests.passes import NEAREST, Apply, assert_same, captured, numbers, quantizers
from tests.training import widths

GRAPHS = Path(__file__).parent / "golden_graphs"
NAMES = ["normalize", "decompose", "annotate", "insert", "share", "bind"]


@dataclass(frozen=True)
class CountProducts(Pass):
    """A user's pass: changes nothing, reports."""

    at_least: int = 0

    name: ClassVar[str] = "count"
    requires: ClassVar[str] = "annotated"

    def run(self, module: fx.GraphModule) -> Report:
        found = sum(DECISION in node.meta for node in module.graph.nodes)
        if found < self.at_least:
            raise ValueError(f"only {found} products")
        return Report(self.name, 0, (f"{found} products",))


def names(pipeline: Pipeline) -> list[str]:
    return [step.name for step in pipeline]


def test_the_order_is_written_once() -> None:
    assert names(Pipeline.standard()) == NAMES
    assert [type(step) for step in Pipeline.standard()] == [Normalize, Decompose, Annotate, Insert, Share, Bind]


def test_repr_is_the_full_record() -> None:
    schedule = Static(Bits(4, 4, 8))
    pipeline = Pipeline.standard(recipe=paper(), exclude=("head",), overrides={"0": 8}, schedule=schedule)
    text = repr(pipeline)
    assert [text.index(f"{type(step).__name__}(") for step in pipeline] == sorted(
        text.index(f"{type(step).__name__}(") for step in pipeline
    )
    for part in ("exclude=('head',)", "overrides={'0': 8}", repr(paper()), repr(schedule)):
        assert part in text
    assert repr(pipeline.replace("annotate", Annotate(recipe=integer()))) != text


def test_a_transformed_model_keeps_the_record() -> None:
    model = cpt_fx.transform(nn.Sequential(nn.Linear(3, 3)), Static(8), exclude=())
    history = api.history_of(model)
    assert [report.name for report in history.reports] == NAMES
    assert history.pipeline == repr(Pipeline.standard(schedule=Static(8)))


def test_edits_return_another_pipeline() -> None:
    standard, count = Pipeline.standard(), CountProducts()
    start = ["normalize", "decompose", "annotate"]
    assert names(standard.after("annotate", count)) == [*start, "count", "insert", "share", "bind"]
    assert names(standard.before("bind", count)) == [*start, "insert", "share", "count", "bind"]
    assert names(standard.drop("share")) == [*start, "insert", "bind"]
    assert names(standard.replace("share", count)) == [*start, "insert", "count", "bind"]
    assert names(standard) == NAMES


@pytest.mark.parametrize("edit", ["after", "before", "replace", "drop"])
def test_a_wrong_name_gets_the_nearest(edit: str) -> None:
    options = () if edit == "drop" else (CountProducts(),)
    with pytest.raises(ValueError, match=r"no pass 'shares' in this pipeline; there are \['normalize'.*\"share\"\?"):
        getattr(Pipeline.standard(), edit)("shares", *options)


def test_a_pass_in_the_wrong_place_is_refused() -> None:
    pipeline = Pipeline.standard().before("annotate", CountProducts())
    with pytest.raises(ValueError, match="pass 'count' needs a graph that is annotated, this one is normalized"):
        pipeline.run(captured(nn.Sequential(nn.Linear(3, 3))))


def test_a_users_pass_runs_and_reports() -> None:
    pipeline = Pipeline.standard().after("annotate", CountProducts(at_least=1))
    reports = pipeline.run(captured(nn.Sequential(nn.Linear(3, 3))))
    assert str(reports[3]) == "count: 0 changed\n    1 products"


def test_every_pass_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run = Verify.run

    def spy(self: Verify, module: fx.GraphModule) -> Report:
        seen.append(self.after)
        return run(self, module)

    monkeypatch.setattr(Verify, "run", spy)
    Pipeline.standard().after("annotate", CountProducts()).run(captured(nn.Sequential(nn.Linear(3, 3))))
    assert seen == ["normalize", "decompose", "annotate", "count", "insert", "share", "bind"]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 3])
def test_without_sharing_the_numbers_are_the_same(bits: int) -> None:
    x = torch.randn(2, 3, 8)
    found = []
    for pipeline in (Pipeline.standard(recipe=NEAREST), Pipeline.standard(recipe=NEAREST).drop("share")):
        model = pipeline.transform(SelfAttention(8, 2), Static(bits))
        model.load_state_dict({key: torch.full_like(value, 0.1).cumsum(0) for key, value in model.state_dict().items()
                               if "cpt_fx" not in key})  # fmt: skip
        found.append(numbers(model, x))
    assert_same(*found)


def test_an_edited_pipeline_transforms_a_model() -> None:
    schedule = Static(Bits(4, 4, 8))
    pipeline = Pipeline.standard().drop("share").after("annotate", CountProducts())
    model = pipeline.transform(nn.Sequential(nn.Linear(3, 3)), schedule)
    assert "CountProducts(at_least=0)" in api.history_of(model).pipeline
    assert [report.name for report in api.history_of(model).reports] == [
        "normalize", "decompose", "annotate", "count", "insert", "bind",
    ]  # fmt: skip
    assert widths(model)["weight"] == 4
    assert isinstance(cpt_fx.revert(model)[0], nn.Linear)  # type: ignore[index]
    assert model(torch.randn(2, 3)).shape == (2, 3)


def test_a_pipeline_without_bind_leaves_the_widths_at_32() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    result = Pipeline.standard().drop("bind").transform(model, Static(2))
    assert torch.equal(result(x), model(x))


# The graphs. Small models, one for each thing that graphs can show.


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(2, 2, 3, padding=1)
        self.shortcut = nn.Conv2d(2, 2, 1)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        y = self.conv2(x) + self.shortcut(x)
        out: Tensor = self.head(y.mean((2, 3)))
        return out


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.decoder(torch.tanh(self.encoder(tokens)))
        return logits


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = F.softmax(self.q(x) @ self.k(x).transpose(-1, -2) / 2, dim=-1)
        return weights @ self.v(x), weights


class FusedAttention(Attention):
    def forward(self, x: Tensor) -> Any:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Linear(2, 8)
        self.U = nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        for step in range(2):
            i, f, g, o = (self.W(x[step]) + self.U(h)).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


def _mix(self: Any, x: Tensor) -> Tensor:
    y = F.conv1d(x[None], weight=self.kernel, padding=1)[0]
    y = torch.einsum("ij,kj->ik", [y, self.w]) @ (self.w * self.gain)
    return F.linear(torch.addmm(self.b, y, self.w), self.w, self.b)


def functional_mix() -> nn.Module:
    return Apply(_mix, kernel=torch.randn(3, 3, 3), w=torch.randn(3, 3), gain=torch.randn(1), b=torch.randn(3))


def recurrent_layer() -> nn.Module:
    return recurrent(nn.LSTM(2, 2))


def graph_convolution() -> nn.Module:
    return GraphConv(3, 2, 4)


ZOO: dict[str, tuple[Any, Recipe, dict[str, Any]]] = {
    "convolutions": (Convolutions, default(), {"exclude": ("head",), "overrides": {"conv1": 8}}),
    "tied": (TiedLanguageModel, default(), {}),
    "attention": (Attention, paper(), {}),
    "fused_attention": (FusedAttention, default(), {}),
    "recurrent_layer": (recurrent_layer, default(), {}),
    "lstm_cell": (Cell, paper(), {}),
    "graph_convolution": (graph_convolution, paper(family="graph", aggregation="q"), {}),
    "functional": (functional_mix, integer(), {"execution": "integer"}),
}
FILES = sorted([*(f"{model}.{stage}.txt" for model in ZOO for stage in ("capture", *NAMES)), "functional.lower.txt"])


def graphs_of(name: str) -> dict[str, str]:
    """The text of a model's graph behind each pass."""
    build, recipe, options = ZOO[name]
    module = captured(build())
    texts = {"capture": graph_text(module)}
    for step in Pipeline.standard(recipe=recipe, schedule=Static(Bits(4, 4, 8)), **options):
        report = step(module)
        Verify(step.name)(module)
        header = [*str(report).splitlines(), *(f"    in full precision: {item}" for item in report.uncovered)]
        texts[step.name] = "".join(f"# {line}\n" for line in header) + graph_text(module)
    return texts


@pytest.mark.parametrize("name", ZOO)
def test_graphs_are_those_on_file(name: str) -> None:
    for stage, text in graphs_of(name).items():
        path = GRAPHS / f"{name}.{stage}.txt"
        if os.environ.get("CPT_FX_REGENERATE"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path.name}; CPT_FX_REGENERATE=1 writes it anew"


def test_every_file_belongs_to_a_graph() -> None:
    assert sorted(path.name for path in GRAPHS.iterdir()) == FILES


def test_the_texts_are_the_same_every_time() -> None:
    assert graphs_of("attention") == graphs_of("attention")


def test_the_texts_see_what_matters() -> None:
    build, recipe, options = ZOO["convolutions"]
    module = captured(build())
    Pipeline.standard(recipe=recipe, **options).run(module)
    text = graph_text(module)
    assert "head (linear)" not in text
    assert len(quantizers(module)) == text.count("cpt_fx.")
    assert "by weight_fixed_8" in text


def test_what_is_set_on_one_pass_counts_for_all() -> None:
    pipeline = Pipeline.standard().replace("annotate", Annotate(recipe=integer()))
    assert [step.recipe for step in pipeline if hasattr(step, "recipe")] == [integer(), integer()]
    with pytest.raises(ValueError, match=r"passes 'decompose' and 'annotate' disagree: recipe="):
        pipeline.replace("decompose", Decompose(recipe=paper()))


def test_a_pass_of_ones_own_is_handed_the_settings() -> None:
    @dataclass(frozen=True)
    class Looking(Pass):
        schedule: Any = None
        execution: Any = None
        name: ClassVar[str] = "looking"

        def run(self, module: fx.GraphModule) -> Report:
            seen.append((self.schedule, self.execution))
            return Report(self.name, 0)

    seen: list[Any] = []
    plan = Static(4)
    Pipeline.standard().after("annotate", Looking()).transform(nn.Sequential(nn.Linear(2, 2)), plan)
    assert seen[0][0] is plan and seen[0][1] == "simulated"
