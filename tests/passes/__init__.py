"""One file per pass. Here: how the tests make a graph, bring it to a stage, and read its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from cpt_fx.capture import trace_module
from cpt_fx.capture.base import assemble
from cpt_fx.capture.captured import WHOLE
from cpt_fx.capture.session import Session
from cpt_fx.capture.standalone import precision_of
from cpt_fx.capture.tree import own_tree
from cpt_fx.ir.meta import DECISION, QUANTIZER, Decision, Quantizer
from cpt_fx.ir.pass_base import Pass
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import Recipe, Rule, paper
from cpt_fx.schedules.base import Schedule

NEAREST = paper(gradient_rounding="nearest")
"""A recipe without any random number: two runs agree to the bit."""


class Apply(nn.Module):
    """A model out of a function; keyword arguments become its parameters and modules."""

    def __init__(self, function: Callable[..., Any], **parts: Tensor | nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part if isinstance(part, nn.Module) else nn.Parameter(part))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def captured(model: nn.Module) -> fx.GraphModule:
    """Capture as `transform` does."""
    session = Session(own_tree(model), Pipeline(()), "symbolic", strict=False)
    view = trace_module(session, WHOLE).view
    return assemble(session.root, view.graph)


def at_stage(model: nn.Module, last: str, schedule: Schedule | None = None, **options: Any) -> fx.GraphModule:
    """Capture (a GraphModule is taken as it is) and run the standard passes up to and with `last`."""
    module = model if isinstance(model, fx.GraphModule) else captured(model)
    steps: list[Pass] = []
    for step in Pipeline.standard(schedule=schedule, **options):
        steps.append(step)
        if step.name == last:
            break
    Pipeline(tuple(steps)).run(module)
    return module


def numbers(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Run forward and backward; return outputs, gradients of the inputs, gradients of the parameters."""
    torch.manual_seed(0)
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    module.zero_grad()
    # Inputs that the model overwrites must not be leaves.
    result = module(*[x.clone() for x in leaves])
    outputs = list(result) if isinstance(result, (tuple, list)) else [result]
    torch.autograd.backward(outputs, [torch.linspace(-1, 1, y.numel()).view_as(y) for y in outputs])
    parameters = [p.grad for _, p in sorted(module.named_parameters()) if p.grad is not None]
    found = [y.detach().clone() for y in outputs]
    return found + [g.clone() for g in (*(x.grad for x in leaves), *parameters) if g is not None]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Agree to the bit."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


def node(module: fx.GraphModule, name: str) -> fx.Node:
    """Return the node of that name."""
    (found,) = [node for node in module.graph.nodes if node.name == name]
    assert isinstance(found, fx.Node)
    return found


def decisions(module: fx.GraphModule) -> dict[str, Decision]:
    """Return the decisions by layer."""
    return {found.meta[DECISION].layer: found.meta[DECISION] for found in module.graph.nodes if DECISION in found.meta}


def quantizers(module: fx.GraphModule, role: str | None = None) -> list[Quantizer]:
    """Return the quantizers of a graph in order, all or those of one role."""
    found = [node.meta[QUANTIZER] for node in module.graph.nodes if QUANTIZER in node.meta]
    return [quantizer for quantizer in found if role in (None, quantizer.role)]


def targets(module: fx.GraphModule) -> list[Any]:
    """Return what the nodes call, in order, without inputs, reads and output."""
    return [node.target for node in module.graph.nodes if node.op.startswith("call")]


def set_bits(module: nn.Module, bits: int) -> None:
    """Write one width to every width source."""
    held: Any = precision_of(module).bits
    for width in held.buffers():
        width.fill_(bits)


def only(family: str, **rule: Any) -> Recipe:
    """Return a recipe with a rule for one family."""
    rules: dict[str, Any] = {family: Rule(**rule)}
    return Recipe(name="only", **rules)
