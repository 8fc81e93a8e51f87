"""A tensor function as one ONNX graph, with PyTorch's own backward pass if the function computes gradients.

There are two traces. `make_fx` runs the function with autograd on fake tensors and records the ATen operators, so
that gradients are PyTorch's by construction. torch.export then removes in-place writes from the recorded graph. The
graph that torch's exporter makes of it is simplified.
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
from onnx_ir.passes import common
from onnx_ir.tape import Tape
from onnxscript import optimizer
from torch import Tensor, fx, nn
from torch.export import Dim, default_decompositions
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpt_fx.capture.base import patched
from cpt_fx.common.torch_private import pytree
from cpt_fx.export.backward import BACKWARD, embedding_bag
from cpt_fx.export.operators import EVERYWHERE, OPERATORS
from cpt_fx.export.refusals import UnsupportedError, check_nodes, check_numbers, operator_of
from cpt_fx.export.torch_private import ONNXRegistry, decomposition_table, enable_python_dispatcher, fake_tensor

OPSET = 18
Table = Mapping[Any, Callable[..., Any]]
Places = frozenset[tuple[int, int]]
"""Dims of arguments: the index of a tensor, and the dim."""
Least = dict[tuple[int, int], int]
"""The smallest valid size of dims, where it is more than two."""

_MOVES = {
    operator.getitem, *(getattr(torch.ops.aten, name) for name in (
        "clone", "constant_pad_nd", "contiguous", "expand", "flatten", "narrow", "pad", "permute", "reshape", "select",
        "slice", "split", "squeeze", "to", "_to_copy", "transpose", "unsqueeze", "view", "where",
    )),
}  # fmt: skip
"""Operators that move the values of an argument without changing them."""

_known = cache(ONNXRegistry.from_torchlib)
"""The exporter's translations, cached: it only reads them, and would build them again for each graph."""


@cache
def decompositions() -> Table:
    """Return the decompositions for training steps: operators that ONNX lacks, expressed in operators that it has."""
    with _quiet():
        known = _known()
    plain = {key: entry for key, entry in default_decompositions().items() if not known.is_registered(key)}
    backward = {key: entry for key, entry in decomposition_table.items() if "_backward" in str(key)}
    # ONNX has this loss, but not the sum of weights that its backward pass needs.
    backward |= {key: entry for key, entry in decomposition_table.items() if "nll_loss" in str(key)}
    # ONNX has no uninitialized tensors: zeros will do.
    empty = {
        torch.ops.aten.empty_like.default: lambda x, *, dtype=None, **_: torch.zeros_like(x, dtype=dtype),
        torch.ops.aten.empty_permuted.default: lambda size, order, *, dtype=None, **_: torch.zeros(size, dtype=dtype),
    }
    return {**plain, **backward, **EVERYWHERE, **OPERATORS, **BACKWARD, **empty}


@cache
def _taken_apart() -> Table:
    """Return the decompositions for evaluation, where most operators are exported as the model calls them."""
    aten = torch.ops.aten
    # The exporter would leave their random numbers to the runtime.
    drawing = (aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.feature_alpha_dropout, aten.rrelu)
    # The exporter gives convolutions without a bias one of zeros, in 3d of the wrong size, and drops label smoothing.
    others = (aten.chunk, aten.cdist, aten.cross_entropy_loss, aten.nll_loss_nd, aten.nll_loss, aten.nll_loss2d,
              aten.conv1d, aten.conv2d, aten.conv3d,
              aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)  # fmt: skip
    apart = [getattr(entry, name) for entry in (*drawing, *others) for name in entry.overloads() if "out" not in name]
    losses = {key: decomposition_table[key] for key in (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)}
    bags = dict.fromkeys((aten.embedding_bag.default, aten.embedding_bag.padding_idx), embedding_bag)
    with _quiet():
        known = _known()
    unknown = {key: entry for key, entry in OPERATORS.items() if not known.is_registered(key)}
    return {**unknown, **{entry: entry.decompose for entry in apart}, **EVERYWHERE, **losses, **bags}


def record(
    function: Callable[..., Any], arguments: Any, varying: Any, extra: Table, *, whole: bool = False
) -> tuple[fx.GraphModule, Places, Least]:
    """Trace what a function does with tensors like the given ones, autograd included.

    `varying` has the structure of the arguments: whether the sizes of a tensor are dynamic. With `whole`, operators are
    recorded as the model calls them, before decomposition: for a graph without a backward pass. Return the graph, the
    dims that it is specialized for, and the smallest sizes of dynamic dims.
    """
    # Without duck shapes: sizes that happen to be equal in the examples are independent.
    mode = fake_tensor.FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)

    def fake(value: Any, varies: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        kind = symbolic_shapes.DimDynamic.DYNAMIC if varies else symbolic_shapes.DimDynamic.STATIC
        context: Any = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=[kind] * value.ndim)
        return mode.from_tensor(value.detach(), symbolic_context=context)

    leaves, structure = pytree.tree_flatten(arguments)
    made = [fake(value, varies) for value, varies in zip(leaves, pytree.tree_leaves(varying), strict=True)]
    table = {**(_taken_apart() if whole else decompositions()), **extra}
    # Fused attention would have a fused backward pass; without Python's dispatcher, C++ would read sizes as numbers.
    trace = make_fx(function, decomposition_table=table, tracing_mode="real", pre_dispatch=whole)
    with mode, enable_python_dispatcher(), sdpa_kernel(SDPBackend.MATH):
        try:
            recorded = trace(*pytree.tree_unflatten(made, structure))
        except (
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.DataDependentOutputException,
            fake_tensor.UnsupportedOperatorException,
        ) as error:
            reason = "PyTorch cannot say what it returns without the values that it is given"
            raise UnsupportedError(str(error.func).removesuffix(".default"), reason) from error
        except symbolic_shapes.GuardOnDataDependentSymNode as error:
            reason = "the values of a tensor decide what is computed, which is fixed in a graph"
            raise UnsupportedError("aten._local_scalar_dense", reason) from error
    if not whole:
        check_numbers(recorded)
    return recorded, _relied_on(mode, made), _least(mode, made)


