"""Training of an exported model in ONNX Runtime: what `cpt_fx.export.ort_training` wrote, driven step by step.

Names load on first use: they need a build of ONNX Runtime that trains (extra `ort` or `ort-gpu`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cpt_fx.export.environment import require_training

if TYPE_CHECKING:
    from cpt_fx.ort.state_file import StateFileError as StateFileError
    from cpt_fx.ort.trainer import Trainer as Trainer

_HOMES = {"StateFileError": "cpt_fx.ort.state_file", "Trainer": "cpt_fx.ort.trainer"}

__all__ = sorted(_HOMES)  # pyright: ignore


def __getattr__(name: str) -> Any:
    """Import a public name's home on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cpt_fx.ort' has no attribute {name!r}")
    # First: a missing package, or a mixture of builds, fails in the imports in ways that help nobody.
    require_training()
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted({*globals(), *__all__})
