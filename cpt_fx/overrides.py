"""Per-layer overrides: patterns that select layers, and what changes for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from cpt_fx.errors import check_int, nearest
from cpt_fx.formats import FULL_PRECISION, Format
from cpt_fx.ir.meta import WidthSource, above_of, label_of
from cpt_fx.ir.pass_base import Pass
from cpt_fx.recipes import OPERANDS, Recipe, Rule, default
from cpt_fx.schedules import Bits
from cpt_fx.schedules.base import Schedule

Pattern = str | type[nn.Module]
Around = list[tuple[str, type[nn.Module] | None]]
"""The modules around an operator, as (path, class)."""
_FIELDS = ("bits", "offset", "schedule", *OPERANDS, "activation")


@dataclass(frozen=True, kw_only=True)
class Override:
    """Fixed bit-widths, an offset, another schedule, or other formats, for the layers a pattern selects.

    `bits` and `offset` are an int for all roles or a `Bits`. `schedule` replaces the model's schedule and is read at
    the model's position. `widths` maps `weight`, `activation`, `bias`, `gradient` to a width, or to an offset as text;
    an entry takes precedence over `bits` and `offset`, and a bias without one follows the weight. `rules` is a Rule,
    or a Recipe whose rule for the layer's family is taken. `formats` maps `input`, `weight`, `bias`, `gradient` to a
    Format, or to None for full precision.
    """

    bits: int | Bits | None = None
    offset: int | Bits | None = None
    schedule: Schedule | None = None
    widths: tuple[tuple[str, int | str], ...] = ()
    rules: Rule | Recipe | None = None
    formats: tuple[tuple[str, Format | None], ...] = ()
    label: str = field(default="", repr=False, compare=False)
    """Distinguishes `schedule` from an unequal one with the same repr."""

    @classmethod
    def all(cls, given: Mapping[Pattern, object]) -> dict[Pattern, Override]:
        """Parse all overrides of a model; schedules that are not equal get different labels."""
        read: dict[Pattern, Override] = {}
        known: dict[str, list[Schedule]] = {}
        for pattern, value in given.items():
            override = cls.of(value)
            if override.schedule is not None:
                label = label_of(override.schedule)
                alike = known.setdefault(label, [])
                if override.schedule not in alike:
                    alike.append(override.schedule)
                number = alike.index(override.schedule)
                override = replace(override, label=f"{label}_{number}" if number else label)
            read[pattern] = override
        return read

    @classmethod
    def of(cls, value: object) -> Override:
        """Parse any accepted form: 8, (8, 8, 8), "+2", a schedule, a Rule, a Recipe, a mapping of fields."""
        if isinstance(value, Override):
            return value
        if isinstance(value, (Rule, Recipe)):
            return cls(rules=value)
        if isinstance(value, Schedule):
            return cls(schedule=value)
        if isinstance(value, (tuple, list)) and len(value) == len(Bits._fields):
            return cls(bits=Bits(*(check_int("override", width, 0, FULL_PRECISION) for width in value)))
        if isinstance(value, str):
            return cls(offset=int(_offset_text("an override", value)))
        if isinstance(value, Mapping):
            return cls._of_fields(value)
        if isinstance(value, (int, float)) or hasattr(value, "__index__"):
            return cls(bits=check_int("override", value, 0, FULL_PRECISION))
        raise TypeError(
            'an override is fixed bits (8 or (8, 8, 8)), an offset ("+2"), a schedule, a Rule, a Recipe, or a mapping '
            f"of {', '.join(_FIELDS)}; got {value!r}"
        )

    @classmethod
    def _of_fields(cls, given: Mapping[str, Any]) -> Override:
        for name in given:
            if name not in _FIELDS:
                raise ValueError(f"an override has fields {_FIELDS}, got {name!r}.{nearest(name, _FIELDS)}")
        if "input" in given and "activation" in given:
            raise ValueError("input and activation are two names for one field of an override: give one of them")
        bits, offset, schedule = given.get("bits"), given.get("offset"), given.get("schedule")
        if bits is not None and offset is not None:
            raise ValueError(f"an override has bits or an offset, not both: got bits={bits!r}, offset={offset!r}")
        if bits is not None and schedule is not None:
            raise ValueError(f"an override has bits or a schedule, not both: got bits={bits!r}, schedule={schedule!r}")
        if not isinstance(schedule, (Schedule, type(None))):
            raise TypeError(f"override field 'schedule' must be a schedule such as Static(8), got {schedule!r}")
        widths: dict[str, int | str] = {}
        formats: dict[str, Format | None] = {}
        for name in (*OPERANDS, "activation"):
            if name not in given:
                continue
            if isinstance(given[name], (Format, Mapping, type(None))):
                formats["input" if name == "activation" else name] = _format(given[name])
            else:
                widths["activation" if name == "input" else name] = _width(name, given[name])
        return cls(
            bits=None if bits is None else cls._widths(bits),
            offset=None if offset is None else _offset(offset),
            schedule=schedule,
            widths=tuple(widths.items()),
            formats=tuple(formats.items()),
        )

    @classmethod
    def _widths(cls, bits: object) -> int | Bits:
        found = cls.of(bits).bits if not isinstance(bits, str) else None
        if found is None:
            raise TypeError(f"override field 'bits' must be a width such as 8 or (8, 8, 8), got {bits!r}")
        return found

    def width_sources(self, sources: Mapping[str, WidthSource]) -> dict[str, WidthSource]:
        """Return the bit-width sources of a layer, by role, with this override applied."""
        changed = dict(sources)
        if not (self.bits is None and self.offset is None and self.schedule is None):
            # Settings for the whole layer apply to its bias too.
            changed.pop("bias", None)
            changed = {role: self._changed(source) for role, source in changed.items()}
        for role, width in self.widths:
            source = changed.get(role, changed["weight"])
            fixed, offset = (None, int(width)) if isinstance(width, str) else (width, 0)
            changed[role] = replace(source, fixed=fixed, offset=offset)
        return changed

    def _changed(self, source: WidthSource) -> WidthSource:
        """Apply `bits`, or `schedule` and `offset`, to the bit-width source of a role."""
        if self.bits is not None:
            return WidthSource(source.role, fixed=self._for(self.bits, source.role), with_forward=source.with_forward)
        offset = 0 if self.offset is None else self._for(self.offset, source.role)
        if self.schedule is not None:
            return replace(source, schedule=self.schedule, label=self.label, fixed=None, offset=offset)
        return replace(source, fixed=None, offset=offset)

    def rule(self, rule: Rule | None, family: str) -> Rule | None:
        """Return the rule of a layer with this override applied."""
        if self.rules is not None:
            rule = self.rules.rule(family) if isinstance(self.rules, Recipe) else self.rules
        if not self.formats:
            return rule
        return replace(rule or Rule(), **dict(self.formats))  # type: ignore[arg-type]

    @staticmethod
    def _for(value: int | Bits, role: str) -> int:
        return int(getattr(value, role)) if isinstance(value, Bits) else int(value)


def _width(name: str, value: Any) -> int | str:
    """Parse the bit-width of one role: an int, or an offset as text."""
    if isinstance(value, str):
        return _offset_text(f"override field {name!r}", value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(
            f'override field {name!r} must be a width such as 8, an offset such as "+1", a Format, a mapping of its '
            f"fields or None, got {value!r}"
        )
    return check_int(f"override field {name!r}", value, 0, FULL_PRECISION)


def _offset_text(what: str, value: str) -> str:
    if value[:1] not in ("+", "-") or not value[1:].isdecimal():
        raise ValueError(f'{what} given as text is an offset such as "+2" or "-1", got {value!r}')
    return value


def _format(value: Any) -> Format | None:
    if not isinstance(value, Mapping):
        return value  # type: ignore[no-any-return]
    known = tuple(field.name for field in fields(Format))
    for name in value:
        if name not in known:
            raise ValueError(f"a format in an override has fields {known}, got {name!r}.{nearest(name, known)}")
    return Format(**value)


def _offset(value: Any) -> int | Bits:
    """Parse an offset: an int, text such as "+2", or one number for each role."""
    if isinstance(value, (tuple, list)) and len(value) == len(Bits._fields):
        return Bits(*(check_int("override offset", number) for number in value))
    if isinstance(value, str) and value[:1] in ("+", "-") and value[1:].isdecimal():
        return int(value)
    return check_int("override offset", value)


def as_patterns(given: object) -> tuple[Pattern, ...]:
    """Return a tuple of patterns, given one or several; a string is one pattern."""
    if isinstance(given, (str, type)):
        return (given,)
    if not isinstance(given, Iterable):
        raise TypeError(f"exclude takes module names, globs and module types, got {given!r}")
    return tuple(given)


class Aliases:
    """The other names of modules that a model holds under several names; layers are named after the first."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self.others: dict[str, list[str]] = {}
        self._containers: set[str] = set()
        """Paths of ModuleLists and ModuleDicts: never called, so only its name shows that a layer is in one."""
        firsts: dict[nn.Module, str] = {}
        for path, module in () if root is None else root.named_modules(remove_duplicate=False):
            first = firsts.setdefault(module, path)
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                self._containers.add(path)
            if path != first:
                self.others.setdefault(first, []).append(path)

    def of(self, name: str) -> Iterator[str]:
        """Yield the other names of a module or an operator, and the containers around it under those names."""
        above = name
        while above and above not in self.others:
            above = above.rpartition(".")[0]
        for other in self.others.get(above, ()):
            yield other + name[len(above) :]
            yield from (path for path in above_of(other) if path in self._containers)


