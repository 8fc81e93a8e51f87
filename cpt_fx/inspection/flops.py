"""Floating point operations of one forward pass, by `torch.utils.flop_counter`, for each layer or node."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cpt_fx.capture.dry_run import dry_run, eager_model
from cpt_fx.capture.side_effects import run_aside
from cpt_fx.capture.standalone import Result, transformed_in
from cpt_fx.inspection.places import GENERATED, frames, nodes_by_line
from cpt_fx.inspection.torch_private import get_mkldnn_enabled, set_mkldnn_enabled
from cpt_fx.inspection.tree import Modules, module_of
from cpt_fx.inspection.views import named_below
from cpt_fx.ir.meta import DECISION, Decision
from cpt_fx.operators import FLOPS


@dataclass(frozen=True)
class CountedProduct:
    """Operations of one layer that share their bit-widths."""

    layer: str
    flops: int
    decision: Decision | None = None


@contextmanager
def _counting(model: nn.Module) -> Iterator[FlopCounterMode]:
    """Count operations in evaluation mode, without the fused kernels that the counter does not know."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(dry_run(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(set_mkldnn_enabled, get_mkldnn_enabled())
        set_mkldnn_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        for module in model.modules():
            # The flags directly: a model may override `train()`.
            module.training = False
        ours = {attrgetter(name.replace("::", "."))(torch.ops): cost for name, cost in FLOPS.items()}
        counter = FlopCounterMode(display=False, custom_mapping={torch.ops.cpt_fx._multiply: _integer_flops, **ours})
        # The default tracker would set hooks on all modules, which must then be called as modules.
        counter.mod_tracker = _Where(model)  # type: ignore[assignment]
        yield stack.enter_context(counter)


class _Where(nullcontext[None]):
    """Replaces the counter's module tracker: names the layer that runs, and the quantization decision of its node."""

    def __init__(self, model: nn.Module, parts: Sequence[tuple[str, Result]] = ()) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.graphs: dict[int, dict[int, tuple[str, Decision | None]]] = {}
        for path, part in parts:
            self.names |= {id(module): named_below(path, name) for name, module in part.root.named_modules()}
            for graph in part.graphs():
                known = dict(graph.named_modules(remove_duplicate=False))
                self.graphs[id(graph)] = {
                    line: _place(path, node, known) for line, node in nodes_by_line(graph).items()
                }

    @property
    def parents(self) -> set[tuple[str, Decision | None]]:
        """The place of the node that runs, or, outside of all graphs, the innermost module."""
        layer = None
        for frame in frames():
            code = frame.f_code
            held = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            layer = self.names.get(id(held)) if layer is None else layer
            here = self.graphs.get(id(held), {}).get(frame.f_lineno)
            if here is not None and code.co_filename.startswith(GENERATED):
                return {here}
        return {(layer or "", None)}


def _place(path: str, node: fx.Node, known: Modules) -> tuple[str, Decision | None]:
    decision: Decision | None = node.meta.get(DECISION)
    return named_below(path, decision.layer if decision else module_of(node, known)), decision


def counted_products(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], transformed: bool
) -> list[CountedProduct]:
    """Count the operations of a model for each node of its graphs, and outside of these for the innermost module."""
    model = eager_model(model)
    if transformed:
        model = _for_a_look(model)
        _check_inputs(model, args, kwargs)
    with _counting(model) as counter:
        run_aside(model, args, kwargs)
        if transformed:
            # Count again: Dynamo may just have captured other graphs for evaluation.
            counter.flop_counts.clear()
            counter.mod_tracker = _Where(model, transformed_in(model))  # type: ignore[assignment]
            run_aside(model, args, kwargs)
    counts: Any = counter.flop_counts
    found = [CountedProduct(layer, sum(flops.values()), decision) for (layer, decision), flops in counts.items()]
    order = [] if transformed else [name for name, _ in model.named_modules()]
    return sorted(found, key=lambda product: order.index(product.layer)) if order else found


def _integer_flops(name: str, a: Sequence[Any], b: Sequence[Any], *rest: Any, out_shape: Any) -> int:
    """Count an integer product like the floating point product it stands for; tensors are given as shapes."""
    if not name.endswith("forward"):
        return 0
    summed = torch.Size(b[0][1:]).numel() if name.startswith("conv") else int(a[0][-1])
    return 2 * torch.Size(out_shape).numel() * summed


def _for_a_look(model: nn.Module) -> nn.Module:
    """Return a copy that shares the parameters: graphs captured under the counter are of no use to the model."""
    try:
        return copy.deepcopy(model, {id(value): value for value in model.parameters()})
    except Exception:  # it holds something that cannot be copied: a lock, a tensor with a grad_fn
        return model


def _check_inputs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise an error that names the missing argument, if one is missing."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        what, _, name = str(error).partition(": ")
        if name and what.startswith("missing"):
            raise TypeError(f"the model needs the argument {name}, which the example inputs leave out") from None
        raise
