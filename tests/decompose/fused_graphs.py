"""Graphs with fused operators in them, made by hand as Dynamo records them: parameters read by name, sources noted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from cpt_fx.ir.module import QuantizedGraphModule, blank
from cpt_fx.passes import Decompose, Normalize, Verify

Made = tuple[QuantizedGraphModule, fx.Graph]


class GraphMaker:
    """Builds one graph over a tree of modules."""

    def __init__(self, **parts: nn.Module) -> None:
        self.module = blank()
        for name, part in parts.items():
            self.module.add_module(name, part)
        self.graph = fx.Graph()
        self.here: dict[str, tuple[str, type[nn.Module]]] = {}

    def inputs(self, *names: str) -> list[fx.Node]:
        return [self.graph.placeholder(name) for name in names]

    def read(self, path: str) -> fx.Node:
        return self.graph.create_node("get_attr", path)

    def call(self, function: Callable[..., Any], *args: Any, at: str = "", **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(function, args, kwargs)
        if at:
            node.meta["nn_module_stack"] = {at: (at, type(self.module.get_submodule(at)))}
        return node

    def finish(self, result: Any) -> QuantizedGraphModule:
        self.graph.output(result)
        self.module.graph = self.graph
        return self.module


def recurrent(layer: nn.RNNBase, *, packed: bool = False) -> QuantizedGraphModule:
    """The graph of `nn.LSTM(...)(x, state)` and its like; packed sequences come as data and batch sizes."""
    make = GraphMaker(rnn=layer)
    function: Any = getattr(torch, layer.mode.lower())
    sources = make.inputs("x", "batch_sizes") if packed else make.inputs("x")
    state: Any = make.inputs("h", "c") if layer.mode == "LSTM" else make.inputs("h")[0]
    state = tuple(state) if isinstance(state, list) else state
    weights = [make.read(f"rnn.{name}") for name in layer._flat_weights_names]
    flags = [layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional]
    if not packed:
        flags.append(layer.batch_first)
    result = make.call(function, *sources, state, weights, *flags, at="rnn")
    return make.finish(result)


def cell(layer: nn.RNNCellBase) -> QuantizedGraphModule:
    """The graph of a recurrent cell."""
    make = GraphMaker(rnn=layer)
    kind: Any = {"LSTMCell": torch.lstm_cell, "GRUCell": torch.gru_cell}.get(type(layer).__name__)
    if kind is None:
        kind = torch.rnn_tanh_cell if getattr(layer, "nonlinearity", "") == "tanh" else torch.rnn_relu_cell
    x, h = make.inputs("x", "h")
    state: Any = (h, *make.inputs("c")) if isinstance(layer, nn.LSTMCell) else h
    weights = [make.read(f"rnn.{name}") for name in ("weight_ih", "weight_hh")]
    biases = [make.read(f"rnn.{name}") for name in ("bias_ih", "bias_hh")] if layer.bias else []
    return make.finish(make.call(kind, x, state, *weights, *biases, at="rnn"))


def multi_head(layer: nn.MultiheadAttention, *, same: bool = True, masks: tuple[str, ...] = (),
               **options: Any) -> QuantizedGraphModule:  # fmt: skip
    """The graph of a call of `F.multi_head_attention_forward` with the parameters of a layer."""
    make = GraphMaker(attn=layer)
    query = make.inputs("query")[0]
    key, value = (query, query) if same else make.inputs("key", "value")
    given = dict(zip(masks, make.inputs(*masks), strict=True))

    def read(name: str) -> fx.Node | None:
        return None if getattr(layer, name, None) is None else make.read(f"attn.{name}")

    separate = not layer._qkv_same_embed_dim
    extra = {f"{name}_proj_weight": read(f"{name}_proj_weight") for name in "qkv"} if separate else {}
    result = make.call(
        F.multi_head_attention_forward, query, key, value, layer.embed_dim, layer.num_heads, read("in_proj_weight"),
        read("in_proj_bias"), read("bias_k"), read("bias_v"), layer.add_zero_attn, layer.dropout,
        make.read("attn.out_proj.weight"), None if layer.out_proj.bias is None else make.read("attn.out_proj.bias"),
        training=layer.training, use_separate_proj_weight=separate, at="attn", **extra, **given, **options,
    )  # fmt: skip
    return make.finish(result)


def decomposed(module: QuantizedGraphModule) -> QuantizedGraphModule:
    """A copy of a graph, decomposed; the parameters are copies too."""
    result = copy.deepcopy(module)
    for step in (Normalize(), Decompose()):
        step(result)
        Verify(step.name)(result)
    return result


def results(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Outputs and all gradients of a call, from one seed; inputs that are not floating point are passed as they are."""
    torch.manual_seed(7)
    module.zero_grad()
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = [y for y in _flat(module(*leaves)) if isinstance(y, Tensor)]
    torch.autograd.backward(outputs, [torch.linspace(-1, 2, y.numel()).view_as(y).to(y.dtype) for y in outputs])
    gradients = [leaf.grad for leaf in leaves] + [p.grad for _, p in sorted(module.named_parameters())]
    return [y.detach() for y in outputs] + [g for g in gradients if g is not None]


def _flat(value: Any) -> list[Any]:
    return [item for part in value for item in _flat(part)] if isinstance(value, (tuple, list)) else [value]


def assert_close(ours: list[Tensor], theirs: list[Tensor], tolerance: float = 1e-5) -> None:
    """Agree to float rounding: relative to the largest element of each tensor."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        scale = float(other.nan_to_num().abs().max()) if other.numel() else 0.0
        torch.testing.assert_close(mine, other, rtol=0, atol=tolerance * max(scale, 1e-3), equal_nan=True)
