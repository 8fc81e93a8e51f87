"""The plan of a study: a cell for each schedule, seed and (q_min, q_max). Nothing here trains or needs torch."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cpt_fx.errors import check_choice, check_int, nearest
from cpt_fx.schedules import FULL_PRECISION, NAMES, Bits, Cyclic, Deficit, Delayed, Schedule, Sequence, Static, named
from cpt_fx.schedules.bits import check_range
from cpt_fx.schedules.memory import fresh, remembered
from cpt_fx.schedules.savings import costs_of, static_cost
from cpt_fx.study.training import Task, train_function

PERIODS = ("deficit", "window", "first-cycle", "delayed")
"""The experiments on critical learning periods."""
BASELINES = ("static q_max", "static q_min", "full precision")
Labelled = tuple[str, Schedule]
GradientBits = int | tuple[int, int] | None


@dataclass(frozen=True)
class ScheduleFacts:
    """What is known about a schedule before training."""

    widths: str
    """A digest of the planned widths of all steps, and of the initial state of the user's functions."""
    relative_cost: float
    mean_bits: float
    first_cycle_bits: float | None


class Setting:
    """The settings that all cells of a study have in common, validated."""

    def __init__(
        self,
        train: Callable[..., object] | str,
        *,
        name: str | None,
        total_steps: int,
        seeds: int | Iterable[int],
        cycles: int,
        q_grad: GradientBits,
        better: str,
        metric: str | None,
        options: Mapping[str, Any] | None,
    ) -> None:
        self.options = check_options(options)
        self.train = train_function(train, self.options)
        self.study = self.train.name if name is None else name
        if metric is not None and not isinstance(metric, str):
            raise TypeError(f"metric must be the name of what is compared, or None, got {metric!r}")
        if not isinstance(self.study, str) or not self.study.strip():
            raise ValueError(f"name must be a text that names the study, got {name!r}")
        self.metric, self.q_grad = metric, q_grad
        self.total_steps = check_int("total_steps", total_steps, 1)
        self.seeds = check_seeds(seeds)
        self.cycles = check_int("cycles", cycles, 1)
        self.better = check_choice("better", better, ("higher", "lower"))

    def gradient(self, q_max: int) -> int:
        """Return the gradient width of schedules that do not cycle."""
        if self.q_grad is None:
            return q_max
        return self.q_grad if isinstance(self.q_grad, int) else self.q_grad[1]

    def static(self, width: int, q_max: int) -> Static:
        """Return the baseline of one forward width, with gradients as in the schedules, or at 32 bits if it is 32."""
        gradient = FULL_PRECISION if width == FULL_PRECISION else self.gradient(q_max)
        return Static(Bits(width, width, gradient), total_steps=self.total_steps)

    def named(self, name: str, bits: tuple[int, int], total_steps: int | None = None) -> Cyclic:
        """Return one of the ten published schedules."""
        low, high, steps = *bits, self.total_steps if total_steps is None else total_steps
        return named(name, q_min=low, q_max=high, total_steps=steps, cycles=self.cycles, q_grad=self.q_grad)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training run, and its place in a study."""

    setting: Setting
    experiment: str
    label: str
    schedule: Schedule
    facts: ScheduleFacts
    q_min: int
    q_max: int
    seed: int

    @property
    def total_steps(self) -> int:
        """The length of the run."""
        assert self.schedule.total_steps is not None  # checked where the cell is made
        return self.schedule.total_steps

    @cached_property
    def identity(self) -> str:
        """All that a result depends on, as text; cells with the same identity share one run.

        The experiment and the label are not part of it: static 8 bits is the same training in every comparison. The
        widths are, as a digest, because the repr of a schedule made of your own function shows only its name.
        """
        common = self.setting
        return canonical([common.study, repr(self.schedule), self.facts.widths, self.seed, common.options])

    @property
    def place(self) -> tuple[str, str, str, int, int, int]:
        """The key of the cell in a store."""
        return self.setting.study, self.experiment, self.label, self.q_min, self.q_max, self.seed

    @property
    def task(self) -> Task:
        """The data that its training needs, in this process or another."""
        return self.schedule, self.seed, self.setting.options, self.setting.metric


def facts(schedule: Schedule, q_max: int) -> ScheduleFacts:
    """Return the planned cost of a schedule relative to static q_max, and how the schedule begins.

    The cost of a run is computed from the widths that ran: the planned ones, unless the schedule keeps state.
    """
    memory = {place: values for place, values in remembered(schedule).items() if values}
    with fresh(schedule) as planned:
        widths = planned.trajectory()
        digest = hashlib.sha256(widths.tobytes() + repr(memory).encode() * bool(memory)).hexdigest()[:16]
        costs = costs_of(widths)
        return ScheduleFacts(digest, costs.average / static_cost(q_max), costs.mean_bits, _first_cycle_bits(planned))


def _first_cycle_bits(schedule: Schedule) -> float | None:
    """Return the mean forward width over the first cycle's length, from the first step of the run."""
    inner = schedule.schedule if isinstance(schedule, Delayed) else schedule
    if isinstance(inner, Static):
        return float(schedule.bits(0).weight)
    if not isinstance(inner, Cyclic) or inner.total_steps is None:
        return None
    period = inner.period or inner.total_steps / inner.cycles
    return float(schedule.trajectory(max(round(period), 1))[:, 0].mean())