class Patterns:
    """Names, globs and types that select layers; keeps track of which of them matched.

    A module that a model uses in several places is selected by any of its names.
    """

    def __init__(self, patterns: Iterable[Pattern], argument: str, aliases: Aliases | None = None) -> None:
        self.patterns = tuple(patterns)
        self.argument = argument
        self.aliases = aliases or Aliases()
        self.used: set[Pattern] = set()
        self.by_alias: dict[str, dict[str, str]] = {}
        """For each pattern that matched by another name: the names of what it selected -> "module" or "operator"."""
        self.idle: dict[tuple[Pattern, str], bool] = {}
        """(pattern, role) with a bit-width in an override -> whether no selected layer has had that quantizer yet."""
        for pattern in self.patterns:
            if not isinstance(pattern, (str, type)):
                raise TypeError(f"{argument} takes module names, globs and module types, got {pattern!r}")

    def matches(self, layer: str, stack: Around) -> list[Pattern]:
        """Return the patterns that select a layer: by its name, by a module around it, or by that module's type."""
        names = {layer, *(path for path, _ in stack)}
        found: list[Pattern] = []
        for pattern in self.patterns:
            if isinstance(pattern, str):
                hit = any(_fits(name, pattern) for name in names) or self._matches_alias(pattern, names)
            else:
                hit = any(kind is not None and issubclass(kind, pattern) for _, kind in stack)
            if hit:
                found.append(pattern)
        self.used.update(found)
        return found

    def _matches_alias(self, pattern: str, names: Iterable[str]) -> bool:
        """Return whether a pattern matches another name of a layer or of a module around it, outermost first."""
        for name in sorted(names, key=len):
            if any(_fits(other, pattern) for other in self.aliases.of(name)):
                kind = "module" if name in self.aliases.others else "operator"
                self.by_alias.setdefault(pattern, {})[name] = kind
                return True
        return False

    def check(self, layers: Iterable[str], modules: Collection[tuple[str, type[nn.Module] | None]]) -> tuple[str, ...]:
        """Raise for patterns that match nothing; return notes on those whose effect may surprise, or that have none."""
        names = sorted({*layers, *(path for path, _ in modules if path)})
        notes = [
            f"{self.argument} {pattern!r} selects {name}, which is the same {kind}"
            for pattern, found in self.by_alias.items()
            for name, kind in found.items()
        ]
        notes += [
            f"{self.argument} {shown(pattern)} sets the bits of the {role}, and nothing that it selects has a "
            f"quantized {role}: no effect"
            for (pattern, role), idle in self.idle.items()
            if idle and pattern in self.used
        ]
        for pattern in self.patterns:
            if pattern in self.used:
                continue
            if isinstance(pattern, str):
                if not any(_fits(name, pattern) for name in names):
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
            notes.append(f"{self.argument} {shown(pattern)} selects modules in which nothing is quantized: no effect")
        return tuple(notes)


