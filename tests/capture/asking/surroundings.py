"""Refusals that the code hides, and the state of the process."""

# Comparisons by identity and by type are what these are about; imports inside stand for those of a user's module.
from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_grad_enabled

from tests.capture.asking.cases import asks, one

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
def by_is_grad_enabled_below_torch(self: Any, x: Tensor) -> Any:
    return self.fc(x) * 2 if torch._C.is_grad_enabled() else self.fc(x)


@asks(inputs=one)
def by_any_autocast(self: Any, x: Tensor) -> Any:
    return self.fc(x) if torch._C._is_any_autocast_enabled() else self.fc(x) * 2


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
