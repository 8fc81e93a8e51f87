"""Which quantized products ran in a step, by the model's own counts; the profiler cannot tell."""

from __future__ import annotations

from cpt_fx.api import graphs
from cpt_fx.inspection.views import products_in, views_in
from cpt_fx.ir.meta import DECISION, QUANTIZER
from harness.contenders import Trainee
from harness.memory import Traced
from harness.results import Executed

Counts = dict[str, int]


def counts(trainee: Trainee) -> Counts:
    """Return how often everything that is counted ran: quantizers, and products on integers."""
    if trainee.schedule is None:
        return {}
    found = {f"{view.graph}/{view.node}": view.times_run for view in views_in(trainee.plain)}
    integer = (view.integer for view in products_in(trainee.plain))
    forward, *backward = (sum(column) for column in zip(*integer, strict=True))
    return found | {"forward": forward, "backward": sum(backward)}


def since(before: Counts, trainee: Trainee, trace: Traced) -> Executed:
    """Return what ran since: on integers the products counted there, else products whose quantizers ran."""
    if trainee.schedule is None:
        return Executed(integer=trace.integer, floating=trace.floating)
    now = counts(trainee)
    ran = {key for key, runs in now.items() if runs > before.get(key, 0)}
    if trainee.contender.kind == "integer":
        forward, backward = (now[key] - before[key] for key in ("forward", "backward"))
        # Native kernels are not operators, and no profiler sees them.
        integer = max(trace.integer, forward + backward)
    else:
        forward, backward = _between_quantizers(trainee, ran)
        integer = trace.integer
    return Executed(integer=integer, floating=trace.floating, forward=forward, backward=backward)


def _between_quantizers(trainee: Trainee, ran: set[str]) -> tuple[int, int]:
    """Return the number of products all of whose quantized operands ran, and of gradients that were quantized."""
    forward = backward = 0
    for index, module in enumerate(graphs(trainee.plain)):
        for node in module.graph.nodes:
            if DECISION in node.meta:
                made = [operand for operand in node.all_input_nodes if QUANTIZER in operand.meta]
                forward += bool(made) and all(f"{index}/{operand.name}" in ran for operand in made)
            quantizer = node.meta.get(QUANTIZER)
            backward += quantizer is not None and quantizer.role == "gradient" and f"{index}/{node.name}" in ran
    return forward, backward
