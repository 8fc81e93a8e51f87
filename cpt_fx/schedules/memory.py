"""State that a user's schedule keeps from step to step: in objects, closures and attributes."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from cpt_fx.schedules.base import BOOKS, Schedule


class _Home(NamedTuple):
    """A place that holds state: its name, its current values, and how to restore them."""

    place: str
    values: dict[str, Any]
    write: Callable[[Mapping[str, Any]], object]


def remembered(schedule: Schedule) -> dict[str, Any]:
    """Return a schedule's state by place, as plain data for a checkpoint; warn about values that are not plain data.

    An object with state_dict and load_state_dict is saved by these.
    """
    found: dict[str, Any] = {}
    for place, values, write in _homes(schedule, "", set()):
        own = getattr(write, "__name__", "") == "load_state_dict"
        kept = {name: value for name, value in values.items() if own or _is_plain(value)}
        code = [name for name, value in values.items() if callable(value) or isinstance(value, types.ModuleType)]
        if lost := [name for name in values if name not in (*kept, *code)]:
            warnings.warn(
                f"{', '.join(lost)} of {place} in {schedule!r} is no plain data, and so not in its state: write it as "
                "an object with state_dict and load_state_dict",
                stacklevel=3,
            )
        found[place] = copy.deepcopy(kept)
    return found


def recall(schedule: Schedule, saved: Mapping[str, Any]) -> None:
    """Restore what `remembered` returned."""
    homes = {home.place: home for home in _homes(schedule, "", set())}
    if absent := [place for place in saved if place not in homes]:
        raise ValueError(f"this state remembers {', '.join(absent)}, which {schedule!r} does not have")
    for place, values in saved.items():
        homes[place].write(copy.deepcopy(values))


@contextmanager
def fresh(schedule: Schedule) -> Iterator[Schedule]:
    """Yield a copy at position 0; functions are shared with it, so their state is restored afterwards."""
    homes = list(_homes(schedule, "", set()))
    known = [{name: part for name, part in home.values.items() if not callable(part)} for home in homes]
    names = [set(home.values) for home in homes]
    try:
        made, before = copy.deepcopy(schedule), copy.deepcopy(known)  # two calls: the copies must share nothing
    except (TypeError, NotImplementedError, RuntimeError) as error:
        raise TypeError(f"{schedule!r} cannot be copied for each run: {error}") from error
    made.reset()
    try:
        yield made
    finally:
        for home, values, kept in zip(homes, before, names, strict=True):
            for name in set(home.values) - kept:
                del home.values[name]
            home.write(values)


def _homes(value: Any, place: str, seen: set[int]) -> Iterator[_Home]:
    if id(value) in seen or isinstance(value, type | types.ModuleType):
        return
    if not isinstance(value, list | tuple):  # some are temporary, and their ids may be reused
        seen.add(id(value))
    parts: dict[str, Any] = {}
    if isinstance(value, Schedule):
        config = {name: part for name, part in value._config().items() if not isinstance(part, dict)}
        parts = {f"{place}{'.' * bool(place)}{name}": part for name, part in config.items()}
        if not type(value).__module__.startswith("cpt_fx."):  # attributes of a user's class besides its arguments
            mine = {name: part for name, part in vars(value).items() if name not in {*value._config(), *BOOKS}}
            yield _Home(place or "self", mine, vars(value).update)
    elif isinstance(value, dict):
        yield _Home(place, value, value.update)
    elif isinstance(value, list | tuple):
        parts = {f"{place}[{index}]": part for index, part in enumerate(value)}
    elif isinstance(value, functools.partial):
        parts = {place: value.func, f"{place} (arguments)": [*value.args, value.keywords]}
    elif isinstance(value, types.MethodType):
        parts = {place: value.__self__}
    elif isinstance(value, types.FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        cells = {name: cell for name, cell in cells.items() if cell != types.CellType()}
        mine = {name: cell.cell_contents for name, cell in cells.items()}
        yield _Home(f"{place} (closure)", mine, lambda new: _fill(cells, new))
        yield _Home(f"{place} (attributes)", vars(value), vars(value).update)
        parts = {f"{place}.{name}": part for name, part in {**mine, **vars(value)}.items() if callable(part)}
        parts |= {f"{place} (defaults)": [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]}
    elif all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        yield _Home(place, value.state_dict(), value.load_state_dict)
    elif hasattr(value, "__dict__"):
        yield _Home(place, vars(value), vars(value).update)
    elif callable(value) and (slots := getattr(type(value), "__slots__", ())):
        mine = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        yield _Home(place, mine, lambda new: _set(value, new))
    for name, part in parts.items():
        yield from _homes(part, name, seen)


def _fill(cells: Mapping[str, types.CellType], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        cells[name].cell_contents = value


def _set(target: object, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(target, name, value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
