"""A part of the operator table: exported and right, or refused by name. docs/make_export_table.py runs all of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from tests.export.operator_cases import CASES

ROOT = Path(__file__).parents[2]
CHOSEN = (
    "pow, tensor exponent", "maximum, ties", "clamp, tensor bounds", "where, broadcast", "masked_fill, tensor value",
    "detach, all of a layer", "detach, no gradient beyond it", "torch.no_grad() in forward", "in-place operators",
    "to(float16) and back", "complex numbers", "lgamma", "atan", "floor", "amax, ties", "max, dim, ties",
    "prod, with zeros", "cumsum", "cummin, of equal ones", "median, not a number", "std over the batch", "norm, of all",
    "GELU(approximate='none')", "Softplus(beta=2.0, threshold=0.5)", "PReLU(3)", "GroupNorm", "BatchNorm2d",
    "BatchNorm2d, no affine", "BatchNorm2d, momentum=None", "BatchNorm1d in eval mode", "weight_norm", "MaxPool2d",
    "AvgPool2d, padded", "AvgPool2d, divisor_override, padded, ceil_mode", "AvgPool3d", "AdaptiveAvgPool2d, uneven",
    "AdaptiveMaxPool2d, uneven", "Conv3d, groups, stride", "ConvTranspose2d", "einsum, attention",
    "Embedding, padding_idx", "Dropout2d", "multinomial", "RReLU(), random", "split, unused outputs", "flip",
    "pad, reflect, 2d", "interpolate, bilinear", "interpolate, bicubic, antialias",
    "grid_sample, bilinear, border, moving", "gaussian_nll_loss", "linalg.inv",
    "cross_entropy, label_smoothing, weights, ignore_index", "inside the model, label_smoothing",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """Run the chosen cases in two processes, which make a copy of themselves for each: ONNX Runtime may crash."""
    halves = [CHOSEN[start::2] for start in (0, 1)]
    script = [sys.executable, str(ROOT / "docs" / "make_export_table.py"), "--only"]
    patterns = ["|".join(f": {re.escape(name)}$" for name in half) for half in halves]
    runs = [
        subprocess.Popen([*script, pattern], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for pattern in patterns
    ]
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        output, errors = run.communicate()
        lines = [line for line in output.splitlines() if line.startswith("{")]
        assert lines, errors
        found |= {outcome["name"]: outcome for outcome in map(json.loads, lines)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CHOSEN)
def test_exported_and_right_or_refused(name: str, outcomes: dict[str, dict[str, Any]]) -> None:
    case = next(case for case in CASES if case.name == name)
    outcome = outcomes[name]
    assert not case.complaint(outcome["verdict"], outcome["remark"])


def test_every_name_of_a_case_is_there_once_in_its_section() -> None:
    names = [(case.section, case.name) for case in CASES]
    assert len(names) == len(set(names)) >= 170
