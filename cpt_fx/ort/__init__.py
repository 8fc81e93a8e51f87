"""Training of an exported model in ONNX Runtime: what `cpt_fx.export.ort_training` wrote, driven step by step.

Names load on first use: they need a build of ONNX Runtime that trains (extra `ort` or `ort-gpu`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpt_fx.export.environment import require_training
from cpt_fx.lazy import on_first_use

if TYPE_CHECKING:
    from cpt_fx.ort.state_file import StateFileError as StateFileError
    from cpt_fx.ort.trainer import Trainer as Trainer

_HOMES = {"StateFileError": "cpt_fx.ort.state_file", "Trainer": "cpt_fx.ort.trainer"}

__all__ = sorted(_HOMES)  # pyright: ignore

# First: a missing package, or a mixture of builds, fails in the imports in ways that help nobody.
__getattr__, __dir__ = on_first_use(__name__, _HOMES, lambda name: require_training())
