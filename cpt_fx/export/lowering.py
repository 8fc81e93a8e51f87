"""Trace a transformed model so that its quantizers and random draws become nodes of our own domain.

The model's code is not changed. A torch function mode intercepts each call of a quantizer and traces a node
instead; running ranges become values that are returned. In the backward pass a quantizer passes the gradient on, and
a gradient quantizer becomes a node of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.onnx import ops as onnx_ops
from torch.overrides import TorchFunctionMode

from cpt_fx.errors import ExportError
from cpt_fx.export.functions import DOMAIN, LEARNED, UNIFORM, QuantizerKind, constant, kind_of
from cpt_fx.export.torch_private import decomposition_table
from cpt_fx.quantizers import ops
from cpt_fx.quantizers.numerics import in_blocks, reduced_dims
from cpt_fx.quantizers.straight_through import grid_of

QUANTIZER = "quantizer"
"""Attribute of a traced node: the name of the quantizer."""


class Calls(TorchFunctionMode):
    """Mode that passes each call of a torch function to `run(func, *args, **kwargs)`."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass on one call."""
        return self.run(func, *args, **(kwargs or {}))


class _Apart(torch.autograd.Function):
    """An autograd function made from a forward and a backward function; the latter also receives the forward inputs."""

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


class Lowering(Calls):
    """The torch function mode. It collects the kinds of quantizers that are called."""

    def __init__(self, seeds: Tensor, names: Mapping[int, str], *, gradients: bool, plain: bool) -> None:
        super().__init__(self._traced)
        self.seeds = seeds
        self.names = names
        """`id` of a quantizer's counters -> the quantizer's name."""
        self.gradients = gradients
        self.plain = plain
        """Trace nodes that hold only a quantizer's name; the caller replaces them."""
        self.kinds: dict[str, QuantizerKind] = {}
        """Kinds that were called, by function name."""
        self.draws = 0

    def _traced(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        if func in ops.QUANTIZERS:
            return self._quantizer(func, *args, **kwargs)
        if func in (F.affine_grid, torch.affine_grid_generator) and self.gradients:
            return _affine_grid(*args, **kwargs)
        return func(*args, **kwargs)

    def _quantizer(
        self, func: Any, x: Tensor, bits: Tensor, *args: Any, counters: Tensor | None = None, **options: Any
    ) -> Tensor:
        name = self.names.get(id(counters), "quantizer")
        if x.dtype != torch.float32:
            kind = str(x.dtype).removeprefix("torch.")
            raise ExportError(f"{name} quantizes {kind}: only models in float32 can be exported (model.float())")
        if func is ops.QUANTIZE_GRADIENT:
            if not (self.gradients and x.requires_grad):
                return x
            return _apart(torch.clone, lambda gradient, _: (self._operand(name, bits, options, gradient, True),), x)
        if self.plain:
            return self._call(QuantizerKind(), name, (x, bits), x)[0]
        if func is ops.FAKE_QUANTIZE_LEARNED:
            return self._learned(name, x, bits, *args, **options)
        if func is ops.FAKE_QUANTIZE:
            if options.get("zero_point") is not None:
                raise ExportError(f"{name} quantizes over a range that it is given: that has no form in ONNX")
            forward = partial(self._operand, name, bits, options)
        else:
            assert func is ops.FAKE_QUANTIZE_OBSERVED
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
        """Quantize over a learned range, which has a value by now: see `program._check_learned`."""
        kind = kind_of(grid_of(options, "nearest"), "Learned")

        def quantized(x: Tensor, low: Tensor, span: Tensor, bits: Tensor) -> Tensor:
            return self._call(kind, name, (x, low, span, bits), x)[0]

        return _apart(quantized, _learned_gradients, x, zero_point, range, bits)

    def _call(self, kind: QuantizerKind, name: str, inputs: tuple[Tensor, ...], *like: Tensor) -> Sequence[Tensor]:
        """Trace a quantizer, with a seed if it draws random numbers."""
        self.kinds[kind.name] = kind
        return call(kind.name, (*inputs, *(self.seed() if kind.draws else ())), *like, **{QUANTIZER: name})

    def seed(self) -> tuple[Tensor, Tensor]:
        """Return the seeds of the step, and the index of the next one."""
        self.draws += 1
        return self.seeds, constant([self.draws - 1])

    def uniform(self, like: Tensor) -> Tensor:
        """Return noise in [0, 1) in the shape of a tensor, from the seeds of the step."""
        return call(UNIFORM, (like, *self.seed()), like)[0]


def _affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool | None = None) -> Tensor:
    """Decompose an operator above autograd, since its backward operator takes static sizes only."""
    made: Tensor = decomposition_table[torch.ops.aten.affine_grid_generator.default](theta, size, bool(align_corners))
    return made


def _apart(*given: Any) -> Tensor:
    made: Tensor = _Apart.apply(*given)  # type: ignore[no-untyped-call]
    return made


def call(name: str, inputs: tuple[Any, ...], *like: Tensor, **attributes: Any) -> Sequence[Tensor]:
    """Trace a node of our domain, with outputs of the dtypes and shapes of `like`."""
    return onnx_ops.symbolic_multi_out(
        f"{DOMAIN}::{name}", inputs, attrs=attributes, dtypes=[x.dtype for x in like], shapes=[x.shape for x in like],
        version=1,
    )  # fmt: skip
