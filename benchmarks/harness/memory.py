"""How much memory a step needs, and which products it runs: both read from one profiled step.

Peak memory is counted, not sampled: every allocation and release of torch's CPU allocator, to the byte. The profiler
reports these events; tensors that existed before it started are added from a walk over Python's objects. Eager,
compiled and native code all use this allocator, so contenders are comparable. Buffers that libraries allocate for
themselves are not counted.

The peak resident size of a process was tried too. With every large block mapped by itself (MALLOC_MMAP_THRESHOLD_) it
agreed with the count except for 12 to 20 MiB of libraries. With glibc's usual settings it was 1.2 to 1.9 times as
large, and varied by 3 % from run to run: it then measures how freed blocks happen to be reused.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch._subclasses import FakeTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from cpt_fx.capture.dry_run import tensors_in

INTEGER_PRODUCTS = ("aten::_int_mm",)
FLOATING_PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot",
    "aten::mkldnn_convolution", "aten::_slow_conv2d_forward", "aten::slow_conv3d_forward", "aten::thnn_conv2d",
    "aten::_conv_depthwise2d", "aten::convolution_backward", "mkldnn::_linear_pointwise",
    "mkldnn::_convolution_pointwise", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
INTEGER_NAMESPACES = ("quantized::", "onednn::q")


@dataclass(frozen=True)
class Traced:
    """What one step did."""

    peak_bytes: int
    """The largest amount of its own allocations that it held at once."""
    integer: int
    floating: int


def traced(step: Callable[[], object]) -> Traced:
    """Run a step under the profiler."""
    # The profiler reports its start and stop on standard error, unless this is set before its first start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    products = Counter(kind for kind in map(_kind, _outermost(roots)) if kind)
    return Traced(_peak(roots), products["integer"], products["floating"])


def _peak(roots: Iterable[Any]) -> int:
    """Return the highest level of allocations since the start; earlier allocations are not counted."""
    events = []
    for event in _all(roots):
        if event.typed[0] == _EventType.Allocation and event.typed[1].device.type == "cpu":
            events.append((event.start_time_ns, event.typed[1].alloc_size))
    level = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        level += size
        peak = max(peak, level)
    return peak


def _all(roots: Iterable[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        waiting.extend(event.children)


def _outermost(roots: Iterable[Any]) -> Iterator[Any]:
    """Walk over the events without descending into a product, so that it counts as one."""
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        yield event
        if _kind(event) is None:
            waiting.extend(event.children)


def _kind(event: Any) -> str | None:
    if event.typed[0] != _EventType.TorchOp:
        return None
    if event.name in INTEGER_PRODUCTS or event.name.startswith(INTEGER_NAMESPACES):
        return "integer"
    return "floating" if event.name in FLOATING_PRODUCTS else None


def storages() -> dict[int, int]:
    """Return the bytes of every storage that Python can reach, by address."""
    gc.collect()
    found = {}
    for value in gc.get_objects():
        # By type: asking an object for its class may run code of its own. Wrappers hold other tensors.
        if not issubclass(type(value), Tensor) or _is_wrapper(value):
            continue
        if value.layout is torch.strided and value.device.type == "cpu":
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def _is_wrapper(value: Tensor) -> bool:
    own = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return isinstance(value, FakeTensor) or own or torch._C._functorch.is_functorch_wrapped_tensor(value)


def kept_for_backward(model: Callable[..., object], inputs: tuple[Any, ...]) -> int | None:
    """Return the bytes that autograd keeps for a batch from forward to backward; None if a batch cannot be halved.

    This is twice the amount that the second half of the batch adds: weights, and their copies, do not grow with it.
    """
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in tensors_in(inputs)}
    if len(sizes) != 1 or (size := sizes.pop()) < 2:
        return None
    half = size // 2
    whole, part = (_kept(model, _first(rows, inputs)) for rows in (2 * half, half))
    return (whole - part) * size // half


def _first(rows: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the first rows of a batch, in memory of their own: a view would keep all of it."""
    piece: tuple[Any, ...] = pytree.tree_map_only(Tensor, lambda tensor: tensor[:rows].clone(), inputs)
    return piece


def _kept(model: Callable[..., object], inputs: tuple[Any, ...]) -> int:
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    # Saved tensors live as long as the result, so no address is used twice.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(*inputs)
    del result
    return sum(seen.values())
