"""What quantization knows about operators, the one list of them: which multiply, what, and under which other names."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from cpt_fx.formats import Format, Group, Range, group_dims
from cpt_fx.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_LEARNED, FAKE_QUANTIZE_OBSERVED

Target = Callable[..., Any]
Index = int | tuple[int, int]
Groups = tuple[tuple[int, ...], tuple[int, ...] | None]

FIRST_DIM: Groups = ((0,), None)

MULTIPLY = ("conv", "linear", "matmul", "attention", "recurrent")
"""Families of products. The operators of the others multiply nothing by themselves: they look up, add, or scale."""


@dataclass(frozen=True)
class OpSpec:
    """One operator: its family, its argument names in order, and which of them are multiplied.

    `operands` maps an argument's position to its kind: `input`, `weight`, `bias`, `either` where a product takes two
    tensors of which each may be a weight, `sparse` for one that is passed on as it is. `channels` says, by position,
    what `group="channel"` means for a weight there, as `(keep, over)`: its output axis is kept, or all that a product
    sums over shares a range.
    """

    family: str
    name: str
    arguments: tuple[str, ...]
    operands: tuple[tuple[int, str], ...]
    channels: tuple[tuple[int, Groups], ...] = ()
    variadic: int | None = None
    """Position from which all further arguments are operands (einsum, multi_dot)."""


def _conv(name: str, *, transposed: bool = False) -> OpSpec:
    extra = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    arguments = ("input", "weight", "bias", "stride", "padding", *extra)
    # Transposed weights are stored (in, out / groups, ...), the others (out, in / groups, ...).
    output_axis = 1 if transposed else 0
    operands = ((0, "input"), (1, "weight"), (2, "bias"))
    return OpSpec("conv", name, arguments, operands, ((1, ((output_axis,), None)),))


def _linear(name: str, *inputs: str) -> OpSpec:
    kinds = (*["input"] * len(inputs), "weight", "bias")
    return OpSpec("linear", name, (*inputs, "weight", "bias"), tuple(enumerate(kinds)), ((len(inputs), FIRST_DIM),))


def _product(name: str, *, addend: bool = False, right: int = -2) -> OpSpec:
    arguments = ("input", "mat1", "mat2") if addend else ("input", "other")
    first = 1 if addend else 0
    operands = ((first, "either"), (first + 1, "either"))
    # Rank-free: the left operand's output axis is its rows, the right one's its columns, batched or not, or its rows.
    channels: tuple[tuple[int, Groups], ...] = ((first, ((), (-1,))), (first + 1, ((), (right,))))
    return OpSpec("matmul", name, arguments, (((0, "bias"),) if addend else ()) + operands, channels)


def _either(name: str) -> OpSpec:
    """A product whose output axes depend on how it is called: no operand has channels."""
    return OpSpec("matmul", name, ("input", "other"), ((0, "either"), (1, "either")))


def _scatter(name: str, *arguments: str) -> OpSpec:
    source = next(place for place, argument in enumerate(arguments) if argument in ("source", "src", "values"))
    return OpSpec("aggregation", name, arguments, ((source, "input"),))


_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_PRODUCTS = ("matmul", "mm", "bmm", "mv", "dot", "vdot", "outer")
_ADDED = ("addmm", "addbmm", "baddbmm", "addmv", "addr")
_INDEXED = {
    "index_add": ("input", "dim", "index", "source"),
    "scatter_add": ("input", "dim", "index", "src"),
    "scatter_reduce": ("input", "dim", "index", "src", "reduce"),
    "index_reduce": ("input", "dim", "index", "source", "reduce"),
    # With numbers instead of tensors, and unless told to add up, these two write values and sum nothing.
    "scatter": ("input", "dim", "index", "src"),
    "index_put": ("input", "indices", "values", "accumulate"),
}
"""Sums over neighbours, and the names of their arguments."""

SPECS: dict[Target, OpSpec] = {
    **{getattr(torch, name): _conv(name) for name in _CONVOLUTIONS},
    **{getattr(torch, name): _conv(name, transposed=True) for name in _TRANSPOSED},
    F.linear: _linear("linear", "input"),
    F.bilinear: _linear("bilinear", "input1", "input2"),
    **{getattr(torch, name): _product(name) for name in _PRODUCTS},
    **{getattr(torch, name): _product(name, addend=True) for name in _ADDED},
    **{getattr(torch.Tensor, f"{name}_"): _product(f"{name}_", addend=True) for name in _ADDED},
    torch.inner: _product("inner", right=-1),
    torch.linalg.vecdot: _product("vecdot", right=-1),
    torch.kron: _either("kron"),
    torch.tensordot: _either("tensordot"),
    # Products of experts: rows of the left operand meet the matrix of their group.
    torch._grouped_mm: _product("grouped_mm"),
    torch.einsum: OpSpec("matmul", "einsum", ("equation",), (), variadic=1),
    torch.linalg.multi_dot: OpSpec("matmul", "multi_dot", ("tensors",), (), variadic=0),
    torch.chain_matmul: OpSpec("matmul", "chain_matmul", ("matrices",), (), variadic=0),
    F.embedding: OpSpec("embedding", "embedding", ("input", "weight"), ((1, "weight"),), ((1, FIRST_DIM),)),
    F.embedding_bag: OpSpec("embedding", "embedding_bag", ("input", "weight"), ((1, "weight"),), ((1, FIRST_DIM),)),
    **{getattr(torch, name): _scatter(name, *more) for name, more in _INDEXED.items()},
    **{getattr(torch.Tensor, f"{name}_"): _scatter(f"{name}_", *more) for name, more in _INDEXED.items()},
    torch.sparse.mm: OpSpec("aggregation", "sparse_mm", ("input", "mat2"), ((0, "sparse"), (1, "input"))),
    torch.sparse.addmm: OpSpec("aggregation", "sparse_addmm", ("input", "mat1", "mat2"), ((1, "sparse"), (2, "input"))),
    torch.segment_reduce: OpSpec("aggregation", "segment_reduce", ("data", "reduce"), ((0, "input"),)),
}
"""The operators that quantization knows, in normal form."""

ALIASES: dict[Target, Target] = {
    operator.matmul: torch.matmul,
    operator.imatmul: torch.matmul,
    torch.linalg.matmul: torch.matmul,
    torch.ger: torch.outer,
    **({F.grouped_mm: torch._grouped_mm} if hasattr(F, "grouped_mm") else {}),
    torch.ops.aten._sparse_mm: torch.sparse.mm,
    torch.ops.aten._sparse_mm.default: torch.sparse.mm,
    torch.ops.aten._sparse_mm.reduce: torch.sparse.mm,
    torch.ops.aten._sparse_addmm: torch.sparse.addmm,
    torch.ops.aten._sparse_addmm.default: torch.sparse.addmm,
}
"""Other functions for the same operator. Torch methods of the same name follow below."""

METHODS: dict[str, Target] = {
    **{name: getattr(torch, name) for name in (*_PRODUCTS, *_ADDED, *_INDEXED, "inner", "kron")},
    **{f"{name}_": getattr(torch.Tensor, f"{name}_") for name in (*_ADDED, *_INDEXED)},
    "__matmul__": torch.matmul,
    "ger": torch.outer,
}  # fmt: skip
"""Tensor methods and the function each stands for."""
ALIASES.update({getattr(torch.Tensor, name): target for name, target in METHODS.items() if not name.endswith("_")})

_ATEN = {
    **{name: getattr(torch, name) for name in (
        *_PRODUCTS, *_ADDED, *_INDEXED, *_CONVOLUTIONS, *_TRANSPOSED, "inner", "kron", "tensordot", "_grouped_mm",
        "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
    )},
    **{name: getattr(F, name) for name in ("linear", "bilinear", "scaled_dot_product_attention")},
}  # fmt: skip
"""Operators of ATen that take the same arguments as the function of torch that calls them."""
for _name, _function in _ATEN.items():
    _packet = getattr(torch.ops.aten, _name)
    ALIASES[_packet] = _function
    ALIASES.update({getattr(_packet, name): _function for name in _packet.overloads() if not name.endswith("out")})

NAMED_SPECS: dict[str, OpSpec] = {"transformers::grouped_mm_fallback": SPECS[torch._grouped_mm]}
"""Operators of other packages, which need not be installed."""

ADDS: frozenset[Any] = frozenset({operator.add, operator.iadd, torch.add, "add", "add_", "iadd"})
MULTIPLIES: frozenset[Any] = frozenset(
    {operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply", "imul"}
)
DIVIDES: frozenset[Any] = frozenset({operator.truediv, torch.div, torch.divide, "div", "divide", "itruediv"})
SUBTRACTS: frozenset[Any] = frozenset({operator.sub, operator.isub, torch.sub, torch.subtract, "sub", "sub_", "isub"})
SUMS: frozenset[Any] = frozenset({torch.sum, "sum"})

FILLED: frozenset[Any] = frozenset(
    {torch.zeros, torch.ones, torch.full, torch.zeros_like, torch.ones_like, torch.full_like,
     "new_zeros", "new_ones", "new_full"}
)  # fmt: skip
"""Tensors of one value: summed over neighbours they count degrees, they carry no message."""

OPERATOR_OF: dict[type[nn.Module], str] = {
    nn.Linear: "linear", nn.Bilinear: "bilinear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d", nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d", nn.Embedding: "embedding", nn.EmbeddingBag: "embedding_bag",
}  # fmt: skip
"""The one operator of a layer, by the name it has in `SPECS`."""

OPENED: tuple[type[nn.Module], ...] = tuple(OPERATOR_OF)
"""Layers that normalize replaces by the function they call, with the weight as an explicit value."""

HIDING: tuple[type[nn.Module], ...] = (*OPENED, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
"""Modules that multiply: one of these inside an opaque module is reported as uncovered."""

_INSIDE = "its products are not separate operators in this graph"
_SPARSE = "a product with a sparse result is not in the operator table"
FUSED: dict[Target, str] = {
    F.scaled_dot_product_attention: "fused attention: its two products are not separate operators in this graph",
    F.multi_head_attention_forward: f"fused attention: {_INSIDE}",
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), f"fused recurrent kernel: {_INSIDE}"),
    **dict.fromkeys(
        (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
        f"fused recurrent cell: {_INSIDE}",
    ),
    torch._native_multi_head_attention: f"fused attention: {_INSIDE}",
    torch._transformer_encoder_layer_fwd: f"fused encoder layer: {_INSIDE}",
    torch.cdist: "distances are not quantized",
    **dict.fromkeys((torch.hspmm, torch.smm), f"{_SPARSE}: call torch.sparse.mm"),
    torch.sspaddmm: f"{_SPARSE}: call torch.sparse.addmm",
    torch.sparse.sampled_addmm: _SPARSE,
    torch.conv_tbc: "conv_tbc is not in the operator table",
    torch.convolution: "convolution in its general form is not in the operator table: call conv1d, conv2d, ...",
    torch.matrix_power: "matrix_power is not in the operator table",
    torch.linalg.matrix_power: "matrix_power is not in the operator table",
}
"""Functions that multiply and that no rule covers, with the reason that inspect shows."""


def is_opaque(target: Any) -> bool:
    """Whether a target is a function of somebody else's, kept whole in a graph: what is inside is not seen."""
    if isinstance(target, torch.jit.ScriptFunction):
        return True
    package = (getattr(target, "__module__", None) or "").partition(".")[0]
    return isinstance(target, FunctionType) and package not in ("torch", "cpt_fx")


