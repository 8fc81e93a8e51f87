"""Floating point operations of one forward pass, by `torch.utils.flop_counter`, and where they happen."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cpt_fx.capture.memory import run_aside
from cpt_fx.inspection.digraph import module_of
from cpt_fx.inspection.views import named_below
from cpt_fx.meta import SITE, Site
from cpt_fx.operators import FLOPS
from cpt_fx.result import plain_rest
from cpt_fx.standalone import transformed_in
from cpt_fx.trial import eager_model, trial


@dataclass(frozen=True)
class Product:
    """Operations that share their widths."""

    layer: str
    flops: int
    site: Site | None = None


@contextmanager
def _counting(model: nn.Module) -> Iterator[FlopCounterMode]:
    """Count operations in evaluation mode, with the fused kernels off that the counter does not know."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(trial(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        # Not torch.backends.mkldnn.flags: it also writes a setting of Intel GPUs, which warns where there are none.
        stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
        torch._C._set_mkldnn_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        for module in model.modules():
            # Flags only: a model may have its own idea of a mode.
            module.training = False
        ours = {torch.ops.cpt_fx._multiply: _integer_flops} | {_operator(name): cost for name, cost in FLOPS.items()}
        counter = FlopCounterMode(display=False, custom_mapping=ours)
        # It would set hooks for all modules, which want to be called as modules then.
        counter.mod_tracker = _NoModules()  # type: ignore[assignment]
        yield stack.enter_context(counter)


def _operator(name: str) -> Any:
    namespace, _, packet = name.partition("::")
    return getattr(getattr(torch.ops, namespace), packet)


class _NoModules(nullcontext[None]):
    """Tells the counter of no modules."""

    parents = frozenset({"Global"})


def module_products(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Product]:
    """Count a plain model: to each module what runs in it and not in a module below it."""
    model = eager_model(model)
    own = {name: 0 for name, _ in model.named_modules()}

    def note(name: str, spent: int) -> None:
        own[name] += spent

    with _counting(model) as counter, _watched(model.named_modules(), counter, note):
        run_aside(model, args, kwargs)
    return [Product(name, flops) for name, flops in own.items()]


@contextmanager
def _watched(
    modules: Iterable[tuple[str, nn.Module]], counter: FlopCounterMode, note: Callable[[str, int], None]
) -> Iterator[None]:
    """Note at the end of each call of a module what ran in it and not in another one of them."""
    running: list[list[int]] = []

    def enter(module: nn.Module, given: Any) -> None:
        running.append([counter.get_total_flops(), 0])

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, given: Any, result: Any) -> None:
            start, inner = running.pop()
            spent = counter.get_total_flops() - start
            note(name, spent - inner)
            if running:
                running[-1][1] += spent

        return hook

    with ExitStack() as hooks:
        for name, module in modules:
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave(name)).remove)
        yield


def _integer_flops(name: str, a: Sequence[Any], b: Sequence[Any], *rest: Any, out_shape: Any) -> int:
    """Count a product of a lowered graph as that of the graph it was made from; tensors come as their shapes."""
    if not name.endswith("forward"):
        return 0
    summed = torch.Size(b[0][1:]).numel() if name.startswith("conv") else int(a[0][-1])
    return 2 * torch.Size(out_shape).numel() * summed


class _Counter(fx.Interpreter):
    """Runs a graph node by node and notes what each costs."""

    def __init__(self, path: str, module: fx.GraphModule, counter: FlopCounterMode, products: list[Product]) -> None:
        super().__init__(module)
        self.path = path
        self.counter = counter
        self.products = products
        self.known = dict(module.named_modules(remove_duplicate=False))

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        before = self.counter.get_total_flops()
        result = super().run_node(n)
        spent = self.counter.get_total_flops() - before
        if spent:
            site: Site | None = n.meta.get(SITE)
            layer = site.layer if site else module_of(n, self.known)
            self.products.append(Product(named_below(self.path, layer), spent, site))
        return result


def graph_products(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Product]:
    """Count a transformed model operator by operator, and layer by layer what stands outside of what is transformed."""
    products: list[Product] = []
    model = _for_a_look(eager_model(model))
    _check_inputs(model, args, kwargs)
    with _counting(model) as counter, ExitStack() as restored:
        # Once before: Dynamo may need other graphs for evaluation.
        run_aside(model, args, kwargs)
        before = counter.get_total_flops()
        for path, result in transformed_in(model):
            for module in result.graphs():
                interpreter = _Counter(path, module, counter, products)
                restored.callback(module.__dict__.pop, "forward")
                module.__dict__["forward"] = _entrance(interpreter)
        plain = _watched(plain_rest(model), counter, lambda name, spent: products.append(Product(name, spent)))
        restored.enter_context(plain)
        run_aside(model, args, kwargs)
        rest = counter.get_total_flops() - before - sum(product.flops for product in products)
    return [*products, Product("", rest)]


def _for_a_look(model: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters: what Dynamo captures under a counter is of no use to the model."""
    try:
        return copy.deepcopy(model, {id(value): value for value in model.parameters()})
    except Exception:  # it holds what cannot be copied: a lock, a result that has a history
        return model


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say which argument is missing, if one is."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        what, _, name = str(error).partition(": ")
        if name and what.startswith("missing"):
            raise TypeError(f"the model needs the argument {name}, which the example inputs leave out") from None
        raise


def _entrance(interpreter: _Counter) -> Callable[..., Any]:
    """Return a forward that runs the interpreter: keywords and defaults become what the placeholders expect."""
    signature = inspect.signature(interpreter.module.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return interpreter.run(*given.args, *given.kwargs.values())

    return forward
