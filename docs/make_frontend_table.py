"""Write docs/frontends.md, what each frontend makes of the zoo of the tests: python docs/make_frontend_table.py

Takes half an hour or so on two cores. Models of packages that are not installed are left out, and the page says which.
"""

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import re
import sys
import textwrap
import warnings
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.capture.faithful import stages  # noqa: E402
from tests.zoo import ANY_MODEL, Entry  # noqa: E402
from tests.zoo.any_model import missing  # noqa: E402

FRONTENDS = ("symbolic", "export", "dynamo", "auto")
LONGEST = 150
TOP = """\
# Frontends

What each value of `capture=` makes of the models in `tests/zoo/`, which are small, seeded ones of the families that
people train. A model passes if outputs, gradients and buffers of a training step at 32 bits are the plain model's,
with another batch size too, and its output in evaluation; if the keys of its `state_dict` are kept; and if it trains at
4 bits with every quantizer at work. "The plain model's" is to the last bit, and to 1e-5 of the largest element where a
fused operator was decomposed. TorchScript passes where it is refused.

This page is written by `docs/make_frontend_table.py` (torch {torch}).

| family | models | {frontends} |
| --- | ---: | {rules} |
"""


def result_of(entry: Entry, frontend: str) -> str:
    """Return nothing if a model passes all stages, else the stage it fails and the reason."""
    stage = ""
    torch._dynamo.reset()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for reached in stages(entry, frontend):
                stage = reached
    except Exception as error:
        return f"{stage}: {shortened(error)}"
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return ""


def shortened(error: Exception) -> str:
    """Return the first sentence of an error, or what its list begins with, without what differs from run to run."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else ""
    if isinstance(error, AssertionError) and (not text or text.startswith("assert ")):
        text = "the numbers are not those of the plain model"
    text = re.sub(r"0x[0-9a-f]+|/\S*/(?:site-packages|python3\.\d+)/|" + re.escape(f"{ROOT}/"), "", text)
    kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
    return (
        textwrap.shorten(kind + text, LONGEST, placeholder=" ...")
        .replace("|", "\\|")
        .replace("<", "\\<")
        .replace("](", "] (")
    )


def table(results: dict[str, dict[str, str]]) -> str:
    """Return one row per family: how many models there are, and how many pass."""
    families = defaultdict(list)
    for name in results:
        families[ANY_MODEL[name].family].append(name)
    rows = []
    for family, names in [*families.items(), ("**all**", list(results))]:
        passed = [sum(not results[name][frontend] for name in names) for frontend in FRONTENDS]
        rows.append(f"| {family} | {len(names)} | {' | '.join(map(str, passed))} |")
    return "\n".join(rows)


def reasons(results: dict[str, dict[str, str]]) -> str:
    """Return what is said about the models that do not pass, one list per frontend, equal reasons together."""
    parts = []
    for frontend in FRONTENDS:
        grouped = defaultdict(list)
        for name, said in results.items():
            if said[frontend]:
                grouped[said[frontend]].append(f"`{name}`")
        parts.append(f"## {frontend}\n")
        parts += [f"* {', '.join(names)}: {reason}" for reason, names in grouped.items()] or ["Every model passes."]
        parts.append("")
    return "\n".join(parts)


def results_of(name: str) -> dict[str, str]:
    """Put one model through all frontends, in a process that does nothing else."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return {frontend: result_of(ANY_MODEL[name], frontend) for frontend in FRONTENDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-most", type=int, metavar="N", help="run N models of each family; the page says so")
    at_most = parser.parse_args().at_most
    absent = sorted({entry.needs for entry in ANY_MODEL.values() if entry.needs and missing(entry.needs)})
    families = defaultdict(list)
    for name, entry in ANY_MODEL.items():
        if entry.needs not in absent:
            families[entry.family].append(name)
    chosen = [name for names in families.values() for name in names[:at_most]]
    results = {}
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for name, found in zip(chosen, pool.map(results_of, chosen), strict=True):
            results[name] = found
            print(name, {frontend: said[:60] or "pass" for frontend, said in found.items()}, flush=True)
    version = torch.__version__.partition("+")[0]
    top = TOP.format(torch=version, frontends=" | ".join(FRONTENDS), rules=" | ".join(["---:"] * len(FRONTENDS)))
    gone = f"\nNot measured, since they were not installed: models of {', '.join(absent)}.\n" if absent else ""
    some = f"\nRun with at most {at_most} models of each family.\n" if at_most else ""
    page = f"{top}{table(results)}\n{gone}{some}\n{reasons(results)}"
    (ROOT / "docs" / "frontends.md").write_text(page.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
