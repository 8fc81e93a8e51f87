"""`export.onnx`: the evaluation graph with its quantizers, in plain ONNX Runtime, against PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cpt_fx
from cpt_fx.errors import ExportError
from cpt_fx.formats import Rounding, Scheme
from cpt_fx.ir.meta import QUANTIZER, get_attribute
from cpt_fx.recipes import default
from cpt_fx.schedules import Static
from tests.export.exported_cases import MODELS, evaluated, save, trained

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
plain = pytest.importorskip("cpt_fx.export.plain")
recording = pytest.importorskip("cpt_fx.export.recording")
runner = pytest.importorskip("tests.export.run_exported")

OPEN = {"bits.activation", "bits.weight"}
FIXED = {
    "mlp": (True,),
    "residual": (True, False, False),
    "grouped": (True, False, False),
    "transformer": (False,),
    "lstm": (True, True),
}
"""Which dims behind the batch each model of the examples fixes."""


def session(path: Path | bytes, *, optimized: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    given = path if isinstance(path, bytes) else str(path)
    return onnxruntime.InferenceSession(given, options, providers=["CPUExecutionProvider"])


def inputs_of(path: Path) -> dict[str, list[Any]]:
    return {value.name: value.shape for value in session(path).get_inputs()}


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    assert np.abs(ours - theirs).max() <= tolerance * np.abs(theirs).max()


@pytest.mark.parametrize("name", MODELS)
def test_widths_are_inputs_and_numbers_are_those_of_pytorch(name: str, tmp_path: Path) -> None:
    model, x = trained(name)
    path = plain.onnx(model, (x,), tmp_path / "model.onnx")
    argument = MODELS[name][2]
    # What the model leaves open: lengths and sides of images, not features, nor the length of a recurrent layer.
    sizes = ["batch", *(size if fixed else f"{argument}_{dim}" for dim, (size, fixed) in enumerate(
        zip(x.shape[1:], FIXED[name], strict=True), 1))]  # fmt: skip
    assert inputs_of(path) == {argument: sizes, "bits.activation": [], "bits.weight": []}
    run = session(path)
    other_batch = x[:3]
    for bits in (8, 5, 3, 32):
        widths = {width: np.array(bits) for width in OPEN}
        found = run.run(["output"], {argument: other_batch.numpy(), **widths})[0]
        close(found, evaluated(model, other_batch, bits))


@pytest.mark.parametrize("recipe", ["paper", "integer", "fp8"])
def test_every_recipe_exports(recipe: str, tmp_path: Path) -> None:
    model, x = trained("residual", recipe=recipe)
    run = session(plain.onnx(model, (x,), tmp_path / "model.onnx", bits=6))
    close(run.run(None, {"x": x.numpy()})[0], evaluated(model, x, 6))


@pytest.mark.parametrize("bits", [2, 5, 8, 32])
def test_quantizer_nodes_are_bit_equal(bits: int, tmp_path: Path) -> None:
    """Each one, on what ONNX Runtime itself feeds it: what comes before rounds its sums in another order."""
    model, x = trained("residual", bits)
    proto = onnx.load(plain.onnx(model, (x,), tmp_path / "model.onnx", bits))
    nodes = [node for node in proto.graph.node if node.domain == "cpt_fx"]
    known = {value.name for value in (*proto.graph.output, *proto.graph.input, *proto.graph.initializer)}
    for name in {name for node in nodes for name in (node.input[0], node.output[0])} - known:
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    run = session(proto.SerializeToString())
    names = [value.name for value in run.get_outputs()]
    values = dict(zip(names, run.run(None, {"x": x.numpy()}), strict=True))
    values |= {held.name: onnx.numpy_helper.to_array(held) for held in proto.graph.initializer} | {"x": x.numpy()}
    model.eval()
    graph = cpt_fx.graphs(model)[0]
    ours = {
        node.name: node
        for node in graph.graph.nodes
        if QUANTIZER in node.meta and node.meta[QUANTIZER].role != "gradient"
    }
    assert {node.name for node in nodes} == set(ours)
    for node in nodes:
        torch_node = ours[node.name]
        given = torch.from_numpy(values[node.input[0]].copy())
        rest = [get_attribute(graph, str(value.target)) for value in torch_node.args[1:] if hasattr(value, "target")]
        training = [] if len(torch_node.args) < 6 else [False]
        options = {key: value for key, value in torch_node.kwargs.items() if key not in ("counters", "trains")}
        expected = torch_node.target(given, *rest[:4], *training, **options).detach().numpy()
        assert np.array_equal(values[node.output[0]], expected), node.name


def test_fixed_widths_leave_the_inputs_of_the_user_alone(tmp_path: Path) -> None:
    model, x = trained("mlp")
    path = plain.onnx(model, (x,), tmp_path / "model.onnx", bits=cpt_fx.Bits(3, 5, 32))
    assert list(inputs_of(path)) == ["input"]
    found = session(path).run(None, {"input": x.numpy()})[0]
    cpt_fx.schedules.Static(cpt_fx.Bits(3, 5, 32)).bind(model)
    close(found, evaluated(model, x))


def test_layers_at_a_distance_from_the_schedule(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = cpt_fx.transform(net, cpt_fx.schedules.Static(3), overrides={"0": "+2", "4": 8})
    x = torch.randn(16, 6)
    model(x)
    fixed = session(plain.onnx(model, (x,), tmp_path / "fixed.onnx", bits=3))
    close(fixed.run(None, {"input": x.numpy()})[0], evaluated(model, x, 3))
    widths = {name: np.array(8 if "fixed" in name else 5 if "plus" in name else 3) for name in inputs_of(
        plain.onnx(model, (x,), tmp_path / "open.onnx")) if name.startswith("bits.")}  # fmt: skip
    assert len(widths) == 6
    found = session(tmp_path / "open.onnx").run(None, {"input": x.numpy(), **widths})[0]
    close(found, evaluated(model, x, 3))


def test_a_layer_with_a_schedule_of_its_own(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    own = cpt_fx.schedules.Piecewise({0: 2, 5: 6}, eval_bits="current")
    schedule = cpt_fx.schedules.Static(3)
    model = cpt_fx.transform(net, schedule, overrides={"2": own})
    x = torch.randn(16, 6)
    model(x)
    outputs = []
    for step in (0, 5):
        schedule.position = step
        path = plain.onnx(model, (x,), tmp_path / f"{step}.onnx", bits=3)
        outputs.append(session(path).run(None, {"input": x.numpy()})[0])
        close(outputs[-1], evaluated(model, x))
    assert not np.array_equal(*outputs)


def test_the_file_is_standard_and_says_where_it_comes_from(tmp_path: Path) -> None:
    model, x = trained("residual")
    proto = onnx.load(plain.onnx(model, (x,), tmp_path / "model.onnx"))
    onnx.checker.check_model(proto, full_check=True)
    assert proto.ir_version == 10
    assert {opset.domain: opset.version for opset in proto.opset_import} == {"": 18, "cpt_fx": 1}
    called = {node.op_type for node in proto.graph.node if node.domain == "cpt_fx"}
    assert called == {function.name for function in proto.functions}
    props = {item.key: item.value for item in proto.metadata_props}
    assert props["cpt_fx.version"] == cpt_fx.__version__
    assert props["cpt_fx.schedule"] == "Static(bits=8)"
    assert "name='default'" in props["cpt_fx.pipeline"]
    assert [value.name for value in proto.graph.output] == ["output"]


def test_a_batch_of_one_is_no_size_to_keep(tmp_path: Path) -> None:
    model, x = trained("residual")
    path = plain.onnx(model, (x[:1],), tmp_path / "model.onnx", 8)
    assert inputs_of(path) == {"x": ["batch", 4, "x_2", "x_3"]}
    close(session(path).run(None, {"x": x.numpy()})[0], evaluated(model, x))
    flat = cpt_fx.transform(Flat(), cpt_fx.schedules.Static(8))
    one = torch.randn(1, 6)
    flat(one)
    with pytest.raises(ExportError, match=r"pass at least 2, or .*dynamic_batch=False"):
        plain.onnx(flat, (one,), tmp_path / "flat.onnx", 8)
    assert inputs_of(plain.onnx(flat, (one,), tmp_path / "flat.onnx", 8, dynamic_batch=False)) == {"x": [1, 6]}


class Flat(nn.Module):
    """A model of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x.view(6))
        return y


