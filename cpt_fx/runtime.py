"""The state of a transformed model: the widths, the running ranges and the records, in one submodule."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cpt_fx.errors import TransformError
from cpt_fx.evidence import RECORD_LENGTH
from cpt_fx.formats import FULL_PRECISION
from cpt_fx.integer.counts import COUNTS
from cpt_fx.meta import STATE, Dial
from cpt_fx.schedules import Bits
from cpt_fx.schedules.base import Schedule

ZERO_POINT, RANGE, WEIGHT = "running_zero_point", "running_range", "running_weight"


class _State(nn.Module):
    """A holder of buffers. Ranges stay in float32 when the model is cast: their average would lose its tail.

    Holders inside holders are ordinary attributes too: every quantizer reads its state by a path of several names, and
    what `nn.Module` looks up for itself takes ten times as long.
    """

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child, and let it be found like any attribute."""
        super().add_module(name, module)
        self.__dict__[name] = module

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_modules", ()):
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _State:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype != tensor.dtype else moved

        super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]
        return self


class Precision(_State):
    """Widths as 0-dim tensors, written by a schedule; `train()` and `eval()` switch between its two settings."""

    is_precision_controller = True

    def __init__(self) -> None:
        super().__init__()
        self.bits = _State()
        self.ranges = _State()
        self.records = _State()
        self.products = _State()
        self.grows = False
        """Whether graphs may still be found: a checkpoint may then know more ranges than there are by now."""
        self.dials: dict[str, Dial] = {}
        self.schedule: Schedule | None = None
        self._written: dict[str, int] = {}
        self._pinned: frozenset[str] = frozenset()
        self.register_load_state_dict_pre_hook(_accept_other_checkpoints)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_follow_schedule)  # type: ignore[no-untyped-call]

    def add_dial(self, dial: Dial) -> str:
        """Make sure a width tensor exists for a dial; return its path from the model."""
        if dial.name not in self.dials:
            self.dials[dial.name] = dial
            self.bits.register_buffer(dial.name, torch.tensor(FULL_PRECISION, dtype=torch.int64))
        return f"{STATE}.bits.{dial.name}"

    def add_range(self, layer: str, operand: str, *, learned: bool = False) -> str:
        """Make sure a running range exists for an operand of a layer; return its path below this module."""
        path = f"{layer}.{operand}"
        holder: nn.Module = self.ranges
        for name in path.split("."):
            if name not in holder._modules:
                holder.add_module(name, _State())
            holder = holder.get_submodule(name)
        for name in (ZERO_POINT, RANGE, WEIGHT):
            value = holder._buffers.get(name)
            if learned and name != WEIGHT and name not in holder._parameters:
                # A buffer where a checkpoint brought it before the graph said what it is.
                holder._buffers.pop(name, None)
                holder.register_parameter(name, nn.Parameter(_zero() if value is None else value))
            elif not hasattr(holder, name):
                holder.register_buffer(name, _zero())
        return f"ranges.{path}"

    def pin(self) -> None:
        """Keep all that is here now: a graph that was captured reads it, whatever later captures have no use for."""
        ranges = {f"ranges.{path}" for path, holder in self.ranges.named_modules() if hasattr(holder, RANGE)}
        self._pinned = frozenset({*ranges, *self.dials, *(f"records.{name}" for name in self.records._buffers)})

    def drop_dial(self, name: str) -> None:
        """Forget a width that no quantizer reads."""
        if name not in self._pinned:
            del self.dials[name]
            delattr(self.bits, name)

    def drop_record(self, name: str) -> None:
        """Forget the record of a quantizer that is gone."""
        if f"records.{name}" not in self._pinned:
            delattr(self.records, name)

    def drop_range(self, path: str) -> None:
        """Forget a running range that sharing made redundant, and the holders it leaves empty."""
        if path in self._pinned:
            return
        names = path.split(".")
        for length in range(len(names), 1, -1):
            parent, name = self.get_submodule(".".join(names[: length - 1])), names[length - 1]
            holder = parent.get_submodule(name)
            if length == len(names):
                for buffer in (ZERO_POINT, RANGE, WEIGHT):
                    delattr(holder, buffer)
            if holder._modules or holder._buffers:
                return
            delattr(parent, name)

    def add_record(self, name: str) -> str:
        """Make sure a record exists for a quantize node; return its path from the model."""
        if name not in self.records._buffers:
            self.records.register_buffer(name, torch.zeros(RECORD_LENGTH, dtype=torch.int64), persistent=False)
        return f"{STATE}.records.{name}"

    def add_counts(self, name: str) -> str:
        """Make sure a product that may run on integers has something to count in; return its path from the model."""
        if name not in self.products._buffers:
            self.products.register_buffer(name, torch.zeros(COUNTS, dtype=torch.int64), persistent=False)
        return f"{STATE}.products.{name}"

    def forget(self) -> None:
        """Forget what was observed and recorded: it came from a run that only looked at the model."""
        for state in (self.ranges, self.records, self.products):
            for buffer in (*state.buffers(), *state.parameters()):
                buffer.detach().zero_()

    def attach(self, schedule: Schedule) -> None:
        """Follow a schedule from now on (called by `schedule.bind`)."""
        self.schedule = schedule

    def update(self) -> None:
        """Write the widths of the schedule's current step, those for evaluation in `eval()` mode."""
        if self.schedule is None:
            return
        position = self.schedule.position
        bits = self.schedule.bits(position) if self.training else self.schedule.evaluation_bits(position)
        for name, dial in self.dials.items():
            width = dial_width(dial, bits)
            if dial.schedule is not None:
                width = width_of(dial, dial.schedule, position, self.training)
            # Unchanged widths are not written: a backward pass may hold on to them.
            if self._written.get(name) != width:
                self.bits.get_buffer(name).fill_(width)
                self._written[name] = width

    def train(self, mode: bool = True) -> Precision:
        """Switch between the widths for training and those for evaluation."""
        was_training = self.training
        super().train(mode)
        self.update()
        if was_training and not mode:
            self._warn_of_broken_ranges()
        return self

    def broken_ranges(self) -> list[str]:
        """Return the layers and operands whose running range holds a NaN or an infinity."""
        return [
            path
            for path, holder in self.ranges.named_modules()
            if hasattr(holder, RANGE) and not (getattr(holder, RANGE) + getattr(holder, ZERO_POINT)).isfinite().item()
        ]

    def _warn_of_broken_ranges(self) -> None:
        """Tell when evaluation is about to use ranges that a NaN in training has spoilt."""
        broken = self.broken_ranges()
        if broken:
            shown = ", ".join(broken[:5]) + (f" and {len(broken) - 5} more" if len(broken) > 5 else "")
            warnings.warn(
                f"the running range of {shown} is not finite: a NaN or infinity went through in training, and "
                "evaluation will return NaN there",
                stacklevel=2,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Precision:
        super()._apply(fn, recurse)
        self._written.clear()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Precision:
        """Copy the tensors; the copy follows the same schedule, unless that is being copied too."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        state = {key: value for key, value in self.__dict__.items() if key != "schedule"}
        new.__dict__.update(copy.deepcopy(state, memo))
        new.schedule = memo.get(id(self.schedule), self.schedule)
        new._rebind()
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore from a pickle, and let the schedule that came along drive this copy."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._rebind()

    def _rebind(self) -> None:
        self._written.clear()
        if self.schedule is not None:
            self.schedule.bind(self)


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


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float32)


def _accept_other_checkpoints(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
    missing: list[str], unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Let the original model's checkpoint load: where it holds nothing of ours, keep what is there.

    Where graphs are found as the model runs, a checkpoint may have been made when other ones were known. Ranges it
    brings are kept for their layers; widths are the schedule's to say.
    """
    assert isinstance(module, Precision)
    ours = module.state_dict(prefix=prefix)
    theirs = [key for key in state_dict if key.startswith(prefix)]
    if not theirs:
        state_dict.update(ours)
    if not module.grows:
        return
    for key in theirs:
        kind, _, path = key.removeprefix(prefix).partition(".")
        if kind == "ranges" and key not in ours:
            layer, _, _ = path.rpartition(".")
            module.add_range(*layer.rsplit(".", 1))
        elif kind == "bits" and key not in ours:
            del state_dict[key]
    for key, value in module.state_dict(prefix=prefix).items():
        state_dict.setdefault(key, value)


def _follow_schedule(module: nn.Module, keys: Any) -> None:
    """After loading, show the widths of the schedule that drives this model now, not those at the time of saving."""
    assert isinstance(module, Precision)
    module._written.clear()
    module.update()


def precision_of(model: nn.Module) -> Precision:
    """Return the state module of a transformed model (wrapped or not)."""
    for module in model.modules():
        if isinstance(module, Precision):
            return module
    raise TransformError(f"{type(model).__name__} is not transformed: call cpt_fx.transform(model, schedule) first")


def ensure_precision(root: nn.Module) -> Precision:
    """Return the state module of a graph, adding an empty one where there is none."""
    if STATE not in root._modules:
        root.add_module(STATE, Precision())
    state = root.get_submodule(STATE)
    assert isinstance(state, Precision)
    return state
