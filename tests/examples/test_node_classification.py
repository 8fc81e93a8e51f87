"""Graphs: what is read from files, what is sampled, and that every model trains under both kinds of aggregation."""

from __future__ import annotations

import argparse
import copy
import gzip
import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.recipes import paper
from cpt_fx.schedules import Static, named
from tests import paper_models

pytest.importorskip("torch_geometric")

import node_classification
from node_classification import PRESETS, SCRIPT, NodeClassification
from support import graph_files, graph_models, graphs
from support.neighbours import NeighbourSampler
from support.training import fit

FETCHES = pytest.mark.skipif(not os.environ.get("CPT_FX_FETCH"), reason="downloads; set CPT_FX_FETCH=1 to run it")


def options(**given: Any) -> argparse.Namespace:
    return SCRIPT.options(fast=True, **given)


def task(**given: Any) -> NodeClassification:
    return node_classification.make_task(options(**given))


# --- files


def test_tables_of_cora(tmp_path: Path) -> None:
    (tmp_path / "toy.content").write_text("p1 1 0 1 B\np2 0 0 0 A\np9 0 1 0 B\n")
    (tmp_path / "toy.cites").write_text("p1 p2\np9 p1\np1 p1\np2 p1\n")
    raw = graph_files.read(tmp_path)
    assert raw.features.tolist() == [[0.5, 0, 0.5], [0, 0, 0], [0, 1, 0]]
    assert raw.labels.tolist() == [1, 0, 1]
    assert raw.edges.tolist() == [[1, 0, 0, 0], [0, 2, 0, 1]]  # from the citing to the cited paper
    assert graphs.both_ways(raw).tolist() == [[1, 2, 0, 0], [0, 0, 1, 2]]
    (tmp_path / "toy.cites").write_text("p1 p7\n")
    with pytest.raises(ValueError, match=r"toy\.cites names 1 papers that toy\.content does not have"):
        graph_files.read(tmp_path)
    (tmp_path / "toy.cites").unlink()
    with pytest.raises(FileNotFoundError, match=r"toy\.cites is missing"):
        graph_files.read(tmp_path)


def old_pickle(value: object) -> bytes:
    """Pickle under the names of the time that Planetoid's files are from."""
    names = {"numpy._core": "numpy.core", "scipy.sparse._csr": "scipy.sparse.csr", "cbuiltins\n": "c__builtin__\n"}
    content = pickle.dumps(value, protocol=3)
    for new, old in names.items():
        content = content.replace(new.encode(), old.encode())
    return content


def planetoid(folder: Path, name: str = "toy") -> None:
    """Write a graph of 506 nodes, the last 5 of them to test on, stored in another order, one without any file."""
    sparse = pytest.importorskip("scipy.sparse")
    features = np.eye(505, 7, dtype=np.float32)
    labels = np.eye(3, dtype=np.int32)[np.arange(505) % 3]
    order = [505, 501, 504, 502]
    parts: dict[str, Any] = {
        "x": sparse.csr_matrix(features[:2]), "y": labels[:2],
        "allx": sparse.csr_matrix(features[:501]), "ally": labels[:501],
        "tx": sparse.csr_matrix(features[:4]), "ty": labels[:4],
        "graph": defaultdict(list, {0: [1, 505], 1: [0], 505: [0]} | {node: [] for node in range(2, 505)}),
    }  # fmt: skip
    for part, value in parts.items():
        (folder / f"ind.{name}.{part}").write_bytes(old_pickle(value))
    (folder / f"ind.{name}.test.index").write_text("\n".join(map(str, order)) + "\n")


def test_files_of_planetoid(tmp_path: Path) -> None:
    planetoid(tmp_path)
    raw = graph_files.read(tmp_path)
    assert raw.nodes == 506
    assert raw.features[[505, 501, 504, 502]].argmax(dim=1).tolist() == [0, 1, 2, 3]
    assert raw.labels[[505, 501, 504, 502]].tolist() == [0, 1, 2, 0]
    assert raw.features[503].sum() == 0
    assert raw.split is not None
    assert [part.tolist()[:2] for part in raw.split] == [[0, 1], [2, 3], [501, 502]]
    assert sorted(raw.edges.t().tolist()) == [[0, 1], [0, 505], [1, 0], [505, 0]]
    (tmp_path / "ind.toy.ty").unlink()
    with pytest.raises(FileNotFoundError, match=r"ind\.toy\.ty is missing"):
        graph_files.read(tmp_path)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_calls_a_function_is_refused(tmp_path: Path) -> None:
    planetoid(tmp_path)
    (tmp_path / "ind.toy.graph").write_bytes(old_pickle(Bomb(tmp_path / "harm")))
    with pytest.raises(ValueError, match=r"ind\.toy\.graph is no file of Planetoid: it asks for \w+\.mkdir"):
        graph_files.read(tmp_path)
    assert not (tmp_path / "harm").exists()


