"""Bit-widths as 0-dim tensors whose value is known on the host, so that no device is read for it."""

from __future__ import annotations

import torch
from torch import Tensor

from cpt_fx.common.functorch import is_batched
from cpt_fx.common.torch_private import FakeTensor, dispatch_depth
from cpt_fx.quantizers.torch_private import dispatch_mode_at

_VALUE = "_cpt_fx_width"
LOOKS_ON = "_cpt_fx_looks_on"
"""Attribute of a dispatch mode that only observes: code runs under it as it does without."""
_KEPT: dict[tuple[int, torch.device, str], Tensor] = {}


def is_watched() -> bool:
    """Return whether a mode intercepts operators (fake tensors, a tracer); one that observes does not (`LOOKS_ON`)."""
    depth = dispatch_depth()
    return depth > 0 and not all(hasattr(dispatch_mode_at(place), LOOKS_ON) for place in range(depth))


def width_tensor(width: int, device: torch.device, source: str = "") -> Tensor:
    """Return the tensor of a bit-width on a device; it is shared and never written.

    Each bit-width source has its own, even at equal bit-widths: compiled graphs guard which inputs are the same tensor.
    """
    if is_watched():
        # Tensors made under a mode are the mode's own: a fake one must not be cached.
        return torch.tensor(width, dtype=torch.int64, device=device)
    key = (width, device, source)
    if key not in _KEPT:
        with torch.inference_mode(False):
            _KEPT[key] = torch.tensor(width, dtype=torch.int64).to(device)
        setattr(_KEPT[key], _VALUE, width)
    return _KEPT[key]


def host_value(tensor: Tensor) -> int | None:
    """Return the value of a 0-dim tensor if that is free; None while tracing, or on another device."""
    if torch.compiler.is_compiling() or is_watched():
        return None
    width: int | None = getattr(tensor, _VALUE, None)
    if width is not None:
        return width
    return int(tensor.item()) if is_free(tensor) else None


def is_free(tensor: Tensor) -> bool:
    """Return whether reading a value needs no synchronization with a device."""
    return tensor.is_cpu and not is_batched(tensor) and not isinstance(tensor, FakeTensor)


def on_device(bits: Tensor, device: torch.device) -> Tensor:
    """Return a bit-width on the device of the tensor that is quantized."""
    if bits.device == device:
        return bits
    width = host_value(bits)
    return bits.to(device) if width is None else width_tensor(width, device)
