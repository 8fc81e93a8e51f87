"""Ranges that a layer learns: buffers or parameters of the layer, under names with our prefix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from cpt_fx.common.torch_private import FakeTensor

PREFIX = "cpt_fx_"
"""Prefix of the names of all our tensors: one filter strips them from a state_dict."""
MIN, SIZE, WEIGHT = "min", "size", "weight"
"""The parts of a running range: averages of minimum and size, and their accumulated weight."""
PARTS = (MIN, SIZE, WEIGHT)


def add_range(root: nn.Module, layer: str, operand: str, device: torch.device, *, learned: bool = False) -> str:
    """Make sure a running range exists for an operand of a layer; return its path from the root, without the part.

    It belongs to the layer's module or, for a product without one, to the module whose code computes it.
    """
    path, holder, product = holder_of(root, layer)
    name = f"{PREFIX}{product}_{operand}_range" if product else f"{PREFIX}{operand}_range"
    home = home_of(holder)
    for part in PARTS:
        key = f"{name}_{part}"
        value = holder._buffers.get(key)
        if learned and part != WEIGHT and key not in holder._parameters:
            # It is a buffer if a checkpoint was loaded before the graph was known.
            holder._buffers.pop(key, None)
            holder.register_parameter(key, nn.Parameter(zeros((), home, device) if value is None else value))
        elif value is None and key not in holder._parameters:
            holder.register_buffer(key, zeros((), home, device))
    return f"{path}.{name}" if path else name


def holder_of(root: nn.Module, layer: str) -> tuple[str, nn.Module, str]:
    """Return the path of the innermost module on a layer's path, that module, and the rest of the layer's name."""
    holder, names = root, layer.split(".") if layer else []
    for place, name in enumerate(names):
        inner = holder._modules.get(name)
        if inner is None:
            return ".".join(names[:place]), holder, "_".join(names[place:])
        holder = inner
    return layer, holder, ""


def home_of(module: nn.Module) -> Tensor | None:
    """Return a tensor of a module, or of a module inside it, on whose device the module's state belongs, or None."""
    own = chain(module._parameters.values(), module._buffers.values())
    return next((tensor for tensor in chain(own, module.parameters(), module.buffers()) if tensor is not None), None)


def place_for_widths(root: nn.Module, otherwise: torch.device) -> torch.device:
    """Return the device for bit-widths: the CPU if the model has tensors there (reads never wait), else its first."""
    devices = list(dict.fromkeys(tensor.device for tensor in chain(root.parameters(), root.buffers())))
    host = [device for device in devices if device.type == "cpu"]
    return (host or devices or [otherwise])[0]


def alike(home: Tensor | None) -> AbstractContextManager[Any]:
    """Return a context that creates fake tensors if the model's are fake, since real ones do not mix with them."""
    return home.fake_mode if isinstance(home, FakeTensor) else nullcontext()


def own(module: nn.Module) -> dict[str, Tensor]:
    """Return our tensors in a module, by name."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if name.startswith(PREFIX) and tensor is not None}


def ranges(root: nn.Module) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield all running ranges below a module, as (name, minimum, size, weight)."""
    for path, module in root.named_modules():
        tensors = own(module)
        for name in [name.removesuffix(f"_{WEIGHT}") for name in tensors if name.endswith(f"_range_{WEIGHT}")]:
            low, size, weight = (tensors[f"{name}_{part}"] for part in PARTS)
            yield f"{path}.{name}" if path else name, low, size, weight


def is_range(name: str) -> bool:
    """Return whether the tensor of this name, or at this path, is part of a running range."""
    name = name.rpartition(".")[2]
    return name.startswith(PREFIX) and name.rpartition("_")[2] in PARTS and "_range_" in name


def forget(module: nn.Module) -> None:
    """Reset a module's own ranges to zero."""
    for tensor in own(module).values():
        tensor.detach().zero_()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return one of our tensors on a device; a meta tensor has no value and becomes zeros."""
    if tensor.is_meta and device.type != "meta":
        return torch.zeros_like(tensor, device=device)
    return tensor.to(device)


def has_value(tensor: Tensor) -> bool:
    """Return whether a tensor has a value that can be read, even if reading it waits for a device."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def zeros(
    shape: tuple[int, ...], home: Tensor | None, otherwise: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return zeros on the device of `home`, or on `otherwise` if that is None."""
    with alike(home):
        return torch.zeros(shape, dtype=dtype, device=otherwise if home is None else home.device)
