"""What a transformed model runs at: its widths as tensors, and the records of its quantizers."""

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

from cpt_fx.evidence import RECORD_LENGTH, SKIPPED
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.integer.counts import COUNTS
from cpt_fx.layer_state import alike, has_value, holder_of, home_of, moved, zeros
from cpt_fx.meta import STATE, Dial
from cpt_fx.saving import widths_of_pass
from cpt_fx.schedules import Bits
from cpt_fx.schedules.base import Schedule
from cpt_fx.schedules.memory import remembered
from cpt_fx.widths import host_value, width_tensor

AS_SCHEDULED = -1
"""In the place of a gradient's width: that of the schedule."""
LOGGER = logging.getLogger("cpt_fx")


class _State(nn.Module):
    """A holder of buffers.

    Holders inside holders are ordinary attributes too: every quantizer reads its state by a path of several names, and
    what `nn.Module` looks up for itself takes ten times as long.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_modules", ()):
            self.__dict__[name] = value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _State:
        super()._apply(lambda tensor: moved(tensor, fn(tensor).device), recurse)  # type: ignore[no-untyped-call]
        return self


class Widths:
    """The widths of one mode: a 0-dim tensor for each dial. They are replaced when they change, never written.

    So whatever a forward pass has read holds for its backward pass, whatever the schedule does in between.
    """

    def __init__(self, values: dict[str, int], device: torch.device) -> None:
        self.values = values
        self.__dict__.update({name: width_tensor(width, device, name) for name, width in values.items()})


class Precision(_State):
    """Widths as a schedule gives them, for training and for evaluation; records. No part of the model's own tree."""

    is_precision_controller = True
    root: nn.Module
    """The module whose mode decides: the root of the result."""
    in_training: Widths
    in_evaluation: Widths
    handed: Widths | None = None
    """The widths that compiled code reads, while it runs."""

    def __init__(self, root: nn.Module | None = None) -> None:
        super().__init__()
        self.__dict__["root"] = root if root is not None else self
        self.records = _State()
        self.products = _State()
        self.constants = _State()
        self.layers: dict[str, str] = {}
        """Whose a record is: it lies where that layer lies."""
        self.dials: dict[str, Dial] = {}
        self.schedule: Schedule | None = None
        self.forced: Bits | int | None = None
        """What stands in for the schedule: its widths inside `at_bits`, or one width for all dials."""
        self.raises = False
        """Whether a batch that is not finite is an error: the recipe's `not_finite`."""
        self.skipped: dict[str, int] = {}
        """How many such batches each record had counted when it was looked at last."""
        self.pinned: frozenset[str] = frozenset()
        self.device = torch.device("cpu")
        self.update()

    @property
    def bits(self) -> Widths:
        """The widths in force: decided when they are read, in the forward pass."""
        if _COPIED in self.__dict__:
            self.ready()
        widths = self.in_training if self.root.training else self.in_evaluation
        if torch.compiler.is_compiling():
            return widths if self.handed is None else self.handed
        return widths_of_pass(self, widths)

    def hand(self) -> None:
        """Hand compiled code the state of one pass: its widths, and records that its backward pass may hold on to."""
        self.__dict__["handed"] = self.bits
        for holder in (self.records, self.products):
            for name, record in holder._buffers.items():
                assert record is not None
                holder._buffers[name] = record.data

    def ready(self) -> None:
        """Look up the widths of a copy, whose model is complete by now."""
        if self.__dict__.pop(_COPIED, False):
            self.update()

    def now(self) -> dict[str, int]:
        """Return the widths in force as numbers."""
        return dict(self.bits.values)

    def add_dial(self, dial: Dial) -> str:
        """Make sure a width exists for a dial; return its path from the model."""
        if dial.name not in self.dials:
            self.dials[dial.name] = dial
            self.update()
        return f"{STATE}.bits.{dial.name}"

    def add_record(self, name: str, layer: str = "") -> str:
        """Make sure a record exists for a quantize node of a layer; return its path from the model."""
        return self._add("records", name, layer, (RECORD_LENGTH,))

    def add_counts(self, name: str, layer: str = "") -> str:
        """Make sure a product that may run on integers has something to count in; return its path from the model."""
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
        """Keep all records that are here now: a graph that was captured writes them, whatever later ones merge."""
        self.pinned = frozenset(self.records._buffers)

    def drop_record(self, name: str) -> None:
        """Forget the record of a quantizer that is gone."""
        if name not in self.pinned:
            delattr(self.records, name)
            del self.layers[f"records.{name}"]

    def attach(self, schedule: Schedule) -> None:
        """Follow a schedule from now on (called by `schedule.bind`)."""
        self.schedule = schedule

    def mark(self) -> Tensor | None:
        """Return what a checkpoint keeps: the position, and by what schedule it was reached."""
        schedule = self.schedule
        return None if schedule is None else torch.tensor([schedule.position, _digest(schedule)])

    def resume(self, mark: Tensor, name: str) -> None:
        """Go on where a checkpoint was made, if the schedule is an equal one that has not begun."""
        schedule, (position, digest) = self.schedule, mark.tolist()
        if schedule is None or schedule.position == position:
            return
        if mark.is_floating_point():
            warnings.warn(
                f"the checkpoint of {name} was averaged or cast, its position too (about {position:.0f}); the schedule "
                f"keeps its own position, {schedule.position}",
                stacklevel=2,
            )
            return
        if schedule.position == 0 and digest and digest == _digest(schedule):
            schedule.position = position
            end = "" if schedule.total_steps is None else f" of {schedule.total_steps}"
            LOGGER.warning("%s continues at step %d%s; `schedule.reset()` starts anew", name, position, end)
        else:
            warnings.warn(
                f"the checkpoint of {name} was made at step {position}"
                f"{'' if digest == _digest(schedule) else ' of another schedule'}; the schedule keeps its own "
                f"position, {schedule.position}: set `schedule.position = {position}` to go on from there",
                stacklevel=2,
            )

    def stand_on(self, device: torch.device) -> None:
        """Let widths stand on a device, and records where their layers stand."""
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
        """Look up the widths of the schedule's position, for training and for evaluation."""
        if _COPIED in self.__dict__:
            return
        with alike(home_of(self.root)):
            self.__dict__["in_training"] = self._widths(training=True)
            self.__dict__["in_evaluation"] = self._widths(training=False)

    def look(self, step: int) -> None:
        """Raise where a running range met a batch that was not finite, if the recipe says so: one read for all."""
        records = {name: one for name, one in self.records.named_buffers() if self.raises and has_value(one)}
        if not records:
            return
        places = [one[SKIPPED].to(self.device) for one in records.values()]
        before, self.skipped = self.skipped, dict(zip(records, torch.stack(places).tolist(), strict=True))
        found = [self.layers[f"records.{name}"] for name, now in self.skipped.items() if now > before.get(name, 0)]
        if found:
            layers = ", ".join(map(repr, dict.fromkeys(found)))
            raise FloatingPointError(
                f"step {step}: a NaN or an infinity came to {layers}. Running ranges did not learn from it; "
                "not_finite='skip' in the recipe goes on without a word"
            )

    def _widths(self, *, training: bool) -> Widths:
        return Widths({name: self.width(dial, training=training) for name, dial in self.dials.items()}, self.device)

    def width(self, dial: Dial, *, training: bool) -> int:
        """Return the width that a dial shows at the schedule's position."""
        forced, schedule = self.forced, self.schedule
        if isinstance(forced, int):
            return forced
        if forced is not None and dial.schedule is None:
            if forced.gradient == AS_SCHEDULED:
                forced = forced._replace(gradient=FULL_PRECISION if schedule is None else schedule.current.gradient)
            return dial_width(dial, forced)
        return FULL_PRECISION if schedule is None else width_of(dial, schedule, schedule.position, training)

    @contextmanager
    def at(self, bits: Bits | int) -> Iterator[None]:
        """Stand at other widths inside a `with` block."""
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
        """Leave out widths: they are looked up anew."""
        return {key: value for key, value in self.__dict__.items() if key not in _DERIVED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle, and let the schedule that came along drive this copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._rebind()

    def _rebind(self) -> None:
        # The rest of the model may not be there yet: widths are looked up when they are read. No `at_bits` ends a copy.
        self.__dict__[_COPIED] = True
        self.forced = None
        if self.schedule is not None:
            self.schedule.bind(self)


def _digest(schedule: Schedule) -> int:
    """Return a number that equal schedules share; 0 for one that is equal to no other, or remembers more than that."""
    if copy.copy(schedule) != schedule or any(remembered(schedule).values()):
        return 0
    return int.from_bytes(hashlib.sha256(repr(schedule).encode()).digest()[:6], "big")


_COPIED = "copied"
_DERIVED = ("in_training", "in_evaluation", "handed")


def width_of(dial: Dial, schedule: Schedule, position: int, training: bool) -> int:
    """Return the width a dial shows at a position of a model's schedule, or of the dial's own where it has one."""
    followed = schedule if dial.schedule is None else dial.schedule
    return dial_width(dial, followed.bits(position) if training else followed.evaluation_bits(position))


def dial_width(dial: Dial, bits: Bits) -> int:
    """Return the width a dial shows for the bits that it follows. Off and full precision are not shifted."""
    if dial.with_forward and bits.activation == 0:
        return 0
    if dial.fixed is not None:
        return dial.fixed
    width = int(getattr(bits, dial.role))
    if dial.offset and 0 < width < FULL_PRECISION:
        width = min(max(width + dial.offset, 1), FULL_PRECISION)
    return width


class Held(Precision):
    """The state of a graph that stands alone: it is part of the graph's module, and its widths are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["bits"] = _State()

    @property
    def bits(self) -> nn.Module:  # type: ignore[override]
        """The widths in force, written when the schedule moves on or the mode changes."""
        held: nn.Module = self._modules["bits"]  # type: ignore[assignment]
        return held

    def now(self) -> dict[str, int]:
        """Return the widths in force as numbers."""
        return {
            name: int(width) if has_value(width) else self.width(self.dials[name], training=self.training)
            for name, width in self.bits.named_buffers()
        }

    def _home(self, layer: str) -> None:
        """Return nothing: what the layer is, the graph's module knows."""

    def update(self) -> None:
        """Write the widths of the schedule's position."""
        for name, dial in self.dials.items():
            width, held = self.width(dial, training=self.training), self.bits._buffers.get(name)
            if held is None:
                self.bits.register_buffer(name, torch.tensor(width, dtype=torch.int64, device=self.device))
            elif host_value(held) != width:
                # Unchanged widths are not written: a backward pass may hold on to them. Elsewhere nobody looks.
                held.fill_(width)

    def train(self, mode: bool = True) -> Held:
        """Switch between the widths for training and those for evaluation."""
        super().train(mode)
        self.update()
        return self