def table(path: Path, rows: list[list[float]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("\n".join(",".join(map(str, row)) for row in rows).encode()))


def test_tables_of_the_open_graph_benchmark(tmp_path: Path) -> None:
    folder = tmp_path / "arxiv"
    table(folder / "raw" / "edge.csv.gz", [[0, 1], [1, 2]])
    table(folder / "raw" / "node-feat.csv.gz", [[0.5, -1], [2, 3], [0, 1]])
    table(folder / "raw" / "node-label.csv.gz", [[4], [0], [2]])
    for node, part in enumerate(("train", "valid", "test")):
        table(folder / "split" / "time" / f"{part}.csv.gz", [[node]])
    data = graphs.load(str(folder))
    assert (data.name, data.nodes, data.classes) == ("ogbn-arxiv", 3, 5)
    assert data.features.tolist() == [[0.5, -1], [2, 3], [0, 1]]
    assert data.edges.tolist() == [[1, 0, 2, 1], [0, 1, 1, 2]]
    assert [part.tolist() for part in (data.train, data.validation, data.test)] == [[0], [1], [2]]
    assert (
        str(data)
        == "ogbn-arxiv: 3 nodes, 2 edges, 2 features, 5 classes; 1 / 1 / 1 nodes to train, validate and test on"
    )
    (folder / "raw" / "node-label.csv.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"node-label\.csv\.gz is missing"):
        graph_files.read(folder)


def test_what_is_missing_is_said_with_where_to_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CPT_FX_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"ogbn-products is not in .*products\. Fetch http.*products\.zip"):
        graphs.load("ogbn-products")
    with pytest.raises(FileNotFoundError, match=r"--data nowhere is no folder and none of the known graphs: karate"):
        graphs.load("nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no graph in a form that is known\. Put there"):
        graphs.load(str(tmp_path))
    with pytest.raises(ValueError, match=r"--split must be one of public, full, got 'half'"):
        graphs.load("karate", "half")
    with pytest.raises(ValueError, match=r"--split full needs a graph with more than 1500 nodes"):
        graphs.load("karate", "full")


def test_a_drawn_split_is_the_same_every_time() -> None:
    labels = torch.arange(1700) % 4
    train, validation, test = graphs.drawn_split(labels)
    assert torch.bincount(labels[train]).tolist() == [20] * 4
    assert len(torch.cat([train, validation, test]).unique()) == 80 + 500 + 1000
    assert all(torch.equal(*pair) for pair in zip(graphs.drawn_split(labels), (train, validation, test), strict=True))
    with pytest.raises(ValueError, match="too small"):
        graphs.drawn_split(labels[:1000])


# --- samples


def random_graph(nodes: int = 60, edges: int = 400) -> Tensor:
    keys = torch.randperm(nodes * nodes)[:edges]
    source, target = keys // nodes, keys % nodes
    return torch.stack([source, target])[:, source != target]


def test_a_sample_holds_edges_of_the_graph() -> None:
    edges = random_graph()
    sampler = NeighbourSampler(edges, 60)
    seeds = torch.tensor([7, 3, 50])
    found = sampler.sample(seeds, (4, 2), torch.Generator().manual_seed(0))
    assert found.nodes[:3].tolist() == seeds.tolist()
    assert len(found.nodes.unique()) == len(found.nodes) == found.sizes[-1]
    known = set(map(tuple, edges.t().tolist()))
    degree = torch.bincount(edges[1], minlength=60)
    reached = (slice(0, found.sizes[0]), slice(found.sizes[0], found.sizes[1]))
    for hop, count, targets in zip(found.hops, (4, 2), reached, strict=True):
        pairs = list(map(tuple, found.nodes[hop].t().tolist()))
        assert set(pairs) <= known
        assert len(set(pairs)) == len(pairs)
        taken = torch.bincount(hop[1], minlength=found.sizes[-1])
        assert torch.equal(taken[targets], degree[found.nodes[targets]].clamp(max=count))
    again = sampler.sample(seeds, (4, 2), torch.Generator().manual_seed(0))
    other = sampler.sample(seeds, (4, 2), torch.Generator().manual_seed(1))
    assert torch.equal(again.edges, found.edges)
    assert not torch.equal(again.nodes, other.nodes)


def test_every_neighbour_is_drawn_as_often() -> None:
    edges = torch.stack([torch.arange(1, 9), torch.zeros(8, dtype=torch.long)])
    sampler, generator = NeighbourSampler(edges, 9), torch.Generator().manual_seed(0)
    drawn = [sampler.sample(torch.tensor([0]), (2,), generator).nodes[1:] for _ in range(400)]
    counts = torch.bincount(torch.cat(drawn), minlength=9)[1:]
    assert counts.sum() == 800
    assert counts.min() > 70
    assert counts.max() < 130


def test_all_neighbours_give_what_the_whole_graph_gives() -> None:
    edges, x, seeds = random_graph(), torch.randn(60, 5), torch.tensor([4, 9, 31])
    found = NeighbourSampler(edges, 60).sample(seeds, (60, 60), torch.Generator().manual_seed(0))
    model = graph_models.make("sage", 5, 8, 3, layers=2, dropout=0.0, heads=1)
    torch.testing.assert_close(model(x[found.nodes], found.edges)[:3], model(x, edges)[seeds])
    convs = [graph_models.MeanConv(5, 8), graph_models.MeanConv(8, 3)]
    blocks, degrees = node_classification._blocks(found)
    whole, part = x, x[found.nodes]
    for conv, block, degree in zip(convs, blocks, degrees, strict=True):
        whole = conv(whole, edges, graph_models.degrees(edges, 60))
        part = conv(part, block, degree)
    torch.testing.assert_close(part, whole[seeds])


# --- models


def same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        mine.data.copy_(other.data)


@pytest.mark.parametrize("aggregation", ["fp", "q"])
def test_the_published_gcn(aggregation: str) -> None:
    """The same numbers as the model that is compared with the published implementation, and so the same quantizers."""
    edges, x = graph_models.with_self_loops(random_graph(), 60), torch.randn(60, 9)
    reference = paper_models.GCN((9, 12, 12, 4), 60)
    ours = graph_models.PaperGCN((9, 12, 12, 4), dropout=0.0)
    same_weights(ours, reference)
    left, right = (graph_models.degree_norm(index, 60) for index in edges)
    recipe = paper(family="graph", gradient_rounding="nearest", aggregation=aggregation)
    results = []
    for model, inputs in ((reference, (x, *edges)), (ours, (x, edges, left, right))):
        made = cpt_fx.transform(copy.deepcopy(model), Static(3), recipe=recipe)
        y = made(*inputs)
        y.square().sum().backward()
        results.append([y, *(parameter.grad for parameter in made.parameters())])
    for mine, other in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, other)


