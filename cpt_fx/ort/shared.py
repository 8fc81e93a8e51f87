"""Parameters that ONNX Runtime and torch have in common, and what `.grad` means between the two."""

from __future__ import annotations

import torch
from torch import nn

from cpt_fx.ort.memory import Memory


class SharedParameters:
    """Torch parameters on the memory of a training run; their gradients lie where the backward pass writes them."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.parameters = {name: nn.Parameter(memory.parameters[name].tensor) for name in memory.gradients}

    def before_backward(self, *, fresh: bool) -> None:
        """Bring gradients to where they belong; those that torch set to None start from zero.

        `fresh`: the backward pass writes over them, whatever they are.
        """
        for name, parameter in self.parameters.items():
            if parameter.data_ptr() != self._memory.parameters[name].tensor.data_ptr():
                raise RuntimeError(
                    f"the parameter {name} was given other memory (parameter.data = ...), which is not trained here: "
                    "write into it instead (parameter.copy_ under torch.no_grad())"
                )
            place = self._memory.gradients[name].tensor
            gradient = parameter.grad
            with torch.no_grad():
                if gradient is None and not fresh:
                    place.zero_()
                elif gradient is not None and gradient.data_ptr() != place.data_ptr() and not fresh:
                    place.copy_(gradient)
            if gradient is None or gradient.data_ptr() != place.data_ptr():
                parameter.grad = place
