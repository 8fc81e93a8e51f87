"""The user's training function: its arguments, how another process imports it, and the outcome of a run."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import math
import multiprocessing
import os
import platform
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from cpt_fx.errors import nearest
from cpt_fx.schedules import Schedule
from cpt_fx.schedules.base import is_importable
from cpt_fx.schedules.memory import fresh

Task = tuple[Schedule, int, dict[str, Any], str | None]
"""The input of a training run: schedule, seed, options, and the name of the metric that is compared."""
PACKAGES = ("cpt_fx", "torch", "numpy", "torch_geometric", "transformers")
STARTING = "cpt-fx study worker, starting"
"""A worker's name while it imports the training function's file."""
_loaded: dict[Path, ModuleType] = {}


@dataclass(frozen=True)
class TrainFunction:
    """A training function of (schedule) or (schedule, seed), and of options by name."""

    call: Callable[..., object]
    reference: str | None
    """`/path/file.py:name` or `module:name`; None where no other process can import it."""
    takes_seed: bool

    def __call__(self, schedule: Schedule, seed: int, options: Mapping[str, Any]) -> object:
        """Run the training function, and return what it returns."""
        return self.call(schedule, **({"seed": seed} if self.takes_seed else {}), **options)

    @property
    def name(self) -> str:
        """The default name of a study."""
        own = getattr(self.call, "__name__", "study")
        if self.reference is None:
            return "study" if own == "<lambda>" else own
        place, _, own = self.reference.rpartition(":")
        stem = Path(place).stem if place.endswith(".py") else place.rpartition(".")[2]
        return stem if own == "train" else f"{stem}.{own}"

    @property
    def fingerprint(self) -> str | None:
        """A digest of the function's source file, to notice changes; None where it has none."""
        try:
            file = inspect.getsourcefile(inspect.unwrap(self.call))
            return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
        except (OSError, TypeError):
            return None


def train_function(train: Callable[..., object] | str, options: Mapping[str, Any]) -> TrainFunction:
    """Return the training function for a callable or a reference, checked against the options it will get."""
    if not isinstance(train, str) and not callable(train):
        raise TypeError(f'train must be a function, or a text such as "file.py:train", got {train!r}')
    call, where = find(train) if isinstance(train, str) else (train, _reference(train))
    if not callable(call):
        raise TypeError(f"{train} must be a function, it is {call!r}")
    return TrainFunction(call, where, _takes_seed(call, options))


def find(reference: str) -> tuple[Any, str]:
    """Return what `file.py:name`, or `module:Class.name`, refers to, and the reference with the full path."""
    place, _, path = reference.rpartition(":")
    if not place or not path:
        raise ValueError(
            f'a training function is named as in "file.py:train" or "package.module:train", got {reference!r}'
        )
    if place.endswith(".py"):
        place = str(Path(place).resolve())
        found: Any = _load_file(Path(place))
    else:
        found = _imported(place, reference)
    where = place
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{where} has no {part!r}.{nearest(part, vars(found))}")
        found, where = getattr(found, part), f"{where}.{part}"
    return found, f"{place}:{path}"


def _imported(module: str, reference: str) -> ModuleType:
    """Return the module of a reference, from the current folder or installed."""
    if os.getcwd() not in sys.path:  # `python -m` adds it, the script in bin/ does not
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise ImportError(f"there is no module {error.name}, looked for by {reference!r}") from error
        raise


def load_in_worker(reference: str) -> Any:
    """Load a function in a worker process, marked so that a file that starts a study when imported raises an error."""
    worker = multiprocessing.current_process()
    name, worker.name = worker.name, STARTING
    try:
        return find(reference)[0]
    finally:
        worker.name = name


def refuse_in_worker() -> None:
    """Raise an error if a study starts while a worker imports the file that starts it: it would never end."""
    process = multiprocessing.current_process()
    if process.name == STARTING or getattr(process, "_inheriting", False):  # the latter while it imports the script
        raise RuntimeError(
            "this study starts whenever its file is imported, and its worker processes import it: put the call below "
            'the line `if __name__ == "__main__":`'
        )


def _load_file(path: Path) -> ModuleType:
    """Import a file; its folder is added to `sys.path`, so that modules beside it can be imported too."""
    if path in _loaded:
        return _loaded[path]
    if not path.is_file():
        # On a machine of a cluster the file is in the working directory that was sent there.
        beside = Path.cwd() / path.name
        if not beside.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        return _load_file(beside)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _loaded[path] = module
    return module