class Messages(nn.Module):
    """A layer on the nodes of a graph and one on what their neighbours say: as many edges as there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        y: torch.Tensor = self.last(torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))
        return y


def test_nodes_and_edges_are_two_sizes(tmp_path: Path) -> None:
    model = cpt_fx.transform(Messages(), cpt_fx.schedules.Static(8))
    # As many of one as of the other, which says nothing.
    x, edges = torch.randn(5, 6), torch.randint(5, (2, 5))
    model(x, edges)
    path = plain.onnx(model, (x, edges), tmp_path / "model.onnx", 8)
    assert inputs_of(path) == {"x": ["batch", 6], "edges": ["edges_0", "edges_1"]}
    model.eval()
    for nodes, count in ((5, 5), (9, 4), (3, 20)):
        x, edges = torch.randn(nodes, 6), torch.randint(nodes, (2, count))
        with torch.no_grad():
            expected = model(x, edges).numpy()
        close(session(path).run(None, {"x": x.numpy(), "edges": edges.numpy()})[0], expected)


class Bags(nn.Module):
    def __init__(self, mode: str, padding: int | None) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(9, 6, mode=mode, padding_idx=padding)
        self.last = nn.Linear(6, 3)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.last(self.table(words, offsets))
        return y


@pytest.mark.parametrize(("mode", "padding"), [("sum", None), ("mean", None), ("max", None), ("mean", 2), ("max", -1)])
def test_bags_of_embeddings(mode: str, padding: int | None, tmp_path: Path) -> None:
    model = cpt_fx.transform(Bags(mode, padding), cpt_fx.schedules.Static(8))
    words = torch.tensor([[1, 2, 8, 3], [2, 2, 2, 2], [8, 8, 8, 8], [0, 5, 6, 2]])
    model(words)
    path = plain.onnx(model, (words,), tmp_path / "rows.onnx", 8)
    close(session(path).run(None, {"words": words[1:].numpy()})[0], evaluated(model, words[1:]))
    # The third bag is empty.
    flat, offsets = words.flatten(), torch.tensor([0, 3, 9, 9])
    path = plain.onnx(model, (flat, offsets), tmp_path / "flat.onnx", 8)
    with torch.no_grad():
        expected = model.eval()(flat, offsets).numpy()
    close(session(path).run(None, {"words": flat.numpy(), "offsets": offsets.numpy()})[0], expected)


class Losses(nn.Module):
    """Cross entropies with all that ONNX's own operator has no attribute for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> list[Tensor]:
        scores = self.layer(x)
        shares, weight = scores.detach().softmax(1), torch.tensor([0.2, 1.0, 3.0])
        return [
            F.cross_entropy(scores, labels, label_smoothing=0.1),
            F.cross_entropy(scores, labels, weight, label_smoothing=0.1, reduction="none"),
            F.cross_entropy(scores, labels, ignore_index=1, label_smoothing=0.1, reduction="sum"),
            F.cross_entropy(scores, labels, ignore_index=scores.shape[0]),
            F.cross_entropy(scores, shares, weight, label_smoothing=0.1),
            F.cross_entropy(scores[0], labels[0]),
            F.cross_entropy(scores.T[None], labels[None]),
            F.nll_loss(scores.log_softmax(1), labels, weight, ignore_index=2),
        ]


