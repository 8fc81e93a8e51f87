"""Random models in every frontend, under every oracle, for some time or for some models.

python -m tests.fuzz --minutes 60 --seed 1        # on all cores; a fault is shrunk and saved as a test
python -m tests.fuzz --seed 1 --model 17          # one model again: its source, and all that is wrong with it
python -m tests.fuzz --models 100 --json found.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.oracles import ORACLES
from tests.fuzz.report import Report
from tests.fuzz.saving import FOLDER, faults_like, frontends_for, save
from tests.fuzz.shrink import shrunk
from tests.fuzz.trying import Fault, Outcome, try_number
from tests.fuzz.workers import Again, Numbered, Pool, crash, quiet

SHRINKING = 75.0
"""Seconds for a fault of a new kind."""


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, help="for how long; 1 unless --models says how many")
    parser.add_argument("--models", type=int, help="how many models")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first model")
    parser.add_argument("--model", type=int, help="only this one, in this process, with its source")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--record", type=Path, help="the folder for fuzz.json and fuzz.md: benchmarks/results")
    parser.add_argument("--save", type=Path, default=FOLDER, help="the folder for tests of what was found")
    parser.add_argument("--no-shrink", action="store_true", help="only count faults")
    return parser.parse_args()


def main() -> None:
    """Run from the command line."""
    given = options()
    if given.model is not None:
        raise SystemExit(one(given.seed, given.model))
    start = time.monotonic()
    until = start + 60 * given.minutes if given.minutes else start + 60 if given.models is None else float("inf")
    asked = {"minutes": given.minutes, "models": given.models, "first": given.first or None, "seed": given.seed}
    report = Report("python -m tests.fuzz" + "".join(f" --{key} {n:g}" for key, n in asked.items() if n is not None))
    shown = sys.stderr.isatty()

    def tasks() -> Iterator[Numbered]:
        for number in itertools.count(given.first):
            if time.monotonic() > until or (given.models is not None and number >= given.first + given.models):
                return
            yield Numbered(given.seed, number)

    pool, new = Pool(given.workers), []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for task, found in pool.results(tasks()):
            if isinstance(found, str):
                found = (Outcome(task.number, faults=[crash(found)]), "")
            outcome, source = found
            new += [(source, fault) for fault in report.add(outcome)]
            if shown:
                print(f"\r{report.models} models, {report.failing} with a fault", end="", file=sys.stderr)
    except KeyboardInterrupt:
        given.no_shrink = True  # what was found until then is told
    finally:
        pool.close()
    seconds = time.monotonic() - start
    if not given.no_shrink:
        for source, fault in new:
            if source:
                report.saved[fault.signature] = save(smaller(source, fault), fault, given.save).name
    print(report)
    print(f"{seconds:.0f} s with {given.workers} workers: {60 * report.models / max(seconds, 1):.0f} models a minute")
    if given.record is not None:
        (given.record / "fuzz.md").write_text(report.markdown(seconds, given.workers), encoding="utf-8")
        given.json = given.json or given.record / "fuzz.json"
    if given.json is not None:
        given.json.write_text(json.dumps(report.to_dict(seconds, given.workers), indent=1) + "\n", encoding="utf-8")
    raise SystemExit(1 if report.faults else 0)


def smaller(source: str, fault: Fault) -> str:
    """Shrink the model of a fault, in a process of its own."""
    names = list(ORACLES)
    before = tuple(names[: names.index(fault.oracle) + 1]) if fault.oracle in names else ()
    pool = Pool(1)

    def fails(text: str, oracles: tuple[str, ...]) -> bool:
        ((_, found),) = pool.results(iter([Again(text, frontends_for(fault.frontend), oracles)]))
        if isinstance(found, str):
            return fault.kind == "crash"
        likes = [other for other in found.faults if other.kind == fault.kind and other.place == fault.place]
        found.faults = likes
        return found.fits and bool(faults_like(found, fault.frontend, fault.oracle))

    try:
        for oracles in ((fault.oracle,), before):
            if fails(source, oracles):
                return shrunk(source, lambda text, oracles=oracles: fails(text, oracles), SHRINKING)  # type: ignore[misc]
        return source
    finally:
        pool.close()


def one(seed: int, number: int) -> int:
    """Try one model and say everything about it."""
    out = os.fdopen(os.dup(1), "w")
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        outcome, source = try_number(seed, number, Path(folder))
    print(source, file=out)
    for name, state in outcome.states.items():
        print(f"{name}: {state}", file=out)
    for name, said in outcome.passes.items():
        print(f"{name}: {said}", file=out)
    for fault in outcome.faults:
        print(f"FAULT {fault.oracle} {fault.frontend} {fault.kind} {fault.place}: {fault.message}", file=out)
    out.close()
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    main()
