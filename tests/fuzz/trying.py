"""One model under every oracle, in every frontend: what came out, as plain data."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import cpt_fx
from cpt_fx.ir.verifier import SpecError
from tests.fuzz import oracles
from tests.fuzz.case import Case, Seen, Wrong, plain_runs
from tests.fuzz.model import draw
from tests.fuzz.oracles import FRONTENDS, ORACLES, NotExportable, Skipped, Trial
from tests.fuzz.scope import Unfit

BETWEEN = "alike"
"""The oracle that compares two frontends."""


@dataclasses.dataclass
class Fault:
    """Something that should not be."""

    oracle: str
    frontend: str
    kind: str
    """The class of error, or `Wrong`."""
    message: str
    place: str = ""
    """The last line of the package, or else of anybody, that an error came from."""

    @property
    def signature(self) -> str:
        """What faults of one cause have in common, as far as one can tell."""
        text = re.sub(
            r"[a-z_]+\d+(\.\w+)*|\d+(\.\d+)?(e[-+]?\d+)?|drawn_\w+|\bfor (training|evaluation)\b", "#", self.message
        )
        return f"{self.oracle} · {self.kind} · {self.place} · {text[:70]}"


@dataclasses.dataclass
class Outcome:
    """What came out for one model."""

    number: int
    fits: bool = True
    states: dict[str, str] = dataclasses.field(default_factory=dict)
    """Frontend -> "captured", "refused: ...", "not exportable", "failed"."""
    passes: dict[str, str] = dataclasses.field(default_factory=dict)
    """Frontend and oracle -> "passed", "failed", or why it had nothing to say."""
    faults: list[Fault] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


class TooLong(BaseException):
    """The time for a model is over. No `except Exception` of a model, or of ours, stops it."""


def examine(
    number: int,
    source: str,
    folder: Path,
    *,
    frontends: Sequence[str] = FRONTENDS,
    chosen: Sequence[str] | None = None,
    limit: int = 90,
) -> Outcome:
    """Try a model; `chosen` are the oracles to ask, by default those that its number draws."""
    outcome, start = Outcome(number), time.perf_counter()
    case = None
    try:
        with _limited(limit), _silent():
            case = Case.load(source, folder)
            plain = plain_runs(case)
            _examine(outcome, case, plain, frontends, chosen)
    except Unfit:
        outcome.fits = False
    except TooLong:
        outcome.faults.append(Fault("time", "", "TooLong", f"longer than {limit} s"))
    except Exception as error:
        outcome.faults.append(fault("load", "", error))
    finally:
        if case is not None:
            case.close()
        torch._dynamo.reset()
        outcome.seconds = time.perf_counter() - start
    return outcome


def _examine(
    outcome: Outcome, case: Case, plain: dict[str, Seen], frontends: Sequence[str], chosen: Sequence[str] | None
) -> None:
    chance = random.Random(case.source)
    asked = (
        [name for name, (_, share) in ORACLES.items() if chance.random() < share] if chosen is None else list(chosen)
    )
    trials: dict[str, Trial] = {}
    for frontend in frontends:
        trial = _captured(outcome, case, plain, frontend)
        if trial is not None:
            trials[frontend] = trial
            # "auto" is one of the other two: what they say of it is said already.
            few = frontend == "auto" and chosen is None
            _ask(outcome, trial, [name for name in asked if not few or name in ("same", "census")])
        if frontend == "auto":
            torch._dynamo.reset()
    both = [trials.get(frontend) for frontend in ("symbolic", "dynamo")]
    if None not in both and (chosen is None or BETWEEN in chosen):
        _one(outcome, BETWEEN, "dynamo", lambda: oracles.alike(*both))  # type: ignore[arg-type]


def _captured(outcome: Outcome, case: Case, plain: dict[str, Seen], frontend: str) -> Trial | None:
    try:
        trial = Trial(case, frontend, plain)
        outcome.states[frontend] = "captured"
        return trial
    except NotExportable as error:
        outcome.states[frontend] = f"not exportable: {error}"
    except (cpt_fx.VerificationError, SpecError) as error:  # of a proof of `transform`'s own: no refusal
        outcome.states[frontend] = "failed"
        outcome.faults.append(fault("proof", frontend, error))
    except cpt_fx.TransformError as error:
        outcome.states[frontend] = f"refused: {reason(str(error))}"
        if _silent_refusal(str(error), case, frontend):
            outcome.faults.append(Fault("capture", frontend, "no place", str(error)[:300]))
    except Exception as error:
        outcome.states[frontend] = "failed"
        outcome.faults.append(fault("capture", frontend, error))
    return None


def _silent_refusal(message: str, case: Case, frontend: str) -> bool:
    """Whether a refusal is a word without a sentence."""
    return len(message.split()) < 4


def _ask(outcome: Outcome, trial: Trial, names: Sequence[str]) -> None:
    for name in names:
        if name in ORACLES and not _one(outcome, name, trial.frontend, lambda name=name: ORACLES[name][0](trial)):
            return


def _one(outcome: Outcome, oracle: str, frontend: str, ask: Any) -> bool:
    """Ask one oracle; return whether there is any use in asking more."""
    key = f"{frontend} {oracle}"
    try:
        ask()
        outcome.passes[key] = "passed"
    except Skipped as why:
        outcome.passes[key] = str(why)
    except cpt_fx.TransformError as error:
        if not isinstance(error, (cpt_fx.VerificationError, SpecError)) and oracle != "proof":
            outcome.states[frontend] = f"refused: {reason(str(error))}"
            return False
        outcome.passes[key] = "failed"
        outcome.faults.append(fault(oracle, frontend, error))
    except Exception as error:
        outcome.passes[key] = "failed"
        outcome.faults.append(fault(oracle, frontend, error))
        return isinstance(error, Wrong)
    return True


def fault(oracle: str, frontend: str, error: Exception) -> Fault:
    """Describe an error by what it says and by where in the package it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}cpt_fx{os.sep}" in frame.filename or "passes" in frame.filename]
    last = ([*ours] or [*frames])[-1]
    place = "" if isinstance(error, Wrong) else f"{Path(last.filename).name}:{last.name}"
    kind = type(error).__name__
    # Folders are another one at each run.
    text = re.sub(r"(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", str(error).strip()) or kind
    return Fault(oracle, frontend, kind, text[:1500], place)


def reason(message: str) -> str:
    """Return what refusals of one class have in common: the sentence without names and numbers."""
    first = message.strip().splitlines()[0]
    first = re.sub(r"(/[\w./<>-]+|\S+\.py):?\d*|, line \d+|line \d+|'[^']*'|\"[^\"]*\"", "…", first)
    return re.sub(r"\b\w*\d+\w*\b", "#", first)[:110]


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Stop after so many seconds of this process's own work: how busy the machine is makes no fault."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Models print; that is not for anybody to read."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def try_number(seed: int, number: int, folder: Path, limit: int = 90) -> tuple[Outcome, str]:
    """Draw a model by its number and try it; one that does not run, or not to numbers, is drawn anew."""
    for attempt in range(8):
        source = draw(seed, number * 8 + attempt)
        outcome = examine(number, source, folder, limit=limit)
        if outcome.fits:
            break
    if number % 50 == 0:
        gc.collect()
    return outcome, source
