"""Experiments on critical learning periods: does low precision early in training do harm that lasts?

deficit      low precision in the first N steps
window       a window of low precision, moved along training
first-cycle  RTV against ETV: they cost the same, but RTV begins with a cycle of high precision and ETV with one of low
delayed      the remedy: a schedule that starts later, at its largest widths until then; and its opposite, the same
             schedule after a deficit
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from typing import Any

from cpt_fx.errors import check_choice, check_int
from cpt_fx.schedules import NAMES, Bits, Deficit, Delayed, Schedule, Sequence, Static
from cpt_fx.schedules.bits import check_range
from cpt_fx.study.cells import Cell, GradientBits, Setting, ordered
from cpt_fx.study.engines import Engine
from cpt_fx.study.running import Study, carry_out, warn_of_failures

EXPERIMENTS = ("deficit", "window", "first-cycle", "delayed")
Labelled = tuple[str, Schedule]


def critical(
    train: Callable[..., object] | str,
    *,
    store: str | PathLike[str],
    name: str | None = None,
    total_steps: int,
    q_min: int = 3,
    q_max: int = 8,
    experiments: Iterable[str] = EXPERIMENTS,
    deficits: Iterable[int] | None = None,
    lengthen: bool = True,
    window: int | None = None,
    starts: Iterable[int] | None = None,
    delayed: Iterable[str] = ("RR", "RTH"),
    delays: Iterable[int] | None = None,
    seeds: int | Iterable[int] = 3,
    cycles: int = 8,
    q_grad: GradientBits = None,
    better: str = "higher",
    metric: str | None = None,
    options: Mapping[str, Any] | None = None,
    workers: int = 1,
    threads: int = 1,
    ray: str | None = None,
    gpus: float = 0,
    progress: bool = True,
) -> Study:
    """Run the experiments on critical learning periods; training, store and engines are as in :func:`run`.

    ``deficits`` are numbers of first steps at q_min (default: none, an eighth, a quarter and half of total_steps). With
    ``lengthen``, as published, such a run is that much longer, so that each has total_steps at q_max; without, all runs
    are total_steps long. ``window`` is the length of the moving window (default: a quarter of total_steps), ``starts``
    where it begins (default: every eighth, to the middle). ``delayed`` names schedules, ``delays`` the steps they wait
    (default: an eighth and a quarter).

    The training function sees which run it is in by its schedule: ``schedule.total_steps``, and of a
    ``cpt_fx.schedules.Deficit`` also ``start`` and ``end``.
    """
    setting = Setting(
        train, name=name, total_steps=total_steps, seeds=seeds, cycles=cycles, q_grad=q_grad, better=better,
        metric=metric, options=options,
    )  # fmt: skip
    cells = periods(
        setting, q_min=q_min, q_max=q_max, experiments=experiments, deficits=deficits, lengthen=lengthen,
        window=window, starts=starts, delayed=delayed, delays=delays,
    )  # fmt: skip
    study = carry_out(setting, cells, store, Engine(workers, threads, ray, gpus), progress)
    warn_of_failures(study, cells)
    return study


def periods(
    setting: Setting,
    *,
    q_min: int,
    q_max: int,
    experiments: Iterable[str] = EXPERIMENTS,
    deficits: Iterable[int] | None = None,
    lengthen: bool = True,
    window: int | None = None,
    starts: Iterable[int] | None = None,
    delayed: Iterable[str] = ("RR", "RTH"),
    delays: Iterable[int] | None = None,
) -> list[Cell]:
    """Return what the experiments consist of; all that can be wrong with them is said here."""
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
    chosen = [check_choice("experiments", one, EXPERIMENTS) for one in _listed("experiments", experiments)]
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
    """Yield runs of one length: the schedule takes what is left of it."""
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
    gradient = None if setting.q_grad is None else setting.gradient(bits[1])
    return Deficit(q_min=bits[0], q_max=bits[1], start=start, end=end, total_steps=total_steps, q_grad=gradient)


def _listed(field: str, values: object) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{field} must be a list, got {values!r}")
    return list(dict.fromkeys(values))