def test_losses_inside_the_model(tmp_path: Path) -> None:
    """The exporter's own translation forgets the smoothing, and takes labels only."""
    torch.manual_seed(0)
    x, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 2, 0])
    model = cpt_fx.transform(Losses(), cpt_fx.schedules.Static(32), example_inputs=(x, labels)).eval()
    path = plain.onnx(model, (x, labels), tmp_path / "model.onnx", bits=32)
    for size in (5, 3):
        found = session(path).run(None, {"x": x[:size].numpy(), "labels": labels[:size].numpy()})
        for ours, theirs in zip(found, model(x[:size], labels[:size]), strict=True):
            close(ours, theirs.detach().numpy())


class Ordered(nn.Linear):
    """Operators that torch's exporter does not know, and that graphs for training write out."""

    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return torch.hypot(h, x), torch.fmin(h, x), h.median(1)[0], h.kthvalue(2, 1)[0]


def test_what_is_written_out_for_training_is_so_for_inference(tmp_path: Path) -> None:
    x = torch.randn(4, 3)
    model = cpt_fx.transform(Ordered(3, 3), cpt_fx.schedules.Static(32), example_inputs=(x,)).eval()
    path = plain.onnx(model, (x,), tmp_path / "model.onnx", bits=32)
    for ours, theirs in zip(session(path).run(None, {"x": x.numpy()}), model(x), strict=True):
        close(ours, theirs.detach().numpy())


