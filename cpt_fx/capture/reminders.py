"""One-time warnings about what would waste a whole run: a schedule never stepped, a transformed model never called.

One global hook on optimizer steps observes what is trained. It holds weak references to modules, not to parameters:
`torch.utils.swap_tensors` cannot swap a parameter that has weak references.
"""

from __future__ import annotations

import gc
import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cpt_fx.ir.history import LOGGER
from cpt_fx.ir.state import Precision, width_from
from cpt_fx.schedules import Bits
from cpt_fx.schedules.base import Schedule

if TYPE_CHECKING:
    from cpt_fx.capture.session import Session

PATIENCE = 10
"""Steps of every optimizer after which a warning is due."""
ABANDONED = 100
"""Steps of others after which an idle optimizer of the same parameters counts as abandoned."""
HORIZON = 1000
"""Steps to look ahead in a schedule that has no end."""


class Reminder:
    """The warnings about one transform; outlives a transformed model that was never assigned."""

    def __init__(self) -> None:
        self.awake = False
        """Whether a call has been noted already, so that `call` may be skipped."""
        self.called = False
        self.reverted = False
        self.told_unused = self.told_still = False
        self.kind = ""
        self.session: ref[Session] | None = None
        self.modules: list[ref[nn.Module]] = []
        """The modules that hold parameters, in the given and in the transformed model."""
        self.uncalled = 0
        """Optimizer steps before the first call."""
        self.place = self.settled = (0, -1)
        """(schedule id, position) of the latest step, and the one from which on no bit-width changes."""
        self.steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many steps each optimizer of the parameters made at that position."""

    def watch(self, session: Session, *trees: nn.Module) -> None:
        """Watch the optimizers of all parameters in some module trees from now on."""
        self.session, self.kind = ref(session), session.kind
        self.modules = [ref(module) for tree in trees for module in tree.modules() if module._parameters]
        _KNOWN[:] = [*(one for one in _KNOWN if one is not self and one.parameters()), self]
        _FOLLOWED.clear()
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_post_hook(_after_step))

    def call(self, session: Session) -> None:
        """Note a call of the transformed model; after `revert`, only one in training counts."""
        if session.looking or (self.reverted and not session.root.training):
            return
        if self.session is None:
            self.watch(session, session.root)
        self.awake, self.called, self.reverted = True, True, False

    def rest(self) -> None:
        """Stay silent after `revert`: parameters are then trained in the plain model on purpose."""
        self.awake, self.reverted = False, True

    def parameters(self) -> set[int]:
        """Return the ids of the current parameters."""
        alive = [module for held in self.modules if (module := held()) is not None]
        return {id(value) for module in alive for value in module._parameters.values() if value is not None}

    def is_used(self) -> bool:
        """Return whether the model ran, or was reverted; under a compiler, only the quantizers' counters show that."""
        session = None if self.session is None else self.session()
        if not self.called and session is not None:
            self.called = any(bool(counters[0]) for counters in session.state.counters.buffers())
        return self.called or self.reverted

    def stepped(self, optimizer: Optimizer) -> str:
        """Note a step of an optimizer; return the warning that is due, or an empty string."""
        session = None if self.session is None else self.session()
        if self.reverted or (self.called and session is None):
            return ""
        state = None if session is None else session.state
        if session is not None and session.root.training:
            session.trained_at = session.state.in_training
        if state is not None and state.schedule is not None:
            self._count(optimizer, state.schedule)
        if not self.called:
            self.uncalled += 1
            if self.uncalled != PATIENCE:
                return ""
            if not self.is_used():
                return self._unused()
        return "" if state is None or state.schedule is None else self._still(optimizer, state, state.schedule)

    def _count(self, optimizer: Optimizer, schedule: Schedule) -> None:
        place = id(schedule), schedule.position
        if place != self.place:
            self.place = place
            self.steps.update(dict.fromkeys(self.steps, 0))
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1

    def _unused(self) -> str:
        mine = self.parameters()
        if any(one.told_unused or one.is_used() for one in _KNOWN if one is not self and mine & one.parameters()):
            return ""
        self.told_unused = True
        return (
            f"the parameters of {self.kind} are trained in full precision: {PATIENCE} optimizer steps, and what "
            "transform returned was never called. Assign it, and call that: "
            "`model = cpt_fx.transform(model, schedule)`"
        )

    def _still(self, optimizer: Optimizer, state: Precision, schedule: Schedule) -> str:
        if self.told_still or self.settled == self.place or state.forced is not None:
            return ""
        if self.steps[optimizer] < PATIENCE or self._is_waiting():
            return ""
        place, self.settled = self.settled, self.place  # set first, in case looking ahead fails
        if not _changes(state, schedule):
            return ""
        self.settled = place
        self._find_others()
        if self._is_waiting():
            return ""
        for one in _KNOWN:
            one.told_still |= one.place[0] == self.place[0]
        self.told_still = True
        return (
            f"the schedule of {self.kind} stood still at position {schedule.position} for {PATIENCE} steps of every "
            "optimizer, though its widths are to change: add the line "
            "`schedule.step()  # after each optimizer step`"
        )

    def _is_waiting(self) -> bool:
        """Return whether an optimizer of the parameters has to make more steps before a warning is due."""
        late = [one for one, steps in self.steps.items() if steps < PATIENCE]
        if not late or max(self.steps.values()) < ABANDONED:
            return bool(late)
        busy = set().union(*(_trained(one) for one, steps in self.steps.items() if steps >= ABANDONED))
        mine = self.parameters()
        return any(not mine & _trained(one) <= busy for one in late)

    def _find_others(self) -> None:
        """Find optimizers of the parameters that have made no step so far, among all objects of the process."""
        mine = self.parameters()
        for one in gc.get_objects():
            # By type: `isinstance` may run an object's own code. Wrappers of an optimizer have no hooks of their own.
            if issubclass(type(one), Optimizer) and "_optimizer_step_post_hooks" in vars(one) and mine & _trained(one):
                self.steps.setdefault(one, 0)


