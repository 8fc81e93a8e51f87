"""What a user changes for single layers: patterns that select them, and what is different there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from cpt_fx.errors import check_int, nearest
from cpt_fx.formats import FULL_PRECISION, Format
from cpt_fx.meta import Dial
from cpt_fx.recipes import OPERANDS, Recipe, Rule
from cpt_fx.schedules import Bits

Pattern = str | type[nn.Module]


@dataclass(frozen=True, kw_only=True)
class Override:
    """Fixed widths, an offset to the schedule's widths, or other formats, for the layers a pattern selects.

    `bits` and `offset` are an int for all roles or a `Bits`. `rules` is a Rule, or a Recipe whose rule for the layer's
    family is taken. `formats` maps `input`, `weight`, `bias`, `gradient` to a Format, or to None for full precision.
    """

    bits: int | Bits | None = None
    offset: int | Bits | None = None
    rules: Rule | Recipe | None = None
    formats: tuple[tuple[str, Format | None], ...] = ()

    @classmethod
    def of(cls, value: object) -> Override:
        """Read the forms a user may write: 8, (8, 8, 8), "+2", a Rule, a Recipe, or a mapping of fields."""
        if isinstance(value, Override):
            return value
        if isinstance(value, (Rule, Recipe)):
            return cls(rules=value)
        if isinstance(value, (tuple, list)) and len(value) == len(Bits._fields):
            return cls(bits=Bits(*(check_int("override", width, 0, FULL_PRECISION) for width in value)))
        if isinstance(value, str):
            if value[:1] not in "+-" or not value[1:].isdigit():
                raise ValueError(f'an override given as text is an offset such as "+2" or "-1", got {value!r}')
            return cls(offset=int(value))
        if isinstance(value, Mapping):
            return cls._of_fields(value)
        if isinstance(value, (int, float)) or hasattr(value, "__index__"):
            return cls(bits=check_int("override", value, 0, FULL_PRECISION))
        raise TypeError(
            'an override is fixed bits (8 or (8, 8, 8)), an offset ("+2"), a Rule, a Recipe, or a mapping of bits, '
            f"offset, input, weight, bias, gradient; got {value!r}"
        )

    @classmethod
    def _of_fields(cls, given: Mapping[str, Any]) -> Override:
        known = ("bits", "offset", *OPERANDS)
        for name in given:
            if name not in known:
                raise ValueError(f"an override has fields {known}, got {name!r}.{nearest(name, known)}")
        for name in OPERANDS:
            if not isinstance(given.get(name), (Format, Mapping, type(None))):
                raise TypeError(
                    f"override field {name!r} must be a Format, a mapping of its fields or None, got {given[name]!r}"
                )
        bits, offset = given.get("bits"), given.get("offset")
        if bits is not None and offset is not None:
            raise ValueError(f"an override has bits or an offset, not both: got bits={bits!r}, offset={offset!r}")
        return cls(
            bits=None if bits is None else cls._widths(bits),
            offset=None if offset is None else _offset(offset),
            formats=tuple((name, _format(given[name])) for name in OPERANDS if name in given),
        )

    @classmethod
    def _widths(cls, bits: object) -> int | Bits:
        found = cls.of(bits).bits if not isinstance(bits, str) else None
        if found is None:
            raise TypeError(f"override field 'bits' must be a width such as 8 or (8, 8, 8), got {bits!r}")
        return found

    def dial(self, dial: Dial) -> Dial:
        """Return the dial of a role as this override changes it."""
        if self.bits is not None:
            return Dial(dial.role, fixed=self._for(self.bits, dial.role), with_forward=dial.with_forward)
        if self.offset is not None:
            return Dial(dial.role, offset=self._for(self.offset, dial.role), with_forward=dial.with_forward)
        return dial

    def rule(self, rule: Rule | None, family: str) -> Rule | None:
        """Return the rule of a layer as this override changes it."""
        if self.rules is not None:
            rule = self.rules.rule(family) if isinstance(self.rules, Recipe) else self.rules
        if not self.formats:
            return rule
        rule = rule or Rule()
        return Rule(**{**rule.__dict__, **dict(self.formats)})

    @staticmethod
    def _for(value: int | Bits, role: str) -> int:
        return int(getattr(value, role)) if isinstance(value, Bits) else int(value)


def _format(value: Any) -> Format | None:
    if not isinstance(value, Mapping):
        return value  # type: ignore[no-any-return]
    known = tuple(field.name for field in fields(Format))
    for name in value:
        if name not in known:
            raise ValueError(f"a format in an override has fields {known}, got {name!r}.{nearest(name, known)}")
    return Format(**value)


def _offset(value: Any) -> int | Bits:
    """Read an offset: an int, text such as "+2", or one number for each role."""
    if isinstance(value, (tuple, list)) and len(value) == len(Bits._fields):
        return Bits(*(check_int("override offset", number) for number in value))
    if isinstance(value, str) and value[:1] in ("+", "-") and value[1:].isdigit():
        return int(value)
    return check_int("override offset", value)


def as_patterns(given: object) -> tuple[Pattern, ...]:
    """Accept one pattern as well as several: a string is not a list of letters."""
    if isinstance(given, (str, type)):
        return (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"exclude takes module names, globs and module types, got {given!r}")
    return tuple(given)


class Patterns:
    """Names, globs and types that select layers, with a record of which of them selected something."""

    def __init__(self, patterns: Iterable[Pattern], argument: str) -> None:
        self.patterns = tuple(patterns)
        self.argument = argument
        self.used: set[Pattern] = set()
        for pattern in self.patterns:
            if not isinstance(pattern, (str, type)):
                raise TypeError(f"{argument} takes module names, globs and module types, got {pattern!r}")

    def matches(self, layer: str, stack: list[tuple[str, type[nn.Module] | None]]) -> list[Pattern]:
        """Return the patterns that select a layer: by its name, by a module around it, or by such a module's type."""
        names = {layer, *(path for path, _ in stack)}
        found: list[Pattern] = []
        for pattern in self.patterns:
            if isinstance(pattern, str):
                hit = any(name == pattern or fnmatchcase(name, pattern) for name in names)
            else:
                hit = any(kind is not None and issubclass(kind, pattern) for _, kind in stack)
            if hit:
                found.append(pattern)
        self.used.update(found)
        return found

    def check(self, layers: Iterable[str], modules: Iterable[tuple[str, type[nn.Module] | None]]) -> tuple[str, ...]:
        """Raise for patterns that select nothing at all; return notes on those that select no operator."""
        modules = tuple(modules)
        names = sorted({*layers, *(path for path, _ in modules if path)})
        notes = []
        for pattern in self.patterns:
            if pattern in self.used:
                continue
            if isinstance(pattern, str):
                if not any(name == pattern or fnmatchcase(name, pattern) for name in names):
                    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
                    raise ValueError(
                        f"{self.argument}: {pattern!r} matches no module.{nearest(pattern, names)} Modules: {listed}"
                    )
            elif not any(kind is not None and issubclass(kind, pattern) for _, kind in modules):
                kinds = sorted({kind.__name__ for _, kind in modules if kind is not None})
                raise ValueError(
                    f"{self.argument}: no module is a {pattern.__name__}.{nearest(pattern.__name__, kinds)} "
                    f"Types: {', '.join(kinds)}"
                )
            shown = pattern if isinstance(pattern, str) else pattern.__name__
            notes.append(f"{self.argument} {shown!r} selects modules in which nothing is quantized: no effect")
        return tuple(notes)


