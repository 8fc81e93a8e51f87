"""Training of an exported model in ONNX Runtime: what `cpt_fx.export.ort_training` wrote, driven step by step."""

from cpt_fx.export.environment import require_training

# Before anything of it is imported: a missing package, or a mixture of builds, fails there in ways that help nobody.
require_training()

from cpt_fx.ort.state_file import StateFileError  # noqa: E402
from cpt_fx.ort.trainer import Trainer  # noqa: E402

__all__ = ["StateFileError", "Trainer"]
