"""The census over torch's database of operators: `python -m tests.operators.op_db` looks at everything."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Iterator
from time import time

from tests.operators.census import FRONTENDS, GOOD, Run, judge, multiplies, plain
from tests.operators.entries import Call, calls
from tests.operators.seen import Product
from tests.operators.strangers import strangers

SAMPLES = 6
"""Samples of an entry in which the short form looks for a product."""


def multiplying(samples: int | None, *, variants: bool) -> Iterator[tuple[Call, Run]]:
    """Of each entry and variant, the call that multiplies most, before all forward, on factors that say something."""
    for found in calls(samples, variants=variants):
        runs = [(call, seen) for call in found if (seen := plain(call)) is not None and multiplies(seen)]
        if runs:
            yield max(runs, key=lambda pair: [_telling(pair[1].forward), _telling(pair[1].backward)])


def _telling(products: list[Product]) -> int:
    """Count the products whose factors have more levels than two bits allow: on those, quantizers can be seen."""
    return sum(product.off_grid for product in products)


def every(*, variants: bool) -> Iterator[tuple[Call, Run]]:
    """Return every call that multiplies, with every sample."""
    for found in calls(None, variants=variants):
        for call in found:
            seen = plain(call)
            if seen is not None and multiplies(seen):
                yield call, seen


def of_strangers() -> Iterator[tuple[Call, Run]]:
    """Return what is not in the database, also where it multiplies nothing."""
    for call in strangers():
        seen = plain(call)
        assert seen is not None, f"torch itself does not run {call}"
        yield call, seen


def faults(found: Iterable[tuple[Call, Run]], frontends: tuple[str, ...], *, show: bool = False) -> Iterator[str]:
    """Judge each call in each frontend; return a line for what is silent, wrong or broken."""
    for call, expected in found:
        for frontend in frontends:
            verdict = judge(call, frontend, expected)
            line = f"{call} {frontend}: {verdict}"
            if show:
                print(line, flush=True)
            if verdict.kind not in GOOD:
                yield line


def main() -> int:
    """Look at everything, or at entries by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one sample of each entry, as the tests have it")
    parser.add_argument("--variants", action="store_true", help="one sample of each variant of each entry")
    parser.add_argument("--strangers", action="store_true", help="only what is not in the database")
    parser.add_argument("--frontends", nargs="+", default=FRONTENDS, choices=FRONTENDS)
    given = parser.parse_args()
    logging.getLogger("cpt_fx").setLevel(logging.ERROR)
    start = time()
    if given.strangers:
        found = of_strangers()
    elif given.short or given.variants:
        found = multiplying(SAMPLES, variants=given.variants)
    else:
        found = every(variants=True)
    lines = list(faults(found, tuple(given.frontends), show=True))
    print(f"{len(lines)} faults in {time() - start:.0f} s", *lines, sep="\n  ")
    return len(lines) > 0


if __name__ == "__main__":
    sys.exit(main())
