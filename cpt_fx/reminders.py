"""What is told once, since it would cost a whole run: a schedule that nobody steps, a result that nobody calls.

One hook of all optimizers sees what is trained. What it knows, it knows by weak references, and to modules: parameters
that somebody refers to weakly can no longer be swapped, as `torch.utils.swap_tensors` does.
"""

from __future__ import annotations

import gc
import logging
import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from cpt_fx.runtime import Precision, dial_width
from cpt_fx.schedules import Bits
from cpt_fx.schedules.base import Schedule

if TYPE_CHECKING:
    from cpt_fx.session import Session

LOGGER = logging.getLogger("cpt_fx")
PATIENCE = 10
"""Steps of every optimizer after which something was forgotten."""
ABANDONED = 100
"""Steps of others after which an optimizer of the same parameters is one that is not used any more."""
HORIZON = 1000
"""Steps to look ahead where a schedule has no end."""


class Reminder:
    """What is remembered of a transform; it outlives a result that was not assigned."""

    def __init__(self) -> None:
        self.awake = False
        """Whether a call of the result would tell nothing new."""
        self.called = False
        self.reverted = False
        self.told_unused = self.told_still = False
        self.kind = ""
        self.session: ref[Session] | None = None
        self.modules: list[ref[nn.Module]] = []
        """Whatever holds the parameters, in the given model and in the result."""
        self.uncalled = 0
        """Steps of optimizers before any call."""
        self.place = self.settled = (0, -1)
        """Schedule and position of the latest step, and those from which on no width changes."""
        self.steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """What each optimizer of the parameters did at that place."""

    def watch(self, session: Session, *trees: nn.Module) -> None:
        """Look from now on at the optimizers of all parameters in some trees."""
        self.session, self.kind = ref(session), session.kind
        self.modules = [ref(module) for tree in trees for module in tree.modules() if module._parameters]
        _KNOWN[:] = [*(one for one in _KNOWN if one is not self and one.parameters()), self]
        _FOLLOWED.clear()
        if not _HOOKS:
            _HOOKS.append(register_optimizer_step_post_hook(_after_step))

    def call(self, session: Session) -> None:
        """Note that the result is called: by whoever goes on with it, where it was reverted."""
        if session.looking or (self.reverted and not session.root.training):
            return
        if self.session is None:
            self.watch(session, session.root)
        self.awake, self.called, self.reverted = True, True, False

    def rest(self) -> None:
        """Say nothing of parameters that are trained in the plain model on purpose."""
        self.awake, self.reverted = False, True

    def parameters(self) -> set[int]:
        """Return the parameters by identity, as they are now."""
        alive = [module for held in self.modules if (module := held()) is not None]
        return {id(value) for module in alive for value in module._parameters.values() if value is not None}

    def is_used(self) -> bool:
        """Whether the result ran. Where a compiler runs its graphs, only their records know."""
        session = None if self.session is None else self.session()
        if not self.called and session is not None:
            self.called = any(bool(record[0]) for record in session.state.records.buffers())
        return self.called or self.reverted

    def stepped(self, optimizer: Optimizer) -> str:
        """Note a step of an optimizer; return what there is to say."""
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
        if self.told_still or self.settled == self.place or self.steps[optimizer] < PATIENCE or self._is_waiting():
            return ""
        if state.forced is not None:
            return ""
        place, self.settled = self.settled, self.place  # also where looking ahead fails
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
        """Whether an optimizer of the parameters still has steps to make before anything is said."""
        late = [one for one, steps in self.steps.items() if steps < PATIENCE]
        if not late or max(self.steps.values()) < ABANDONED:
            return bool(late)
        busy = set().union(*(_trained(one) for one, steps in self.steps.items() if steps >= ABANDONED))
        mine = self.parameters()
        return any(not mine & _trained(one) <= busy for one in late)

    def _find_others(self) -> None:
        """Look for optimizers of the parameters that have made no step so far: nothing but the collector has them."""
        mine = self.parameters()
        for one in gc.get_objects():
            # By its type: some objects are not to be asked. What wraps an optimizer has no hooks, and so no steps.
            if issubclass(type(one), Optimizer) and "_optimizer_step_post_hooks" in vars(one) and mine & _trained(one):
                self.steps.setdefault(one, 0)


def _changes(state: Precision, schedule: Schedule) -> bool:
    """Whether any width of a model is going to be another one than it is now."""
    ahead: dict[int, set[Bits]] = {}
    for dial in state.dials.values():
        followed = schedule if dial.schedule is None else dial.schedule
        if id(followed) not in ahead:
            length = HORIZON if followed.total_steps is None else None
            rows = followed.trajectory(length, start=schedule.position).tolist()
            ahead[id(followed)] = {Bits(*row) for row in rows}
        if len({dial_width(dial, bits) for bits in ahead[id(followed)]}) > 1:
            return True
    return False


_KNOWN: list[Reminder] = []
_FOLLOWED: WeakKeyDictionary[Optimizer, tuple[int, list[Reminder]]] = WeakKeyDictionary()
"""For each optimizer the number of its groups, and the transforms whose parameters it had then."""
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
    except Exception:  # a reminder is not worth a run
        _FOLLOWED[optimizer] = len(optimizer.param_groups), []  # not at every step
        LOGGER.warning("a forgotten schedule.step() cannot be noticed: %s", type(optimizer).__name__, exc_info=True)
        return
    for text in said:
        warnings.warn(text, stacklevel=3)
