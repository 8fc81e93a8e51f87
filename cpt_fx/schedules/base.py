"""The base class of schedules: everything but the widths as a function of the step."""

import copy
import sys
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cpt_fx.errors import check_int, nearest
from cpt_fx.schedules.bits import Bits, check_width

if TYPE_CHECKING:
    from os import PathLike

    from matplotlib.axes import Axes

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
EvalBits = int | str | None
BOOKS = ("total_steps", "eval_bits", "_position", "_warned", "_controllers", "_held", "_ran", "_best")
"""Attributes of this class, which are not state of a user's subclass."""


class Controller(Protocol):
    """The state module of a transformed model, which sets the bit-widths that its graphs read."""

    is_precision_controller: bool

    def attach(self, schedule: "Schedule") -> None:
        """Follow ``schedule`` from now on."""

    def update(self) -> None:
        """Read the bits at the schedule's position."""


class Model(Protocol):
    """Anything that lists its modules; every ``nn.Module`` does."""

    def modules(self) -> Iterable[object]:
        """Return the model and everything in it."""


class Schedule(ABC):
    """Bit-widths over a training run, and the position reached in it.

    Two schedules are equal if they have the same configuration; the position does not count. Functions that can be
    imported by name are compared by identity. Any other (a lambda, a nested function, a partial, a bound method) makes
    its schedule, and any that contains it, equal only to itself: whether two such functions agree cannot be known.
    """

    total_steps: int | None
    eval_bits: EvalBits

    def __init__(self, total_steps: int | None, eval_bits: EvalBits) -> None:
        """Check and store the settings that all schedules share."""
        self.total_steps = None if total_steps is None else check_int("total_steps", total_steps, 1)
        self.eval_bits = _check_eval_bits(eval_bits)
        self._position = 0
        self._warned = False
        self._held: Bits | None = None
        self._ran: list[tuple[Bits | None, int]] = []
        self._best: Bits | None = None
        self._controllers: weakref.WeakSet[Controller] = weakref.WeakSet()

    # What a subclass implements.

    @abstractmethod
    def _values(self, steps: IntArray) -> FloatArray:
        """Return the widths before rounding, one (weight, activation, gradient) row per step within the run."""

    @abstractmethod
    def _config(self) -> dict[str, object]:
        """Return the constructor's arguments, from which an equal schedule is built."""

    @abstractmethod
    def _widest(self) -> Bits | None:
        """Return the most precise widths of the run, or None where they cannot be known."""

    # Widths.

    def bits(self, step: int) -> Bits:
        """Return the widths of a step (from 0), set before its forward pass; after the end the last ones stay in force.

        Those of the position are computed once and kept until the next step, even if a user's function changes state.
        """
        if self._held is not None and step == self._position:
            return self._held
        found = Bits(*self._rounded(self._one(step))[0].tolist())
        if step == self._position:
            self._held = found
        return found

    def value(self, step: int) -> float:
        """Return the forward (weight) width before rounding to the nearest integer, ties to even."""
        return float(self._values(self._one(step))[0, 0])

    def trajectory(self, length: int | None = None, *, start: int = 0) -> IntArray:
        """Return the widths of ``length`` steps from ``start`` (default: to the end of the run), shape (length, 3)."""
        first = check_int("start", start, 0)
        if length is None:
            if self.total_steps is None:
                raise ValueError(f"{self!r} has no total_steps: pass a length, as in length=1000")
            length = max(self.total_steps - first, 0)
        count = check_int("length", length, 0)
        return self._rounded(self._within_run(np.arange(first, first + count, dtype=np.int64)))

    def evaluation_bits(self, step: int) -> Bits:
        """Return the widths that evaluation uses at a step; the gradient width stays the scheduled one."""
        current = self.bits(step)
        if isinstance(self.eval_bits, int):
            return Bits(self.eval_bits, self.eval_bits, current.gradient)
        best = self._widest() if self.eval_bits is None else None
        return current if best is None else best._replace(gradient=current.gradient)

    def _rounded(self, steps: IntArray) -> IntArray:
        return np.rint(self._values(steps)).astype(np.int64)

    def _one(self, step: int) -> IntArray:
        return self._within_run(np.array([check_int("step", step, 0)], dtype=np.int64))

    def _within_run(self, steps: IntArray) -> IntArray:
        return steps if self.total_steps is None else np.minimum(steps, self.total_steps - 1)

    # Position.

    @property
    def position(self) -> int:
        """The current step, counted from 0; setting it updates the bound models, as `step` does."""
        return self._position

    @position.setter
    def position(self, value: int) -> None:
        value = check_int("position", value, 0)
        self._note(self._held if value == self._position + 1 else None, value - self._position)
        over = self._position - value
        while over > 0:
            bits, count = self._ran.pop()
            self._note(bits, count - over)
            over -= count
        self._position, self._held = value, None
        self._update()

    @property
    def current(self) -> Bits:
        """The bits at the position."""
        return self.bits(self._position)

    def reset(self) -> None:
        """Go back to position 0; running past the end will warn again."""
        self._warned = False
        self.position = 0

    def step(self, n: int = 1) -> None:
        """Advance by ``n`` optimizer steps and update the bound models.

        With ``not_finite="raise"`` in a model's recipe, raises FloatingPointError if a batch since the last step had a
        NaN or an infinity.
        """
        over = self._position
        if check_int("n", n, 0):
            self._note(self._held, 1)
            self._note(None, n - 1)
            self._position, self._held = self._position + n, None
        if self.total_steps is not None and self._position > self.total_steps and not self._warned:
            self._warned = True
            warnings.warn(
                f"step {self._position} is past the end of a schedule of total_steps={self.total_steps}; "
                f"its last bits, {self.current}, hold",
                UserWarning,
                stacklevel=2,
            )
        self._update()
        for controller in list(self._controllers):
            if hasattr(controller, "look"):
                controller.look(over)

    def _widths_that_ran(self) -> list[tuple[Bits, int]]:
        """Return the widths of the steps before the position, each with the number of steps it held.

        Steps whose widths were never read have the planned ones. If none were ever read, the list is empty.
        """
        found: list[tuple[Bits, int]] = []
        start = 0
        if all(bits is None for bits, _ in self._ran):
            return found
        for bits, count in self._ran:
            rows = np.array([bits]) if bits is not None else self.trajectory(count, start=start)
            edges = [0, *(np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1).tolist(), len(rows)]
            for first, last in pairwise(edges):
                row, length = Bits(*rows[first].tolist()), count if bits is not None else last - first
                before = found.pop()[1] if found and found[-1][0] == row else 0
                found.append((row, before + length))
            start += count
        return found

    def _note(self, bits: Bits | None, count: int) -> None:
        """Record the widths of ``count`` more steps; None stands for the planned ones."""
        if count > 0:
            before = self._ran.pop()[1] if self._ran and self._ran[-1][0] == bits else 0
            self._ran.append((bits, before + count))

    def state_dict(self) -> dict[str, object]:
        """Return the position, and the configuration as text, by which loading detects a different schedule.

        For a schedule with your own functions or of your own class, also their state and the widths that ran.
        """
        from cpt_fx.schedules.memory import remembered

        state = {"position": self._position, "schedule": type(self).__name__, "config": self._described()}
        if memory := remembered(self):
            state["memory"] = memory
            state["ran"] = [[*bits, count] for bits, count in [*self._widths_that_ran(), (self.current, 0)]]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position; raise ValueError if the state is of a differently configured schedule."""
        missing = [key for key in ("position", "schedule", "config") if key not in state]
        if missing:
            raise ValueError(f"not the state of a schedule: no {', '.join(missing)} among {sorted(map(str, state))}")
        position = check_int('state["position"]', state["position"], 0)
        difference = self._difference(state["schedule"], state["config"])
        if difference:
            raise ValueError(
                f"this state is of another schedule: {difference}. To go on from position {position} "
                f"all the same, call step({position}) on a fresh schedule"
            )
        from cpt_fx.schedules.memory import recall

        recall(self, state.get("memory", {}))
        self._best = None
        self.position = position
        if ran := state.get("ran"):
            *passed, (*current, _) = ran
            self._ran = [(Bits(*widths), count) for *widths, count in passed] or self._ran
            self._held = Bits(*current)
            self._update()

    def _described(self) -> dict[str, str]:
        return {field: show(value) for field, value in self._config().items()}

    def _difference(self, kind: object, config: object) -> str:
        if kind != type(self).__name__:
            return f"it is a {kind}, this is a {type(self).__name__}"
        if not isinstance(config, Mapping):
            return f"its config is {config!r}, not a mapping"
        mine = self._described()
        fields = [*mine, *(field for field in config if field not in mine)]
        parts = [(field, config.get(field, "missing"), mine.get(field, "missing")) for field in fields]
        return "; ".join(
            f"{field} is {theirs} there and {ours} here" for field, theirs, ours in parts if theirs != ours
        )

    # Models.

    def bind(self, model: Model) -> None:
        """Set the bit-widths of a transformed model from now on; one schedule may be bound to several models."""
        controllers = _controllers_of(model)
        for controller in controllers:
            controller.attach(self)
            self._controllers.add(controller)
            controller.update()

    def unbind(self, model: Model) -> None:
        """Stop updating a model, which keeps its current bits."""
        for controller in _controllers_of(model):
            self._controllers.discard(controller)

    def _update(self) -> None:
        for controller in self._controllers:
            controller.update()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Schedule":
        """Copy the schedule; models that were copied earlier in the same call follow the copy."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        for twin in [memo[id(mine)] for mine in self._controllers if id(mine) in memo]:
            self._controllers.discard(twin)
            twin.attach(new)
            new._controllers.add(twin)
        return new

    def __getstate__(self) -> dict[str, object]:
        """Leave out the models: a copy is bound to no model."""
        return {key: value for key, value in self.__dict__.items() if key != "_controllers"}

    def __setstate__(self, state: dict[str, object]) -> None:
        """Restore everything but the models."""
        self.__dict__.update(state)
        self._controllers = weakref.WeakSet()

    # Showing and comparing.

    def plot(
        self, path: "str | PathLike[str] | None" = None, *, ax: "Axes | None" = None, length: int | None = None
    ) -> "Axes":
        """Draw the bits over the run, on ``ax`` or a new figure, and save it when a path is given."""
        from cpt_fx.schedules.plot import plot_schedule  # keeps matplotlib optional

        return plot_schedule(self, path, ax=ax, length=length)

    def __repr__(self) -> str:
        """Return an expression that builds an equal schedule; callables show as their name."""
        arguments = (f"{field}={show(value)}" for field, value in self._config().items() if value is not None)
        return f"{type(self).__name__}({', '.join(arguments)})"

    def __eq__(self, other: object) -> bool:
        """Compare by class and configuration; a schedule with a function that cannot be imported equals only itself."""
        if not isinstance(other, Schedule):
            return NotImplemented
        if self is other:
            return True
        mine = self._config()
        return type(self) is type(other) and mine == other._config() and _is_comparable(mine.values())

    def __hash__(self) -> int:
        """Return a hash that agrees with equality: the length is part of every configuration."""
        return hash((type(self), self.total_steps))


