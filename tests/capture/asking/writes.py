"""What is written where a trace does not see it."""

# Comparisons by identity and by type are what these are about; imports inside stand for those of a user's module.
from __future__ import annotations

import collections
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.capture.asking.cases import a_layer, asks, one


class _Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


@asks(make=lambda: {**a_layer(), "meter": _Slots()}, inputs=one)
def counter_in_slots(self: Any, x: Tensor) -> Any:
    self.meter.count += 1
    return self.fc(x) * self.meter.count


AVERAGE = torch.ones(4)


@asks(inputs=one)
def tensor_of_the_process(self: Any, x: Tensor) -> Any:
    AVERAGE.mul_(1.0)
    return self.fc(x) * AVERAGE


class _Shared:
    seen: ClassVar[list[Any]] = []


@asks(inputs=one)
def list_of_a_class(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    _Shared.seen.append(y)
    del _Shared.seen[:-1]
    return y * 2


@asks(inputs=lambda: (torch.randn(3, 4), SimpleNamespace(h=None)))
def attribute_of_an_argument(self: Any, x: Tensor, batch: Any) -> Any:
    batch.h = self.fc(x)
    return batch.h * 2


@asks(inputs=one)
def data_of_a_weight(self: Any, x: Tensor) -> Any:
    self.fc.weight.data = torch.renorm(self.fc.weight.data, 2, 0, 0.5)
    return self.fc(x)


@asks(inputs=one)
def data_of_a_weight_by_setattr(self: Any, x: Tensor) -> Any:
    setattr(self.fc.weight, "data", self.fc.weight.detach().sign())  # noqa: B010
    return self.fc(x)


@asks(inputs=one)
def data_of_a_result(self: Any, x: Tensor) -> Any:
    h = self.fc(x)
    h.data = h.data.clamp(-0.1, 0.1)
    return h * 2


@asks(inputs=one)
def data_of_parameters(self: Any, x: Tensor) -> Any:
    for parameter in self.parameters():
        parameter.data = torch.full_like(parameter.data, 0.5)
    return self.fc(x)


@asks(inputs=one)
def data_of_parameters_by_torch_function(self: Any, x: Tensor) -> Any:
    for parameter in self.parameters():
        parameter.data = torch.full(parameter.shape, 0.5)
    return self.fc(x)


@asks(inputs=one)
def requires_grad_of_a_parameter(self: Any, x: Tensor) -> Any:
    self.fc.bias.requires_grad = False
    return self.fc(x)


@asks(inputs=one)
def requires_grad_of_parameters(self: Any, x: Tensor) -> Any:
    for parameter in self.parameters():
        parameter.requires_grad = parameter.ndim > 1
    return self.fc(x)


@asks(inputs=one)
def requires_grad_of_parameters_by_method(self: Any, x: Tensor) -> Any:
    for parameter in self.parameters():
        parameter.requires_grad_(parameter.ndim > 1)
    return self.fc(x)


@asks(inputs=one)
def freezing_in_forward(self: Any, x: Tensor) -> Any:
    self.fc.requires_grad_(False)
    return self.fc(x) * x


@asks(inputs=one)
def grad_of_a_parameter(self: Any, x: Tensor) -> Any:
    self.fc.weight.grad = torch.ones(4, 4)
    return self.fc(x)


@asks(inputs=one)
def grad_of_parameters(self: Any, x: Tensor) -> Any:
    for parameter in self.parameters():
        parameter.grad = None
    return self.fc(x)


@asks(inputs=one)
def hooks_of_parameters(self: Any, x: Tensor) -> Any:
    for parameter in self.parameters():
        parameter.register_hook(lambda gradient: gradient * 2)
    return self.fc(x)


@asks(inputs=one)
def a_seed(self: Any, x: Tensor) -> Any:
    torch.random.manual_seed(3)
    return self.fc(x) * torch.rand(4)


@asks(inputs=one)
def mark_on_a_value(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    y.is_special = True
    return y * 2


@asks(inputs=one)
def reading_the_state(self: Any, x: Tensor) -> Any:
    return self.fc(x) * self.state_dict()["fc.weight"].norm()


@asks(make=lambda: {**a_layer(), "scale": nn.Buffer(torch.ones(4))}, inputs=one)
def reading_all_buffers(self: Any, x: Tensor) -> Any:
    return self.fc(x) * dict(self.named_buffers())["scale"].sum()


@asks(make=lambda: {**a_layer(), "average": torch.ones(4)}, inputs=one)
def plain_tensor_in_place(self: Any, x: Tensor) -> Any:
    self.average.mul_(0.5)
    return self.fc(x) * self.average


LOSSES: list[Any] = []
CALLS = 0


@asks(inputs=one)
def list_of_the_process(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    LOSSES.append(y.mean())
    return y * len(LOSSES)


@asks(inputs=one)
def counter_of_the_process(self: Any, x: Tensor) -> Any:
    global CALLS
    CALLS += 1
    return self.fc(x) * CALLS


def _closing() -> dict[str, Any]:
    calls, kept = 0, {}

    def count(y: Any) -> int:
        nonlocal calls
        calls += 1
        kept["last"] = y
        return calls

    return {**a_layer(), "count": count}


@asks(make=_closing, inputs=one)
def cell_of_a_closure(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    return y * self.count(y)


@asks(inputs=one)
def class_attribute(self: Any, x: Tensor) -> Any:
    type(self).calls = getattr(type(self), "calls", 0) + 1
    return self.fc(x) * type(self).calls


@asks(make=lambda: {**a_layer(), "meter": SimpleNamespace(count=0)}, inputs=one)
def counter_of_an_object(self: Any, x: Tensor) -> Any:
    self.meter.count += 1
    return self.fc(x) * self.meter.count


@asks(make=lambda: {**a_layer(), "meter": SimpleNamespace(last=None)}, inputs=one)
def value_in_an_object(self: Any, x: Tensor) -> Any:
    self.meter.last = self.fc(x)
    return self.meter.last * 2


@asks(inputs=one)
def global_of_a_module_of_python(self: Any, x: Tensor) -> Any:
    setattr(sys.modules[__name__], "CALLS", CALLS + 1)  # noqa: B010
    return self.fc(x) * 2


@asks(inputs=one)
def around_setattr(self: Any, x: Tensor) -> Any:
    object.__setattr__(self, "last", self.fc(x))
    return self.last * 2


@asks(inputs=one)
def in_the_dict(self: Any, x: Tensor) -> Any:
    self.__dict__["last"] = self.fc(x)
    return self.last * 2


@asks(make=lambda: {**a_layer(), "average": nn.Buffer(torch.zeros(4))}, inputs=one)
def buffer_assigned(self: Any, x: Tensor) -> Any:
    self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
    return self.fc(x - self.average)


@asks(make=lambda: {**a_layer(), "average": nn.Buffer(torch.zeros(4))}, inputs=one)
def buffer_in_the_container(self: Any, x: Tensor) -> Any:
    self._buffers["average"] = 0.9 * self.average + 0.1 * x.detach().mean(0)
    return self.fc(x - self._buffers["average"])


@asks(make=lambda: {**a_layer(), "average": nn.Buffer(torch.zeros(4))}, inputs=one)
def buffer_registered(self: Any, x: Tensor) -> Any:
    self.register_buffer("average", 0.9 * self.average + 0.1 * x.detach().mean(0))
    return self.fc(x - self.average)


@asks(make=lambda: {**a_layer(), "average": nn.Buffer(torch.zeros(4))}, inputs=one)
def under_no_grad(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.average.copy_(x.mean(0))
    return self.fc(x - self.average)


@asks(make=lambda: {**a_layer(), "losses": []}, inputs=one)
def list_of_the_module(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    self.losses.append(y.mean())
    return y * len(self.losses)


@asks(make=lambda: {**a_layer(), "counts": collections.Counter()}, inputs=one)
def counter_of_a_module(self: Any, x: Tensor) -> Any:
    self.counts["calls"] += 1
    return self.fc(x)
