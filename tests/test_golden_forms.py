"""The published layers written in other ways: the recipe follows what is computed, not how it is spelled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx, nn

import cpt_fx
from cpt_fx.recipes import paper
from cpt_fx.schedules import Static
from tests.golden_data import Case, case_id, cases, tensors
from tests.paper_models import SelfAttention
from tests.test_golden_layers import check_gradients, close, load, quantized


def graph_of(model: nn.Module) -> fx.graph._node_list:
    """Return the nodes of a transformed model."""
    (graph,) = cpt_fx.graphs(model)
    return graph.graph.nodes


class EinsumAttention(SelfAttention):
    """The same attention, its products as einsum."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(self.width)
        if mask is not None:
            scores = scores + mask
        probabilities = self.dropout(torch.softmax(scores, dim=-1))
        context = torch.einsum("bhqk,bhkd->bhqd", probabilities, v).permute(0, 2, 1, 3).contiguous()
        return context.view(x.shape[0], x.shape[1], -1), probabilities


@pytest.mark.slow
@pytest.mark.parametrize("case", cases("layers", kind="bert_self_attention"), ids=case_id)
def test_attention_by_einsum(case: Case) -> None:
    data, options = tensors("layers", case), case["options"]
    plain = load(EinsumAttention(options["hidden"], options["heads"]), data)
    mask = (data["attention_mask"],) if options["masked"] else ()
    x = data["x"].requires_grad_()
    y, probabilities = quantized(plain, case, example_inputs=(x.detach(), *mask))(x, *mask)
    close(y, data["y"])
    close(probabilities, data["attention_probs"])
    y.backward(data["grad_y"])
    close(x.grad, data["grad_x"])  # type: ignore[arg-type]
    check_gradients(plain, data)


class Products(nn.Module):
    """A linear layer, as a product with the transposed weight and an addition."""

    def __init__(self, weight: Tensor, bias: Tensor | None, form: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "t":
            y = x @ self.weight.t()
        elif self.form == "T":
            y = torch.matmul(x, self.weight.T)
        elif self.form == "transpose":
            y = x @ self.weight.transpose(0, 1)
        else:
            y = torch.einsum("ni,oi->no", x, self.weight)
        if self.bias is None:
            return y
        return self.bias + y if self.form == "T" else y + self.bias


@pytest.mark.parametrize("form", ["t", "T", "transpose", "einsum"])
@pytest.mark.parametrize("case", cases("layers", kind="linear"), ids=case_id)
def test_linear_layers_as_products(case: Case, form: str) -> None:
    data = tensors("layers", case)
    if form == "einsum" and data["grad_y"].ndim != 2:
        form = "t"  # the equation is for matrices
    family = "dense" if case["observer"] else "graph"
    plain = Products(data["weight"], data.get("bias"), form)
    model = quantized(plain, case, paper(family=family, gradient_rounding="nearest"))
    for batch, expected in zip(data["x"], data["y"], strict=True):
        x = batch.clone().requires_grad_()
        y = model(x)
        close(y, expected)
    y.backward(data["grad_y"])
    close(x.grad, data["grad_x"])
    close(plain.weight.grad, data["grad_weight"])  # type: ignore[arg-type]
    if plain.bias is not None:
        close(plain.bias.grad, data["grad_bias"])  # type: ignore[arg-type]


@pytest.mark.parametrize("equation", ["ni,oi->no", "...i,oi->...o", "ni, oi -> no", "no,io", "ni,oi"])
def test_einsum_finds_the_output_axis_however_it_is_spelled(equation: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(equation, x, self.weight)

    model = cpt_fx.transform(Product(), Static(4))
    (weight,) = [node for node in graph_of(model) if node.name == "einsum_operand1_q"]
    summed = equation.replace(" ", "").partition("->")[0].split(",")[1].index("o" if equation == "no,io" else "i")
    assert weight.kwargs["over"] == [summed] or weight.kwargs["over"] == [summed - 2]


def test_the_sublist_form_of_einsum_is_quantized() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum(x, [0, 1], self.weight, [1, 2], [0, 2])

    model = cpt_fx.transform(Product(), Static(4))
    assert [view.role for view in cpt_fx.inspect(model).quantizers] == ["activation", "weight", "gradient"]
    model(torch.randn(3, 4)).sum().backward()


def test_a_bias_after_a_layer_without_one_belongs_to_it() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3, bias=False)
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(x) + self.bias
            return y

    plain = Split()
    whole = nn.Sequential(nn.Linear(4, 3))
    whole.load_state_dict({"0.weight": plain.fc.weight, "0.bias": plain.bias})
    x = torch.randn(5, 4)
    results = [cpt_fx.transform(net, Static(3), recipe=paper(gradient_rounding="nearest"))(x) for net in (plain, whole)]
    close(results[0].detach(), results[1].detach())
