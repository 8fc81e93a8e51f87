"""ATen operators in the form that the passes know: the same numbers, and names that say what overwrites."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.operators import why_left
from cpt_fx.operators.aten import arguments_of, to_torch
from tests.training import check_same_output


def one_call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Rewrite a graph of one ATen call, check that it computes the same, and return the node that it became."""
    graph = fx.Graph()
    tensors = [value for value in args if isinstance(value, Tensor)]
    given = iter([graph.placeholder(f"x{place}") for place in range(len(tensors))])
    node = graph.call_function(
        target, tuple(next(given) if isinstance(value, Tensor) else value for value in args), kwargs
    )
    graph.output(node)
    to_torch(graph)
    result = fx.GraphModule(nn.Module(), graph)(*copy.deepcopy(tensors))
    wanted = target(*copy.deepcopy(args), **kwargs)
    check_same_output(result, wanted)
    nodes: list[fx.Node] = [item for item in graph.nodes if item.op.startswith("call")]
    return nodes[0]


def test_arguments_in_another_order() -> None:
    aten, index, table = torch.ops.aten, torch.tensor([1, 2]), torch.randn(3, 4)
    embedding = one_call(aten.embedding.default, table, index)
    assert embedding.target is F.embedding and embedding.kwargs["padding_idx"] is None
    assert one_call(aten.embedding.default, table, index, 2).kwargs["padding_idx"] == 2
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 2, 2)
    options = ([1, 1], [0, 0], [1, 1])
    assert one_call(aten.convolution.default, x, weight, None, *options, False, [0, 0], 1).target is torch.conv2d
    up = one_call(aten.convolution.default, x, torch.randn(3, 4, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [1, 1], 1)
    assert up.target is torch.conv_transpose2d
    mean, variance = torch.zeros(3), torch.ones(3)
    norm = (x, torch.rand(3), torch.rand(3), mean, variance, False, 0.1, 1e-5, False)
    assert one_call(aten.batch_norm.default, *norm).target is F.batch_norm
    assert one_call(aten.add_.Tensor, torch.randn(3), torch.randn(3), alpha=2).target == "add_"
    assert one_call(aten.elu_.default, torch.randn(3)).target is torch._C._nn.elu_
    assert one_call(aten.cumsum.default, torch.randn(3), 0).target is aten.cumsum.default


def test_in_place_operators_say_so() -> None:
    """Everything that overwrites its argument gets a name that ends with an underscore."""
    for name in ("add_", "mul_", "relu_", "copy_", "index_put_", "masked_fill_", "dropout_", "celu_", "silu_", "zero_"):
        packet = getattr(torch.ops.aten, name)
        graph = fx.Graph()
        node = graph.call_function(getattr(packet, packet.overloads()[0]), (graph.placeholder("x"),))
        to_torch(graph)
        assert (node.target if isinstance(node.target, str) else node.target.__name__).endswith("_"), name


def test_defaults_of_a_schema() -> None:
    graph = fx.Graph()
    node = graph.call_function(torch.ops.aten.addmm.default, tuple(graph.placeholder(name) for name in "abc"))
    assert list(arguments_of(node)) == ["self", "mat1", "mat2", "beta", "alpha"]


def test_hidden_products_have_a_reason() -> None:
    assert "fused attention" in why_left(torch.ops.aten._efficient_attention_forward.default)
    assert "quantized already" in why_left(torch.ops.aten._scaled_mm.default)
    assert why_left(torch.ops.aten.relu.default) == ""
