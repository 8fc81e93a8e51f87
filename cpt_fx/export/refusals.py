"""What no exported graph can say, by layer."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from cpt_fx.errors import ExportError
from cpt_fx.meta import Dial


def check_modules(model: nn.Module) -> None:
    """Refuse layers whose arithmetic depends on how often they were called: a graph is the same for every step."""
    for path, layer in model.named_modules():
        if isinstance(layer, _NORMS) and layer.momentum is None and layer.training and layer.track_running_stats:
            raise ExportError(
                f"{path}: {type(layer).__name__} with momentum=None averages over all batches so far, which no graph "
                "can say: give it a momentum (0.1 is PyTorch's default) before transform"
            )


def check_schedules(dials: Iterable[Dial]) -> None:
    """Refuse parts with a schedule of their own: what is exported is trained under one."""
    own = {repr(dial.schedule) for dial in dials if dial.schedule is not None}
    if own:
        raise ExportError(
            f"a part of the model follows a schedule of its own ({', '.join(sorted(own))}), and ONNX Runtime trains "
            "all parts under one: leave it out of overrides"
        )


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
