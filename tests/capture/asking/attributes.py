"""What a value has, whether it is another one, and what it is as a number or a text."""

# Comparisons by identity and by type are what these are about; imports inside stand for those of a user's module.
# ruff: noqa: UP031, UP032
from __future__ import annotations

import copy
import enum
import math
import operator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.capture.asking.cases import a_layer, asks, fine, one, twice

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


@fine(inputs=lambda: (torch.randn(3, 4), SimpleNamespace(node=torch.randn(3, 4))))
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


class Mode(enum.Enum):
    SUM = 1
    MEAN = 2


@asks(inputs=lambda: (torch.randn(3, 4), Mode.MEAN))
def by_member(self: Any, x: Tensor, mode: Any) -> Any:
    return self.fc(x).mean(0) if mode is Mode.MEAN else self.fc(x)


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
