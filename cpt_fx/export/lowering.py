"""Run a rewritten model so that an exporter sees its quantizers, and what it draws at random, as nodes.

The model's code is not touched. While it is traced, a mode stands between it and torch: where it calls a quantizer, a
node of our own is traced, and running ranges become values that are handed back. Backward, a quantizer passes the
gradient on, and the quantizer of a gradient is a node in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.onnx import ops as onnx_ops
from torch.overrides import TorchFunctionMode

from cpt_fx.errors import ExportError
from cpt_fx.export.functions import BLOCKS, DOMAIN, LEARNED, UNIFORM, Kind
from cpt_fx.formats import Rounding, Scheme, Specials
from cpt_fx.numerics import reduced_dims
from cpt_fx.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_LEARNED, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT, QUANTIZERS

QUANTIZER = "quantizer"
"""Attribute of a node that is to be replaced: the quantizer's name."""


class Placed(NamedTuple):
    """A quantizer that was traced."""

    kind: Kind
    is_gradient: bool
    name: str
    """What its node is called in the rewritten graph."""


class _Through(torch.autograd.Function):
    """A function forward, nothing backward: the gradient goes on as it is."""

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Back(torch.autograd.Function):
    """Nothing forward, a function of the gradient backward."""

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.function = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.function(gradient), None


class _Learned(torch.autograd.Function):
    """A quantizer whose range has gradients: its backward pass is a node, too."""

    @staticmethod
    def forward(function: Callable[..., Tensor], x: Tensor, low: Tensor, span: Tensor, bits: Tensor) -> Tensor:
        return function(x, low, span, bits)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, low, span, bits = ctx.saved_tensors
        made = onnx_ops.symbolic_multi_out(
            f"{DOMAIN}::{LEARNED}", (gradient, x, low, span, bits), dtypes=(x.dtype, low.dtype, span.dtype),
            shapes=(x.shape, low.shape, span.shape), version=1,
        )  # fmt: skip
        return None, *made, None


class Lowering(TorchFunctionMode):
    """The mode. It collects which quantizers were met."""

    def __init__(self, seeds: Tensor, names: Mapping[int, str], *, gradients: bool, plain: bool) -> None:
        super().__init__()
        self.seeds = seeds
        self.names = names
        """Identity of a quantizer's record -> the quantizer's name."""
        self.gradients = gradients
        self.plain = plain
        """Nodes say which quantizer they are: what it does is decided elsewhere."""
        self.placed: list[Placed] = []
        self.draws = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Trace one call."""
        if func in QUANTIZERS:
            return self._quantizer(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _quantizer(
        self, func: Any, x: Tensor, bits: Tensor, *args: Any, record: Tensor | None = None, **options: Any
    ) -> Tensor:
        name = self.names.get(id(record), "quantizer")
        if x.dtype != torch.float32:
            kind = str(x.dtype).removeprefix("torch.")
            raise ExportError(f"{name} quantizes {kind}: only models in float32 can be exported (model.float())")
        if func is QUANTIZE_GRADIENT:
            quantize = partial(self._operand, name, bits, options, gradient=True)
            backward: Tensor = _Back.apply(x, quantize) if self.gradients and x.requires_grad else x  # type: ignore[no-untyped-call]
            return backward
        if self.plain:
            return call(Kind().name, (x, bits), x, **{QUANTIZER: name})
        if func is FAKE_QUANTIZE_LEARNED:
            return self._learned(name, x, bits, *args, **options)
        if func is FAKE_QUANTIZE:
            if options.get("zero_point") is not None:
                raise ExportError(f"{name} quantizes over a range that it is given: that has no form in ONNX")
            forward = partial(self._operand, name, bits, options)
        else:
            assert func is FAKE_QUANTIZE_OBSERVED
            forward = partial(self._observed, name, bits, *args, **options)
        quantized: Tensor = _Through.apply(x, forward) if x.requires_grad else forward(x)  # type: ignore[no-untyped-call]
        return quantized

    def _operand(
        self, name: str, bits: Tensor, options: dict[str, Any], x: Tensor, *, gradient: bool = False
    ) -> Tensor:
        kind = kind_of(options, Rounding.STOCHASTIC if gradient else Rounding.NEAREST)
        values, axes, back = _in_groups(x, options)
        self.placed.append(Placed(kind, gradient, name))
        made: Tensor = back(call(kind.name, (values, bits, axes, *self._seed_of(kind)), values))
        return made

    def _observed(
        self, name: str, bits: Tensor, zero_point: Tensor, range: Tensor, weight: Tensor, training: bool, x: Tensor, *,
        momentum: float = 0.9, corrected: bool = True, when_off: bool = False, percentile: float = 100.0,
        trains: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        source = "Observed" if training else "Recalled"
        kind = kind_of(options, Rounding.NEAREST)._replace(
            source=source, percentile=percentile, corrected=corrected, when_off=when_off
        )
        self.placed.append(Placed(kind, False, name))
        attributes: dict[str, Any] = {"percentile": (1 - percentile / 100) / 2} if percentile < 100 else {}
        state = (zero_point, range, weight)
        inputs = (x, bits, *state, *self._seed_of(kind))
        if not training:
            return call(kind.name, inputs, x, **attributes)
        attributes |= {"kept": momentum, "taken": 1 - momentum}
        y, *new = onnx_ops.symbolic_multi_out(
            f"{DOMAIN}::{kind.name}", inputs, attrs=attributes, dtypes=(x.dtype, *(part.dtype for part in state)),
            shapes=(x.shape, *(part.shape for part in state)), version=1,
        )  # fmt: skip
        for part, value in zip(state, new, strict=True):
            part.copy_(value)
        return y

    def _learned(
        self, name: str, x: Tensor, bits: Tensor, zero_point: Tensor, range: Tensor, weight: Tensor, training: bool,
        trains: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Quantize over parameters. They have their first values by now: see `check_learned`."""
        kind = kind_of(options, Rounding.NEAREST)._replace(source="Learned", floored=False)
        self.placed.append(Placed(kind, False, name))
        seed = self._seed_of(kind)

        def quantized(x: Tensor, low: Tensor, span: Tensor, bits: Tensor) -> Tensor:
            return call(kind.name, (x, low, span, bits, *seed), x)

        learned: Tensor = _Learned.apply(quantized, x, zero_point, range, bits)  # type: ignore[no-untyped-call]
        return learned

    def _seed_of(self, kind: Kind) -> tuple[Tensor, ...]:
        """Return the seeds of the step, and which of them is the next draw's, for a kind that draws."""
        if kind.rounding is not Rounding.STOCHASTIC:
            return ()
        return self.seed()

    def seed(self) -> tuple[Tensor, Tensor]:
        """Return the seeds of the step, and which of them is the next draw's."""
        self.draws += 1
        return self.seeds, constant([self.draws - 1])

    def uniform(self, like: Tensor) -> Tensor:
        """Return noise in [0, 1) of the shape of a tensor, from the seeds of the step."""
        return call(UNIFORM, (like, *self.seed()), like)


