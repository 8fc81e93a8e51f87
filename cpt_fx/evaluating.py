"""A model at other widths for a while: `with cpt_fx.at_bits(model, 4): ...`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from cpt_fx.formats import FULL_PRECISION
from cpt_fx.layer_state import is_range
from cpt_fx.runtime import AS_SCHEDULED
from cpt_fx.schedules.bits import Bits, as_bits
from cpt_fx.standalone import transformed_in


@contextmanager
def at_bits(model: nn.Module, bits: int | Bits) -> Iterator[None]:
    """Run a transformed model at other widths inside a `with` block, in training and in evaluation.

    Nothing is captured or compiled anew, running ranges do not learn, and the schedule goes on as if nothing were.

    Args:
        model: what `transform` returned, or a model that contains transformed parts, which it then is for.
        bits: a width for weights and activations, gradients staying at the scheduled one; or a `Bits` for all three.
            Fixed widths and schedules of single layers stay, offsets apply. 32 switches every quantizer off.
    """
    widths = as_bits("bits", bits)
    forced: Bits | int = widths
    if not isinstance(bits, tuple):
        forced = FULL_PRECISION if bits == FULL_PRECISION else widths._replace(gradient=AS_SCHEDULED)
    with ExitStack() as stack:
        for _, result in transformed_in(model):
            stack.enter_context(result.state.at(forced))
            stack.enter_context(_unlearning(result.root))
        yield


@contextmanager
def _unlearning(root: nn.Module) -> Iterator[None]:
    """Put copies in the place of running ranges: what these learn is forgotten."""
    held = [
        (module, name, buffer)
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if is_range(name) and buffer is not None
    ]
    copies = {id(buffer): buffer.clone() for _, _, buffer in held}
    for module, name, buffer in held:
        module._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for module, name, buffer in held:
            # Unless it was loaded or moved in the meantime.
            if module._buffers.get(name) is copies[id(buffer)]:
                module._buffers[name] = buffer
