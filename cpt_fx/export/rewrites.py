"""What ONNX Runtime's training gets wrong, or draws at random, in a form that it gets right: by ATen operator.

An exported program is run once more, node by node, while it is traced again. Each rewrite takes the run and the
arguments of one operator. `NotImplemented` leaves the call as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.traceback import preserve_node_meta

from cpt_fx.errors import ExportError
from cpt_fx.export.lowering import constant
from cpt_fx.export.refusals import layer_of, refuse_operator
from cpt_fx.export.rewrite_activations import ACTIVATIONS
from cpt_fx.export.rewrite_elementwise import ELEMENTWISE
from cpt_fx.export.rewrite_indexing import INDEXING
from cpt_fx.export.rewrite_layers import DRAWING, LAYERS
from cpt_fx.export.rewrite_losses import LOSSES
from cpt_fx.export.rewrite_pooling import POOLING
from cpt_fx.export.rewrite_products import PRODUCTS
from cpt_fx.export.rewrite_reductions import REDUCTIONS
from cpt_fx.export.rewriting import Rewrite, stopped

aten = torch.ops.aten
REWRITES: dict[Any, Rewrite] = {
    aten.detach.default: lambda run, x: stopped(x),
    **ACTIVATIONS,
    **ELEMENTWISE,
    **INDEXING,
    **LAYERS,
    **LOSSES,
    **POOLING,
    **PRODUCTS,
    **REDUCTIONS,
}


class Rewriter(fx.Interpreter):
    """Runs the graph of an exported program with rewrites in the place of operators."""

    def __init__(self, module: fx.GraphModule, draws: int, seeds: Tensor | None = None) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self.draws = draws
        """How often was drawn so far."""
        self.seeds = seeds

    def run(self, *args: Any, **options: Any) -> Any:
        """Run the graph; what is traced keeps the names of the layers it belongs to."""
        with preserve_node_meta():
            return super().run(*args, **options)

    def run_node(self, node: fx.Node) -> Any:
        """Run a node; say which layer it belongs to if it is refused."""
        try:
            return super().run_node(node)
        except ExportError as error:
            if not getattr(error, "placed", False):
                error = ExportError(f"{layer_of(node)}: {error}")
                error.placed = True  # type: ignore[attr-defined]
            raise error from None

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take an argument, and notice the seeds."""
        value = super().placeholder(target, args, kwargs)
        if target == "seeds":
            self.seeds = value
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator, rewritten where there is a rewrite."""
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            return self._under(*args)
        plain = _out_of_place(target)
        rewrite = REWRITES.get(target if plain is None else plain)
        result = NotImplemented if rewrite is None else rewrite(self, *args, **kwargs)
        if result is NotImplemented:
            refuse_operator(target)
            return super().call_function(target, args, kwargs)
        return result if plain is None else args[0].copy_(result)

    def seed(self) -> tuple[Tensor | None, Tensor]:
        """Return the seeds, and which of them the next draw takes."""
        self.draws += 1
        return self.seeds, constant([self.draws - 1])

    def _under(self, enabled: bool, body: fx.GraphModule, *args: Any) -> Any:
        """Run what stands under `torch.no_grad()`: an exported graph knows no modes."""
        if not enabled:
            args = tuple(x.detach() if isinstance(x, Tensor) and x.requires_grad else x for x in args)
        inner = Rewriter(body, self.draws, self.seeds)
        results = inner.run(*args)
        self.draws = inner.draws
        return results if enabled else tuple(stopped(x) if isinstance(x, Tensor) else x for x in results)


def count_draws(module: fx.GraphModule) -> int:
    """Return an upper bound of how often a graph draws at random."""
    graphs = (inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule))
    return sum((_out_of_place(node.target) or node.target) in DRAWING for graph in graphs for node in graph.nodes)


def _out_of_place(target: Any) -> Any:
    """Return what an in-place operator computes, as an operator that is rewritten, or None."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.endswith("_"):
        return None
    packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)
    plain = getattr(packet, target._overloadname, None)
    return plain if plain in REWRITES else None
