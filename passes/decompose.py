"""Decompose fused operators: their products become nodes, so that they can be quantized."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from cpt_fx.decompose import attention
from cpt_fx.decompose import recurrent as recurrent_graph
from cpt_fx.decompose.building import Builder, Decomposer, StaysFusedError, arguments
from cpt_fx.ir.contexts import Regions
from cpt_fx.ir.meta import LEFT, around, example_of, get_attribute, module_path
from cpt_fx.ir.pass_base import Report
from cpt_fx.ir.subgraphs import outermost
from cpt_fx.overrides import Choices, ChoosingPass, Selected


def _linear_cross_entropy(builder: Builder) -> None:
    given = arguments(builder.node)
    if _dims(builder, given["linear_weight"]) != 2:
        raise StaysFusedError("a linear layer and its loss in one, whose weight is not known to be a matrix")
    ignored = -100 if given["ignore_index"] is None else given["ignore_index"]
    logits = builder.linear(given["input"], given["linear_weight"], given["linear_bias"], "")
    options = {"reduction": given["reduction"], "label_smoothing": given["label_smoothing"]}
    loss = builder.call(F.cross_entropy, logits, given["target"], given["weight"], ignore_index=ignored, **options)
    builder.replace(loss)


def _dims(builder: Builder, weight: object) -> int | None:
    """Return the number of dims of a weight, or None if the graph does not tell."""
    if not isinstance(weight, fx.Node):
        return None
    if weight.op == "get_attr":
        return int(get_attribute(builder.module, str(weight.target)).ndim)
    example = example_of(weight)
    return example.ndim if isinstance(example, torch.Tensor) else None


DECOMPOSERS: dict[Any, Decomposer] = {
    **attention.DECOMPOSERS, **recurrent_graph.DECOMPOSERS,
    F.linear_cross_entropy: Decomposer((("linear", "linear"),), _linear_cross_entropy),
}  # fmt: skip
"""The operators that can be decomposed, and how."""


@dataclass(frozen=True)
class Decompose(ChoosingPass):
    """Decompose fused operators (attention, recurrent layers, a linear layer with its loss) into their products.

    Only if something in them is to be quantized: decomposing costs time and changes the last bits of the numbers.
    What stays fused is marked with the reason, which annotate reports.
    """

    name: ClassVar[str] = "decompose"
    requires: ClassVar[str] = "normalized"

    def run(self, module: fx.GraphModule) -> Report:
        """Decompose one operator after the other."""
        notes = []
        regions = Regions()
        choices = Choices(self, outermost(module), Selected())
        for node in list(module.graph.nodes):
            regions.visit(node)
            decomposer = DECOMPOSERS.get(node.target) if node.op == "call_function" else None
            if decomposer is None:
                continue
            path, name = module_path(node)[0], str(getattr(node.target, "__name__", node.target))
            node.meta.pop(LEFT, None)
            if regions.transformed or choices.exclude.matches(path, around(node)):
                continue
            prefix = f"{path}." if path else ""
            rules = [choices.rule(family, prefix + product, around(node))[0] for product, family in decomposer.products]
            if all(rule is None for rule in rules):
                families = " and ".join(dict.fromkeys(family for _, family in decomposer.products))
                node.meta[LEFT] = f"recipe {choices.recipe.name!r} leaves {families} in full precision"
                continue
            builder = Builder(module, node)
            try:
                decomposer.decompose(builder)
            except StaysFusedError as reason:
                node.meta[LEFT] = str(reason)
                continue
            parts = f"{builder.products} products"
            notes.append(f"{path or '(root)'}: {name} decomposed into {parts}: equal to float rounding")
        return Report(self.name, len(notes), tuple(notes) or ("nothing to decompose",))