def _is_open(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _relied_on(mode: fake_tensor.FakeTensorMode, arguments: Sequence[Any]) -> Places:
    """Return the dynamic sizes in equations that the next larger size does not satisfy.

    A graph that was decomposed under such a guard (equal windows in adaptive pooling) is wrong for other sizes.
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


def _least(mode: fake_tensor.FakeTensorMode, arguments: Sequence[Any]) -> Least:
    """Return the smallest sizes for which all guards of the trace still hold: x[4] needs five."""
    env = mode.shape_env
    assert env is not None
    bounds = {place: env.bound_sympy(size).lower for place, size in _open_sizes(arguments)}
    return {place: int(bound) for place, bound in bounds.items() if bound > 2}


def _open_sizes(arguments: Sequence[Any]) -> Iterator[tuple[tuple[int, int], sympy.Expr]]:
    """Yield the dynamic sizes: the index of the tensor with the dim, and the symbolic size."""
    tensors: list[Any] = [value for value in arguments if isinstance(value, Tensor)]
    for place, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            if _is_open(size):
                yield (place, dim), size.node.expr


def choices(record: fx.GraphModule) -> dict[int, tuple[int, ...]]:
    """Return the inputs that are indices: the size of the indexed dim, then the index that is ignored, if there is one.

    Only embeddings and gathers count: in a user's own indexing, torch accepts negative numbers too.
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
            if kind is torch.ops.aten.where:  # how losses ignore labels
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
    """A traced graph as a module, for torch.export."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.recorded = graph  # not `graph`: the module that torch.export makes has one of its own

    def forward(self, *arguments: Any) -> Any:
        """Run the graph."""
        return self.recorded(*arguments)


def convert(graph: fx.GraphModule, arguments: tuple[Any, ...], relied: Places = frozenset()) -> tuple[ir.Model, Places]:
    """Convert a traced graph to ONNX; return it, and the dims that it is specialized for.

    Inputs are the tensors of the arguments, in order. A size stays dynamic if it is dynamic in the trace and not in
    `relied`.
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
            # Paths and lines of the user's files do not belong in an export.
            node.meta.pop("stack_trace", None)
        try:
            with patched({(ONNXRegistry, "from_torchlib"): staticmethod(_known)}):
                made = torch.onnx.export(program, dynamo=True, optimize=False, opset_version=OPSET, verbose=False)
        except torch.onnx.OnnxExporterError as error:
            raise _untranslated(error) from error
    assert made is not None
    check_nodes(made.model)
    values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"]
    mode = next(value.fake_mode for value in values if isinstance(value, fake_tensor.FakeTensor))
    return made.model, _relied_on(mode, values)


def _untranslated(error: Exception) -> UnsupportedError:
    """Return an error that names the operator without a translation to ONNX."""
    found = re.search(r"No ONNX function found for <OpOverload\(op='(\w+\.\w+)'", str(error))
    named = found[1] if found else operator_of(str(error.__cause__ or error)) or "an operator"
    said = "" if found else f" ({str(error.__cause__ or error).strip().splitlines()[0]})"
    return UnsupportedError(named, f"torch's ONNX exporter has no translation of it{said}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about its internals and about packages that are not installed."""
    logger = logging.getLogger("torch.onnx")
    before, logger.level = logger.level, logging.ERROR
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(before)


def normalize(model: ir.Model) -> ir.Model:
    """Simplify a traced model in place, and return it."""
    returned = [(value.type, value.shape) for value in model.graph.outputs]
    optimizer.fold_constants(model)
    _drop_straight_transposes(model)
    _make_columns(model)
    common.IdentityEliminationPass()(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.NameFixPass()(model)
    for value, (kind, shape) in zip(model.graph.outputs, returned, strict=True):
        # Of two equal values, the one that was kept may have no type or shape.
        value.type, value.shape = kind, shape
    return model


def _drop_straight_transposes(model: ir.Model) -> None:
    """Remove transposes that keep the order of the dims: ONNX Runtime would fuse them into Gemm as real ones."""
    for node in model.graph:
        if node.op_type == "Transpose" and node.domain == "" and "perm" in node.attributes:
            perm = node.attributes["perm"].as_ints()
            if list(perm) == sorted(perm):
                node.op_type = "Identity"
                node.attributes.clear()


def _make_columns(model: ir.Model) -> None:
    """Multiply by a column instead of a vector: before a vector, ONNX Runtime drops the transpose of the matrix."""
    for node in list(model.graph):
        if node.op_type != "MatMul" or node.domain or node.inputs[1] is None or node.inputs[1].shape is None:
            continue
        left, right = node.inputs
        if len(node.inputs[1].shape) == 1:
            tape = Tape()
            last = tape.op("Constant", [], {"value_ints": [-1]})
            product = tape.op("MatMul", [left, tape.op("Unsqueeze", [right, last])])
            made = tape.op("Squeeze", [product, last], name=node.name)
            made.type, made.shape = node.outputs[0].type, node.outputs[0].shape
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], tape.nodes, node.outputs, [made])


def strip(model: ir.Model) -> None:
    """Remove metadata such as source paths: two exports of a model are equal, byte for byte."""
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.metadata_props.clear()
