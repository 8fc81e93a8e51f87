"""Write docs/export-operators.md, what becomes of every operator in an export: python docs/make_export_table.py

Needs onnxruntime. Takes some minutes: every operator is exported, run for a step, and compared with PyTorch.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.export.operator_case import Case  # noqa: E402
from tests.export.operator_cases import CASES  # noqa: E402
from tests.export.parity import BATCH, EXAMPLE, TOLERANCE, Outcome, run_apart  # noqa: E402

LONGEST = 260
TOP = """\
# Operators in an exported training step

What `export.ort_training` makes of {count} operators and modules of PyTorch. Each stands in a small model with
parameters before and after it, which is transformed, exported with a batch of {example}, and run for one step in
ONNX Runtime with a batch of {batch}, at full precision. Loss, the gradients of all parameters and running statistics
are compared with those of the plain model in PyTorch.

* **right** ({right}): the largest difference is below {tolerance} of the largest element. Gradients that are 0 but for
  rounding, as that of a bias before batch norm, are measured against a tenth of the model's largest gradient.
* **refused** ({refused}): the export ends in an `ExportError` that names the operator, and the layer that calls it.

There is no third kind. Gradients are what PyTorch's own backward pass makes them, rules for equal elements included:
`amax` shares a gradient among them, `max(dim)` gives it to the first. An operator that is not in this table is exported
if it comes down to operators that ONNX has; every export is compared with PyTorch before it is written.

Written by `docs/make_export_table.py` (torch {torch}, onnxruntime {ort}).
"""


def page(results: list[tuple[Case, Outcome]]) -> str:
    """Return the whole page."""
    counts = Counter(outcome.verdict for _, outcome in results)
    top = TOP.format(
        count=len(results), example=EXAMPLE, batch=BATCH, tolerance=f"{TOLERANCE:g}", right=counts["right"],
        refused=counts["refused"], torch=torch.__version__.partition("+")[0], ort=version("onnxruntime"),
    )  # fmt: skip
    return top + "".join(_sections(results))


def _sections(results: list[tuple[Case, Outcome]]) -> Iterator[str]:
    section = ""
    for case, outcome in results:
        if case.section != section:
            section = case.section
            yield f"\n## {section}\n\n| operator | verdict | remark |\n| --- | --- | --- |\n"
        yield f"| {_text(case.name)} | {outcome.verdict} | {_remark(outcome)} |\n"


def _remark(outcome: Outcome) -> str:
    lines = outcome.remark.splitlines()
    said = lines[0] if lines else ""
    return _text(said if len(said) <= LONGEST else said[:LONGEST].rpartition(" ")[0] + " ...")


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", help="run the cases whose section and name match; write no page")
    parser.add_argument("--known", metavar="FILE", help="lines that earlier runs printed: these cases are not run")
    arguments = parser.parse_args()
    only, file = arguments.only, arguments.known
    lines = Path(file).read_text(encoding="utf-8").splitlines() if file else []
    known = {(line.pop("section"), line.pop("name")): line for line in map(json.loads, lines)}
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [case for case in CASES if only is None or re.search(only, f"{case.section}: {case.name}")]
    results = {name: Outcome(**outcome) for name, outcome in known.items()}
    for case, outcome in run_apart(case for case in chosen if (case.section, case.name) not in known):
        print(json.dumps({"section": case.section, "name": case.name, **asdict(outcome)}), flush=True)
        results[case.section, case.name] = outcome
    found = [(case, results[case.section, case.name]) for case in chosen]
    unexpected = [case.name for case, outcome in found if case.complaint(outcome.verdict, outcome.remark)]
    if unexpected:
        print("not as expected:", ", ".join(unexpected), file=sys.stderr)
    if only is None and not unexpected:
        (ROOT / "docs" / "export-operators.md").write_text(page(found), encoding="utf-8")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main())
