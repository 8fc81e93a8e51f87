"""A function of tensors as one ONNX graph, with PyTorch's own backward pass where the function asks for gradients.

Two traces. The first runs the function with autograd on tensors without data, and records what reaches ATen: gradients
are PyTorch's by construction. The second is torch.export's, which takes writes to tensors out of the record.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

# Which operators the exporter translates: nothing public says so.
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.utils import _pytree as pytree

from cpt_fx.errors import ExportError
from cpt_fx.export.backward import BACKWARD
from cpt_fx.export.functions import OPSET

Table = Mapping[Any, Callable[..., Any]]


@cache
def decompositions() -> Table:
    """Return what ONNX has no operator for, in operators that it has."""
    with _quiet():
        known = ONNXRegistry.from_torchlib()
    plain = {key: entry for key, entry in core_aten_decompositions().items() if not known.is_registered(key)}
    backward = {key: entry for key, entry in decomposition_table.items() if "_backward" in str(key)}
    # ONNX has this loss, but not the sum of weights that its backward pass needs.
    backward |= {key: entry for key, entry in decomposition_table.items() if "nll_loss" in str(key)}
    # What nobody has written to yet may as well be zeros, which ONNX has.
    empty = {
        torch.ops.aten.empty_like.default: lambda x, *, dtype=None, **_: torch.zeros_like(x, dtype=dtype),
        torch.ops.aten.empty_permuted.default: lambda size, order, *, dtype=None, **_: torch.zeros(size, dtype=dtype),
    }
    return {**plain, **backward, **BACKWARD, **empty}


_DRAWING = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu")
"""Whole operators that are taken apart nevertheless: the exporter would leave it to runtimes what they draw."""


def record(
    function: Callable[..., Any], arguments: Any, varying: Any, extra: Table, *, whole: bool = False
) -> fx.GraphModule:
    """Record what a function does with tensors like the given ones, autograd included.

    `varying` has the structure of the arguments: whether the sizes of a tensor are left open. `whole` operators are
    recorded as the model calls them, before they are taken apart: for a graph that has no way back.
    """
    # Without duck shapes: sizes that happen to be equal in the examples are not the same size.
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)

    def fake(value: Any, varies: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        kind = DimDynamic.DYNAMIC if varies else DimDynamic.STATIC
        context = StatelessSymbolicContext(dynamic_sizes=[kind] * value.ndim)
        return mode.from_tensor(value.detach(), symbolic_context=context)

    leaves, structure = pytree.tree_flatten(arguments)
    made = [fake(value, varies) for value, varies in zip(leaves, pytree.tree_leaves(varying), strict=True)]
    drawing = {entry: entry.decompose for name in _DRAWING if (entry := getattr(torch.ops.aten, name).default)}
    table = {**(drawing if whole else decompositions()), **extra}
    # Attention in one operator has a backward pass in one operator. Kernels in C++ read sizes as numbers.
    with mode, enable_python_dispatcher(), sdpa_kernel(SDPBackend.MATH):
        return make_fx(function, decomposition_table=table, tracing_mode="real", pre_dispatch=whole)(
            *pytree.tree_unflatten(made, structure)
        )


class _Recorded(nn.Module):
    """A record as a module, for torch.export."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.recorded = graph  # not `graph`, which is something else in what torch.export makes of it

    def forward(self, *arguments: Any) -> Any:
        """Run it."""
        return self.recorded(*arguments)


def convert(graph: fx.GraphModule, arguments: tuple[Any, ...], varying: Any) -> ir.Model:
    """Return a record as an ONNX graph: inputs are the tensors of the arguments, in their order."""

    def shape(value: Any, varies: bool) -> Any:
        return [Dim.AUTO] * value.ndim if varies and isinstance(value, Tensor) else None

    leaves, structure = pytree.tree_flatten(arguments)
    flags = pytree.tree_leaves(varying)
    shapes = pytree.tree_unflatten([shape(*pair) for pair in zip(leaves, flags, strict=True)], structure)
    still = pytree.tree_map_only(Tensor, Tensor.detach, arguments)
    with _quiet(), torch.no_grad():
        program = torch.export.export(_Recorded(graph), still, dynamic_shapes=(shapes,), strict=False)
        for node in program.graph.nodes:
            # Lines of the user's files, with their paths: nothing that belongs into an export.
            node.meta.pop("stack_trace", None)
        try:
            made = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=OPSET, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            raise ExportError(_untranslated(error)) from error
    assert made is not None
    return made.model


def _untranslated(error: Exception) -> str:
    """Say which operator has no translation to ONNX."""
    found = re.search(r"No ONNX function found for <OpOverload\(op='(\w+\.\w+)'", str(error))
    name = re.search(r"translating node %(\w+)", str(error))
    said = "" if found else f" ({str(error.__cause__ or error).strip().splitlines()[0]})"
    operator = found[1] if found else name[1] if name else "an operator"
    return f"{operator}: torch's ONNX exporter has no translation of it{said}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what the exporter says about its own insides and about packages that are not there."""
    logger = logging.getLogger("torch.onnx")
    before, logger.level = logger.level, logging.ERROR
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(before)
