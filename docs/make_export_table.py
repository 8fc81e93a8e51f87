"""Write docs/export-operators.md, what becomes of every operator in an export: python docs/make_export_table.py

Needs the extra `ort`. Takes some minutes: every operator is exported, trained for a step, and compared with PyTorch.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.export.operator_case import Case  # noqa: E402
from tests.export.operator_cases import CASES  # noqa: E402
from tests.export.parity import BATCH, EXAMPLE, TOLERANCE, Outcome, run_apart  # noqa: E402

LONGEST = 260
TOP = """\
# Operators in an export to ONNX Runtime training

What `export.ort_training` makes of {count} operators and modules of PyTorch. Each stands in a small model with
parameters before and after it, which is transformed, exported with a batch of {example}, and trained for one step in
ONNX Runtime with a batch of {batch}, at full precision. Loss, the gradients of all parameters and running statistics
are compared with those of the plain model in PyTorch.

* **right** ({right}): as torch's exporter writes it, ONNX Runtime computes the gradients of PyTorch: the largest
  difference is below {tolerance} of the largest element. Gradients that are 0 but for rounding, as that of a bias
  before batch norm, are measured against a hundredth of the model's largest gradient.
* **rewritten** ({rewritten}): so, too, but in another form than torch's exporter would write: ONNX Runtime has no
  gradient for that one, or a wrong one, or draws at random in a way that cannot be repeated.
* **refused** ({refused}): the export ends in an `ExportError` that names the layer and the operator.

There is no fourth kind. An operator that is not in this table is exported if it comes down to ONNX operators whose
gradients were compared here, towards the same inputs ({proven} such pairs), and refused otherwise. Where PyTorch has a
rule for equal elements (`amax` shares a gradient among them, `max(dim)` gives it to the first) or for a bound that is
hit (`clamp` lets the gradient pass, `hardtanh` does not), the export follows it.

Written by `docs/make_export_table.py` (torch {torch}, onnxruntime-training {ort}).
"""


def page(results: list[tuple[Case, Outcome]]) -> str:
    """Return the whole page."""
    from cpt_fx.export.refusals import PROVEN

    counts = Counter(outcome.verdict for _, outcome in results)
    top = TOP.format(
        count=len(results), example=EXAMPLE, batch=BATCH, tolerance=f"{TOLERANCE:g}",
        torch=torch.__version__.partition("+")[0], ort=_installed("onnxruntime-training-cpu", "onnxruntime-training"),
        proven=len(PROVEN), **{verdict: counts[verdict] for verdict in ("right", "rewritten", "refused")},
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
    if outcome.verdict == "rewritten":
        return ", ".join(f"`{name}`" for name in outcome.rewritten)
    lines = outcome.remark.splitlines()
    said = lines[0] if lines else ""
    return _text(said if len(said) <= LONGEST else said[:LONGEST].rpartition(" ")[0] + " ...")


def _text(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("*", "\\*")


def _installed(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", help="run the cases whose section and name match; write no page")
    only = parser.parse_args().only
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [case for case in CASES if only is None or re.search(only, f"{case.section}: {case.name}")]
    results = []
    unexpected = 0
    for case, outcome in run_apart(chosen):
        fine = not case.complaint(outcome.verdict, outcome.remark)
        unexpected += not fine
        print(json.dumps({"section": case.section, "name": case.name, "fine": fine, **asdict(outcome)}), flush=True)
        results.append((case, outcome))
    if only is None and not unexpected:
        (ROOT / "docs" / "export-operators.md").write_text(page(results), encoding="utf-8")
    return min(unexpected, 1)


if __name__ == "__main__":
    sys.exit(main())
