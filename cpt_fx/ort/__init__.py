"""Training of exported models in ONNX Runtime, from a directory that `cpt_fx.export.ort_training` wrote.

Names are imported on first use, since they need ONNX Runtime (extra `ort` or `ort-gpu`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpt_fx.common.lazy import on_first_use
from cpt_fx.ort.environment import require_training

if TYPE_CHECKING:
    from cpt_fx.ort.trainer import Trainer as Trainer
    from cpt_fx.ort.transfer import StateFileError as StateFileError

_HOMES = {"StateFileError": "cpt_fx.ort.transfer", "Trainer": "cpt_fx.ort.trainer"}

__all__ = sorted(_HOMES)  # pyright: ignore

# Checked first: with a missing package, or several builds at once, the imports fail with unhelpful errors.
__getattr__, __dir__ = on_first_use(__name__, _HOMES, lambda name: require_training())
