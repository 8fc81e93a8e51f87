"""Records that were made up, with effects that are known: tests compare what a report says with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cpt_fx.schedules import NAMES, Bits, Deficit, Delayed, Schedule, Sequence, Static, mean_costs, named, relative_cost
from cpt_fx.study.records import Record

TOTAL = 800


def record(label: str, schedule: Schedule, value: float | None, seed: int = 0, **changes: Any) -> Record:
    """One cell, all of it plausible."""
    q_min, q_max = changes.pop("bits", (3, 8))
    total = schedule.total_steps or TOTAL
    made = Record(
        study="made-up",
        experiment="schedules",
        label=label,
        schedule=repr(schedule),
        q_min=q_min,
        q_max=q_max,
        seed=seed,
        total_steps=total,
        relative_cost=relative_cost(schedule, q_max),
        mean_bits=mean_costs(schedule).mean_bits,
        first_cycle_bits=float(schedule.trajectory()[: total // 8, 0].mean()),
        status="failed" if value is None else "done",
        error="ValueError: the loss is nan at step 40" if value is None else None,
        metric="accuracy",
        better="higher",
        value=value,
        metrics={} if value is None else {"accuracy": value, "loss": 1 - value},
        started="2026-01-01T12:00:00+00:00",
        seconds=12.5,
        machine={"processor": "a processor", "cores": 2, "threads": 1},
        versions={"cpt_fx": "0.1.0", "torch": "2.13.0"},
        options={"data": "digits"},
    )
    return dataclasses.replace(made, **changes)


def schedules(bits: tuple[int, int] = (3, 8), names: Iterable[str] = NAMES) -> dict[str, Schedule]:
    """The schedules and baselines of a comparison, by label."""
    q_min, q_max = bits
    return {
        **{name: named(name, q_min=q_min, q_max=q_max, total_steps=TOTAL) for name in names},
        f"static {q_max}": Static(q_max, total_steps=TOTAL),
        f"static {q_min}": Static(Bits(q_min, q_min, q_max), total_steps=TOTAL),
        "full precision": Static(32, total_steps=TOTAL),
    }


def comparison(
    means: Mapping[str, float], *, seeds: int = 3, noise: float = 0.0, bits: tuple[int, int] = (3, 8), **changes: Any
) -> list[Record]:
    """A study in which every label of `means` has that mean, with normal noise."""
    random = np.random.default_rng(7)
    built = schedules(bits)
    return [
        record(label, built[label], means[label] + noise * float(random.normal()), seed, bits=bits, **changes)
        for seed in range(seeds)
        for label in means
    ]


def by_cost(*, slope: float = 0.05, bits: tuple[int, int] = (3, 8), **options: Any) -> list[Record]:
    """A study in which quality rises with cost: 0.9 at static q_max, `slope` less at no cost at all."""
    means = {
        label: 0.9 + slope * (min(relative_cost(schedule, bits[1]), 1.0) - 1.0)
        for label, schedule in schedules(bits).items()
    }
    return comparison(means, bits=bits, **options)


def deficits(
    lengths: Iterable[int] = (0, 100, 200, 400),
    *,
    harm: float = 1e-4,
    seeds: int = 3,
    noise: float = 0.0,
    longer: bool = False,
) -> list[Record]:
    """Low precision in the first steps: each of them costs `harm`, and makes the run longer if asked to."""
    random = np.random.default_rng(8)
    made = []
    for seed in range(seeds):
        for length in lengths:
            schedule = Deficit(q_min=3, q_max=8, steps=length, total_steps=TOTAL + longer * length)
            value = 0.9 - harm * length + noise * float(random.normal())
            made.append(record(f"deficit {length}", schedule, value, seed, experiment="deficit", first_cycle_bits=None))
    return made


def windows(
    starts: Iterable[int] = (0, 100, 200, 400), *, length: int = 200, harm: float = 0.05, seeds: int = 3
) -> list[Record]:
    """A window of low precision that does less harm the later it comes, and one run without."""
    random = np.random.default_rng(9)
    made = []
    for seed in range(seeds):
        noise = 0.002 * random.normal(size=8)
        made.append(record("static 8", Static(8, total_steps=TOTAL), 0.9 + float(noise[0]), seed, experiment="window"))
        for index, start in enumerate(starts, start=1):
            schedule = Deficit(q_min=3, q_max=8, start=start, steps=length, total_steps=TOTAL)
            value = 0.9 - harm * (1 - start / TOTAL) + float(noise[index])
            made.append(record(f"window {start}", schedule, value, seed, experiment="window", first_cycle_bits=None))
    return made


def first_cycles(*, harm: float = 0.02, seeds: int = 3, noise: float = 0.002) -> list[Record]:
    """RTV and ETV: equal cost; the one with the low first cycle is worse by `harm`. And static 8."""
    built = schedules(names=("RTV", "ETV"))
    random = np.random.default_rng(10)
    return [
        record(
            label,
            built[label],
            0.9 - harm * (label == "ETV") + noise * float(random.normal()),
            seed,
            experiment="first-cycle",
        )
        for seed in range(seeds)
        for label in ("RTV", "ETV", "static 8")
    ]


def delayed(*, gain: float = 0.01, seeds: int = 3, noise: float = 0.002) -> list[Record]:
    """CR and RR: as they are; after a start at high precision, which gains `gain`; after one at low, which costs it."""
    random = np.random.default_rng(11)
    made = []
    for seed in range(seeds):
        parts: list[tuple[str, Schedule, float]] = [("static 8", Static(8, total_steps=TOTAL), 0.02)]
        for name in ("CR", "RR"):
            rest = named(name, q_min=3, q_max=8, total_steps=TOTAL - 100)
            low = Static(Bits(3, 3, 8), total_steps=100)
            parts.append((name, named(name, q_min=3, q_max=8, total_steps=TOTAL), 0.0))
            parts.append((f"{name} delayed 100", Delayed(rest, 100), gain))
            parts.append((f"{name} after deficit 100", Sequence([low, rest]), -gain))
        for label, schedule, more in parts:
            value = 0.88 + more + noise * float(random.normal())
            made.append(record(label, schedule, value, seed, experiment="delayed"))
    return made
