"""One cell of a study, finished or failed: what every table and figure is made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from cpt_fx import schedules
from cpt_fx.schedules import Schedule

Status = Literal["done", "failed"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was trained, what came out, and where it ran."""

    study: str
    experiment: str
    """ "schedules", "deficit", "window", "first-cycle" or "delayed"."""
    label: str
    """Such as "CR", "static 8", "full precision", "deficit 400"."""
    schedule: str
    """An expression that builds the schedule; :meth:`rebuilt` evaluates it."""
    q_min: int
    q_max: int
    seed: int
    total_steps: int
    relative_cost: float
    """BitOps of a mean step relative to static q_max, by the published formula."""
    mean_bits: float
    """The mean forward width."""
    first_cycle_bits: float | None
    """The mean forward width over the first cycle's length; None where there are no cycles."""
    status: Status
    error: str | None
    metric: str
    better: str
    value: float | None
    """The metric that the study compares; None when the cell failed."""
    metrics: dict[str, float]
    """All that the training function returned."""
    started: str
    seconds: float
    machine: dict[str, object]
    versions: dict[str, str]
    options: dict[str, object]

    def rebuilt(self) -> Schedule:
        """Return a schedule equal to the one that was trained; ValueError where it was made of your own functions."""
        return rebuild(self.schedule)

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def rebuild(text: str) -> Schedule:
    """Build the schedule that a repr describes."""
    names = {name: getattr(schedules, name) for name in schedules.__all__}
    try:
        made = eval(text, {"__builtins__": {}}, names)
    except (NameError, SyntaxError, AttributeError, TypeError) as error:
        raise ValueError(f"{text} cannot be rebuilt from its text alone: {error}") from error
    if not isinstance(made, Schedule):
        raise ValueError(f"{text} is not a schedule")
    return made