def call(name: str, inputs: tuple[Any, ...], like: Tensor, **attributes: Any) -> Tensor:
    """Trace a node of our own domain."""
    made: Tensor = onnx_ops.symbolic(
        f"{DOMAIN}::{name}", inputs, attrs=attributes, dtype=like.dtype, shape=like.shape, version=1
    )
    return made


def constant(value: int | Sequence[int]) -> Tensor:
    """Trace a constant: a whole number, or a vector of some."""
    if isinstance(value, int):
        attributes: dict[str, Any] = {"value_int": value}
    elif value:
        attributes = {"value_ints": list(value)}
    else:
        return torch.zeros(0, dtype=torch.int64)
    shape = () if isinstance(value, int) else (len(value),)
    made: Tensor = onnx_ops.symbolic("::Constant", (), attrs=attributes, dtype=torch.int64, shape=shape, version=13)
    return made


def kind_of(options: dict[str, Any], rounding: Rounding) -> Kind:
    """Return the kind that a quantizer's options name."""
    scheme = Scheme(options.get("scheme", "affine"))
    return Kind(
        scheme,
        Rounding(options.get("rounding", rounding.value)),
        exponent=options.get("exponent", 0),
        specials=Specials(options.get("specials", "none")),
        blocks=BLOCKS if options.get("block") else "",
        floored=options.get("floored", True) and scheme is Scheme.AFFINE,
    )


def _in_groups(x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Any]:
    """Return a tensor as its groups lie, the dims that a range spans there, and what brings the result back."""
    over, block = options.get("over"), options.get("block")
    dims = reduced_dims(x.ndim, tuple(options.get("keep", ())), None if over is None else tuple(over))
    if not block:
        return x, constant(dims), lambda y: y
    kept = tuple(dim for dim in range(x.ndim) if dim not in dims)
    order = (*kept, *dims)
    straight = order == tuple(range(x.ndim))
    moved = x if straight else x.permute(order)
    rows = moved.reshape(*moved.shape[: len(kept)], -1)
    length = rows.shape[-1]
    missing = -length % block
    # As in `numerics`: the last block is filled up with its last element.
    rows = torch.cat((rows, rows[..., -1:].expand(*rows.shape[:-1], missing)), -1) if missing else rows
    inverse = sorted(range(x.ndim), key=order.__getitem__)
    values = rows.unflatten(-1, (-1, block))

    def back(y: Tensor) -> Tensor:
        result = y.flatten(-2)[..., :length].reshape(moved.shape)
        return result if straight else result.permute(inverse)

    return values, constant((values.ndim - 1,)), back
