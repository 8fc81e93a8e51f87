"""`export.qdq`: integers in standard nodes, equal to what was trained where the format allows it, else measured."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx import functional
from cpt_fx.errors import ExportError
from cpt_fx.formats import Group, Rounding, Scheme
from cpt_fx.ir.layer_state import PARTS
from cpt_fx.quantizers.ops import FAKE_QUANTIZE
from cpt_fx.recipes import default
from tests.export.exported_cases import MODELS, evaluated, trained

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
qdq_module = pytest.importorskip("cpt_fx.export.deployment")
INT4, INT8, UINT8 = 22, 3, 2


def qdq(*args: Any, **kwargs: Any) -> Any:
    return qdq_module.qdq(*args, verbose=False, **kwargs)


def session(proto: Any, *, optimized: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def everything(proto: Any, feed: dict[str, Any]) -> dict[str, Any]:
    """Run a file, and return every value in it."""
    known = {value.name for value in proto.graph.output}
    for value in onnx.shape_inference.infer_shapes(proto).graph.value_info:
        # numpy has no numbers of 4 bits.
        if value.name not in known and value.type.tensor_type.elem_type != INT4:
            proto.graph.output.append(value)
    run = session(proto, optimized=False)
    names = [value.name for value in run.get_outputs()]
    values = dict(zip(names, run.run(names, feed), strict=True))
    return values | {held.name: onnx.numpy_helper.to_array(held) for held in proto.graph.initializer} | feed


def makers(proto: Any, kind: str) -> dict[str, Any]:
    return {node.name: node for node in proto.graph.node if node.op_type == kind}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", MODELS)
def test_the_default_recipe_is_exact(name: str, bits: int, tmp_path: Path) -> None:
    model, x = trained(name, bits)
    report = qdq(model, (x,), tmp_path / "model.onnx", bits)
    assert report.exact and all(item.error == 0 for item in report.quantizers if item.role != "bias")
    assert all(item.error < (0.01 if bits == 8 else 1e-12) for item in report.quantizers)
    assert "0 converted, 0 left" in str(report)
    proto = onnx.load(report.path)
    onnx.checker.check_model(proto, full_check=True)
    assert {opset.domain: opset.version for opset in proto.opset_import} == {"": 21 if bits <= 4 else 18}
    assert proto.ir_version == 10 and not proto.functions
    assert [value.name for value in proto.graph.input] == [MODELS[name][2]]
    (output,) = report.outputs
    assert output.maximum <= (0.01 if bits == 8 else 1e-5) * output.largest
    assert name == "grouped" or output.agreement == 1.0


@pytest.mark.parametrize("bits", [8, 5, 4, 1])
def test_weights_are_codes_whose_values_are_those_of_pytorch(bits: int, tmp_path: Path) -> None:
    model, x = trained("residual", bits)
    proto = onnx.load(qdq(model, (x,), tmp_path / "model.onnx", bits).path)
    held = {tensor.name: tensor for tensor in proto.graph.initializer}
    parameters = dict(model.named_parameters())
    reach = max(2 ** (bits - 1) - 1, 1)
    for layer in ("stem", "conv", "head"):
        node = makers(proto, "DequantizeLinear")[f"{layer}.weight"]
        stored = held[node.input[0]]
        assert stored.data_type == (INT4 if bits <= 4 else INT8)
        codes, scale, zero_point = (onnx.numpy_helper.to_array(held[name]) for name in node.input)
        assert not zero_point.any() and scale.shape == (len(codes),)
        assert [item.i for item in node.attribute if item.name == "axis"] == [0]
        assert np.abs(codes.astype(int)).max() == reach
        values = codes.astype(np.float32) * scale.reshape(-1, *(1,) * (codes.ndim - 1))
        ours = functional.fake_quantize(parameters[f"{layer}.weight"], bits, keep=(0,), scheme="symmetric")
        assert np.array_equal(values, ours.detach().numpy())
    # Of the layers that are quantized; those of the norms are as they were.
    assert not {f"{layer}.weight" for layer in ("stem", "conv", "head")} & set(held)


@pytest.mark.parametrize("bits", [8, 6, 1])
def test_activations_are_codes_whose_values_are_those_of_pytorch(bits: int, tmp_path: Path) -> None:
    model, x = trained("residual", bits)
    proto = onnx.load(qdq(model, (x,), tmp_path / "model.onnx", bits).path)
    # Beyond the range that was learned, too.
    values = everything(proto, {"x": 3 * x.numpy()})
    quantize = makers(proto, "QuantizeLinear")
    assert len(quantize) == 3 and bool(makers(proto, "Clip")) == (bits < 8)
    for layer in ("stem", "conv", "head"):
        ranges = [model.get_submodule(layer).get_buffer(f"cpt_fx_input_range_{part}") for part in PARTS]
        node = quantize[f"{layer}.input.QuantizeLinear"]
        last = makers(proto, "DequantizeLinear")[f"{layer}.input.DequantizeLinear"]
        codes = values[last.input[0]]
        assert codes.dtype == np.uint8 and codes.max() == 2**bits - 1 and len(np.unique(codes)) <= 2**bits
        ours = torch.ops.cpt_fx.fake_quantize_observed(
            torch.from_numpy(values[node.input[0]].copy()), torch.tensor(bits), *ranges, False, scheme="affine_integer"
        )
        assert np.array_equal(values[last.output[0]], ours.numpy())


def test_a_narrow_bias_keeps_its_quantized_values(tmp_path: Path) -> None:
    """Newer versions of ONNX Runtime round plain biases to steps of the product: coarse ones, below 8 bits."""
    model, x = trained("mlp", 3)
    proto = onnx.load(qdq(model, (x,), tmp_path / "model.onnx", 3).path)
    values = everything(proto, {"input": x.numpy()})
    gemms = list(makers(proto, "Gemm").values())
    for layer, gemm in zip(("0", "2"), gemms, strict=True):
        bias = dict(model.named_parameters())[f"{layer}.bias"]
        ours = functional.fake_quantize(bias, 3, scheme="symmetric").detach().numpy()
        assert np.array_equal(values[gemm.input[2]], ours)
        assert gemm.input[2] in {name for node in proto.graph.node for name in node.output}


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def optimized(path: Path) -> list[str]:
    """Return the operators that ONNX Runtime makes of a file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".optimized.onnx"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