def test_a_pooling_divides_by_what_it_is_told(tmp_path: Path) -> None:
    """The exporter's own translation divides by the size of the window."""
    x = torch.randn(2, 3, 5, 4)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(3, 2, 1, ceil_mode=True, divisor_override=7))
    model = cpt_fx.transform(net, cpt_fx.schedules.Static(32), example_inputs=(x,)).eval()
    path = plain.onnx(model, (x,), tmp_path / "model.onnx", bits=32)
    close(session(path).run(None, {"input": x.numpy()})[0], model(x).detach().numpy())


def test_a_size_that_the_graph_is_made_for_is_fixed(tmp_path: Path) -> None:
    """Pooling to two by two in windows of one size each, which sides of odd length have not got."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
    model = cpt_fx.transform(net, cpt_fx.schedules.Static(8))
    x = torch.randn(4, 3, 6, 8)
    model(x)
    path = plain.onnx(model, (x,), tmp_path / "model.onnx", 8)
    assert inputs_of(path) == {"input": ["batch", 3, 6, 8]}
    close(session(path).run(None, {"input": x[:3].numpy()})[0], evaluated(model, x[:3]))


def test_a_fixed_batch(tmp_path: Path) -> None:
    model, x = trained("mlp")
    assert inputs_of(plain.onnx(model, (x,), tmp_path / "model.onnx", 8, dynamic_batch=False)) == {"input": [8, 12]}


class Affine(nn.Module):
    """A model with arguments by name, and a buffer that counts its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.runs = nn.Linear(4, 4), nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        self.runs.add_(1)
        return {"y": self.layer(x) * scale + shift, "x": x}


@pytest.mark.parametrize("order", [("x", "shift", "scale"), ("scale", "x", "shift")])
def test_arguments_by_name(order: tuple[str, ...], tmp_path: Path) -> None:
    given = {"x": torch.randn(5, 4), "shift": torch.randn(5, 4), "scale": torch.randn(5, 1)}
    model = cpt_fx.transform(Affine(), cpt_fx.schedules.Static(8))
    model(**given)
    path = plain.onnx(model, {name: given[name] for name in order}, tmp_path / "model.onnx", 8)
    assert dict(model.named_buffers())["runs"] == 1
    run = session(path)
    assert [value.name for value in run.get_outputs()] == ["output.y", "output.x"]
    with torch.no_grad():
        expected = model.eval()(**given)
    found = run.run(["output.y"], {name: value.numpy() for name, value in given.items()})[0]
    close(found, expected["y"].numpy())


def test_what_draws_takes_seeds(tmp_path: Path) -> None:
    recipe = default().with_rule("linear", weight=cpt_fx.Format(scheme=Scheme.SYMMETRIC, rounding=Rounding.STOCHASTIC))
    model, x = trained("mlp", 3, recipe=recipe)
    path = plain.onnx(model, (x,), tmp_path / "model.onnx", 3)
    shapes = inputs_of(path)
    assert shapes == {"input": ["batch", 12], "seeds": [2, 2]}
    run = session(path)
    first, again, other = (
        run.run(None, {"input": x.numpy(), "seeds": np.full((2, 2), seed, np.int32)})[0] for seed in (1, 1, 2)
    )
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_the_model_stays_as_it_is(tmp_path: Path) -> None:
    model, x = trained("residual", 5)
    model.train()
    model.get_submodule("norm").eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain.onnx(model, (x,), tmp_path / "model.onnx", 8)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_that_do_not_fit_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "INLINE_LIMIT", 100)
    model, x = trained("mlp")
    path = plain.onnx(model, (x,), tmp_path / "model.onnx", 8)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    close(session(path).run(None, {"input": x.numpy()})[0], evaluated(model, x))


