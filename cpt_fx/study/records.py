"""The record of one cell of a study, finished or failed; all tables and figures are made from records."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Literal

from cpt_fx.schedules import Bits, Cyclic, Deficit, Delayed, Piecewise, Schedule, Sequence, Static, named

Status = Literal["done", "failed"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """What was trained, the result, and where it ran."""

    study: str
    experiment: str
    """ "schedules", "deficit", "window", "first-cycle" or "delayed"."""
    label: str
    """Such as "CR", "static 8", "full precision", "deficit 400"."""
    schedule: str
    """The schedule's repr; :meth:`rebuilt` reads it."""
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
    """Everything that the training function returned."""
    started: str
    seconds: float
    machine: dict[str, object]
    versions: dict[str, str]
    options: dict[str, object]

    def rebuilt(self) -> Schedule:
        """Return a schedule equal to the one that was trained; raise ValueError if it has functions of your own."""
        return rebuild(self.schedule)

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return asdict(self)


def said(error: str | None) -> str:
    """Return the most informative line of an error: the last one of a traceback, else the first."""
    lines = (error or "").strip().splitlines() or ["no reason is known"]
    return lines[-1 if lines[0].startswith("Traceback") else 0].strip()


def duration(seconds: float) -> str:
    """Return a duration as text: "42 s", "12 min" or "3.4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def rebuild(text: str) -> Schedule:
    """Build the schedule that a repr describes, from the package's classes and plain values; no other code is run."""
    try:
        made = _made(_parsed(text))
        if isinstance(made, Schedule):
            return made
        reason = "it is not a schedule"
    except (ValueError, TypeError, ArithmeticError) as error:
        reason = str(error)
    raise ValueError(f"{_short(text)} cannot be rebuilt from its text alone: {_short(reason, 400)}")


def _parsed(text: str) -> ast.expr:
    """Parse calls, names, numbers, strings, lists, tuples and dicts; raise ValueError for anything else."""
    if _PLAIN.fullmatch(text) is None:
        raise ValueError("it is more than calls with plain values")
    depths = accumulate((mark in "([{") - (mark in ")]}") for mark in _TEXT.sub("", text))
    if max(depths, default=0) > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(f"it cannot be parsed ({type(error).__name__}: {error})") from error


def _made(node: ast.expr) -> object:
    """Build what was parsed; nothing but the classes in `_KINDS` is ever called."""
    if isinstance(node, ast.Call):
        kind = _KINDS.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if kind is None:
            raise ValueError(f"{_short(ast.unparse(node))} is recorded as text and never called")
        given = {str(keyword.arg): _made(keyword.value) for keyword in node.keywords}
        if len(given) < len(node.keywords):
            raise ValueError(f"{_short(ast.unparse(node))} gives an argument twice")
        return kind(*map(_made, node.args), **given)
    if isinstance(node, ast.Name):
        raise ValueError(f"{_short(node.id)} is recorded by its name and never called")
    if isinstance(node, ast.List | ast.Tuple):
        items = map(_made, node.elts)
        return tuple(items) if isinstance(node, ast.Tuple) else list(items)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {ast.literal_eval(key): _made(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)


def _short(text: str, length: int = 80) -> str:
    shown = text.encode(errors="backslashreplace").decode()
    return shown if len(shown) <= length else f"{shown[:length]}…"


_KINDS: dict[str, Callable[..., object]] = {
    "Bits": Bits, "Cyclic": Cyclic, "Deficit": Deficit, "Delayed": Delayed, "Piecewise": Piecewise,
    "Sequence": Sequence, "Static": Static, "named": named,
}  # fmt: skip
_DEEPEST = 50
_QUOTED = r"""'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*\""""
_TEXT = re.compile(_QUOTED)
# No operators, no attributes, no two words side by side: what is left is harmless to parse, and only brackets nest.
_PLAIN = re.compile(
    rf"(?:\s*(?:(?:[A-Za-z_]\w*|-?\d{{1,40}}(?:\.\d{{0,40}})?(?:[eE][-+]?\d{{1,4}})?|{_QUOTED})(?=\s*(?:[()\[\]{{}},:=]|\Z))"
    r"|[()\[\]{},:=]))*\s*"
)