def _changes(state: Precision, schedule: Schedule) -> bool:
    """Return whether any bit-width of a model is going to change."""
    ahead: dict[int, set[Bits]] = {}
    for source in state.width_sources.values():
        followed = schedule if source.schedule is None else source.schedule
        if id(followed) not in ahead:
            length = HORIZON if followed.total_steps is None else None
            rows = followed.trajectory(length, start=schedule.position).tolist()
            ahead[id(followed)] = {Bits(*row) for row in rows}
        if len({width_from(source, bits) for bits in ahead[id(followed)]}) > 1:
            return True
    return False


_KNOWN: list[Reminder] = []
_FOLLOWED: WeakKeyDictionary[Optimizer, tuple[int, list[Reminder]]] = WeakKeyDictionary()
"""Cache: for each optimizer the number of its parameter groups, and the reminders whose parameters it had then."""
_HOOKS: list[Any] = []


def _trained(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _followed_by(optimizer: Optimizer) -> list[Reminder]:
    known = _FOLLOWED.get(optimizer)
    if known is None or known[0] != len(optimizer.param_groups):
        trained = _trained(optimizer)
        found = [one for one in _KNOWN if trained & one.parameters()]
        known = _FOLLOWED[optimizer] = len(optimizer.param_groups), found
    return known[1]


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    try:
        said = [text for one in _followed_by(optimizer) if (text := one.stepped(optimizer))]
    except Exception:  # a reminder must not end a run
        _FOLLOWED[optimizer] = len(optimizer.param_groups), []  # fail once, not at every step
        LOGGER.warning("a forgotten schedule.step() cannot be noticed: %s", type(optimizer).__name__, exc_info=True)
        return
    for text in said:
        warnings.warn(text, stacklevel=3)
