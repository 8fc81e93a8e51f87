"""What a value is."""

# Comparisons by identity and by type are what these are about; imports inside stand for those of a user's module.
# ruff: noqa: E721
from __future__ import annotations

import collections.abc
import dataclasses
import functools
import numbers
import typing
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch import is_tensor as a_tensor

from tests.capture.asking.cases import asks, one


@asks()
def by_isinstance(self: Any, x: Tensor, mask: Any) -> Any:
    y = self.fc(x)
    return y * mask if isinstance(mask, torch.Tensor) else y


@asks()
def by_isinstance_of_several(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) if isinstance(mask, (int, float, bool)) else self.fc(x) * mask


@asks(inputs=lambda: (torch.randn(3, 4), 2))
def by_isinstance_of_a_number(self: Any, x: Tensor, n: Any) -> Any:
    return self.fc(x) * n if isinstance(n, int) else self.fc(x)


@asks()
def by_isinstance_of_a_kind_of_tensor(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if isinstance(mask, torch.FloatTensor) else self.fc(x)


@asks()
def by_isinstance_of_a_parameter(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if not isinstance(mask, nn.Parameter) else self.fc(x)


@asks(inputs=one)
def by_isinstance_of_a_size(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if isinstance(x.shape[0], int) else self.fc(x)


@asks(inputs=one)
def by_isinstance_of_a_result(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    return y * 2 if isinstance(y, Tensor) else y


@asks(inputs=one)
def by_number(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if isinstance(x.size(0), numbers.Number) else self.fc(x)


@asks()
def by_abstract_class(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if not isinstance(mask, collections.abc.Mapping) else self.fc(x)


@asks(inputs=lambda: (torch.randn(3, 4), [torch.randn(3, 4)]))
def by_sequence(self: Any, x: Tensor, more: Any) -> Any:
    return self.fc(x) + more[0] if isinstance(more, (list, tuple)) else self.fc(x)


@typing.runtime_checkable
class _HasCpu(typing.Protocol):
    def cpu(self) -> Any: ...


@asks()
def by_protocol(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if isinstance(mask, _HasCpu) else self.fc(x)


@asks()
def by_type(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if type(mask) is torch.Tensor else self.fc(x)


@asks()
def by_type_kept(self: Any, x: Tensor, mask: Any) -> Any:
    kind = type(mask)
    y = self.fc(x)
    return y * mask if kind is torch.Tensor else y


@asks()
def by_equal_type(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if type(mask) == torch.Tensor else self.fc(x)


@asks()
def by_unequal_type(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if type(mask) != int else self.fc(x)


@asks()
def by_same_type(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if type(x) is type(mask) else self.fc(x)


@asks()
def by_type_among(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if type(mask) in (torch.Tensor, nn.Parameter) else self.fc(x)


@asks()
def by_table_of_types(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * {torch.Tensor: 2.0}.get(type(mask), 1.0)


@asks()
def by_name_of_type(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if type(mask).__name__ == "Tensor" else self.fc(x)


@asks()
def by_types_mapped(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if all(kind == Tensor for kind in map(type, (x, mask))) else self.fc(x)


@asks()
def by_list_of_types(self: Any, x: Tensor, mask: Any) -> Any:
    kinds = list(map(type, [mask]))
    return self.fc(x) * mask if kinds[0] is Tensor else self.fc(x)


@asks()
def by_subclass(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if issubclass(type(mask), torch.Tensor) else self.fc(x)


@asks()
def by_class(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if mask.__class__ is torch.Tensor else self.fc(x)


@asks()
def by_class_name(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if mask.__class__.__name__ == "Tensor" else self.fc(x)


def _is_tensor(value: Any) -> bool:
    return type(value) is Tensor


@asks()
def by_helper(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if _is_tensor(mask) else self.fc(x)


@asks()
def by_lambda(self: Any, x: Tensor, mask: Any) -> Any:
    asked: Callable[[Any, Any], bool] = lambda one, other: one is other  # noqa: E731
    return self.fc(x) * (2 if asked(type(mask), Tensor) else 1)


@asks()
def by_is_tensor(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if torch.is_tensor(mask) else self.fc(x)


@asks()
def by_is_tensor_imported(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if a_tensor(mask) else self.fc(x)


@asks()
def by_is_floating_point(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if torch.is_floating_point(mask) else self.fc(x)


@asks()
def by_is_tensor_like(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if not torch.overrides.is_tensor_like(mask) else self.fc(x)


@asks()
def by_is_storage(self: Any, x: Tensor, mask: Any) -> Any:
    library: Any = torch
    return self.fc(x) * mask if not library.is_storage(mask) else self.fc(x)


@functools.singledispatch
def _weigh(mask: Any, y: Any) -> Any:
    return y


@_weigh.register
def _(mask: torch.Tensor, y: Any) -> Any:
    return y * mask


@asks()
def by_dispatch(self: Any, x: Tensor, mask: Any) -> Any:
    return _weigh(mask, self.fc(x))


@asks()
def by_pattern_of_a_class(self: Any, x: Tensor, mask: Any) -> Any:
    match mask:
        case torch.Tensor():
            return self.fc(x) * mask
        case _:
            return self.fc(x)


@asks(inputs=lambda: (torch.randn(3, 4), {"mask": torch.randn(3, 4)}))
def by_pattern_of_a_mapping(self: Any, x: Tensor, batch: Any) -> Any:
    match batch:
        case {"mask": mask}:
            return self.fc(x) * mask
        case _:
            return self.fc(x)


@asks(inputs=lambda: (torch.randn(3, 4), [torch.randn(3, 4)]))
def by_pattern_of_a_sequence(self: Any, x: Tensor, batch: Any) -> Any:
    match batch:
        case [mask]:
            return self.fc(x) * mask
    return self.fc(x)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A check of annotations at run time, as libraries have it."""
    hints = typing.get_type_hints(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        for value, kind in zip(args, hints.values(), strict=False):
            if not isinstance(value, kind):
                return args[0]
        return function(*args)

    return call


@_checked
def _scaled(y: torch.Tensor, mask: torch.Tensor) -> Any:
    return y * mask


@asks()
def by_annotation(self: Any, x: Tensor, mask: Any) -> Any:
    return _scaled(self.fc(x), mask)


@asks(inputs=lambda: (torch.randn(3, 4), {"mask": torch.randn(3, 4)}))
def by_tree(self: Any, x: Tensor, batch: Any) -> Any:
    return self.fc(x) * len(torch.utils._pytree.tree_leaves((batch, batch)))


@asks(inputs=lambda: (torch.randn(3, 4), SimpleNamespace(mask=torch.randn(3, 4))))
def by_dataclass(self: Any, x: Tensor, batch: Any) -> Any:
    return self.fc(x) if dataclasses.is_dataclass(batch) else self.fc(x) * batch.mask


@asks(inputs=lambda: (torch.randn(3, 4), torch.tanh))
def by_callable(self: Any, x: Tensor, function: Any) -> Any:
    return function(self.fc(x)) if not callable(x) else self.fc(x)
