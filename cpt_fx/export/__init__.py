"""Transformed models outside PyTorch: ONNX, ONNX for deployment, and training in ONNX Runtime.

Names load on first use: the packages they need are extras, and some of them exclude each other (`environment`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpt_fx.export.environment import require_onnx, require_training
from cpt_fx.lazy import on_first_use

if TYPE_CHECKING:
    from cpt_fx.export.artifacts import ort_artifacts as ort_artifacts
    from cpt_fx.export.deployment import qdq as qdq
    from cpt_fx.export.plain import onnx as onnx
    from cpt_fx.export.reporting import report as report
    from cpt_fx.export.training import ort_training as ort_training

_HOMES = {
    "onnx": "cpt_fx.export.plain",
    "ort_artifacts": "cpt_fx.export.artifacts",
    "ort_training": "cpt_fx.export.training",
    "qdq": "cpt_fx.export.deployment",
    "report": "cpt_fx.export.reporting",
}

__all__ = sorted(_HOMES)  # pyright: ignore

# Before an import fails for its own reasons: this says what to install.
__getattr__, __dir__ = on_first_use(
    __name__, _HOMES, lambda name: require_training() if name.startswith("ort_") else require_onnx()
)