MODELS = [(name, aggregation) for name in graph_models.NAMES for aggregation in ("fp", "q")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "aggregation"), MODELS)
def test_every_model_trains(name: str, aggregation: str) -> None:
    outcome = fit(task(model=name, aggregation=aggregation), named("CR", q_min=3, q_max=8, total_steps=8, cycles=2))
    inspection = cpt_fx.inspect(outcome.model)
    assert inspection.verify().proven
    sums = {item.op for item in inspection.quantizers} - {"linear", "matmul", "add", "mul"}
    assert bool(sums) == (aggregation == "q")
    left = {item.reason for item in inspection.uncovered if "softmax" not in item.reason}
    assert left == (set() if aggregation == "q" else {"recipe 'paper/graph' leaves aggregation in full precision"})
    assert set(outcome.metrics) == {"accuracy", "loss", "validation_accuracy"}
    assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "evaluate_on"),
    [("sage", "graph"), ("gat", "samples"), ("gcn", "samples"), ("paper-sage", "graph"), ("paper-sage", "samples")],
)
def test_models_train_on_samples(name: str, evaluate_on: str) -> None:
    chosen = task(model=name, neighbours="4,3", batch=3, evaluate_on=evaluate_on, aggregation="q")
    assert chosen.steps_per_epoch == 2
    outcome = fit(chosen, Static(8, total_steps=4))
    assert cpt_fx.inspect(outcome.model).verify().proven
    (x, *_), rows, nodes = chosen.batch(0, seed=1)
    (again, *_), _, same = chosen.batch(0, seed=1)
    assert torch.equal(x, again)
    assert torch.equal(nodes, same)
    assert torch.equal(x[rows], chosen.data.features[nodes])
    seen = torch.cat([chosen.batch(step, seed=1)[2] for step in range(2)])
    assert sorted(seen.tolist()) == sorted(chosen.data.train.tolist())


@pytest.mark.slow
def test_it_learns() -> None:
    schedule = named("CR", q_min=3, q_max=8, total_steps=60)
    assert node_classification.train(schedule, fast=True)["accuracy"] > 0.6