@pytest.mark.parametrize(
    ("make", "shape", "product", "integer", "steps"),
    [
        (perceptron, (12,), "Gemm", ["QGemm"] * 3, 3),
        # Nothing quantizes what the last one returns: it is in floating point, and so is its bias.
        (convolutions, (3, 8, 8), "Conv", ["QLinearConv", "Conv"], 1),
        (perceptron, (5, 12), "MatMul", ["MatMulIntegerToFloat"] * 3, 0),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
def test_products_run_on_integers(
    make: Any, shape: tuple[int, ...], product: str, integer: list[str], steps: int, whole: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    weight = cpt_fx.Format(scheme=Scheme.SYMMETRIC, group=Group.TENSOR if whole else Group.CHANNEL)
    recipe = default().with_rule("linear", weight=weight).with_rule("conv", weight=weight)
    model = cpt_fx.transform(make(), cpt_fx.schedules.Static(8), recipe=recipe)
    x = torch.randn(16, *shape)
    model(x)
    report = qdq(model, (x,), tmp_path / "model.onnx")
    proto = onnx.load(report.path)
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    made = {node.output[0]: node for node in proto.graph.node}
    biases = [made.get(node.input[2]) for node in makers(proto, product).values() if len(node.input) > 2]
    stored = [bias for bias in biases if bias is not None]
    assert len(stored) == steps
    for bias, node in zip(stored, makers(proto, product).values(), strict=False):
        codes, scale = (held[name] for name in bias.input)
        scales = [held[made[name].input[1]] for name in node.input[:2]]
        assert codes.dtype == np.int32 and np.array_equal(scale, scales[0] * scales[1])
        assert scale.shape == (() if whole else codes.shape)
    kinds = {"Gemm", "Conv", "MatMul", "FusedGemm", "FusedConv", *integer}
    assert [kind for kind in optimized(report.path) if kind in kinds] == integer
    found = session(proto).run(None, {"input": x.numpy()})[0]
    ours = evaluated(model, x)
    # A value close to the middle between two codes may go to either, which shows in its own row; a wrong step of a bias
    # would show in all.
    assert np.median(np.abs(found - ours)) <= 1e-4 * np.abs(ours).max()
    assert np.abs(found - ours).max() <= 0.01 * np.abs(ours).max()
    rows = [item for item in report.quantizers if item.role == "bias"]
    assert sum("whole steps" in item.note for item in rows) == steps
    assert all((item.error > 0) == ("whole steps" in item.note) and item.error < 1e-3 for item in rows)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(None)])
def test_biases_of_weights_that_are_zero(rows: slice, tmp_path: Path) -> None:
    """Weights of zeros have no step that biases could be told in: heads start like that, pruning makes such rows."""
    layer = nn.Linear(6, 4)
    with torch.no_grad():
        layer.weight[rows] = 0.0
    model = cpt_fx.transform(layer, cpt_fx.schedules.Static(8))
    x = torch.randn(16, 6)
    model(x)
    report = qdq(model, (x,), tmp_path / "model.onnx")
    assert optimized(report.path) == ["QuantizeLinear", "QGemm"]
    assert all(output.maximum <= 1e-4 * output.largest for output in report.outputs)


@pytest.mark.parametrize(
    ("dims", "options"),
    [
        (2, {"stride": 2}),
        (2, {"stride": (2, 3), "dilation": 2, "padding": 1}),
        (2, {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}),
        (1, {"stride": 3, "output_padding": 2}),
        (3, {"stride": 2, "groups": 4}),
    ],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_transposed_convolution_is_one(dims: int, options: dict[str, Any], bits: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = getattr(nn, f"ConvTranspose{dims}d")(4, 8, 3, **options)
    model = cpt_fx.transform(layer, cpt_fx.schedules.Static(bits))
    x = torch.randn(3, 4, *(5,) * dims)
    model(x)
    report = qdq(model, (x,), tmp_path / "model.onnx", bits)
    kinds = {node.op_type for node in onnx.load(report.path).graph.node}
    assert kinds <= {"QuantizeLinear", "Clip", "DequantizeLinear", "ConvTranspose"}
    assert report.exact
    assert all(output.maximum <= 1e-6 * output.largest for output in report.outputs)


def test_what_follows_a_transposed_convolution_sees_its_bias_as_it_is(tmp_path: Path) -> None:
    """ONNX Runtime would round a plain one, in front of a QuantizeLinear, for a kernel that it does not have."""
    torch.manual_seed(0)
    weight = cpt_fx.Format(scheme=Scheme.SYMMETRIC, group=Group.TENSOR)
    net = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2), nn.ReLU(), nn.Conv2d(6, 3, 3))
    recipe = default().with_rule("conv", weight=weight)
    model = cpt_fx.transform(net, cpt_fx.schedules.Static(8), recipe=recipe)
    x = torch.randn(8, 4, 8, 8)
    model(x)
    report = qdq(model, (x,), tmp_path / "model.onnx")
    assert all(output.maximum <= 1e-6 * output.largest for output in report.outputs)


class Shifted(nn.Module):
    """What the last layer takes never comes near zero."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.first, self.last, self.sign = nn.Linear(12, 16), nn.Linear(16, 3), sign

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.sign * (torch.sigmoid(self.first(x)) + 0.1))
        return y


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_end_of_a_range_that_does_not_reach_zero_is_kept(sign: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = cpt_fx.transform(Shifted(sign), cpt_fx.schedules.Static(8), recipe="paper")
    x = torch.randn(64, 12)
    model(x)
    # Beyond what was trained on: clamped to the range in PyTorch, and in the file.
    report = qdq(model, (4 * x,), tmp_path / "model.onnx")
    (row,) = [item for item in report.quantizers if (item.layer, item.operand) == ("last", "input")]
    assert row.error < 0.01 and "does not reach zero" in row.note
    (clip,) = makers(onnx.load(report.path), "Clip").values()
    assert bool(clip.input[1]) == (sign > 0)
    assert all(output.maximum < 0.02 * output.largest for output in report.outputs)


def test_the_published_format_is_converted_and_the_error_measured(tmp_path: Path) -> None:
    model, x = trained("transformer", recipe="paper")
    report = qdq(model, (x,), tmp_path / "model.onnx")
    converted = [item for item in report.quantizers if item.status == "converted"]
    assert len(converted) > 10 and not report.exact
    assert all(0 < item.error < 0.05 for item in converted)
    biases = [item for item in report.quantizers if item.role == "bias"]
    assert biases and all(item.status == "exact" for item in biases)
    (output,) = report.outputs
    assert 0 < output.mean < 0.05 * output.largest
    said = str(report)
    assert "recipes.default()" in said and "zero point between two codes" in said and "same class for" in said
    assert all(f"{item.layer} {item.operand}" in said for item in converted)


def test_errors_are_those_of_the_file(tmp_path: Path) -> None:
    """The error of a layer is what its nodes make of the tensor, against what the quantizer makes of it."""
    model, x = trained("mlp", 4, recipe="paper")
    report = qdq(model, (x,), tmp_path / "model.onnx", 4)
    values = everything(onnx.load(report.path), {"input": x.numpy()})
    rows = {(item.layer, item.operand): item for item in report.quantizers}
    weight = dict(model.named_parameters())["0.weight"]
    ours = functional.fake_quantize(weight, 4, keep=(0,)).detach().numpy()
    node = makers(onnx.load(report.path), "DequantizeLinear")["0.weight"]
    theirs = values[node.output[0]]
    assert rows["0", "weight"].error == pytest.approx(np.linalg.norm(theirs - ours) / np.linalg.norm(ours), rel=1e-5)
    assert rows["0", "weight"].error > 0.01


def test_ranges_that_training_did_not_fix_are_those_of_the_examples(tmp_path: Path) -> None:
    model, x = trained("mlp", recipe="integer")
    report = qdq(model, (x,), tmp_path / "model.onnx")
    status = {(item.operand, item.status) for item in report.quantizers}
    assert status == {("input", "converted"), ("weight", "exact")}
    # On the examples themselves nothing differs.
    assert all("fixed to the range of the examples" in item.note for item in report.quantizers if item.note)
    assert max(item.error for item in report.quantizers) == 0
    untrained = cpt_fx.transform(nn.Linear(12, 4), cpt_fx.schedules.Static(8))
    (first, *_) = qdq(untrained, (x,), tmp_path / "other.onnx").quantizers
    assert first.status == "converted" and "has seen no training yet" in first.note


@pytest.mark.parametrize("recipe", ["fp8", "mx"])
def test_floating_point_formats_become_integers(recipe: str, tmp_path: Path) -> None:
    model, x = trained("grouped", recipe=recipe)
    report = qdq(model, (x,), tmp_path / "model.onnx")
    assert {item.status for item in report.quantizers} == {"converted"}
    assert all(0 < item.error < 0.1 for item in report.quantizers)


def test_a_model_that_was_never_trained_is_warned_of(tmp_path: Path) -> None:
    schedule = cpt_fx.schedules.Static(8)
    model = cpt_fx.transform(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4)), schedule)
    x = torch.randn(8, 12)
    report = qdq(model, (x,), tmp_path / "model.onnx")
    assert "the range of 0.input and 1 more has seen no batch in training mode" in report.untrained
    assert f"WARNING: {report.untrained}" in str(report)
    model(x)
    report = qdq(model, (x,), tmp_path / "model.onnx", overwrite=True)
    assert "trained for zero steps" in report.untrained
    schedule.step()
    report = qdq(model, (x,), tmp_path / "model.onnx", overwrite=True)
    assert not report.untrained and "WARNING" not in str(report)


def test_openvino_is_compared_with_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: the first export runs on it, the second does not."""
    model, x = trained("mlp")

    class Compiled:
        inputs = (type("Port", (), {"names": {"input"}}),)

        def __call__(self, feed: dict[str, Any]) -> dict[str, Any]:
            return {"output": evaluated(model, torch.from_numpy(feed["input"])) + 0.5}

    class Core:
        def compile_model(self, path: str, device: str, settings: dict[str, str]) -> Compiled:
            assert onnx.load(path).graph.node and (device, settings) == ("CPU", {"INFERENCE_PRECISION_HINT": "f32"})
            return Compiled()

    openvino = type(sys)("openvino")
    vars(openvino).update(__version__="2026.4.1-build", Core=Core)
    monkeypatch.setitem(sys.modules, "openvino", openvino)
    report = qdq(model, (x,), tmp_path / "model.onnx")
    ours, theirs = report.outputs
    assert ours.runtime.startswith("onnxruntime") and theirs.runtime == "OpenVINO 2026.4.1"
    assert ours.maximum < 0.01 and theirs.maximum == pytest.approx(0.5)
    assert "output in OpenVINO 2026.4.1: differs by 0.5 at most" in str(report)

    def fails(*args: Any) -> None:
        raise RuntimeError("Exception from core.cpp\nno such operation")

    monkeypatch.setattr(Core, "compile_model", fails)
    report = qdq(model, (x,), tmp_path / "model.onnx", overwrite=True)
    assert len(report.outputs) == 1 and "not compared in OpenVINO 2026.4.1: no such operation" in str(report)


def test_stochastic_rounding_becomes_nearest(tmp_path: Path) -> None:
    drawn = cpt_fx.Format(scheme=Scheme.SYMMETRIC, group=Group.CHANNEL, rounding=Rounding.STOCHASTIC)
    recipe = default().with_rule("linear", weight=drawn)
    model, x = trained("mlp", 5, recipe=recipe)
    report = qdq(model, (x,), tmp_path / "model.onnx", 5)
    weights = [item for item in report.quantizers if item.role == "weight"]
    assert {item.status for item in weights} == {"converted"}
    assert all("not at random" in item.note and item.error == 0 for item in weights)


def test_layers_of_other_widths(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = cpt_fx.transform(net, cpt_fx.schedules.Static(3), overrides={"0": "+2", "2": 16, "4": 32})
    x = torch.randn(16, 6)
    model(x)
    report = qdq(model, (x,), tmp_path / "model.onnx", 3)
    rows = {(item.layer, item.operand): item for item in report.quantizers}
    assert rows["0", "weight"].bits == 5 and rows["0", "weight"].status == "exact"
    assert rows["2", "weight"].status == rows["2", "input"].status == "float"
    assert "16 bits are more than the 8" in rows["2", "weight"].note and rows["2", "weight"].error < 1e-3
    assert rows["4", "weight"].status == "exact"
    proto = onnx.load(report.path)
    assert len(makers(proto, "QuantizeLinear")) == 1
    found = session(proto).run(None, {"input": x.numpy()})[0]
    assert np.abs(found - evaluated(model, x, 3)).max() < 1e-3


def test_a_layer_with_a_schedule_of_its_own(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    schedule = cpt_fx.schedules.Static(8)
    own = cpt_fx.schedules.Piecewise({0: 2, 5: 6}, eval_bits="current")
    model = cpt_fx.transform(net, schedule, overrides={"2": own})
    x = torch.randn(16, 6)
    model(x)
    schedule.position = 5
    report = qdq(model, (x,), tmp_path / "model.onnx", 3)
    assert {item.layer: item.bits for item in report.quantizers} == {"0": 3, "2": 6}


class Shared(nn.Module):
    """A layer that is called twice, and a weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mask = nn.Linear(6, 6), nn.Buffer(torch.eye(6))
        self.raw = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(torch.tanh(self.layer(x)))
        return nn.functional.linear(x, torch.tanh(self.raw) @ self.mask)


def test_weights_that_are_shared_or_computed(tmp_path: Path) -> None:
    model = cpt_fx.transform(Shared(), cpt_fx.schedules.Static(6))
    x = torch.randn(16, 6)
    model(x)
    report = qdq(model, (x,), tmp_path / "model.onnx", 6)
    found = session(onnx.load(report.path)).run(None, {"x": x.numpy()})[0]
    ours = evaluated(model, x, 6)
    assert np.abs(found - ours).max() <= 1e-5 * np.abs(ours).max()


def test_a_quantizer_of_several_constants_has_one_grid() -> None:
    """As in a body that is called with one weight, then with another."""
    x = torch.randn(4, 3)
    model = cpt_fx.transform(nn.Linear(3, 2), cpt_fx.schedules.Static(8), example_inputs=(x,))
    watched = qdq_module.formats.watched_in(cpt_fx.single_graph(model, (x,)))
    (item,) = [one for one in watched.values() if one.quantizer.role == "weight"]
    item.constant = True
    first, second = torch.tensor([[-1.0, 0.5]]), torch.tensor([[0.0, 2.0]])
    for value in (first, first, second, first):
        item.see(FAKE_QUANTIZE, {"x": value}, value)
        assert item.constant == (item.call is not None) == (float(item.value_range.maximum()) < 2)
    plan = qdq_module.formats.plan_of(item)
    assert plan.status == "converted"
    assert torch.allclose(plan.values(first), first, atol=0.02)


def test_the_model_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = trained("residual", 5)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    qdq(model, (x,), tmp_path / "model.onnx", 8)
    assert model.training and not capsys.readouterr().out
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model(x).sum().backward()
    cpt_fx.inspect(model).verify()
    qdq_module.qdq(model, (x,), tmp_path / "model.onnx", 8, overwrite=True)
    assert "7 quantizers: 7 exact" in capsys.readouterr().out


def test_bad_input(tmp_path: Path) -> None:
    model, x = trained("mlp")
    path = tmp_path / "model.onnx"
    for bits, words in ((9, "weights of 9 bits"), (cpt_fx.Bits(8, 0, 8), "activations of 0 bits"), (32, "export.onnx")):
        with pytest.raises(ExportError, match=words):
            qdq(model, (x,), path, bits)
    with pytest.raises(ExportError, match="does not run on example_inputs"):
        qdq(model, (x[:, :3],), path)
    with torch.no_grad():
        dict(model.named_parameters())["0.weight"][0, 0] = float("nan")
    with pytest.raises(ExportError, match=r"0\.weight holds a NaN"):
        qdq(model, (x,), path)
    assert not list(tmp_path.iterdir())


def test_a_range_that_is_not_finite(tmp_path: Path) -> None:
    model, x = trained("mlp")
    model.get_submodule("2").get_buffer("cpt_fx_input_range_size").fill_(float("inf"))
    with pytest.raises(ExportError, match=r"2\.input cannot be quantized: its running range"):
        qdq(model, (x,), tmp_path / "model.onnx")


class AlwaysDrops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(nn.functional.dropout(x, training=True))
        return y


def test_what_no_standard_operator_says(tmp_path: Path) -> None:
    model = cpt_fx.transform(AlwaysDrops(), cpt_fx.schedules.Static(6))
    x = torch.randn(4, 6)
    model(x)
    with pytest.raises(ExportError, match=r"evaluates Uniform, .*use export\.onnx"):
        qdq(model, (x,), tmp_path / "model.onnx")


class ReturnsWhatItTransposes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.layer(x))
        return h, x @ h.transpose(1, 2)


def test_an_output_that_is_transposed_and_quantized(tmp_path: Path) -> None:
    """ONNX Runtime returned what the quantizer makes of it (1.19.2, 1.31.1)."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 6)
    model = cpt_fx.transform(ReturnsWhatItTransposes(), cpt_fx.schedules.Static(8), example_inputs=(x,))
    model(x)
    qdq(model, (x,), tmp_path / "model.onnx")
    with torch.no_grad():
        expected = model.eval()(x)
    run = session(onnx.load(tmp_path / "model.onnx"))
    for found, value in zip(run.run(None, {"x": x.numpy()}), expected, strict=True):
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-5, atol=1e-5)
