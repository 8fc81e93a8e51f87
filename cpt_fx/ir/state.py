"""Run-time state of a transformed model: its bit-widths as tensors, and the counters of its quantizers."""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cpt_fx.formats import FULL_PRECISION
from cpt_fx.integer.counts import COUNTS
from cpt_fx.ir.layer_state import alike, has_value, holder_of, home_of, moved, zeros
from cpt_fx.ir.meta import STATE, WidthSource
from cpt_fx.quantizers.counters import COUNTER_LENGTH, SKIPPED, SPARSE
from cpt_fx.quantizers.recompute import widths_of_pass
from cpt_fx.quantizers.widths import host_value, width_tensor
from cpt_fx.schedules import Bits
from cpt_fx.schedules.base import Schedule
from cpt_fx.schedules.memory import remembered

AS_SCHEDULED = -1
"""Value of the gradient width in forced `Bits` that means the scheduled one."""
LOGGER = logging.getLogger("cpt_fx")


class _State(nn.Module):
    """A module that holds buffers.

    Modules inside it are plain attributes, too: every quantizer reads its state by a dotted path, and the lookup by
    `nn.Module.__getattr__` takes ten times as long.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_modules", ()):
            self.__dict__[name] = value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _State:
        super()._apply(lambda tensor: moved(tensor, fn(tensor).device), recurse)  # type: ignore[no-untyped-call]
        return self


class Widths:
    """The bit-widths of one mode: a 0-dim tensor for each source, replaced on change and never written.

    So the widths that a forward pass has read hold for its backward pass, whatever the schedule does in between.
    """

    def __init__(self, values: dict[str, int], device: torch.device) -> None:
        self.values = values
        self.__dict__.update({name: width_tensor(width, device, name) for name, width in values.items()})


class Precision(_State):
    """The bit-widths for training and evaluation, and the counters; not part of the model's own module tree."""

    is_precision_controller = True
    root: nn.Module
    """The root of the result, whose training mode selects the widths."""
    in_training: Widths
    in_evaluation: Widths
    handed: Widths | None = None
    """The widths that compiled code reads while it runs."""

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__["root"] = root if root is not None else self
        self.counters = _State()
        self.products = _State()
        self.constants = _State()
        self.layers: dict[str, str] = {}
        """The layer of each counter tensor, which lies on the layer's device."""
        self.width_sources: dict[str, WidthSource] = {}
        self.schedule: Schedule | None = None
        self.forced: Bits | int | None = None
        """Replaces the schedule: the widths of `at_bits`, or one width for all sources."""
        self.raises = False
        """Whether a batch that is not finite is an error (`Recipe.not_finite`)."""
        self.skipped: dict[str, int] = {}
        """The number of such batches in the counters of each quantizer at the last check."""
        self.pinned: frozenset[str] = frozenset()
        self.device = torch.device("cpu")
        self.update()

    @property
    def bits(self) -> Widths:
        """The current widths, selected when the forward pass reads them."""
        if _COPIED in self.__dict__:
            self.ready()
        widths = self.in_training if self.root.training else self.in_evaluation
        if torch.compiler.is_compiling():
            return widths if self.handed is None else self.handed
        return widths_of_pass(self, widths)

    def hand(self) -> None:
        """Set the state that compiled code reads in one pass: its widths, and counters its backward pass may keep."""
        self.__dict__["handed"] = self.bits
        for holder in (self.counters, self.products):
            for name, tensor in holder._buffers.items():
                assert tensor is not None
                holder._buffers[name] = tensor.data

    def ready(self) -> None:
        """Compute the widths of a copy, whose model is complete by now."""
        if self.__dict__.pop(_COPIED, False):
            self.update()

    def now(self) -> dict[str, int]:
        """Return the current widths as numbers."""
        return dict(self.bits.values)

    def add_width_source(self, source: WidthSource) -> str:
        """Make sure a bit-width source has a tensor; return its path from the model."""
        if source.name not in self.width_sources:
            self.width_sources[source.name] = source
            self.update()
        return f"{STATE}.bits.{source.name}"

    def add_counters(self, name: str, layer: str = "") -> str:
        """Make sure a quantizer of a layer has counters; return their path from the model."""
        return self._add("counters", name, layer, (COUNTER_LENGTH,))

    def add_counts(self, name: str, layer: str = "") -> str:
        """Make sure a product that may run on integers has counts; return their path from the model."""
        return self._add("products", name, layer, COUNTS)

    def _add(self, kind: str, name: str, layer: str, shape: tuple[int, ...]) -> str:
        holder: nn.Module = getattr(self, kind)
        if name not in holder._buffers:
            holder.register_buffer(name, zeros(shape, self._home(layer), self.device, torch.int64), persistent=False)
            self.layers[f"{kind}.{name}"] = layer
        return f"{STATE}.{kind}.{name}"

    def _home(self, layer: str) -> Tensor | None:
        return home_of(holder_of(self.root, layer)[1])

    def pin(self) -> None:
        """Keep all current counters: a captured graph writes them, whatever later graphs merge."""
        self.pinned = frozenset(self.counters._buffers)

    def drop_counters(self, name: str) -> None:
        """Remove the counters of a quantizer that was removed, unless they are pinned."""
        if name not in self.pinned:
            delattr(self.counters, name)
            del self.layers[f"counters.{name}"]

    def attach(self, schedule: Schedule) -> None:
        """Follow a schedule from now on (called by `schedule.bind`)."""
        self.schedule = schedule

    def mark(self) -> Tensor | None:
        """Return what a checkpoint keeps: the position, and a hash of the schedule; None without a schedule."""
        schedule = self.schedule
        return None if schedule is None else torch.tensor([schedule.position, _digest(schedule)])

    def resume(self, mark: Tensor, name: str) -> None:
        """Continue at the step of a checkpoint if its schedule equals ours and ours has not begun; else warn."""
        schedule, (position, digest) = self.schedule, mark.tolist()
        if schedule is None or schedule.position == position:
            return
        is_equal = digest == _digest(schedule)
        if not mark.is_floating_point() and schedule.position == 0 and digest and is_equal:
            schedule.position = position
            end = "" if schedule.total_steps is None else f" of {schedule.total_steps}"
            LOGGER.warning("%s continues at step %d%s; `schedule.reset()` starts anew", name, position, end)
            return
        if mark.is_floating_point():
            was, hint = f"averaged or cast, its position too (about {position:.0f})", ""
        else:
            was = f"made at step {position}{'' if is_equal else ' of another schedule'}"
            hint = f": set `schedule.position = {position}` to go on from there"
        keeps = f"the schedule keeps its own position, {schedule.position}{hint}"
        warnings.warn(f"the checkpoint of {name} was {was}; {keeps}", stacklevel=2)

    def move_to(self, device: torch.device) -> None:
        """Move the widths to a device, and the counters to the devices of their layers."""
        for place, holder in self.named_modules():
            for name, tensor in holder._buffers.items():
                assert tensor is not None
                layer = self.layers.get(f"{place}.{name}")
                home = None if layer is None else self._home(layer)
                holder._buffers[name] = moved(tensor, device if home is None else home.device)
        if device != self.device:
            self.device = device
            self.update()

    def update(self) -> None:
        """Compute the widths at the schedule's position, for training and for evaluation."""
        if _COPIED in self.__dict__:
            return
        with alike(home_of(self.root)):
            self.__dict__["in_training"] = self._widths(training=True)
            self.__dict__["in_evaluation"] = self._widths(training=False)

    def look(self, step: int) -> None:
        """Raise, if the recipe asks for it, when any running range met a non-finite batch; one device read for all."""
        counters = {name: one for name, one in self.counters.named_buffers() if self.raises and has_value(one)}
        if not counters:
            return
        places = [one[SKIPPED].to(self.device) for one in counters.values()]
        counts = [count % -SPARSE for count in torch.stack(places).tolist()]
        before, self.skipped = self.skipped, dict(zip(counters, counts, strict=True))
        found = [self.layers[f"counters.{name}"] for name, now in self.skipped.items() if now > before.get(name, 0)]
        if found:
            layers = ", ".join(map(repr, dict.fromkeys(found)))
            raise FloatingPointError(
                f"step {step}: a NaN or an infinity came to {layers}. Running ranges did not learn from it; "
                "not_finite='skip' in the recipe goes on without a word"
            )

    def _widths(self, *, training: bool) -> Widths:
        sources = self.width_sources.items()
        return Widths({name: self.width(source, training=training) for name, source in sources}, self.device)

    def width(self, source: WidthSource, *, training: bool) -> int:
        """Return the width of a source at the schedule's position."""
        forced, schedule = self.forced, self.schedule
        if isinstance(forced, int):
            return forced
        if forced is not None and source.schedule is None:
            if forced.gradient == AS_SCHEDULED:
                forced = forced._replace(gradient=FULL_PRECISION if schedule is None else schedule.current.gradient)
            return width_from(source, forced)
        return FULL_PRECISION if schedule is None else width_of(source, schedule, schedule.position, training)

    @contextmanager
    def at(self, bits: Bits | int) -> Iterator[None]:
        """Use other widths inside a `with` block."""
        before, self.forced = self.forced, bits
        self.update()
        try:
            yield
        finally:
            self.forced = before
            self.update()

    def __deepcopy__(self, memo: dict[int, Any]) -> Precision:
        """Copy the tensors; the copy follows the same schedule, unless that is being copied too."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = {key: value for key, value in self.__dict__.items() if key not in ("schedule", *_DERIVED)}
        new.__dict__.update(copy.deepcopy(state, memo))
        new.schedule = memo.get(id(self.schedule), self.schedule)
        new._rebind()
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the widths, which are computed again."""
        return {key: value for key, value in self.__dict__.items() if key not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle, and bind the schedule in it to this copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._rebind()

    def _rebind(self) -> None:
        # The rest of the model may not be there yet, so the widths are computed when they are read. An `at_bits` block
        # that the original is in does not apply: its end would not reset the copy.
        self.__dict__[_COPIED] = True
        self.forced = None
        if self.schedule is not None:
            self.schedule.bind(self)


def _digest(schedule: Schedule) -> int:
    """Return a hash that equal schedules share; 0 for one that equals no other, or that keeps state."""
    if copy.copy(schedule) != schedule or any(remembered(schedule).values()):
        return 0
    return int.from_bytes(hashlib.sha256(repr(schedule).encode()).digest()[:6], "big")


_COPIED = "copied"
_DERIVED = ("in_training", "in_evaluation", "handed")


def width_of(source: WidthSource, schedule: Schedule, position: int, training: bool) -> int:
    """Return the width of a source at a position of the model's schedule, or of the source's own if it has one."""
    followed = schedule if source.schedule is None else source.schedule
    return width_from(source, followed.bits(position) if training else followed.evaluation_bits(position))


def width_from(source: WidthSource, bits: Bits) -> int:
    """Return the width of a source for the bits that it follows; no offset applies to 0 (off) and full precision."""
    if source.with_forward and bits.activation == 0:
        return 0
    if source.fixed is not None:
        return source.fixed
    width = int(getattr(bits, source.role))
    if source.offset and 0 < width < FULL_PRECISION:
        width = min(max(width + source.offset, 1), FULL_PRECISION)
    return width


class Held(Precision):
    """The state of a standalone graph: it is a submodule of the graph's module, and its widths are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["bits"] = _State()

    @property
    def bits(self) -> nn.Module:  # type: ignore[override]
        """The current widths, written when the schedule advances or the mode changes."""
        held: nn.Module = self._modules["bits"]  # type: ignore[assignment]
        return held

    def now(self) -> dict[str, int]:
        """Return the current widths as numbers."""
        return {
            name: int(width) if has_value(width) else self.width(self.width_sources[name], training=self.training)
            for name, width in self.bits.named_buffers()
        }

    def _home(self, layer: str) -> None:
        """Return None: all state of a standalone graph is on one device."""

    def update(self) -> None:
        """Write the widths at the schedule's position."""
        for name, source in self.width_sources.items():
            width, held = self.width(source, training=self.training), self.bits._buffers.get(name)
            if held is None:
                self.bits.register_buffer(name, torch.tensor(width, dtype=torch.int64, device=self.device))
            elif host_value(held) != width:
                # Unchanged widths are not written: a backward pass may have saved them. On other devices all are
                # written, since comparing would wait for the device.
                held.fill_(width)

    def train(self, mode: bool = True) -> Held:
        """Switch between the widths for training and those for evaluation."""
        super().train(mode)
        self.update()
        return self