@pytest.mark.slow
def test_a_run_on_samples_resumes_exactly(tmp_path: Path) -> None:
    def run(checkpoint: Path | None, steps: int | None = None) -> list[Tensor]:
        chosen = task(model="paper-sage", neighbours="4,3", batch=2, dropout=0.3, aggregation="q")
        schedule = named("RR", q_min=3, q_max=8, total_steps=6, cycles=2)
        if steps is not None:
            loss = chosen.loss

            def stops(model: nn.Module, batch: Any) -> Tensor:
                if schedule.position == steps:
                    raise KeyboardInterrupt
                return loss(model, batch)

            chosen.loss = stops  # type: ignore[method-assign]
        return list(fit(chosen, schedule, checkpoint=checkpoint, save_every=1).model.state_dict().values())

    expected = run(None)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run.pt", steps=3)
    for mine, other in zip(run(tmp_path / "run.pt"), expected, strict=True):
        assert torch.equal(mine, other)


# --- options


def test_presets_are_the_published_settings() -> None:
    found = {name: SCRIPT.options(preset=name) for name in PRESETS}
    arxiv, products, quantized = found["ogbn-arxiv"], found["ogbn-products"], found["ogbn-products-q-6"]
    assert (arxiv.model, arxiv.layers, arxiv.hidden, arxiv.dropout) == ("paper-gcn", 3, 512, 0.2)
    assert (arxiv.epochs, arxiv.lr, arxiv.weight_decay, arxiv.q_min, arxiv.q_max) == (500, 1e-3, 0.0, 3, 8)
    assert (products.model, products.layers, products.neighbours, products.batch) == ("paper-sage", 2, "32,32", 1024)
    assert (products.epochs, products.weight_decay, products.q_min, products.q_max) == (80, 1e-4, 4, 8)
    assert (quantized.aggregation, quantized.q_min, quantized.q_max, quantized.q_grad) == ("q", 3, 6, None)


@pytest.mark.slow
def test_the_published_recipe_is_that_for_graphs() -> None:
    _, _, outcome = SCRIPT.run(options(recipe="paper", aggregation="q", steps=2, schedule="static"))
    assert "scatter_add_" in {item.op for item in cpt_fx.inspect(outcome.model).quantizers}


def test_the_rate_falls_to_a_tenth() -> None:
    chosen = task(lr=0.5)
    assert chosen.learning_rate(0, 10) == 0.5
    assert 0.05 < chosen.learning_rate(9, 10) < 0.1


def test_the_published_loss_has_no_softmax() -> None:
    chosen = task(loss="published")
    inputs, rows, nodes = chosen.batch(0, 0)
    logits = torch.randn(34, 4)
    model: Any = lambda *_: logits  # noqa: E731
    assert torch.equal(chosen.loss(model, (inputs, rows, nodes)), -logits[nodes, chosen.data.labels[nodes]].mean())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "gnc"}, "--model must be one of gcn, sage, gat, paper-gcn, paper-sage, got 'gnc'"),
        ({"neighbours": "4"}, r"--neighbours needs one number for each of the 2 convolutions, as in 10,10; got '4'"),
        ({"neighbours": "4,x"}, "--neighbours needs one number"),
        ({"evaluate_on": "samples"}, "--evaluate-on samples needs --neighbours"),
        ({"model": "paper-gcn", "neighbours": "4,4"}, "--model paper-gcn trains on the whole graph"),
        ({"aggregation": "q", "recipe": "default"}, "leave out --recipe default"),
    ],
)
def test_options_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task(**given).model()


# --- the real files


@FETCHES
def test_the_citation_graphs() -> None:
    cora, citeseer, pubmed = found = [graphs.load(name) for name in ("cora", "citeseer", "pubmed")]
    assert [(data.nodes, data.edges.shape[1]) for data in found] == [(2708, 10556), (3327, 9104), (19717, 88648)]
    assert [data.features.shape[1] for data in found] == [1433, 3703, 500]
    assert [data.classes for data in found] == [7, 6, 3]
    assert [len(data.train) for data in found] == [140, 120, 60]
    assert all((len(data.validation), len(data.test)) == (500, 1000) for data in found)
    assert citeseer.features[citeseer.features.sum(dim=1) == 0].shape[0] == 15
    assert pubmed.features.sum(dim=1).allclose(torch.ones(19717))
    assert torch.bincount(cora.labels).tolist() == [298, 418, 818, 426, 217, 180, 351]
    assert len(graphs.load("cora", "full").train) == 1208
    trained = node_classification.train(Static(8, total_steps=40))
    assert trained["accuracy"] > 0.7