def plan(setting: Setting, schedules: SequenceOf[Any] | None, bits: Iterable[tuple[int, int]]) -> list[Cell]:
    """Return the cells of a comparison of schedules, seed by seed, so that an interrupted study is balanced."""
    entries = check_schedules([*NAMES, *BASELINES] if schedules is None else schedules)
    made: list[tuple[str, str, Schedule, tuple[int, int]]] = []
    for pair in check_bits(bits):
        for entry in entries:
            label, schedule = _build(*entry, setting, pair)
            if schedule.total_steps != setting.total_steps:
                raise ValueError(
                    f"schedules of a study must have its length, but {label!r} has total_steps={schedule.total_steps} "
                    f"where the study has total_steps={setting.total_steps}"
                )
            made.append(("schedules", label, schedule, pair))
    return ordered(setting, made)


def ordered(setting: Setting, parts: Iterable[tuple[str, str, Schedule, tuple[int, int]]]) -> list[Cell]:
    """Return the cells of (experiment, label, schedule, bits), seed by seed; duplicates count once."""
    schedules: dict[tuple[str, str, tuple[int, int]], Schedule] = {}
    for experiment, label, schedule, pair in parts:
        earlier = schedules.setdefault((experiment, label, pair), schedule)
        if earlier != schedule:
            raise ValueError(f"two schedules have the label {label!r}: {earlier!r} and {schedule!r}")
    if not schedules:
        raise ValueError("a study needs at least one schedule and one pair of bits, got none")
    known = {key: facts(schedule, key[2][1]) for key, schedule in schedules.items()}
    return [
        Cell(
            setting=setting, experiment=experiment, label=label, schedule=schedule,
            facts=known[experiment, label, (low, high)], q_min=low, q_max=high, seed=seed,
        )
        for seed in setting.seeds
        for (experiment, label, (low, high)), schedule in schedules.items()
    ]  # fmt: skip


def _build(label: str, thing: Any, setting: Setting, bits: tuple[int, int]) -> tuple[str, Schedule]:
    """Return the label and the schedule that an entry of `schedules` stands for."""
    if isinstance(thing, str):
        found, schedule = _from_text(thing, setting, bits)
        return label or found, schedule
    if not isinstance(thing, Schedule):
        label = label or getattr(thing, "__name__", "")
        thing = thing(q_min=bits[0], q_max=bits[1], total_steps=setting.total_steps)
        if not isinstance(thing, Schedule):
            raise TypeError(f"the function {label} in schedules must return a schedule, it returned {thing!r}")
    label = label or (thing.name or "" if isinstance(thing, Cyclic) else "")
    if label in ("", "<lambda>"):
        raise ValueError(f'a schedule of your own needs a label, as in schedules=[("mine", {thing!r})]')
    return label, thing


