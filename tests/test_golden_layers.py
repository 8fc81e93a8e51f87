"""`transform` with the paper's recipe against the published layers: forward, backward, running ranges, evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.recipes import Recipe, paper
from cpt_fx.schedules import Bits, Static
from tests import paper_models
from tests.golden_data import Case, case_id, cases, tensors


def close(ours: Tensor, theirs: Tensor) -> None:
    """Agree to 1e-5 of the largest element, plus 1e-6: what the reference data promises for any float32 code."""
    tolerance = 1e-5 * float(theirs.abs().max()) + 1e-6
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def quantized(model: nn.Module, case: Case, recipe: Recipe | None = None, **options: Any) -> nn.Module:
    """Transform with the case's widths and no gradient noise."""
    schedule = Static(Bits(case["bits"], case["bits"], case["grad_bits"]))
    return cpt_fx.transform(model, schedule, recipe=recipe or paper(gradient_rounding="nearest"), **options)


def load(model: nn.Module, data: dict[str, Tensor]) -> nn.Module:
    """Fill a model's parameters from the flattened names of the reference."""
    state = {name.removeprefix("param__").replace("__", "."): value for name, value in data.items()
             if name.startswith("param__")}  # fmt: skip
    model.load_state_dict(state)
    return model


def check_gradients(model: nn.Module, data: dict[str, Tensor]) -> None:
    """Compare every parameter's gradient."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        close(parameter.grad, data[f"grad__{name.replace('.', '__')}"])


def check_range(model: nn.Module, layer: str, data: dict[str, Tensor], prefix: str = "") -> None:
    """Compare a layer's running range."""
    for part, name in (("min", "running_zero_point"), ("size", "running_range")):
        ours = model.state_dict()[f"{layer}.cpt_fx_input_range_{part}".removeprefix(".")]
        close(ours.reshape(()), data[prefix + name].reshape(()))


def train_and_evaluate(model: nn.Module, plain: nn.Module, data: dict[str, Tensor]) -> None:
    """Three training batches, backward on the third, then evaluation: what conv and linear cases hold."""
    x: Tensor = torch.empty(0)
    y: Tensor = torch.empty(0)
    for batch, expected in zip(data["x"], data["y"], strict=True):
        x = batch.clone().requires_grad_()
        y = model(x)
        close(y, expected)
    y.backward(data["grad_y"])
    close(x.grad, data["grad_x"])  # type: ignore[arg-type]
    close(plain.weight.grad, data["grad_weight"])  # type: ignore[arg-type]
    if plain.bias is not None:
        close(plain.bias.grad, data["grad_bias"])  # type: ignore[arg-type]
    model.eval()
    close(model(data["eval_x"]), data["eval_y"])


@pytest.mark.parametrize("case", cases("layers", kind="conv2d"), ids=case_id)
def test_conv(case: Case) -> None:
    data, options = tensors("layers", case), dict(case["options"])
    plain = nn.Conv2d(options.pop("cin"), options.pop("cout"), options.pop("k"), **options)
    plain.weight.data = data["weight"]
    if plain.bias is not None:
        plain.bias.data = data["bias"]
    model = quantized(nn.Sequential(plain), case)
    train_and_evaluate(model, plain, data)
    check_range(model, "0", data)


def test_one_conv_on_two_tensors_keeps_one_range() -> None:
    (case,) = cases("layers", kind="conv2d_shared")
    data = tensors("layers", case)

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, padding=1)

        def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
            return self.conv(x1), self.conv(x2)

    plain = Shared()
    plain.conv.weight.data, plain.conv.bias.data = data["weight"], data["bias"]  # type: ignore[union-attr]
    model = quantized(plain, case)
    x1, x2 = data["x1"].requires_grad_(), data["x2"].requires_grad_()
    y1, y2 = model(x1, x2)
    close(y1, data["y1"])
    close(y2, data["y2"])
    torch.autograd.backward([y1, y2], [data["grad_y1"], data["grad_y2"]])
    for ours, name in ((x1.grad, "grad_x1"), (x2.grad, "grad_x2"), (plain.conv.weight.grad, "grad_weight")):
        close(ours, data[name])  # type: ignore[arg-type]
    check_range(model, "conv", data)


@pytest.mark.parametrize("case", cases("layers", kind="linear"), ids=case_id)
def test_linear(case: Case) -> None:
    data = tensors("layers", case)
    plain = nn.Linear(**case["options"])
    plain.weight.data = data["weight"]
    if plain.bias is not None:
        plain.bias.data = data["bias"]
    family = "dense" if case["observer"] else "graph"
    model = quantized(nn.Sequential(plain), case, paper(family=family, gradient_rounding="nearest"))
    train_and_evaluate(model, plain, data)
    if case["observer"]:
        check_range(model, "0", data)