SELECTED = "cpt_fx_selected"
"""Key in `GraphModule.meta` of a `Selected`, where a graph is one of several and cannot judge a pattern alone."""


class Selected:
    """What patterns selected over all graphs of a model: one that selects nothing here may select something there."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, tuple[Pattern, ...]], Patterns] = {}
        self._layers: dict[str, None] = {}

    def add(self, patterns: Patterns, layers: Iterable[str]) -> None:
        """Take note of what patterns selected in one graph, and of the layers there are in it."""
        key = (patterns.argument, patterns.patterns)
        known = self._all.setdefault(key, Patterns(patterns.patterns, patterns.argument))
        known.used |= patterns.used
        self._layers.update(dict.fromkeys(layers))

    def check(self, modules: Iterable[tuple[str, type[nn.Module] | None]]) -> tuple[str, ...]:
        """Judge all patterns as `Patterns.check` does."""
        modules = tuple(modules)
        return tuple(note for patterns in self._all.values() for note in patterns.check(self._layers, modules))


def _around(name: str) -> str:
    """Return the path of the module that holds what a name stands for: the root's is empty."""
    return name.rpartition(".")[0]


def check_before_capture(patterns: Patterns, modules: Mapping[str, type[nn.Module]]) -> None:
    """Raise for patterns that cannot select anything, whatever the graphs will hold: no such module, no such type.

    A name below a module, or one without a dot, may yet be that of an operator.
    """
    certain = [
        pattern
        for pattern in patterns.patterns
        if isinstance(pattern, type) or not (_around(pattern) in modules or any(c in _around(pattern) for c in "*?["))
    ]
    Patterns(certain, patterns.argument).check((), modules.items())
