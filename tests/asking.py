"""Small modules whose code asks what a value is, or writes what a trace does not see. One way of it in each."""

# Comparisons by identity and by type are what these are about; imports inside stand for those of a user's module.
# ruff: noqa: E721, UP031, UP032
from __future__ import annotations

import collections.abc
import contextlib
import copy
import dataclasses
import enum
import functools
import math
import numbers
import operator
import threading
import typing
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled, nn
from torch import is_tensor as a_tensor


@dataclasses.dataclass(frozen=True)
class Case:
    """A forward function, what its module holds, and what it is called with."""

    forward: Callable[..., Any]
    make: Callable[[], dict[str, Any]]
    inputs: Callable[[], tuple[Any, ...]]

    def build(self) -> nn.Module:
        """Return a module; the same one at every call."""
        torch.manual_seed(0)
        model: nn.Module = type(self.forward.__name__, (nn.Module,), {"forward": self.forward})()
        for name, value in self.make().items():
            setattr(model, name, value)
        return model

    def arguments(self) -> tuple[Any, ...]:
        """Return what to call it with."""
        torch.manual_seed(1)
        return self.inputs()


ASKING: dict[str, Case] = {}
"""What no trace can answer, or do."""

FINE: dict[str, Case] = {}
"""What looks alike and is answered truly: torch.fx keeps these."""


def a_layer() -> dict[str, Any]:
    return {"fc": nn.Linear(4, 4)}


def one() -> tuple[Any, ...]:
    return (torch.randn(3, 4),)


def two() -> tuple[Any, ...]:
    return torch.randn(3, 4), torch.randn(3, 4)


def twice() -> tuple[Any, ...]:
    x = torch.randn(3, 4)
    return x, x


