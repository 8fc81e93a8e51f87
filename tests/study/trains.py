"""Training functions that train nothing: what a study needs of one, and what may go wrong with it."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import torch

from cpt_fx.schedules import Schedule


def train(schedule: Schedule, seed: int, log: str = "", scale: float = 1.0) -> dict[str, float]:
    """Every call leaves a line in the log; the schedule is stepped on, as in training."""
    position = schedule.position
    schedule.step(5)
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{schedule!r} {seed}\n")
    widths = schedule.trajectory()[:, 0]
    return {"accuracy": scale * float(widths.mean()) + seed, "position": position}


def draws(schedule: Schedule) -> dict[str, float]:
    return {"random": random.random(), "numpy": np.random.rand(), "torch": float(torch.rand(()))}


def threads(schedule: Schedule) -> int:
    return torch.get_num_threads()


def faulty(schedule: Schedule, seed: int, mended: str = "") -> object:
    """What happens depends on the schedule; with the file `mended` all is well."""
    name = getattr(schedule, "name", None)
    if mended and Path(mended).exists():
        return 1.0
    if name == "LR":
        raise KeyError("no data")
    if name == "ER":
        return float("nan")
    if name == "RR":
        return "good"
    if name == "CT":
        raise SystemExit(3)
    if name == "LT":
        return {}
    if name == "ETV":
        return {"loss": float("inf"), "accuracy": 0.5}
    return torch.tensor(0.5)


def deadly(schedule: Schedule, seed: int) -> float:
    name = getattr(schedule, "name", None)
    if name == "LR":
        os._exit(7)
    if name == "ER":
        os.kill(os.getpid(), 11)
    if name is None:
        raise KeyError("own")
    return 0.5


def blocking(schedule: Schedule, seed: int, folder: str) -> float:
    """Notes the beginning and the end of every run. Two of them wait until the file `go` is there."""
    name = getattr(schedule, "name", None) or repr(schedule)
    where = Path(folder)
    with open(where / "log", "a", encoding="utf-8") as file:
        file.write(f"begin {os.getpid()} {name} {seed}\n")
    if name in ("RR", "CT") and not (where / "go").exists():
        (where / f"{name} waits").touch()
        time.sleep(600)
    with open(where / "log", "a", encoding="utf-8") as file:
        file.write(f"end {os.getpid()} {name} {seed}\n")
    return 0.5


def interrupted(schedule: Schedule, seed: int) -> float:
    if getattr(schedule, "name", None) == "ER":
        raise KeyboardInterrupt
    return 0.5


def four(step: int) -> int:
    return 4


def gpus(schedule: Schedule) -> int:
    """How many GPUs Ray has given."""
    import ray

    return len(ray.get_gpu_ids())


def identity(fraction: float) -> float:
    """A profile of one's own."""
    return fraction
