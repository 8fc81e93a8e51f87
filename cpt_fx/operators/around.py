"""Operators around products: those that multiply no matrices, as far as passes need to know them."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F

from cpt_fx.operators.row import Target

RESHAPING = (
    "reshape", "transpose", "permute", "t", "flatten", "unflatten", "squeeze", "unsqueeze", "chunk", "split", "unbind",
    "narrow", "select", "swapaxes", "movedim",
)  # fmt: skip
"""Functions and methods whose results may share memory with their argument."""

COMPUTING = (
    "add", "sub", "rsub", "mul", "div", "pow", "neg", "exp", "log", "sqrt", "rsqrt", "abs", "clamp", "sin", "cos",
    "tanh", "sigmoid", "relu", "softmax", "log_softmax", "sum", "mean", "var", "std", "cat", "stack", "where", "clone",
    "masked_fill", "square", "maximum", "minimum",
)  # fmt: skip
"""Functions and methods whose results are new tensors."""

VIEWS: frozenset[Any] = frozenset({
    *RESHAPING, *(getattr(torch, name) for name in RESHAPING), "view", "expand", "expand_as", "view_as", "contiguous",
    "detach", "to", "float", "half", "type_as", "mT", "T", operator.getitem, getattr, F.dropout,
})  # fmt: skip
"""Operators whose result may share memory with their first argument, and with no other."""

_NEW = (*COMPUTING, "true_divide")
FRESH: frozenset[Any] = frozenset({
    *_NEW, *(getattr(torch, name) for name in _NEW), operator.add, operator.sub, operator.mul,
    operator.truediv, operator.pow, operator.neg, F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.softmax, F.log_softmax,
    F.layer_norm, F.batch_norm, F.group_norm, F.cross_entropy, F.mse_loss, "size", "stride", "storage_offset",
})  # fmt: skip
"""Operators whose result is always a new tensor or a number, unless told to write in place."""

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
"""Functions that make a constant tensor: summed over neighbours, it counts degrees and carries no message."""

FACTORIES = ("zeros", "ones", "full", "empty", "rand", "randn", "randint", "randperm", "arange", "linspace", "eye")
"""Functions of torch that make a tensor without an input tensor: they run in the graph, not once while tracing."""

SAME_METHOD = ("view", "expand", "expand_as", "view_as", "contiguous", "detach", "type_as", "new_zeros", "new_ones",
               "new_full")  # fmt: skip
"""ATen operators that become the tensor method of the same name, with the same arguments in the same order."""

SAME: dict[str, Target] = {
    **{name: getattr(F, name) for name in ("gelu", "silu", "leaky_relu", "dropout")},
    **{
        name: getattr(torch, name)
        for name in (*COMPUTING, *RESHAPING, "zeros", "ones", "full", "zeros_like", "ones_like", "full_like",
                     "index_select", "gather")
    },
}  # fmt: skip
"""ATen operators, any overload, and the function that takes the same positional arguments."""


_STATISTICS = ("input", "running_mean", "running_var", "weight", "bias")
CONVERTED: dict[str, tuple[Target | str, tuple[str, ...]]] = {
    "aten.batch_norm.default": (F.batch_norm, (*_STATISTICS, "training", "momentum", "eps")),
    "aten.instance_norm.default": (F.instance_norm, (*_STATISTICS, "use_input_stats", "momentum", "eps")),
    "aten.layer_norm.default": (F.layer_norm, ("input", "normalized_shape", "weight", "bias", "eps")),
    "aten.group_norm.default": (F.group_norm, ("input", "num_groups", "weight", "bias", "eps")),
    "aten.sym_size.int": ("size", ("self", "dim")),
    "aten.native_dropout.default": (F.dropout, ("input", "p", "train")),
}
"""ATen operators with another order of arguments: the function or method, and the arguments in its order."""
FIRST_RESULT = ("aten.native_dropout.default",)
"""Those of `CONVERTED` that return several tensors, of which the function returns the first."""

PASSED_ON = frozenset({
    "index_select", "gather", "getitem", "index", "repeat_interleave", "expand", "expand_as", "unsqueeze", "view",
    "reshape", "clamp", "clamp_", "clamp_min", "add", "add_", "iadd", "masked_fill", "nan_to_num", "where", "detach",
})  # fmt: skip
"""Operators that the maximum or sum of each node may go through on its way back to the edges."""

UPDATES = frozenset({"setitem"} | {f"i{name}" for name in (
    "add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul",
)})  # fmt: skip
"""In-place operations such as `x += y`, by their names in Python's module `operator`."""

FLAGS: dict[str, str] = {
    **{f"aten.{kind}dropout{in_place}.default": "train" for in_place in ("", "_")
       for kind in ("", "alpha_", "feature_", "feature_alpha_")},
    "aten.native_dropout.default": "train",
    "aten.batch_norm.default": "training",
    "aten.instance_norm.default": "use_input_stats",
    "aten.rrelu.default": "training",
    "aten.rrelu_.default": "training",
    **{f"aten.{kind}.{form}": "train" for form in ("input", "data")
       for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}  # fmt: skip
"""Operators with a training flag, and the name of that argument."""

ONE_MODE = ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
             "_batch_norm_with_update", "_batch_norm_with_update_functional", "_batch_norm_no_update",
             "_fused_rms_norm_training")  # fmt: skip
"""Operators that stand for a norm in a decomposed program; each is fixed to one mode."""
