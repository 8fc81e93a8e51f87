"""What looks alike and is answered truly."""

# Comparisons by identity and by type are what these are about; imports inside stand for those of a user's module.
from __future__ import annotations

import math
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.capture.asking.attributes import Mode
from tests.capture.asking.cases import fine, one


@fine()
def plain_products(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.fc(x) @ y.mT


@fine(make=lambda: {"fc": nn.Linear(4, 4, bias=False), "mode": Mode.MEAN, "act": nn.ReLU()}, inputs=one)
def questions_about_the_module(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    if isinstance(self.fc, nn.Linear) and hasattr(self, "fc") and type(self.fc) is nn.Linear:
        y = y * 2
    if self.mode is Mode.MEAN and getattr(self, "missing", None) is None and self.fc.bias is None:
        y = y * 3
    if callable(self.act) and type(self).__name__ and self.act.__class__ is nn.ReLU:
        y = self.act(y)
    return y


@fine(inputs=one)
def a_bias_that_is_there(self: Any, x: Tensor) -> Any:
    y = x @ self.fc.weight.mT
    if self.fc.bias is not None:
        y = y + self.fc.bias
    return y if y is not None else x


@fine(inputs=one)
def text_about_the_module(self: Any, x: Tensor) -> Any:
    name = f"fc{''}"
    return getattr(self, name)(x) * len(str(type(self)))


@fine(inputs=one)
def asking_in_place_for_gradients(self: Any, x: Tensor) -> Any:
    y = x.detach()
    y.requires_grad_()
    return self.fc(y) * 2


@fine(inputs=one)
def data_in_place(self: Any, x: Tensor) -> Any:
    self.fc.weight.data.clamp_(-0.2, 0.2)
    self.fc.weight.data[0] = 0.1
    return self.fc(x)


@fine(inputs=one)
def a_list_with_holes(self: Any, x: Tensor) -> Any:
    found: list[Any] = [None, self.fc(x)]
    if found[0] is None and found[1] is not None:
        found[0] = x * 2
    return found[0] + found[1]


@fine(inputs=one)
def a_cleanup(self: Any, x: Tensor) -> Any:
    try:
        return self.fc(x)
    finally:
        del x


@fine(inputs=one)
def functions_inside(self: Any, x: Tensor) -> Any:
    parts: list[Any] = []
    count = 0

    def add(y: Any) -> None:
        nonlocal count
        parts.append(y)
        count += 1

    add(self.fc(x))
    add(self.fc(x) * 2)
    return torch.cat(parts) * count


@fine(inputs=one)
def objects_of_its_own(self: Any, x: Tensor) -> Any:
    out = SimpleNamespace(y=self.fc(x), parts=[])
    out.y = out.y * 2
    out.parts.append(out.y)
    return {"y": out.y, "sum": out.parts[0].sum(0)}


@fine(inputs=one)
def sizes_passed_on(self: Any, x: Tensor) -> Any:
    batch, width = x.shape
    return self.fc(x).view(batch, 2, width // 2) * math.sqrt(x.shape[-1]) + torch.zeros(batch, 2, 2, dtype=x.dtype)


@fine(inputs=one)
def containers_asked_about(self: Any, x: Tensor) -> Any:
    parts = [self.fc(x), x]
    if isinstance(parts, list) and len(parts) == 2 and type(parts) is list:
        parts = [part * 2 for part in parts]
    return torch.cat(parts)


@fine(inputs=one)
def same_value_asked_about(self: Any, x: Tensor) -> Any:
    y = x
    return self.fc(x) * (2 if y is x else 3)


@fine(inputs=one)
def einsums(self: Any, x: Tensor) -> Any:
    return torch.einsum("bi,oi->bo", x, self.fc.weight) + F.softmax(self.fc(x), -1)


@fine(inputs=one)
def scripting_and_compiling(self: Any, x: Tensor) -> Any:
    jit: Any = torch.jit
    if jit.is_scripting() or jit.is_tracing() or torch.compiler.is_compiling():
        return x
    return self.fc(x)


@fine(inputs=one)
def a_warning(self: Any, x: Tensor) -> Any:
    if len(self._modules) > 5:
        warnings.warn("many", stacklevel=2)
    return self.fc(x)
