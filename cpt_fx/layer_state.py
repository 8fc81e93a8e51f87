"""What a layer has learned besides its parameters: running ranges, as buffers of the layer under names of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

PREFIX = "cpt_fx_"
"""What the names of all our tensors begin with: one filter strips them from a state_dict."""
MIN, SIZE, WEIGHT = "min", "size", "weight"
"""A running range: averages of minimum and size, and the weight they have gathered so far."""
PARTS = (MIN, SIZE, WEIGHT)


def add_range(root: nn.Module, layer: str, operand: str, device: torch.device, *, learned: bool = False) -> str:
    """Make sure a running range exists for an operand of a layer; return the path from the root to its names.

    It belongs to the module that the layer is, or, for a product without a layer, to the one whose code computes it.
    """
    path, holder, product = holder_of(root, layer)
    name = f"{PREFIX}{product}_{operand}_range" if product else f"{PREFIX}{operand}_range"
    home = home_of(holder)
    for part in PARTS:
        key = f"{name}_{part}"
        value = holder._buffers.get(key)
        if learned and part != WEIGHT and key not in holder._parameters:
            # A buffer where a checkpoint brought it before the graph said what it is.
            holder._buffers.pop(key, None)
            holder.register_parameter(key, nn.Parameter(zeros((), home, device) if value is None else value))
        elif value is None and key not in holder._parameters:
            holder.register_buffer(key, zeros((), home, device))
    return f"{path}.{name}" if path else name


def holder_of(root: nn.Module, layer: str) -> tuple[str, nn.Module, str]:
    """Return the innermost module on the way to a layer, with its path, and the rest of the layer's name."""
    holder, names = root, layer.split(".") if layer else []
    for place, name in enumerate(names):
        inner = holder._modules.get(name)
        if inner is None:
            return ".".join(names[:place]), holder, "_".join(names[place:])
        holder = inner
    return layer, holder, ""


def home_of(module: nn.Module) -> Tensor | None:
    """Return the tensor that what belongs to a module lies with: one of its own, or of what is inside it."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            return tensor
    return next(chain(module.parameters(), module.buffers()), None)


def place_for_widths(root: nn.Module, otherwise: torch.device) -> torch.device:
    """Return the device of a model. In one over several it is the CPU, if that is one: from there nothing waits."""
    devices = list(dict.fromkeys(tensor.device for tensor in chain(root.parameters(), root.buffers())))
    host = [device for device in devices if device.type == "cpu"]
    return (host or devices or [otherwise])[0]


def alike(home: Tensor | None) -> AbstractContextManager[Any]:
    """Let tensors that are made inside be fake ones where those of a model are: real ones do not go with them."""
    return home.fake_mode if isinstance(home, FakeTensor) else nullcontext()


def own(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of ours that a module holds."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if name.startswith(PREFIX) and tensor is not None}


def ranges(root: nn.Module) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Walk over all running ranges below a module: name, minimum, size, weight."""
    for path, module in root.named_modules():
        tensors = own(module)
        for name in [name.removesuffix(f"_{WEIGHT}") for name in tensors if name.endswith(f"_range_{WEIGHT}")]:
            low, size, weight = (tensors[f"{name}_{part}"] for part in PARTS)
            yield f"{path}.{name}" if path else name, low, size, weight


def is_range(name: str) -> bool:
    """Whether a tensor of a module is part of a running range."""
    return name.startswith(PREFIX) and name.rpartition("_")[2] in PARTS and "_range_" in name


def forget(module: nn.Module) -> None:
    """Start anew with a module's own ranges."""
    for tensor in own(module).values():
        tensor.detach().zero_()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of ours on a device; one without memory has no value, and starts anew."""
    if tensor.is_meta and device.type != "meta":
        return torch.zeros_like(tensor, device=device)
    return tensor.to(device)


def has_value(tensor: Tensor) -> bool:
    """Whether a tensor has a value to look at, even if that means to wait for a device."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def zeros(
    shape: tuple[int, ...], home: Tensor | None, otherwise: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return zeros where another tensor lies."""
    with alike(home):
        return torch.zeros(shape, dtype=dtype, device=otherwise if home is None else home.device)
