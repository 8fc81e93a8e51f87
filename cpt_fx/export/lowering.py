"""Run a rewritten model so that an exporter sees its quantizers, and what it draws at random, as nodes.

The model's code is not touched. While it is traced, a mode stands between it and torch: where it calls a quantizer, a
node of our own is traced, and running ranges become values that are handed back. Backward, a quantizer passes the
gradient on, and the quantizer of a gradient is a node in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table
from torch.onnx import ops as onnx_ops
from torch.overrides import TorchFunctionMode

from cpt_fx.errors import ExportError
from cpt_fx.export.bodies import constant
from cpt_fx.export.functions import LEARNED, UNIFORM, Kind, kind_of
from cpt_fx.export.local_functions import DOMAIN
from cpt_fx.numerics import in_blocks, reduced_dims
from cpt_fx.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_LEARNED, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT, QUANTIZERS
from cpt_fx.straight_through import grid_of

QUANTIZER = "quantizer"
"""Attribute of a traced node: the quantizer's name."""


class _Apart(torch.autograd.Function):
    """A function forward, another one backward, of the gradient and of what was passed forward."""

    @staticmethod
    def forward(function: Callable[..., Tensor], backward: Callable[..., Sequence[Any]], *given: Tensor) -> Tensor:
        return function(*given)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.function, *given = inputs
        ctx.save_for_backward(*given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.function(gradient, *ctx.saved_tensors)


def _learned_gradients(gradient: Tensor, x: Tensor, low: Tensor, span: Tensor, bits: Tensor) -> Sequence[Any]:
    flat = x.flatten()
    made, *ends = call(LEARNED, (gradient.flatten(), flat, low, span, bits), flat, low, span)
    return made.reshape(x.shape), *ends, None


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
        self.kinds: dict[str, Kind] = {}
        """Those that were met, by the names of their functions."""
        self.draws = 0

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Trace one call."""
        if func in QUANTIZERS:
            return self._quantizer(func, *args, **(kwargs or {}))
        if func in (F.affine_grid, torch.affine_grid_generator) and self.gradients:
            return _affine_grid(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _quantizer(
        self, func: Any, x: Tensor, bits: Tensor, *args: Any, record: Tensor | None = None, **options: Any
    ) -> Tensor:
        name = self.names.get(id(record), "quantizer")
        if x.dtype != torch.float32:
            kind = str(x.dtype).removeprefix("torch.")
            raise ExportError(f"{name} quantizes {kind}: only models in float32 can be exported (model.float())")
        if func is QUANTIZE_GRADIENT:
            if not (self.gradients and x.requires_grad):
                return x
            return _apart(torch.clone, lambda gradient, _: (self._operand(name, bits, options, gradient, True),), x)
        if self.plain:
            return self._call(Kind(), name, (x, bits), x)[0]
        if func is FAKE_QUANTIZE_LEARNED:
            return self._learned(name, x, bits, *args, **options)
        if func is FAKE_QUANTIZE:
            if options.get("zero_point") is not None:
                raise ExportError(f"{name} quantizes over a range that it is given: that has no form in ONNX")
            forward = partial(self._operand, name, bits, options)
        else:
            assert func is FAKE_QUANTIZE_OBSERVED
            forward = partial(self._observed, name, bits, *args, **options)
        return _apart(forward, lambda gradient, _: (gradient,), x) if x.requires_grad else forward(x)

    def _operand(self, name: str, bits: Tensor, options: dict[str, Any], x: Tensor, gradient: bool = False) -> Tensor:
        grid = grid_of(options, "stochastic" if gradient else "nearest")
        kind = kind_of(grid)
        if grid.block:
            blocks, back = in_blocks(x, grid)
            return back(self._call(kind, name, (blocks, bits, constant([blocks.ndim - 1])), blocks)[0])
        axes = constant(reduced_dims(x.ndim, grid.keep, grid.over))
        return self._call(kind, name, (x, bits, axes), x)[0]

    def _observed(
        self, name: str, bits: Tensor, zero_point: Tensor, range: Tensor, weight: Tensor, training: bool, x: Tensor, *,
        trains: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        own = {key: options.pop(key) for key in ("momentum", "corrected", "when_off", "percentile") if key in options}
        kind = kind_of(grid_of(options, "nearest"), "Observed" if training else "Recalled", **own)
        state = (zero_point, range, weight)
        learned = state if training else ()
        y, *new = self._call(kind, name, (x, bits, *state), x, *learned)
        for part, value in zip(learned, new, strict=True):
            part.copy_(value)
        return y

    def _learned(
        self, name: str, x: Tensor, bits: Tensor, zero_point: Tensor, range: Tensor, weight: Tensor, training: bool,
        trains: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Quantize over parameters. They have their first values by now: see `check_learned`."""
        kind = kind_of(grid_of(options, "nearest"), "Learned")

        def quantized(x: Tensor, low: Tensor, span: Tensor, bits: Tensor) -> Tensor:
            return self._call(kind, name, (x, low, span, bits), x)[0]

        return _apart(quantized, _learned_gradients, x, zero_point, range, bits)

    def _call(self, kind: Kind, name: str, inputs: tuple[Tensor, ...], *like: Tensor) -> Sequence[Tensor]:
        """Trace a quantizer, with its seed where it draws."""
        self.kinds[kind.name] = kind
        return call(kind.name, (*inputs, *(self.seed() if kind.draws else ())), *like, **{QUANTIZER: name})

    def seed(self) -> tuple[Tensor, Tensor]:
        """Return the seeds of the step, and which of them is the next draw's."""
        self.draws += 1
        return self.seeds, constant([self.draws - 1])

    def uniform(self, like: Tensor) -> Tensor:
        """Return noise in [0, 1) of the shape of a tensor, from the seeds of the step."""
        return call(UNIFORM, (like, *self.seed()), like)[0]


def _affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool | None = None) -> Tensor:
    """Write out an operator before autograd, since its backward pass takes sizes that do not vary only."""
    made: Tensor = decomposition_table[torch.ops.aten.affine_grid_generator.default](theta, size, bool(align_corners))
    return made


def _apart(*given: Any) -> Tensor:
    made: Tensor = _Apart.apply(*given)  # type: ignore[no-untyped-call]
    return made


def call(name: str, inputs: tuple[Any, ...], *like: Tensor, **attributes: Any) -> Sequence[Tensor]:
    """Trace a node of our own domain, whose outputs are like these tensors."""
    return onnx_ops.symbolic_multi_out(
        f"{DOMAIN}::{name}", inputs, attrs=attributes, dtypes=[x.dtype for x in like], shapes=[x.shape for x in like],
        version=1,
    )  # fmt: skip