@dataclass(frozen=True)
class ChoosingPass(Pass):
    """A pass with the options that choose how layers are quantized."""

    recipe: Recipe | None = None
    exclude: tuple[Pattern, ...] | None = None
    overrides: Mapping[Pattern, Any] | None = None


class Choices:
    """The quantization choices of a transform: the recipe, the exclusions and the overrides."""

    def __init__(self, step: ChoosingPass, root: nn.Module, selected: Selected) -> None:
        aliases = Aliases(root)
        self.recipe = step.recipe or default()
        self.exclude = selected.patterns(step.exclude or (), "exclude", aliases)
        self.changes = selected.patterns(step.overrides or {}, "overrides", aliases)
        self.overrides = Override.all(step.overrides or {})

    def rule(self, family: str, layer: str, stack: Around) -> tuple[Rule | None, list[Pattern]]:
        """Return the rule of a layer, and the override patterns that select it."""
        selecting = self.changes.matches(layer, stack)
        rule = self.recipe.rule(family)
        for pattern in selecting:
            rule = self.overrides[pattern].rule(rule, family)
        return rule, selecting


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def shown(pattern: Pattern) -> str:
    """Return a pattern as messages quote it."""
    return repr(pattern if isinstance(pattern, str) else pattern.__name__)


SELECTED = "cpt_fx_selected"
"""Key in `GraphModule.meta` of a `Selected` that several graphs share: one graph cannot tell what matches nothing."""


