"""What the passes of a pipeline have in common: given once, handed to every pass that has a field of the name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from cpt_fx.overrides import Pattern
from cpt_fx.pass_base import Pass
from cpt_fx.recipes import Recipe
from cpt_fx.schedules.base import Schedule


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choices of a transform. None stands for one that nobody made."""

    schedule: Schedule | None = None
    recipe: Recipe | None = None
    exclude: tuple[Pattern, ...] | None = None
    overrides: Mapping[Pattern, Any] | None = None
    execution: str | None = None


def handed(settings: Settings, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return the passes with every field filled that a setting is for.

    What is set on a pass counts for all of them; two passes that disagree are an error.
    """
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(Settings)):
        given = [step for step in passes if getattr(step, name, None) is not None]
        for step in given[1:]:
            if getattr(step, name) != getattr(given[0], name):
                raise ValueError(
                    f"passes {given[0].name!r} and {step.name!r} disagree: {name}={getattr(given[0], name)!r} and "
                    f"{name}={getattr(step, name)!r}. Set it on one of them, or to the same on both"
                )
        values[name] = getattr(given[0] if given else settings, name)
    return tuple(_filled(step, values) for step in passes)


def _filled(step: Pass, values: Mapping[str, Any]) -> Pass:
    own = {field.name for field in fields(step) if field.init}
    missing = {name: value for name, value in values.items() if name in own and value is not None}
    return replace(step, **{name: value for name, value in missing.items() if getattr(step, name) is None})