def _from_text(text: str, setting: Setting, bits: tuple[int, int]) -> tuple[str, Schedule]:
    if text.upper() in NAMES:
        return text.upper(), setting.named(text.upper(), bits)
    low = text.lower()
    if low in ("full", "full precision"):
        return "full precision", setting.static(FULL_PRECISION, bits[1])
    widths = {"static": bits[1], "static q_max": bits[1], "static q_min": bits[0]}
    number = re.fullmatch(r"static (\d+)", low)
    width = int(number[1]) if number else widths.get(low)
    if width is None:
        known = [*NAMES, *BASELINES, "static 6"]
        listed = ", ".join(f'"{name}"' for name in known)
        raise ValueError(f"schedules may name {listed}, got {text!r}.{nearest(text, known)}")
    return f"static {width}", setting.static(width, bits[1])


# Critical learning periods.


def periods(
    setting: Setting,
    *,
    q_min: int,
    q_max: int,
    experiments: Iterable[str] = PERIODS,
    deficits: Iterable[int] | None = None,
    lengthen: bool = True,
    window: int | None = None,
    starts: Iterable[int] | None = None,
    delayed: Iterable[str] = ("RR", "RTH"),
    delays: Iterable[int] | None = None,
) -> list[Cell]:
    """Return the cells of the experiments on critical learning periods, after checking their settings."""
    bits = check_range(q_min, q_max)
    steps = setting.total_steps
    eighths = [steps * part // 8 for part in range(5)]
    lengths = [*eighths[:3], eighths[4]] if deficits is None else _listed("deficits", deficits)
    width = max(steps // 4, 1) if window is None else check_int("window", window, 1)
    begins = eighths if starts is None else _listed("starts", starts)
    waits = eighths[1:3] if delays is None else _listed("delays", delays)
    parts: dict[str, Iterator[Labelled]] = {
        "deficit": _deficits(setting, bits, lengths, lengthen),
        "window": _windows(setting, bits, width, begins),
        "first-cycle": _first_cycle(setting, bits),
        "delayed": _delayed(setting, bits, _listed("delayed", delayed), waits),
    }
    chosen = [check_choice("experiments", one, PERIODS) for one in _listed("experiments", experiments)]
    cells = [(experiment, label, schedule, bits) for experiment in chosen for label, schedule in parts[experiment]]
    return ordered(setting, cells) if chosen else []


def _deficits(setting: Setting, bits: tuple[int, int], deficits: list[Any], lengthen: bool) -> Iterator[Labelled]:
    for length in deficits:
        check_int("a length of deficits", length, 0, None if lengthen else setting.total_steps - 1)
        total = setting.total_steps + length if lengthen else setting.total_steps
        yield f"deficit {length}", _low(setting, bits, 0, length, total)


def _windows(setting: Setting, bits: tuple[int, int], window: int, starts: list[Any]) -> Iterator[Labelled]:
    for start in starts:
        check_int("a step of starts", start, 0)
        if start + window > setting.total_steps:
            raise ValueError(
                f"a window of {window} steps from step {start} ends after the run of "
                f"total_steps={setting.total_steps}: give a shorter window, or earlier starts"
            )
        yield f"window {start}-{start + window}", _low(setting, bits, start, start + window, setting.total_steps)
    yield f"static {bits[1]}", setting.static(bits[1], bits[1])


def _first_cycle(setting: Setting, bits: tuple[int, int]) -> Iterator[Labelled]:
    if setting.cycles % 2:
        raise ValueError(
            "the first-cycle experiment needs an even number of cycles, because RTV and ETV cost the same only then, "
            f"got cycles={setting.cycles}"
        )
    for name in ("RTV", "ETV"):
        yield name, setting.named(name, bits)
    yield f"static {bits[1]}", setting.static(bits[1], bits[1])


def _delayed(setting: Setting, bits: tuple[int, int], names: list[Any], delays: list[Any]) -> Iterator[Labelled]:
    """Yield runs of equal length: after the delay, the schedule takes the remaining steps."""
    longest = setting.total_steps - setting.cycles
    for name in names:
        check_choice("delayed", name, NAMES)
        yield name, setting.named(name, bits)
        for delay in delays:
            check_int("a number of steps of delays", delay, 1, longest)
            rest = setting.named(name, bits, setting.total_steps - delay)
            low = Static(Bits(bits[0], bits[0], setting.gradient(bits[1])), total_steps=delay)
            yield f"{name} delayed {delay}", Delayed(rest, delay)
            yield f"{name} after deficit {delay}", Sequence([low, rest])
    yield f"static {bits[1]}", setting.static(bits[1], bits[1])


def _low(setting: Setting, bits: tuple[int, int], start: int, end: int, total_steps: int) -> Deficit:
    gradient = setting.gradient(bits[1])
    return Deficit(q_min=bits[0], q_max=bits[1], start=start, end=end, total_steps=total_steps, q_grad=gradient)


# Checks of arguments.


def check_schedules(schedules: Any) -> list[tuple[str, Any]]:
    """Return (label, entry) for all `schedules`: entries are names, schedules or functions; "" is no label."""
    if isinstance(schedules, str | Schedule) or callable(schedules):
        schedules = [schedules]
    entries = []
    for entry in schedules:
        label, thing = entry if isinstance(entry, tuple) and len(entry) == 2 else ("", entry)
        if not isinstance(label, str) or not (isinstance(thing, str | Schedule) or callable(thing)):
            raise TypeError(
                "schedules must hold names, schedules, functions of (q_min, q_max, total_steps), or "
                f"(label, one of these) pairs, got {entry!r}"
            )
        entries.append((label, thing))
    return entries


def check_bits(bits: Any) -> list[tuple[int, int]]:
    """Return the (q_min, q_max) pairs; `bits` may be a single pair."""
    pairs = list(bits)
    if len(pairs) == 2 and all(isinstance(width, int) for width in pairs):
        pairs = [tuple(pairs)]
    checked = []
    for pair in pairs:
        if not isinstance(pair, SequenceOf) or isinstance(pair, str) or len(pair) != 2:
            raise TypeError(f"bits must hold (q_min, q_max) pairs, as in [(3, 8), (4, 8)], got {pair!r}")
        checked.append(check_range(pair[0], pair[1]))
    return list(dict.fromkeys(checked))


def check_seeds(seeds: int | Iterable[int]) -> tuple[int, ...]:
    """Return the seeds; a number n of seeds means 0 to n - 1."""
    if isinstance(seeds, Iterable):
        found = tuple(dict.fromkeys(check_int("a seed of seeds", seed, 0) for seed in seeds))
    else:
        found = tuple(range(check_int("seeds", seeds, 1)))
    if not found:
        raise ValueError("seeds must name at least one seed, got none")
    return found


def check_options(options: Any) -> dict[str, Any]:
    """Return the options as plain data, as they are read back from JSON."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise TypeError(f"options must map names of arguments to values, got {options!r}")
    try:
        text = canonical(dict(options))
    except (TypeError, ValueError) as error:
        raise TypeError(
            "options must be texts, numbers, lists and mappings, because they are kept with the results; "
            f"got {dict(options)!r} ({error})"
        ) from error
    plain: dict[str, Any] = json.loads(text)
    if plain != dict(options):
        warnings.warn(f"options are passed on as they are kept: {plain!r}, not {dict(options)!r}", stacklevel=2)
    return plain


def canonical(data: object) -> str:
    """Return the canonical JSON text of data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def _listed(field: str, values: object) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{field} must be a list, got {values!r}")
    return list(dict.fromkeys(values))
