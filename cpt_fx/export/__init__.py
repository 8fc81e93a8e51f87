"""Export of transformed models: ONNX, integer ONNX for deployment, and training in ONNX Runtime.

Names are imported on first use: the packages they need are extras, some of which exclude each other
(`cpt_fx.ort.environment`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpt_fx.common.lazy import on_first_use
from cpt_fx.ort.environment import require_onnx, require_training

if TYPE_CHECKING:
    from cpt_fx.export.artifacts import ort_artifacts as ort_artifacts
    from cpt_fx.export.deployment import qdq as qdq
    from cpt_fx.export.plain import onnx as onnx
    from cpt_fx.export.reporting import report as report
    from cpt_fx.export.training import ort_training as ort_training

TARGETS = {
    "ort_training": "cpt_fx.export.training",
    "onnx": "cpt_fx.export.plain",
    "qdq": "cpt_fx.export.deployment",
}
"""The function of each target -> its module, whose function `attempt` tries it for `report`."""

_HOMES = TARGETS | {"ort_artifacts": "cpt_fx.export.artifacts", "report": "cpt_fx.export.reporting"}

__all__ = sorted(_HOMES)  # pyright: ignore

# Checked first: its error says what to install, while the import would fail with an unrelated one.
__getattr__, __dir__ = on_first_use(
    __name__, _HOMES, lambda name: require_training() if name.startswith("ort_") else require_onnx()
)
