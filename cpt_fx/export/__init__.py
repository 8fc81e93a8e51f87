"""Transformed models outside PyTorch: ONNX, ONNX for deployment, and training in ONNX Runtime.

Names load on first use: the packages they need are extras, and some of them exclude each other (`environment`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cpt_fx.export.environment import require_onnx, require_training

if TYPE_CHECKING:
    from cpt_fx.export.deployment import qdq as qdq
    from cpt_fx.export.plain import onnx as onnx
    from cpt_fx.export.reporting import report as report
    from cpt_fx.export.training import ort_training as ort_training

_HOMES = {
    "onnx": "cpt_fx.export.plain",
    "ort_training": "cpt_fx.export.training",
    "qdq": "cpt_fx.export.deployment",
    "report": "cpt_fx.export.reporting",
}

__all__ = sorted(_HOMES)  # pyright: ignore


def __getattr__(name: str) -> Any:
    """Import a public name's home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cpt_fx.export' has no attribute {name!r}")
    # Before an import fails for its own reasons: this says what to install.
    (require_training if name == "ort_training" else require_onnx)()
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__})
