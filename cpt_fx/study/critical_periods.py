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
from pathlib import Path
from typing import Any

from cpt_fx.errors import check_choice, check_int
from cpt_fx.schedules import NAMES, Bits, Deficit, Delayed, Schedule, Sequence, Static
from cpt_fx.schedules.bits import check_range
from cpt_fx.study.cells import GradientBits, Setting, check_options, ordered
from cpt_fx.study.engines import Engine
from cpt_fx.study.function import train_function
from cpt_fx.study.running import Plan, Study, carry_out, warn_of_failures

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
    planned = periods(
        train, name=name, q_min=q_min, q_max=q_max, experiments=experiments, deficits=deficits, lengthen=lengthen,
        window=window, starts=starts, delayed=delayed, delays=delays, total_steps=total_steps, seeds=seeds,
        cycles=cycles, q_grad=q_grad, better=better, metric=metric, options=options,
    )  # fmt: skip
    if not planned.cells:
        return Study(Path(store), planned.study)
    study = carry_out(planned, store, Engine(workers, threads, ray, gpus), progress)
    warn_of_failures(study, planned)
    return study


def periods(
    train: Callable[..., object] | str,
    *,
    name: str | None,
    q_min: int,
    q_max: int,
    experiments: Iterable[str] = EXPERIMENTS,
    deficits: Iterable[int] | None = None,
    lengthen: bool = True,
    window: int | None = None,
    starts: Iterable[int] | None = None,
    delayed: Iterable[str] = ("RR", "RTH"),
    delays: Iterable[int] | None = None,
    options: Mapping[str, Any] | None,
    **common: Any,
) -> Plan:
    """Return what the experiments consist of; all that can be wrong with them is said here."""
    function = train_function(train, check_options(options))
    made = Setting(study=function.name if name is None else name, options=options, **common)
    bits = check_range(q_min, q_max)
    steps = made.total_steps
    eighths = [steps * part // 8 for part in range(5)]
    lengths = [*eighths[:3], eighths[4]] if deficits is None else _listed("deficits", deficits)
    width = max(steps // 4, 1) if window is None else check_int("window", window, 1)
    begins = eighths if starts is None else _listed("starts", starts)
    waits = eighths[1:3] if delays is None else _listed("delays", delays)
    parts: dict[str, Iterator[Labelled]] = {
        "deficit": _deficits(made, bits, lengths, lengthen),
        "window": _windows(made, bits, width, begins),
        "first-cycle": _first_cycle(made, bits),
        "delayed": _delayed(made, bits, _listed("delayed", delayed), waits),
    }
    chosen = [check_choice("experiments", one, EXPERIMENTS) for one in _listed("experiments", experiments)]
    cells = [(experiment, label, schedule, bits) for experiment in chosen for label, schedule in parts[experiment]]
    return Plan(made.study, ordered(made, cells) if chosen else [], function)


def _deficits(common: Setting, bits: tuple[int, int], deficits: list[Any], lengthen: bool) -> Iterator[Labelled]:
    for length in deficits:
        check_int("a length of deficits", length, 0, None if lengthen else common.total_steps - 1)
        total = common.total_steps + length if lengthen else common.total_steps
        yield f"deficit {length}", _low(common, bits, 0, length, total)


def _windows(common: Setting, bits: tuple[int, int], window: int, starts: list[Any]) -> Iterator[Labelled]:
    for start in starts:
        check_int("a step of starts", start, 0)
        if start + window > common.total_steps:
            raise ValueError(
                f"a window of {window} steps from step {start} ends after the run of total_steps={common.total_steps}: "
                "give a shorter window, or earlier starts"
            )
        yield f"window {start}-{start + window}", _low(common, bits, start, start + window, common.total_steps)
    yield f"static {bits[1]}", common.static(bits[1], bits[1])


def _first_cycle(common: Setting, bits: tuple[int, int]) -> Iterator[Labelled]:
    if common.cycles % 2:
        raise ValueError(
            "the first-cycle experiment needs an even number of cycles, because RTV and ETV cost the same only then, "
            f"got cycles={common.cycles}"
        )
    for name in ("RTV", "ETV"):
        yield name, common.named(name, bits)
    yield f"static {bits[1]}", common.static(bits[1], bits[1])


def _delayed(common: Setting, bits: tuple[int, int], names: list[Any], delays: list[Any]) -> Iterator[Labelled]:
    """Yield runs of one length: the schedule takes what is left of it."""
    longest = common.total_steps - common.cycles
    for name in names:
        check_choice("delayed", name, NAMES)
        yield name, common.named(name, bits)
        for delay in delays:
            check_int("a number of steps of delays", delay, 1, longest)
            rest = common.named(name, bits, common.total_steps - delay)
            low = Static(Bits(bits[0], bits[0], common.gradient(bits[1])), total_steps=delay)
            yield f"{name} delayed {delay}", Delayed(rest, delay)
            yield f"{name} after deficit {delay}", Sequence([low, rest])
    yield f"static {bits[1]}", common.static(bits[1], bits[1])


def _low(common: Setting, bits: tuple[int, int], start: int, end: int, total_steps: int) -> Deficit:
    gradient = None if common.q_grad is None else common.gradient(bits[1])
    return Deficit(q_min=bits[0], q_max=bits[1], start=start, end=end, total_steps=total_steps, q_grad=gradient)


def _listed(field: str, values: object) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"{field} must be a list, got {values!r}")
    return list(dict.fromkeys(values))