def asks(
    make: Callable[[], dict[str, Any]] = a_layer, inputs: Callable[[], tuple[Any, ...]] = two, into: Any = ASKING
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(forward: Callable[..., Any]) -> Callable[..., Any]:
        assert forward.__name__ not in into
        into[forward.__name__] = Case(forward, make, inputs)
        return forward

    return register


fine = functools.partial(asks, into=FINE)


# What a value is


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


# What a value has


@asks()
def by_hasattr(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) if hasattr(mask, "is_padding") else self.fc(x) * mask


@asks()
def by_getattr(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask + (0.0 if getattr(mask, "offset", None) is None else 1.0)


@asks()
def by_getattr_of_a_number(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * getattr(mask, "factor", 3.0)


@asks()
def by_dir(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if "masked_fill" in dir(mask) else self.fc(x)


@asks()
def by_vars(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * (1 + len(vars(mask)))


@asks(inputs=lambda: (torch.randn(3, 4), SimpleNamespace(node=torch.randn(3, 4))), into=FINE)
def by_a_name_of_the_tracer(self: Any, x: Tensor, batch: Any) -> Any:
    return self.fc(x) * batch.node


@asks(inputs=one)
def by_dtype(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if x.dtype is torch.float32 else self.fc(x)


@asks(inputs=one)
def by_table_of_dtypes(self: Any, x: Tensor) -> Any:
    return self.fc(x) * {torch.float32: 2.0}.get(x.dtype, 1.0)


@asks(inputs=one)
def by_set_of_dtypes(self: Any, x: Tensor) -> Any:
    return self.fc(x) * (2.0 if x.dtype in {torch.float32} else 1.0)


@asks(inputs=one)
def by_device(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if x.device.type == "cpu" else self.fc(x)


@asks(inputs=one)
def by_ndim(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if x.ndim == 2 else self.fc(x)


@asks(make=lambda: {**a_layer(), "dims": 2}, inputs=one)
def by_ndim_identity(self: Any, x: Tensor) -> Any:
    ndim = x.ndim
    return self.fc(x) * 2 if ndim is self.dims else self.fc(x)


@asks(inputs=one)
def by_requires_grad(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if self.fc.weight.requires_grad is True else self.fc(x)


@asks(inputs=one)
def by_grad_fn(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if x.grad_fn is None else self.fc(x)


@asks(inputs=one)
def by_is_leaf(self: Any, x: Tensor) -> Any:
    leaf = {True: 2.0, False: 3.0}
    return self.fc(x) * leaf[x.is_leaf]


@asks(inputs=one)
def by_grad(self: Any, x: Tensor) -> Any:
    grad = self.fc.weight.grad
    return self.fc(x) * (2.0 if grad is None else 3.0)


@asks(inputs=lambda: (torch.randn(3, 4), {"mask": None}))
def by_item_that_may_be_none(self: Any, x: Tensor, batch: Any) -> Any:
    mask = batch["mask"]
    return self.fc(x) if mask is None else self.fc(x) * 2


@asks(inputs=lambda: (torch.randn(3, 4), {}))
def by_get(self: Any, x: Tensor, batch: Any) -> Any:
    return self.fc(x) * 2 if batch.get("mask") is not None else self.fc(x)


@asks(inputs=lambda: (torch.randn(3, 4), {}))
def by_walrus(self: Any, x: Tensor, batch: Any) -> Any:
    if (mask := batch.get("mask")) is not None:
        return self.fc(x) * mask.mean() * 2
    return self.fc(x)


@asks(make=lambda: {**a_layer(), "attention": nn.MultiheadAttention(4, 2)}, inputs=one)
def by_result_that_is_none(self: Any, x: Tensor) -> Any:
    y, weights = self.attention(x, x, x, need_weights=False)
    return self.fc(y) if weights is None else self.fc(y) * 2


# Identity


@asks(inputs=twice)
def by_identity(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) * 2 if q is k else self.fc(q) + k


@asks(inputs=twice)
def by_identity_negated(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) + k if q is not k else self.fc(q) * 2


@asks(inputs=lambda: (*twice(), torch.randn(3, 4)))
def by_identity_over_lines(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    same = (
        q
        is
        k
    )  # fmt: skip
    return self.fc(q) * v if same else self.fc(q) + v


@asks(inputs=lambda: (twice() * 2)[:3])
def by_identity_chained(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return self.fc(q) * 2 if q is k is v else self.fc(q) + v


@asks(inputs=twice)
def by_identity_in_a_list(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) * (2 if any(each is q for each in [k]) else 3)


@asks(inputs=twice)
def by_identity_of_a_choice(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) * (2 if (q if self.training else k) is k else 3)


@asks(make=lambda: {**a_layer(), "drop": nn.Dropout(0.0)}, inputs=one)
def by_identity_of_a_result(self: Any, x: Tensor) -> Any:
    y = self.drop(x).contiguous()
    return self.fc(x) * 2 if x.contiguous() is x else self.fc(y)


@asks(inputs=twice)
def by_id(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) * 2 if id(q) == id(k) else self.fc(q) + k


@asks(inputs=twice)
def by_operator(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) * 2 if operator.is_(q, k) else self.fc(q) + k


@asks(inputs=twice)
def by_membership(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) * 2 if k in {q: 1} else self.fc(q) + k


@asks(inputs=twice)
def by_cache(self: Any, q: Tensor, k: Tensor) -> Any:
    seen = {q: self.fc(q)}
    return seen[q] if k not in seen else seen[q] * 2


@asks(inputs=twice)
def by_equality(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) * 2 if torch.equal(q, k) else self.fc(q) + k


@asks(inputs=twice)
def by_memory(self: Any, q: Tensor, k: Tensor) -> Any:
    return self.fc(q) * 2 if q.data_ptr() == k.data_ptr() else self.fc(q) + k


class _Mode(enum.Enum):
    SUM = 1
    MEAN = 2


@asks(inputs=lambda: (torch.randn(3, 4), _Mode.MEAN))
def by_member(self: Any, x: Tensor, mode: Any) -> Any:
    return self.fc(x).mean(0) if mode is _Mode.MEAN else self.fc(x)


@asks(inputs=one)
def by_copy(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    kept = copy.deepcopy(y.detach())
    y.mul_(2.0)
    return y + kept


# Values as numbers and text


@asks(inputs=one)
def by_text_of_a_shape(self: Any, x: Tensor) -> Any:
    return self.fc(x) * {"torch.Size([3, 4])": 2.0}.get(f"{x.shape}", 1.0)


@asks(inputs=one)
def by_str(self: Any, x: Tensor) -> Any:
    return self.fc(x) * (2.0 if str(x.dtype) == "torch.float32" else 1.0)


@asks(inputs=one)
def by_repr(self: Any, x: Tensor) -> Any:
    return self.fc(x) * (2.0 if repr(x.device) == "device(type='cpu')" else 1.0)


@asks(inputs=one)
def by_percent(self: Any, x: Tensor) -> Any:
    return self.fc(x) * len("%s" % (x.shape,))


@asks(inputs=one)
def by_format(self: Any, x: Tensor) -> Any:
    return self.fc(x) * len("{:>5}".format(x.shape[0]))


@asks(inputs=one)
def by_text_of_a_list(self: Any, x: Tensor) -> Any:
    return self.fc(x) * len(str([x.shape[0]]))


@asks(inputs=one)
def by_int(self: Any, x: Tensor) -> Any:
    return self.fc(x) * int(x.shape[0])


@asks(inputs=one)
def by_float(self: Any, x: Tensor) -> Any:
    return self.fc(x) * float(x.shape[0])


@asks(inputs=one)
def by_len(self: Any, x: Tensor) -> Any:
    return self.fc(x) * len(x)


@asks(inputs=one)
def by_iteration(self: Any, x: Tensor) -> Any:
    return torch.stack([self.fc(row) for row in x])


@asks(inputs=one)
def by_truth(self: Any, x: Tensor) -> Any:
    return self.fc(x) if x.sum() > 0 else self.fc(-x)


@asks(inputs=one)
def by_math(self: Any, x: Tensor) -> Any:
    return self.fc(x) / math.floor(math.log2(x.shape[-1]) + int(x.shape[0]))


# Refusals that the code hides


@asks(inputs=one)
def caught_around_an_operator(self: Any, x: Tensor) -> Any:
    try:
        return self.fc(x) * 2
    except Exception:
        return x


@asks(inputs=one)
def caught_by_everything(self: Any, x: Tensor) -> Any:
    try:
        return self.fc(x) * 2
    except:  # noqa: E722
        return x


@asks()
def caught_attribute(self: Any, x: Tensor, mask: Any) -> Any:
    try:
        mask.is_padding  # noqa: B018
    except AttributeError:
        return self.fc(x) * mask
    return self.fc(x)


def _size_of(x: Any) -> int:
    try:
        return int(x.shape[0])
    except Exception:
        return 0


@asks(inputs=one)
def caught_in_a_helper(self: Any, x: Tensor) -> Any:
    return self.fc(x) * _size_of(x)


def _length_of(x: Any) -> int:
    try:
        return len(x)
    except:  # noqa: E722
        return 0


@asks(inputs=one)
def caught_by_everything_in_a_helper(self: Any, x: Tensor) -> Any:
    return self.fc(x) * _length_of(x)


@asks()
def caught_question(self: Any, x: Tensor, mask: Any) -> Any:
    given = False
    with contextlib.suppress(Exception):
        given = isinstance(mask, Tensor)
    return self.fc(x) * 2 if given else self.fc(x)


@asks(inputs=one)
def suppressed(self: Any, x: Tensor) -> Any:
    count = 1
    with contextlib.suppress(TypeError):
        count = [5, 6, 7, 8][x.shape[0]]
    return self.fc(x) * count


def _first(values: Any) -> Any:
    try:
        for value in values:
            return value
    finally:
        return 1.0  # noqa: B012


@asks(inputs=one)
def swallowed_by_finally(self: Any, x: Tensor) -> Any:
    return self.fc(x) * _first(x.shape)


# The state of the process


@asks(inputs=one)
def by_is_grad_enabled(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if torch.is_grad_enabled() else self.fc(x)


@asks(inputs=one)
def by_is_grad_enabled_imported(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if is_grad_enabled() else self.fc(x)


@asks(inputs=one)
def by_is_autocast_enabled(self: Any, x: Tensor) -> Any:
    return self.fc(x) if torch.is_autocast_enabled("cpu") else self.fc(x) * 2


@asks(inputs=one)
def by_autocast_dtype(self: Any, x: Tensor) -> Any:
    return self.fc(x) + torch.zeros(4, dtype=torch.get_autocast_dtype("cpu"))


@asks(inputs=one)
def by_is_inference_mode_enabled(self: Any, x: Tensor) -> Any:
    return self.fc(x) if torch.is_inference_mode_enabled() else self.fc(x) * 2


@asks(inputs=one)
def by_is_inference(self: Any, x: Tensor) -> Any:
    return self.fc(x) if x.is_inference() else self.fc(x) * 2


@asks(inputs=one)
def by_default_dtype(self: Any, x: Tensor) -> Any:
    return self.fc(x).to(torch.get_default_dtype())


@asks(inputs=one)
def switching_gradients(self: Any, x: Tensor) -> Any:
    torch.set_grad_enabled(True)
    return self.fc(x)


@asks(inputs=one)
def under_a_context(self: Any, x: Tensor) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        q = self.fc(x)[None]
        return F.scaled_dot_product_attention(q, q, q)


@asks(inputs=one)
def under_forked_random_numbers(self: Any, x: Tensor) -> Any:
    with torch.random.fork_rng():
        noise = torch.rand(3, 4)
    return self.fc(x) * noise


@asks(inputs=one)
def in_a_thread(self: Any, x: Tensor) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(x * 2))
    thread.start()
    thread.join()
    return self.fc(found[0])


is_kind = isinstance


@asks()
def by_isinstance_under_another_name(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) * mask if is_kind(mask, Tensor) else self.fc(x)


@asks()
def by_a_new_one_of_its_type(self: Any, x: Tensor, mask: Any) -> Any:
    return self.fc(x) + type(mask)([1.0, 2.0, 3.0, 4.0])


@asks(inputs=one)
def by_has_torch_function(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if torch.overrides.has_torch_function((x,)) else self.fc(x)


@asks(inputs=one)
def by_is_fx_tracing(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if torch.fx._symbolic_trace.is_fx_tracing() else self.fc(x)


@asks(inputs=one)
def by_generator(self: Any, x: Tensor) -> Any:
    return self.fc(x) * (2 if all(isinstance(each, Tensor) for each in (x, x)) else 3)


class _Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


# What is written


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


# What is answered truly


@fine()
def plain_products(self: Any, x: Tensor, y: Tensor) -> Any:
    return self.fc(x) @ y.mT


@fine(make=lambda: {"fc": nn.Linear(4, 4, bias=False), "mode": _Mode.MEAN, "act": nn.ReLU()}, inputs=one)
def questions_about_the_module(self: Any, x: Tensor) -> Any:
    y = self.fc(x)
    if isinstance(self.fc, nn.Linear) and hasattr(self, "fc") and type(self.fc) is nn.Linear:
        y = y * 2
    if self.mode is _Mode.MEAN and getattr(self, "missing", None) is None and self.fc.bias is None:
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