def _reference(call: Any) -> str | None:
    """Return how another process can import a function, or None where it cannot."""
    name, module = getattr(call, "__qualname__", ""), sys.modules.get(getattr(call, "__module__", None) or "")
    if module is None or not is_importable(call):
        return None
    if module.__name__ == "__main__":
        file = getattr(module, "__file__", None)
        return f"{Path(file).resolve()}:{name}" if file and file.endswith(".py") else None
    loaded = next((path for path, one in _loaded.items() if one is module), None)
    return f"{loaded or module.__name__}:{name}"


def _takes_seed(call: Callable[..., object], options: Mapping[str, Any]) -> bool:
    """Return whether a function takes the seed; raise an error if it cannot be called with its arguments."""
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        raise TypeError(f"what arguments {call!r} takes cannot be seen: wrap it in a function") from None
    name = getattr(call, "__name__", "train")
    if not parameters:
        raise TypeError(f"{name} must take the schedule as its first argument: it takes none")
    first, *rest = parameters
    by_name = {one.name for one in rest if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters)
    for option in options:
        if option in (first.name, "seed"):
            raise ValueError(f"options must not hold {option!r}: the study itself gives it to {name}")
        if option not in by_name and not anything:
            others = sorted(by_name - {"seed"})
            raise ValueError(f"{name} takes no argument {option!r} of options.{nearest(option, others)}")
    single = [one for one in rest if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
    needed = [one.name for one in single if one.default is one.empty]
    if missing := [one for one in needed if one not in ("seed", *options)]:
        raise TypeError(f"{name} needs {', '.join(missing)}: give options={{{missing[0]!r}: ...}}")
    return "seed" in by_name or anything


# A run and its outcome.


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a training run returned, or why it failed."""

    status: str
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    started: str
    seconds: float
    machine: dict[str, object] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    widths: list[tuple[int, ...]] = field(default_factory=list)
    """Weight, activation and gradient width, and the number of steps they ran for; empty if no step was made."""


class Stopwatch:
    """When something began, and how long it has taken so far."""

    def __init__(self) -> None:
        self.started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """The elapsed time."""
        return round(time.perf_counter() - self._began, 3)

    def failed(self, error: str) -> Outcome:
        """Return the outcome of a run that was lost."""
        return Outcome(status="failed", error=error, started=self.started, seconds=self.seconds)


def execute(train: TrainFunction, threads: int, task: Task) -> Outcome:
    """Seed, train, and check what is returned; errors of the training become part of the outcome."""
    import torch

    schedule, seed, options, metric = task
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    watch = Stopwatch()
    error, metrics, widths = None, dict[str, float](), list[tuple[int, ...]]()
    try:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        # stdout is for the study's own output, such as --json. Each run gets a fresh copy of the schedule's state.
        with redirect_stdout(sys.stderr), fresh(schedule) as own:
            returned = train(own, seed, options)
            widths = [(*bits, count) for bits, count in own._widths_that_ran()]
        metrics, error = checked(returned, metric)
    except (Exception, SystemExit):  # the training may call sys.exit(); the study continues
        error = traceback.format_exc()
    finally:
        torch.set_num_threads(before)
    return Outcome(
        status="done" if error is None else "failed",
        error=error,
        metrics=metrics,
        started=watch.started,
        seconds=watch.seconds,
        machine={"processor": processor(), "cores": os.cpu_count() or 1, "threads": threads},
        versions=versions(PACKAGES),
        widths=widths,
    )


def checked(returned: object, metric: str | None) -> tuple[dict[str, float], str | None]:
    """Return the finite numbers among what a training function returned, and an error message if it is not valid."""
    found = returned if isinstance(returned, Mapping) else {metric or "metric": returned}
    metrics: dict[str, float] = {}
    wrong = []
    for key, value in found.items():
        number = _number(value)
        if number is None:
            wrong.append(f"{key} = {value!r}, not a number")
        elif not math.isfinite(number):
            wrong.append(f"{key} = {number}")
        else:
            metrics[str(key)] = number
    compared = metric or next((str(key) for key in found), None)
    if compared is None:
        return metrics, "the training function returned an empty dict"
    if compared in metrics:
        return metrics, None
    if wrong:
        return metrics, f"the training function returned {'; '.join(wrong)}"
    return metrics, absent(compared, metrics)


def absent(metric: str, metrics: Mapping[str, float]) -> str:
    """Return the message that the compared metric was not returned."""
    return f"the training function returned no {metric!r}, but {', '.join(metrics) or 'an empty dict'}"


def _number(value: object) -> float | None:
    """Return a float for a number, a numpy scalar or a tensor of one element."""
    item = getattr(value, "item", None)
    if callable(item):
        try:
            value = item()
        except (RuntimeError, ValueError):  # it has several elements
            return None
    # A bool is an int in Python; as a result it is a mistake.
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


# Where a run was made.


def processor() -> str:
    """Return the name of the processor, or of the machine where the system does not tell it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"Python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
