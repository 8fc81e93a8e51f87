"""Measure all figures of this project, and write the page about them.

    python benchmarks/run.py                      # everything: hours, most of them in compilers
    python benchmarks/run.py --only resnet74      # one model of `compare.py`, or one script below
    python benchmarks/run.py --page               # only the page, from existing results

Each part runs in a separate process, so that parts do not affect each other. Results are written to
benchmarks/results/; benchmarks/README.md is made from them, and says which targets are not met.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from harness.catalog import PRESETS
from readme import page

HERE = Path(__file__).parent
SCRIPTS = ("step_overhead", "transform_scaling", "capture_cost", "recurrent_step", "compiled_zoo")
OPTIONS = {"compiled_zoo": ("gcn", "sdpa_causal_dropout")}
"""The whole zoo would take hours: compiling a model takes about a minute."""
MODELS = tuple(name for name in PRESETS if name != "resnet20")


def command(part: str, results: Path, bench: list[str]) -> list[str]:
    """Return the command that measures one part."""
    if part in SCRIPTS:
        return [sys.executable, str(HERE / f"{part}.py"), *OPTIONS.get(part, ()), "--output", str(results)]
    return [sys.executable, str(HERE / "compare.py"), "--model", part, *bench, "--json",
            "--html", str(results / f"bench_{part}.html")]  # fmt: skip


def measure(part: str, results: Path, bench: list[str]) -> bool:
    """Run one part; for `compare.py` its output is the result."""
    print(f"{part} ...", flush=True)
    if part in SCRIPTS:
        return subprocess.run(command(part, results, bench)).returncode == 0
    run = subprocess.run(command(part, results, bench), stdout=subprocess.PIPE, text=True)
    if run.returncode == 0:
        (results / f"bench_{part}.json").write_text(run.stdout, encoding="utf-8")
    return run.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*PRESETS, *SCRIPTS), default=[*MODELS, *SCRIPTS], metavar="PART")
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--readme", type=Path, default=HERE / "README.md", metavar="FILE", help="(default: %(default)s)"
    )
    parser.add_argument("bench", nargs="*", help="after --: options for `compare.py`, such as --steps 30")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    failed = (
        [] if options.page else [part for part in options.only if not measure(part, options.results, options.bench)]
    )
    options.readme.write_text(page(options.results), encoding="utf-8")
    print(f"wrote {options.readme}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
