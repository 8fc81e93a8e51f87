"""cpt_fx: cyclic precision training as a compiler pass.

    schedule = cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=64_000)
    model = cpt_fx.transform(model, schedule)
    ...                      # any training loop
    schedule.step()          # after each optimizer step

Names are imported on first use, so that planning a schedule does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpt_fx.common.lazy import on_first_use

__version__ = "0.1.0"

if TYPE_CHECKING:
    from cpt_fx import export as export
    from cpt_fx import functional as functional
    from cpt_fx import operators as operators
    from cpt_fx import ort as ort
    from cpt_fx import passes as passes
    from cpt_fx import recipes as recipes
    from cpt_fx import schedules as schedules
    from cpt_fx import study as study
    from cpt_fx.api import graphs as graphs
    from cpt_fx.api import revert as revert
    from cpt_fx.api import single_graph as single_graph
    from cpt_fx.api import transform as transform
    from cpt_fx.capture import CaptureError as CaptureError
    from cpt_fx.capture.recalibrating import at_bits as at_bits
    from cpt_fx.capture.recalibrating import recalibrate as recalibrate
    from cpt_fx.errors import ExportError as ExportError
    from cpt_fx.errors import TransformError as TransformError
    from cpt_fx.formats import Format as Format
    from cpt_fx.inspection import VerificationError as VerificationError
    from cpt_fx.inspection import inspect as inspect
    from cpt_fx.inspection.cost import cost as cost
    from cpt_fx.overrides import Override as Override
    from cpt_fx.pipeline import Pipeline as Pipeline
    from cpt_fx.schedules import Bits as Bits

_HOMES = {
    "Bits": "cpt_fx.schedules",
    "CaptureError": "cpt_fx.capture",
    "at_bits": "cpt_fx.capture.recalibrating",
    "cost": "cpt_fx.inspection.cost",
    "ExportError": "cpt_fx.errors",
    "Format": "cpt_fx.formats",
    "Override": "cpt_fx.overrides",
    "Pipeline": "cpt_fx.pipeline",
    "recalibrate": "cpt_fx.capture.recalibrating",
    "TransformError": "cpt_fx.errors",
    "VerificationError": "cpt_fx.inspection",
    "graphs": "cpt_fx.api",
    "inspect": "cpt_fx.inspection",
    "revert": "cpt_fx.api",
    "single_graph": "cpt_fx.api",
    "transform": "cpt_fx.api",
    **{
        name: f"cpt_fx.{name}"
        for name in ("export", "functional", "operators", "ort", "passes", "recipes", "schedules", "study")
    },
}

__all__ = sorted(_HOMES)  # pyright: ignore

__getattr__, __dir__ = on_first_use(__name__, _HOMES)