OP_OF_RANGE = {
    Range.DYNAMIC: FAKE_QUANTIZE,
    Range.OBSERVER: FAKE_QUANTIZE_OBSERVED,
    Range.PERCENTILE: FAKE_QUANTIZE_OBSERVED,
    Range.LEARNED: FAKE_QUANTIZE_LEARNED,
}
"""The op that quantizes an operand, by where its range comes from. All but the first keep state in the layer."""


def einsum_group(equation: str, position: int, format: Format) -> Groups | None:
    """Return `(keep, over)` of an operand of a two-operand einsum, as the product that the equation spells has them.

    A channel range spans what is summed over. A vector is what `matmul` has along its last dim: on the left what is
    summed over, on the right what is left over. None where the equation does not tell, or the group does not ask.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != 2 or format.group not in (Group.CHANNEL, Group.VECTOR):
        return None
    if not arrow:  # every letter that occurs once
        output = "".join(letter for letter in inputs if inputs.count(letter) == 1)
    mine, other = names[position], names[1 - position]
    # Letters after an ellipsis are counted from the end.
    before, dots, after = mine.partition("...")
    dims = dict(zip(before, range(len(before)), strict=True))
    dims |= dict(zip(after, range(-len(after), 0), strict=True)) if dots else {}
    summed = tuple(dim for letter, dim in dims.items() if letter in other and letter not in output)
    free = tuple(dim for letter, dim in dims.items() if letter not in other)
    over = free if format.group is Group.VECTOR and position == 1 else summed
    return ((), over) if over else None


def group_of(spec: OpSpec, index: Index, format: Format) -> Groups:
    """Return `(keep, over)` of an operand: channel groups follow the operator's output axis."""
    if format.group is Group.CHANNEL:
        # Without an output axis of its own (an activation, an einsum operand) a tensor has one range.
        return dict(spec.channels).get(index if isinstance(index, int) else index[0], ((), None))
    return group_dims(format.group, 0)


def gradient_groups(format: Format) -> Groups:
    """Return `(keep, over)` of an output gradient, which has no output axis of its own: channels are the tensor."""
    return ((), None) if format.group is Group.CHANNEL else group_dims(format.group, 0)


def spec_of(node: fx.Node) -> OpSpec | None:
    """Return the operator a normalized node is, if quantization knows it."""
    return spec_for(node.target) if node.op == "call_function" else None


def spec_for(target: Any) -> OpSpec | None:
    """Return what a function is to quantization; operators of other packages are known by name."""
    if isinstance(target, torch._ops.OpOverload):
        return SPECS.get(target) or NAMED_SPECS.get(str(target._schema.name))
    if isinstance(target, torch._ops.OpOverloadPacket):
        return SPECS.get(target) or NAMED_SPECS.get(target._qualified_op_name)
    return SPECS.get(target)
