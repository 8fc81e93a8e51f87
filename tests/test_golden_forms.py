"""The published layers written in other ways: the recipe follows what is computed, not how it is spelled."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from cpt_fx.recipes import paper
from tests.golden_data import Case, case_id, cases, tensors
from tests.paper_models import SelfAttention
from tests.test_golden_layers import check_gradients, close, load, quantized


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
