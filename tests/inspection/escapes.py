"""Models that multiply something behind the back of every quantizer, each in another way: `ESCAPES`, by name."""

from __future__ import annotations

import contextvars
import ctypes
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ESCAPES: dict[str, Callable[[], nn.Module]] = {}
WIDTH = 12


class Escaping(nn.Module):
    """Two layers with something between them that multiplies by `w`, or registers what will."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.between(self.first(x))))
        return result

    def between(self, h: Tensor) -> Tensor:
        raise NotImplementedError


def escape(between: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """Register a model by what it does between its layers."""
    ESCAPES[between.__name__] = type(f"Escape_{between.__name__}", (Escaping,), {"between": between})
    return between


def unseen(product: Callable[[], Any]) -> Any:
    """Call a function where no function of torch can be overridden, and no compiler looks."""
    with torch._C.DisableTorchFunction():
        return product()


unseen = torch.compiler.disable(unseen)


# Past the functions of torch.


@escape
def functions_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: h @ self.w)
    return result


@escape
def linear_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: F.linear(h, self.w))
    return result


@escape
def overload_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: torch.ops.aten.mm.default(h, self.w))
    return result


@escape
def internal_function_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: torch._C._VariableFunctions.matmul(h, self.w))
    return result


@escape
def attention_disabled(self: Any, h: Tensor) -> Tensor:
    one = h[None, None]
    result: Tensor = unseen(lambda: F.scaled_dot_product_attention(one, one, one))[0, 0]
    return result


@escape
def convolution_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: torch.conv1d(h[None], self.w[:, :1, None].expand(-1, len(h), -1)))[0, : len(h)]
    return result


@escape
def batched_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: torch.bmm(h[None], self.w[None]))[0]
    return result


@escape
def einsum_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: torch.einsum("bi,ij->bj", h, self.w))
    return result


@escape
def vectors_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: torch.stack([torch.mv(self.w, row) for row in h]))
    return result


@escape
def dots_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = h * unseen(lambda: torch.dot(h[0], self.w[0]))
    return result


@escape
def added_disabled(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: torch.addmm(h, h, self.w))
    return result


@escape
def recurrent_disabled(self: Any, h: Tensor) -> Tensor:
    cell = torch.gru_cell
    result: Tensor = unseen(lambda: cell(h, h, self.w.repeat(3, 1), self.w.repeat(3, 1)))
    return result


@escape
def sequence_disabled(self: Any, h: Tensor) -> Tensor:
    run, start = torch.lstm, h.new_zeros(1, 6, WIDTH)
    weights = [self.w.repeat(4, 1), self.w.repeat(4, 1)]
    result: Tensor = unseen(lambda: run(h[None], (start, start), weights, False, 1, 0.0, False, False, True)[0][0])
    return result


@escape
def nested_disabled(self: Any, h: Tensor) -> Tensor:
    nested = unseen(lambda: torch.nested.nested_tensor([h.detach(), h.detach()]))
    result: Tensor = h * unseen(lambda: F.linear(nested, self.w.detach()).to_padded_tensor(0.0)).mean()
    return result


@escape
def in_eight_bits_disabled(self: Any, h: Tensor) -> Tensor:
    def product() -> Tensor:
        left, right = h.detach().repeat(6, 2)[:32, :16], self.w.detach().repeat(2, 2)[:16, :16]
        small, one = torch.float8_e4m3fn, torch.ones(())
        return torch._scaled_mm(left.to(small), right.to(small).T, one, one, out_dtype=torch.float32)

    result: Tensor = h * unseen(product).mean()
    return result


@escape
def without_gradients_disabled(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale: Tensor = unseen(lambda: h @ self.w)
    return h * scale


@escape
def inference_disabled(self: Any, h: Tensor) -> Tensor:
    def infer() -> Tensor:
        with torch.inference_mode():
            return torch.matmul(h.detach(), self.w.detach())

    return h * float(unseen(infer).sum())


# In another place of Python.


@escape
def reflected(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: h.__rmatmul__(self.w.new_ones(len(h), len(h)) + self.w[0, 0]))
    return result


@escape
def in_a_thread(self: Any, h: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(h @ self.w))
    thread.start()
    thread.join()
    return found[0]


class _OwnThread(threading.Thread):
    def __init__(self, h: Tensor, w: Tensor) -> None:
        super().__init__()
        self.h, self.w = h, w

    def run(self) -> None:
        self.found = self.h @ self.w


@escape
def in_a_thread_of_its_own(self: Any, h: Tensor) -> Tensor:
    thread = _OwnThread(h, self.w)
    thread.start()
    thread.join()
    return thread.found


@escape
def in_a_pool(self: Any, h: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.matmul, h, self.w).result()


_POOL = ThreadPoolExecutor(1)
_POOL.submit(int).result()


@escape
def in_a_pool_that_was_there(self: Any, h: Tensor) -> Tensor:
    return _POOL.submit(torch.matmul, h, self.w).result()


@escape
def in_another_context(self: Any, h: Tensor) -> Tensor:
    result: Tensor = contextvars.copy_context().run(unseen, lambda: h @ self.w)
    return result


@escape
def from_c(self: Any, h: Tensor) -> Tensor:
    found: list[Tensor] = []

    back = ctypes.CFUNCTYPE(None)(lambda: found.append(unseen(lambda: h @ self.w)))
    back()
    return found[0]


class _Dying:
    pass


@escape
def in_a_finalizer(self: Any, h: Tensor) -> Tensor:
    found: list[Tensor] = []
    dying = _Dying()
    weakref.finalize(dying, lambda: found.append(unseen(lambda: h @ self.w)))
    del dying
    return found[0]


@escape
def in_a_property(self: Any, h: Tensor) -> Tensor:
    class Hidden:
        @property
        def value(inner) -> Tensor:  # noqa: N805
            result: Tensor = unseen(lambda: h @ self.w)
            return result

    return Hidden().value


@escape
def in_an_exit(self: Any, h: Tensor) -> Tensor:
    class Leaving:
        found: Tensor

        def __enter__(inner) -> Leaving:  # noqa: N805
            return inner

        def __exit__(inner, *_: object) -> None:  # noqa: N805
            inner.found = unseen(lambda: h @ self.w)

    with Leaving() as leaving:
        pass
    return leaving.found


@escape
def in_a_hidden_layer(self: Any, h: Tensor) -> Tensor:
    hidden = nn.Linear(WIDTH, WIDTH)
    result: Tensor = unseen(lambda: hidden(h))
    return result


# In modes and tensors of somebody else.


class _FunctionMode(TorchFunctionMode):
    w: Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.sigmoid:
            return unseen(lambda: args[0] @ self.w)
        return func(*args, **(kwargs or {}))


@escape
def in_a_mode_of_functions(self: Any, h: Tensor) -> Tensor:
    mode = _FunctionMode()
    mode.w = self.w
    with mode:
        return torch.sigmoid(h)


class _AroundLayers(TorchFunctionMode):
    """Multiplies inside of an operator that has quantizers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return unseen(lambda: result @ torch.ones(WIDTH, WIDTH)) if func in (F.linear, torch.conv1d) else result