@pytest.mark.parametrize("case", cases("layers", kind="lstm"), ids=case_id)
def test_lstm(case: Case) -> None:
    data, options = tensors("layers", case), case["options"]
    plain = load(paper_models.LSTM(options["input_size"], options["hidden_size"], options["steps"]), data)
    model = quantized(plain, case)
    x, h0, c0 = (data[name].requires_grad_() for name in ("x", "h0", "c0"))
    outputs = model(x, h0, c0)
    for ours, name in zip(outputs, ("output", "h_n", "c_n"), strict=True):
        close(ours, data[name])
    torch.autograd.backward(outputs, [data["grad_output"], data["grad_h_n"], data["grad_c_n"]])
    for tensor, name in ((x, "grad_x"), (h0, "grad_h0"), (c0, "grad_c0")):
        close(tensor.grad, data[name])  # type: ignore[arg-type]
    check_gradients(plain, data)
    for layer in ("W", "U"):
        check_range(model, layer, data, f"{layer}__quantize_input__")
    model.eval()
    zeros = torch.zeros_like(data["h0"])
    for ours, name in zip(model(data["eval_x"], zeros, zeros), ("output", "h_n", "c_n"), strict=True):
        close(ours, data[f"eval_{name}"])


@pytest.mark.parametrize("case", cases("layers", kind="language_model"), ids=case_id)
def test_language_model(case: Case) -> None:
    data, options = tensors("layers", case), case["options"]
    steps = len(data["tokens"])
    plain = load(paper_models.LanguageModel(options["tokens"], options["embedding"], options["hidden"], steps), data)
    model = quantized(plain, case)
    zeros = torch.zeros_like(data["h_n"])
    logits, h, c = model(data["tokens"], zeros, zeros)
    for ours, name in ((logits, "logits"), (h, "h_n"), (c, "c_n")):
        close(ours, data[name])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), data["targets"].flatten())
    close(loss, data["loss"])
    loss.backward()
    check_gradients(plain, data)
    for layer in ("rnn.W", "rnn.U", "decoder"):
        check_range(model, layer, data, f"{layer.replace('.', '__')}__quantize_input__")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*cases("layers", kind="bert_self_attention"), *cases("layers", kind="bert_layer")],
                         ids=case_id)  # fmt: skip
def test_attention(case: Case) -> None:
    data, options = tensors("layers", case), case["options"]
    plain: nn.Module
    if case["kind"] == "bert_layer":
        plain = paper_models.BertLayer(
            options["hidden"], options["heads"], options["intermediate"], options["layer_norm_eps"]
        )
    else:
        plain = paper_models.SelfAttention(options["hidden"], options["heads"])
    load(plain, data)
    mask = (data["attention_mask"],) if options["masked"] else ()
    x = data["x"].requires_grad_()
    model = quantized(plain, case, example_inputs=(x.detach(), *mask))
    y, probabilities = model(x, *mask)
    close(y, data["y"])
    close(probabilities, data["attention_probs"])
    y.backward(data["grad_y"])
    close(x.grad, data["grad_x"])  # type: ignore[arg-type]
    check_gradients(plain, data)
    ranges = {name.split("__quantize_input__")[0] for name in data if name.endswith("running_range")}
    for layer in ranges - {"attention__self__key", "attention__self__value", "key", "value"}:
        # Query, key and value read one tensor: one quantizer, one range, under the first layer's name.
        check_range(model, layer.replace("__", "."), data, f"{layer}__quantize_input__")
    model.eval()
    close(model(data["eval_x"], *mask)[0], data["eval_y"])


def graph_model(case: Case, data: dict[str, Tensor]) -> nn.Module:
    """Build the plain model of a graph case."""
    options, kind = case["options"], case["kind"]
    nodes = len(data["x"])
    if kind == "graph_conv":
        return paper_models.GraphConv(options["in_features"], options["out_features"], nodes)
    if kind == "sage_conv":
        return paper_models.SageConv(options["in_features"], options["out_features"], options["num_dst"])
    if kind == "gat_layer":
        degree = len(data["dst"]) // nodes
        return paper_models.GATLayer(options["in_features"], options["out_features"], degree)
    hidden = (options["hidden"],) * options["n_layers"]
    return paper_models.GCN((options["in_features"], *hidden, options["classes"]), nodes)


GRAPH_CASES = [case for kind in ("graph_conv", "sage_conv", "gat_layer", "gcn_model")
               for case in cases("layers", kind=kind)]  # fmt: skip


@pytest.mark.parametrize("case", GRAPH_CASES, ids=case_id)
def test_graph_layers(case: Case) -> None:
    data, options = tensors("layers", case), case["options"]
    plain = graph_model(case, data)
    if case["kind"] == "graph_conv":
        data |= {f"param__{name}": data[name] for name in ("weight", "bias")}
        data |= {f"grad__{name}": data[f"grad_{name}"] for name in ("weight", "bias")}
    load(plain, data)
    recipe = paper(
        family="graph",
        gradient_rounding="nearest",
        aggregation="q" if options["quant_agg"] else "fp",
        quantize_norm=options.get("quant_norm", False),
    )
    model = quantized(plain, case, recipe)
    x = data["x"].requires_grad_()
    y = model(x, data["src"], data["dst"])
    close(y, data["y"])
    y.backward(data["grad_y"])
    close(x.grad, data["grad_x"])  # type: ignore[arg-type]
    check_gradients(plain, data)
    model.eval()
    close(model(data["x"], data["src"], data["dst"]), data["y"])
