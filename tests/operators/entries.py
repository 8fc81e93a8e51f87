"""Calls to look at: torch's own database of operators, with every variant of an entry, as data."""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

if importlib.util.find_spec("expecttest") is None:
    # Torch derives its own test cases from it, none of which is of interest here.
    _stub = ModuleType("expecttest")
    _stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = _stub

from torch.testing._internal.common_methods_invocations import op_db


@dataclass(frozen=True)
class Call:
    """One function and what it is called with. Tensors in there become inputs and a weight of a module."""

    name: str
    variant: str
    function: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(default_factory=dict, repr=False)
    writes: bool = False
    """Whether the first argument is overwritten: it is given a copy."""
    layer: Callable[[], nn.Module] | None = field(default=None, repr=False)
    """Makes the layer to call in the function's place."""
    out: bool = False
    """Whether the result is written to a tensor given as `out`, which autograd does not do."""

    def __str__(self) -> str:
        """Name entry and variant."""
        return f"{self.name} [{self.variant}]"


def calls(samples: int | None, *, variants: bool) -> Iterator[Iterator[Call]]:
    """Walk over the database: for each entry and variant, its calls with up to so many samples."""
    for info in op_db:
        name = info.formatted_name
        for variant, function in _variants(info) if variants else [("function", info.op)]:
            yield _of_variant(info, name, variant, function, samples)


def _variants(info: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "function", info.op
    for kind in ("method", "inplace", "operator", "inplace_operator"):
        function = getattr(info, f"{kind}_variant")
        if callable(function):
            yield kind, function
    for alias in info.aliases:
        yield f"alias {alias.name}", alias.op
        if alias.method_variant is not None:
            yield f"alias method {alias.name}", alias.method_variant
        if alias.inplace_variant is not None:
            yield f"alias inplace {alias.name}", alias.inplace_variant
    if info.supports_out:
        yield "out", info.op


def _of_variant(info: Any, name: str, variant: str, function: Any, samples: int | None) -> Iterator[Call]:
    for sample in islice(info.sample_inputs("cpu", _dtype(info), requires_grad=False), samples):
        if "inplace" in variant and sample.broadcasts_input:
            continue
        args = (sample.input, *sample.args)
        if variant == "out":
            yield from _with_out(name, function, args, sample.kwargs)
        elif "operator" in variant:
            if len(args) == 2 and not sample.kwargs:
                yield Call(name, variant, function, args, writes="inplace" in variant)
        else:
            yield Call(name, variant, function, args, sample.kwargs, writes="inplace" in variant)


def _with_out(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
    try:
        result = function(*args, **kwargs)
    except RuntimeError:
        return
    if isinstance(result, Tensor):
        yield Call(name, "out", function, args, {**kwargs, "out": torch.empty_like(result)}, out=True)


def _dtype(info: Any) -> torch.dtype:
    """Single precision, or what the entry has instead."""
    for dtype in (torch.float32, torch.complex64, torch.bfloat16):
        if info.supports_dtype(dtype, "cpu"):
            return dtype
    return next(iter(info.supported_dtypes("cpu")), torch.float32)