def test_weights_beside_a_file_belong_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = trained("mlp")
    beside = tmp_path / "model.onnx.data"
    beside.write_text("precious")
    with pytest.raises(ExportError, match=r"model\.onnx\.data exists: .*overwrite=True"):
        plain.onnx(model, (x,), tmp_path / "model.onnx")
    assert beside.read_text() == "precious"
    monkeypatch.setattr(plain, "INLINE_LIMIT", 100)
    path = plain.onnx(model, (x,), tmp_path / "model.onnx", overwrite=True)
    assert beside.stat().st_size > 100
    monkeypatch.undo()
    plain.onnx(model, (x,), path, overwrite=True)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_exists_is_replaced_on_demand(tmp_path: Path) -> None:
    model, x = trained("mlp")
    path = tmp_path / "model.onnx"
    path.write_text("precious")
    with pytest.raises(ExportError, match=r"model\.onnx exists: .*overwrite=True"):
        plain.onnx(model, (x,), path)
    assert path.read_text() == "precious"
    plain.onnx(model, (x,), path, overwrite=True)
    assert list(tmp_path.iterdir()) == [path] and onnx.load(path).graph.node


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = trained("mlp")
    path = tmp_path / "model.onnx"
    path.write_text("precious")

    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(onnx.checker, "check_model", fails)
    with pytest.raises(RuntimeError, match="power cut"):
        plain.onnx(model, (x,), path, overwrite=True)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "precious"


def test_places_that_cannot_be_written_to(tmp_path: Path) -> None:
    model, x = trained("mlp")
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=r"is a directory: name a file"):
        plain.onnx(model, (x,), tmp_path)
    with pytest.raises(ExportError, match=r"cannot write to .*file"):
        plain.onnx(model, (x,), tmp_path / "file" / "model.onnx")


def test_bad_arguments(tmp_path: Path) -> None:
    model, x = trained("mlp")
    path = tmp_path / "model.onnx"
    with pytest.raises(ExportError, match=r"does not run on example_inputs: RuntimeError: .*shapes"):
        plain.onnx(model, (x[:, :5],), path)
    with pytest.raises(ExportError, match=r"does not run on example_inputs: TypeError"):
        plain.onnx(model, (x, x), path)
    with pytest.raises(ExportError, match=r"example_inputs must be a tuple"):
        plain.onnx(model, 3, path)
    with pytest.raises(ValueError, match=r"bits must be an integer from 0 to 32, got 33"):
        plain.onnx(model, (x,), path, 33)
    with pytest.raises(cpt_fx.TransformError, match=r"not transformed"):
        plain.onnx(nn.Linear(12, 3), (x,), path)
    assert not list(tmp_path.iterdir())


def test_the_runner_of_other_environments_sees_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = trained("mlp")
    for case, shift in (("right", 0.0), ("wrong", 0.1)):
        plain.onnx(model, (x,), tmp_path / case / "case.onnx", 8)
        save(tmp_path / case, {"input": x.numpy()}, {"output": evaluated(model, x) + shift}, 1e-5)
    assert runner.main(tmp_path) == 1
    said = capsys.readouterr().out
    assert "FAILED wrong: output differs by 0.1" in said and "1 of 2 cases are right" in said
    assert runner.main(tmp_path / "nothing") == 1


@pytest.mark.parametrize("bits", [None, 4])
def test_a_file_that_computes_something_else_is_refused(
    bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's exporter did for label smoothing, which it left out."""
    x = torch.randn(4, 3)
    model = cpt_fx.transform(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), cpt_fx.schedules.Static(8))
    wrong = {torch.ops.aten.tanh.default: lambda x: torch.sigmoid(x)}
    known = recording._taken_apart()
    monkeypatch.setattr(recording, "_taken_apart", lambda: known | wrong)
    with pytest.raises(ExportError, match=r"another output 'output' than PyTorch \(they differ by"):
        plain.onnx(model, (x,), tmp_path / "model.onnx", bits=bits)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["onnx", "qdq", "ort_training"])
def test_memory_can_be_resized_as_before(way: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 2)), torch.randn(3, 4)
    result = cpt_fx.transform(model, Static(8), example_inputs=(x,))
    result(x).sum().backward()
    result.eval()
    if way == "ort_training":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        cpt_fx.export.ort_training(result, (x,), tmp_path / way, loss="cross_entropy", optimizer=optimizer)
    else:
        getattr(cpt_fx.export, way)(result, (x,), tmp_path / "model.onnx")
    assert all(tensor.untyped_storage().resizable() for tensor in (x, *model.parameters(), *result.buffers()))