class Selected:
    """What patterns selected over all graphs of a model; a pattern may match in one of them only."""

    def __init__(self) -> None:
        self._all: dict[tuple[str, tuple[Pattern, ...]], Patterns] = {}
        self.layers: dict[str, None] = {}

    def patterns(self, given: Iterable[Pattern], argument: str, aliases: Aliases) -> Patterns:
        """Return the shared `Patterns` of these patterns, for one more graph."""
        patterns = Patterns(given, argument)
        patterns = self._all.setdefault((argument, patterns.patterns), patterns)
        patterns.aliases = aliases
        return patterns

    def check(self, modules: Collection[tuple[str, type[nn.Module] | None]]) -> tuple[str, ...]:
        """Check all patterns, as `Patterns.check` does."""
        return tuple(note for patterns in self._all.values() for note in patterns.check(self.layers, modules))


def check_before_capture(patterns: Patterns, modules: Mapping[str, type[nn.Module]]) -> None:
    """Raise for patterns that can match nothing, whatever the graphs will hold: no such module, no such type.

    A name directly below a module, or one without a dot, may turn out to be that of an operator.
    """
    certain = []
    for pattern in patterns.patterns:
        around = "" if isinstance(pattern, type) else pattern.rpartition(".")[0]
        if isinstance(pattern, type) or not (around in modules or any(character in around for character in "*?[")):
            certain.append(pattern)
    Patterns(certain, patterns.argument).check((), modules.items())