class InsideAnOperator(Escaping):
    def forward(self, x: Tensor) -> Tensor:
        with _AroundLayers():
            result: Tensor = self.last(torch.tanh(self.first(x)))
        return result


ESCAPES["inside_an_operator"] = InsideAnOperator


@escape
def where_an_operand_is_saved(self: Any, h: Tensor) -> Tensor:
    def packed(saved: Tensor) -> Tensor:
        if saved.shape == h.shape:
            unseen(lambda: saved.detach() @ self.w.detach())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda saved: saved):
        result: Tensor = self.last(h)
    return result


class _DispatchMode(TorchDispatchMode):
    w: Tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sigmoid.default:
            return args[0] @ self.w
        return func(*args, **(kwargs or {}))


@escape
def in_a_mode_of_operators(self: Any, h: Tensor) -> Tensor:
    mode: Any = _DispatchMode()  # type: ignore[no-untyped-call]
    mode.w = self.w.detach()
    with mode:
        return torch.sigmoid(h)


class _Functions(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return unseen(lambda: result @ torch.randn(WIDTH, WIDTH)) if func is torch.sigmoid else result


@escape
def in_a_tensor_of_functions(self: Any, h: Tensor) -> Tensor:
    result: Tensor = torch.sigmoid(h.as_subclass(_Functions))
    return result.as_subclass(Tensor)


class _Wrapper(Tensor):
    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        object.__setattr__(made, "plain", inner)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        values = [vars(arg)["plain"] if isinstance(arg, _Wrapper) else arg for arg in args]
        return func(*values, **(kwargs or {}))


@escape
def in_a_wrapper(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale: Tensor = unseen(lambda: torch.mm(_Wrapper(h.detach()), self.w.detach()))
    return h * scale


@torch.library.custom_op("cpt_fx_tests::hidden_product", mutates_args=())
def _hidden_product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@_hidden_product.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


_hidden_product.register_autograd(
    lambda ctx, gradient: (gradient @ ctx.saved_tensors[1].T, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


class OperatorOfItsOwn(Escaping):
    """Calls an operator with code of its own, which is listed: nothing escapes."""

    def between(self, h: Tensor) -> Tensor:
        result: Tensor = _hidden_product(h, self.w)
        return result


# In operators that nobody has listed.


@escape
def exponential(self: Any, h: Tensor) -> Tensor:
    result: Tensor = h * unseen(lambda: torch.matrix_exp(self.w * 0.01))[0]
    return result


@escape
def convolution_in_time(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: torch.conv_tbc(h[:, None], self.w[None], h.new_zeros(WIDTH)))[:, 0]
    return result


@escape
def covariance(self: Any, h: Tensor) -> Tensor:
    result: Tensor = h * unseen(lambda: torch.cov(h))[0, 0]
    return result


@escape
def into_a_given_tensor(self: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        found = torch.empty_like(h)
        unseen(lambda: torch.mm(h, self.w, out=found))
    return h * found


@escape
def in_place(self: Any, h: Tensor) -> Tensor:
    result: Tensor = unseen(lambda: h.clone().addmm_(h, self.w))
    return result


# On the way back.


@escape
def in_a_hook_of_a_tensor(self: Any, h: Tensor) -> Tensor:
    h = h * 1
    h.register_hook(lambda gradient: unseen(lambda: gradient @ self.w.detach()))
    return h


@escape
def in_a_hook_of_a_node(self: Any, h: Tensor) -> Tensor:
    h = h * 1
    assert h.grad_fn is not None
    h.grad_fn.register_prehook(lambda gradients: (gradients[0] @ self.w.detach(),))
    return h


class _OnlyBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return unseen(lambda: gradient @ ctx.saved_tensors[0]), None


@escape
def in_a_backward_alone(self: Any, h: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    result: Tensor = _OnlyBack.apply(h, self.w)  # type: ignore[no-untyped-call]
    return result


class BeforeALeftLayer(Escaping):
    """A function that multiplies on the way back, before a layer that is left and makes no node in autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        apply: Any = _OnlyBack.apply
        self.first.register_forward_hook(lambda module, given, result: apply(result, self.w.detach()))

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.left(h)
        return h + found


class _ForwardToo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        result: Tensor = unseen(lambda: h @ w)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[0].T, None


@escape
def in_a_function_of_autograd(self: Any, h: Tensor) -> Tensor:
    result: Tensor = _ForwardToo.apply(h, self.w)  # type: ignore[no-untyped-call]
    return result


@escape
def where_tensors_are_saved(self: Any, h: Tensor) -> Tensor:
    def packed(saved: Tensor) -> Tensor:
        if saved.shape == h.shape:
            unseen(lambda: saved.detach() @ self.w.detach())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(packed, lambda saved: saved):
        return h.exp()


@escape
def in_an_inner_gradient(self: Any, h: Tensor) -> Tensor:
    def inner() -> Tensor:
        with torch.enable_grad():
            point = h.detach().requires_grad_()
            (found,) = torch.autograd.grad((point @ self.w).square().sum(), point, create_graph=True)
        return found

    result: Tensor = unseen(inner)
    return result


class _HookedForward(Escaping):
    """A hook of a layer multiplies."""

    def __init__(self) -> None:
        super().__init__()
        w = torch.randn(WIDTH, WIDTH)
        self.first.register_forward_hook(lambda module, given, result: unseen(lambda: result @ w))

    def between(self, h: Tensor) -> Tensor:
        return h


class _HookedBefore(Escaping):
    def __init__(self) -> None:
        super().__init__()
        w = torch.randn(WIDTH, WIDTH)
        self.last.register_forward_pre_hook(lambda module, given: unseen(lambda: given[0] @ w))

    def between(self, h: Tensor) -> Tensor:
        return h


class _HookedBackward(Escaping):
    def __init__(self) -> None:
        super().__init__()
        w = torch.randn(WIDTH, WIDTH)

        def hook(module: Any, given: Any, result: Any) -> Any:
            return unseen(lambda: (given[0] @ w,))

        self.first.register_full_backward_hook(hook)

    def between(self, h: Tensor) -> Tensor:
        return h


ESCAPES["in_a_hook_after_a_layer"] = _HookedForward
ESCAPES["in_a_hook_before_a_layer"] = _HookedBefore
ESCAPES["in_a_hook_of_gradients"] = _HookedBackward
