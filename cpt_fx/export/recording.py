"""A function of tensors as one ONNX graph, with PyTorch's own backward pass where the function asks for gradients.

Two traces. The first runs the function with autograd on tensors without data, and records what reaches ATen: gradients
are PyTorch's by construction. The second is torch.export's, which takes writes to tensors out of the record.
"""

from __future__ import annotations

import logging
import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

# Which operators the exporter translates: nothing public says so.
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.utils import _pytree as pytree

from cpt_fx.export.backward import BACKWARD
from cpt_fx.export.bags import embedding_bag
from cpt_fx.export.operators import EVERYWHERE, OPERATORS
from cpt_fx.export.refusals import UnsupportedError, check_draws, check_numbers, operator_of

OPSET = 18
Table = Mapping[Any, Callable[..., Any]]
Places = frozenset[tuple[int, int]]
"""Dims of arguments: each the number of a tensor, and the dim."""
Least = dict[tuple[int, int], int]
"""The smallest size that a record is right for, where that is more than two."""

_MOVES = {
    operator.getitem, *(getattr(torch.ops.aten, name) for name in (
        "clone", "constant_pad_nd", "contiguous", "expand", "flatten", "narrow", "pad", "permute", "reshape", "select",
        "slice", "split", "squeeze", "to", "_to_copy", "transpose", "unsqueeze", "view", "where",
    )),
}  # fmt: skip
"""Operators whose numbers are those of their first argument."""


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
    return {**plain, **backward, **EVERYWHERE, **OPERATORS, **BACKWARD, **empty}


@cache
def _taken_apart() -> Table:
    """Return whole operators that are taken apart nevertheless."""
    aten = torch.ops.aten
    # The exporter would leave it to runtimes what these draw.
    drawing = (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout, aten.rrelu)
    # Convolutions without a bias get one of zeros from it, in three dims of the wrong size; losses no label smoothing.
    others = (aten.chunk, aten.cdist, aten.cross_entropy_loss, aten.nll_loss_nd, aten.nll_loss, aten.nll_loss2d,
              aten.conv1d, aten.conv2d, aten.conv3d,
              aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)  # fmt: skip
    apart = [getattr(entry, name) for entry in (*drawing, *others) for name in entry.overloads() if "out" not in name]
    losses = {key: decomposition_table[key] for key in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)}
    bags = dict.fromkeys((aten.embedding_bag.default, aten.embedding_bag.padding_idx), embedding_bag)
    with _quiet():
        known = ONNXRegistry.from_torchlib()
    unknown = {key: entry for key, entry in OPERATORS.items() if not known.is_registered(key)}
    return {**unknown, **{entry: entry.decompose for entry in apart}, **EVERYWHERE, **losses, **bags}


def record(
    function: Callable[..., Any], arguments: Any, varying: Any, extra: Table, *, whole: bool = False
) -> tuple[fx.GraphModule, Places, Least]:
    """Record what a function does with tensors like the given ones, autograd included.

    `varying` has the structure of the arguments: whether the sizes of a tensor are left open. `whole` operators are
    recorded as the model calls them, before they are taken apart: for a graph that has no way back. Returned are the
    record, the sizes that it is made for, and the least of those that are open.
    """
    # Without duck shapes: sizes that happen to be equal in the examples are not the same size.
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)

    def fake(value: Any, varies: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        kind = DimDynamic.DYNAMIC if varies else DimDynamic.STATIC
        context: Any = StatelessSymbolicContext(dynamic_sizes=[kind] * value.ndim)
        return mode.from_tensor(value.detach(), symbolic_context=context)

    leaves, structure = pytree.tree_flatten(arguments)
    made = [fake(value, varies) for value, varies in zip(leaves, pytree.tree_leaves(varying), strict=True)]
    table = {**(_taken_apart() if whole else decompositions()), **extra}
    # Attention in one operator has a backward pass in one operator. Kernels in C++ read sizes as numbers.
    trace = make_fx(function, decomposition_table=table, tracing_mode="real", pre_dispatch=whole)
    with mode, enable_python_dispatcher(), sdpa_kernel(SDPBackend.MATH):
        try:
            recorded = trace(*pytree.tree_unflatten(made, structure))
        except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException) as error:
            reason = "PyTorch cannot say what it returns without the values that it is given"
            raise UnsupportedError(str(error.func).removesuffix(".default"), reason) from error
        except GuardOnDataDependentSymNode as error:
            reason = "the values of a tensor decide what is computed, which is fixed in a graph"
            raise UnsupportedError("aten._local_scalar_dense", reason) from error
    if not whole:
        check_numbers(recorded)
    return recorded, _relied_on(mode, made), _least(mode, made)