def _is_comparable(values: Iterable[object]) -> bool:
    """Return whether every callable in a configuration, and in the schedules in it, can be imported by name."""
    for value in values:
        if isinstance(value, Schedule):
            value = list(value._config().values())
        if isinstance(value, list | tuple):
            if not _is_comparable(value):
                return False
        elif callable(value) and not is_importable(value):
            return False
    return True


def is_importable(function: object) -> bool:
    """Return whether a callable is the object that its module holds under its name."""
    found: object = sys.modules.get(getattr(function, "__module__", None) or "")
    for name in str(getattr(function, "__qualname__", "<unnamed>")).split("."):
        found = getattr(found, name, None)
    return found is not None and found == function


def show(value: object) -> str:
    """Format a configuration value as source code; a function as its name, without its state."""
    if isinstance(value, partial):
        return f"partial({', '.join([show(value.func), *map(show, value.args)])})"
    if callable(value):
        return str(getattr(value, "__name__", type(value).__qualname__))
    return repr(value)


def _check_eval_bits(value: object) -> EvalBits:
    if value is None or (isinstance(value, str) and value == "current"):
        return value
    if isinstance(value, str):
        raise ValueError(f'eval_bits must be an int, "current" or None, got {value!r}.{nearest(value, ["current"])}')
    return check_width("eval_bits", value)


def _controllers_of(model: Model) -> list[Controller]:
    if not callable(getattr(model, "modules", None)):
        raise TypeError(f"model must be a module with a modules() method, got {type(model).__name__}")
    found = []
    for module in model.modules():
        part = vars(module).get("_cpt_fx_part")
        controller = module if part is None else part.session.state
        if getattr(controller, "is_precision_controller", False) is True and controller not in found:
            found.append(controller)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no precision to schedule because it is not transformed: "
            "call cpt_fx.transform(model, schedule) first"
        )
    return found  # type: ignore[return-value]