def _is_open(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _relied_on(mode: FakeTensorMode, arguments: Sequence[Any]) -> Places:
    """Return the open sizes with which equations hold that the next larger size does not fulfil.

    A graph that was taken apart for one of them (windows of equal size in adaptive pooling) is wrong for others.
    """
    env = mode.shape_env
    assert env is not None
    values = env.backed_var_to_val
    equations = [known for guard in env.guards if isinstance(known := env.replace(guard.expr), sympy.Eq)]
    relied = {
        symbol
        for equation in equations
        for symbol in equation.free_symbols
        if equation.subs({**values, symbol: values[symbol] + 1}) == sympy.false
    }
    return frozenset(place for place, size in _open_sizes(arguments) if size.free_symbols & relied)


def _least(mode: FakeTensorMode, arguments: Sequence[Any]) -> Least:
    """Return the smallest sizes for which what was asked while recording has the same answers: x[4] asks for five."""
    env = mode.shape_env
    assert env is not None
    bounds = {place: env.bound_sympy(size).lower for place, size in _open_sizes(arguments)}
    return {place: int(bound) for place, bound in bounds.items() if bound > 2}


def _open_sizes(arguments: Sequence[Any]) -> Iterator[tuple[tuple[int, int], sympy.Expr]]:
    """Give the sizes that are open: the number of the tensor with the dim, and what is known of it."""
    tensors: list[Any] = [value for value in arguments if isinstance(value, Tensor)]
    for place, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            if _is_open(size):
                yield (place, dim), size.node.expr


def choices(record: fx.GraphModule) -> dict[int, tuple[int, ...]]:
    """Return the tensors that choose from a dim: from how many, and a number that chooses nothing, if there is one.

    Where a user's code indexes a tensor, negative numbers count from the end in torch, too: that is not looked at.
    """
    inputs = [node for node in record.graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    found: dict[int, tuple[int, ...]] = {}
    for node in record.graph.nodes:
        if node.target is torch.ops.aten.embedding.default:
            table, dim, source = node.args[0], 0, node.args[1]
        elif node.target is torch.ops.aten.gather.default:
            table, dim, source, *_ = node.args
        else:
            continue
        ignored: tuple[int, ...] = ()
        while (kind := getattr(source.target, "overloadpacket", source.target)) in _MOVES:
            if kind is torch.ops.aten.where:  # as losses leave labels out
                test, source, _ = source.args
                if test.target is not torch.ops.aten.ne.Scalar or test.args[0] is not source:
                    break
                ignored = test.args[1:]
            else:
                source = source.args[0]
        size = table.meta["val"].shape[dim]
        if source in inputs and all(isinstance(number, int) for number in (size, *ignored)):
            place = inputs.index(source)
            found[place] = min(found.get(place, (size, *ignored)), (size, *ignored))
    return found


class _Recorded(nn.Module):
    """A record as a module, for torch.export."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.recorded = graph  # not `graph`, which is something else in what torch.export makes of it

    def forward(self, *arguments: Any) -> Any:
        """Run it."""
        return self.recorded(*arguments)


def convert(graph: fx.GraphModule, arguments: tuple[Any, ...], relied: Places = frozenset()) -> tuple[ir.Model, Places]:
    """Return a record as an ONNX graph, and the sizes that it is made for.

    Inputs are the tensors of the arguments, in their order. Sizes are open that were left open and that nothing in the
    record has fixed, but for those that it relies on.
    """
    shapes: list[Any] = []
    places = count()
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            place = next(places)
            is_open = [_is_open(size) and (place, dim) not in relied for dim, size in enumerate(value.shape)]
            shapes.append([Dim.AUTO if one else Dim.STATIC for one in is_open])
        else:
            shapes.append(None)
    structure = pytree.tree_structure(arguments)
    still = pytree.tree_map_only(Tensor, Tensor.detach, arguments)
    with _quiet(), torch.no_grad():
        program = torch.export.export(
            _Recorded(graph), still, dynamic_shapes=(pytree.tree_unflatten(shapes, structure),), strict=False
        )
        for node in program.graph.nodes:
            # Lines of the user's files, with their paths: nothing that belongs into an export.
            node.meta.pop("stack_trace", None)
        try:
            made = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=OPSET, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            raise _untranslated(error) from error
    assert made is not None
    check_draws(made.model)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    return made.model, _relied_on(mode, values)


def _untranslated(error: Exception) -> UnsupportedError:
    """Say which operator has no translation to ONNX."""
    found = re.search(r"No ONNX function found for <OpOverload\(op='(\w+\.\w+)'", str(error))
    named = found[1] if found else operator_of(str(error.__cause__ or error)) or "an operator"
    said = "" if found else f" ({str(error.__cause__ or error).strip().splitlines()[0]})"
    return UnsupportedError(named, f"torch's ONNX exporter has no translation of it{said}")


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
