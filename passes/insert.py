"""Carry out the decisions: insert a quantizer before each operand and a gradient quantizer after each operator."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from cpt_fx.formats import Format, Range
from cpt_fx.ir.aliasing import overwritten
from cpt_fx.ir.layer_state import PARTS, add_range
from cpt_fx.ir.meta import DECISION, QUANTIZER, STATE, Decision, Operand, Quantizer, WidthSource, read_before, source_of
from cpt_fx.ir.pass_base import Pass, Report
from cpt_fx.ir.state import Precision
from cpt_fx.ir.subgraphs import OUTER, free_name, given_quantized, has_quantizers, nodes_of, outermost, state_of
from cpt_fx.operators import returns_one_tensor
from cpt_fx.operators.groups import gradient_groups
from cpt_fx.quantizers.numerics import keywords_of
from cpt_fx.quantizers.ops import OP_OF_RANGE, QUANTIZE_GRADIENT


@dataclass(frozen=True)
class Insert(Pass):
    """Insert quantizers for weights, biases, activations and gradients where annotate decided so.

    They read the plain bit-width of their role, which is 32 (the identity) until bind attaches a schedule. Every
    operand of every operator gets its own quantizer; share merges the redundant ones.
    """

    name: ClassVar[str] = "insert"
    requires: ClassVar[str] = "annotated"
    reaches: ClassVar[str | None] = "inserted"

    def run(self, module: fx.GraphModule) -> Report:
        """Insert the quantizers of every operator that has a quantization decision."""
        state = state_of(module)
        made = [node.meta[QUANTIZER] for node in nodes_of(outermost(module)) if QUANTIZER in node.meta]
        editor = _Editor(module, state, {quantizer.counters for quantizer in made})
        nodes = {node.name: node for node in module.graph.nodes}
        given = given_quantized(module)
        decisions = [node for node in module.graph.nodes if DECISION in node.meta and not has_quantizers(node, given)]
        after = {node: nodes[node.meta[DECISION].gradient_name].users for node in decisions}
        # Skip those that an earlier run of this pass has handled.
        decisions = [node for node in decisions if all(user.target is not QUANTIZE_GRADIENT for user in after[node])]
        for node in decisions:
            decision: Decision = node.meta[DECISION]
            if node.args[0] in overwritten(node, {}):
                editor.write_afterwards(node)
            for operand in decision.operands:
                editor.quantize_operand(nodes[operand.node] if operand.node else node, decision, operand)
            if decision.gradient is not None:
                editor.quantize_gradient(nodes[decision.gradient_name], node, decision)
        counts = ", ".join(f"{count} {role}" for role, count in editor.counts.items())
        return Report(self.name, sum(editor.counts.values()), (counts or "nothing to insert",))


class _Editor:
    """Creates quantizer nodes; each value of the state is read by one node."""

    def __init__(self, module: fx.GraphModule, state: Precision, taken: set[str]) -> None:
        self.module = module
        self.graph = module.graph
        self.state = state
        self.taken = taken
        self.counts: dict[str, int] = {}
        self._reads: dict[str, fx.Node] = {}

    def write_afterwards(self, node: fx.Node) -> None:
        """Run an in-place operator on a copy; its result is written back after its gradient quantizer.

        In place it would overwrite the copy that the operand's quantizer returns, not the tensor itself; and the
        gradient of a view flows through its base, bypassing a gradient quantizer on the view.
        """
        written = node.args[0]
        with self.graph.inserting_before(node):
            aside = self.graph.call_method("clone", (written,))
        with self.graph.inserting_before(node.next):
            # Not copy_: the zeros it returns as gradient have another memory layout. Adding to -0.0 changes no value.
            empty = self.graph.call_method("fill_", (written, -0.0))
            returns_it = returns_one_tensor(node.target)
            back = self.graph.call_method("add_", (empty, node if returns_it else aside))
        node.update_arg(0, aside)
        if returns_it:
            node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        for new in (aside, empty, back):
            new.meta |= {key: value for key, value in node.meta.items() if key == "val"} | source_of(node)

    def quantize_operand(self, node: fx.Node, decision: Decision, operand: Operand) -> None:
        """Insert a quantizer between an operator and one of its operands."""
        value = operand.value(node)
        options = keywords_of(operand.format, (operand.keep, operand.over))
        source = decision.width_source(operand.role)
        ranges = ""
        args: list[Any] = [value, self._bits(source.role)]
        if operand.format.range is not Range.DYNAMIC:
            learned = operand.format.range is Range.LEARNED
            root = outermost(self.module)
            ranges = add_range(root, decision.layer, operand.name, self.state.device, learned=learned)
            args += [self._read(f"{_outward(self.module)}{ranges}_{part}", node) for part in PARTS]
            args.append(self._read(_training_flag(self.module, node), node))
            if not learned:
                options |= {
                    "momentum": operand.format.momentum,
                    "corrected": operand.format.corrected,
                    "when_off": operand.format.observe_when_off,
                }
            if operand.format.range is Range.PERCENTILE:
                options["percentile"] = operand.format.percentile
        with self.graph.inserting_before(node):
            name = f"{decision.layer}_{operand.name}_q"
            made = self.graph.create_node("call_function", OP_OF_RANGE[operand.format.range], tuple(args), name=name)
        self._finish(made, options, node, decision, operand.name, operand.role, operand.format, ranges)
        _replace_argument(node, operand, made)
        if decision.return_quantized:
            for user in list(value.users):
                if user.op == "output":
                    user.replace_input_with(value, made)

    def quantize_gradient(self, node: fx.Node, at: fx.Node, decision: Decision) -> None:
        """Insert a gradient quantizer after an operator; all users of the operator read the quantizer instead."""
        assert decision.gradient is not None
        with self.graph.inserting_after(node):
            made = self.graph.create_node("call_function", QUANTIZE_GRADIENT, name=f"{decision.layer}_gradient_q")
        node.replace_all_uses_with(made)
        source = decision.width_source("gradient")
        made.args = (node, self._bits(source.role))
        options = keywords_of(decision.gradient, gradient_groups(decision.gradient))
        self._finish(made, options, at, decision, "gradient", "gradient", decision.gradient)

    def _finish(
        self, made: fx.Node, options: dict[str, Any], at: fx.Node, decision: Decision, operand: str, role: str,
        format: Format, ranges: str = "",
    ) -> None:  # fmt: skip
        """Give a new quantizer its counters and its provenance."""
        counters = self._counters(made.name, decision.layer)
        made.kwargs = {**options, "counters": self._read(counters, made)}
        source = decision.width_source(role)
        what = Quantizer((decision.layer,), decision.op, operand, role, format, source, counters, ranges)
        made.meta.update(source_of(at), **{QUANTIZER: what})
        value = made.args[0]
        if isinstance(value, fx.Node) and "val" in value.meta:
            made.meta["val"] = value.meta["val"]
        self.counts[what.role] = self.counts.get(what.role, 0) + 1

    def _counters(self, name: str, layer: str) -> str:
        """Add counters that no other quantizer writes, as node names may repeat in subgraphs; return their path."""
        free = free_name(name, lambda free: f"{STATE}.counters.{free}" in self.taken)
        counters = self.state.add_counters(free, layer)
        self.taken.add(counters)
        return counters

    def _bits(self, role: str) -> fx.Node:
        path = self.state.add_width_source(WidthSource(role))
        if path in self._reads:
            return self._reads[path]
        # Before the current first node: the first operator may have a quantizer in front of it by now.
        return self._read(path, next(node for node in self.graph.nodes if node.op != "placeholder"))

    def _read(self, path: str, before: fx.Node) -> fx.Node:
        """Return the node that reads a value of the state, created once, before its first use."""
        if path not in self._reads:
            self._reads[path] = read_before(before, path)
        return self._reads[path]


def _replace_argument(node: fx.Node, operand: Operand, value: fx.Node) -> None:
    if isinstance(operand.index, int):
        node.update_arg(operand.index, value)
    else:
        outer, inner = operand.index
        items: Any = node.args[outer]
        node.update_arg(outer, (*items[:inner], value, *items[inner + 1 :]))


def _outward(module: fx.GraphModule) -> str:
    """Return the path prefix that leads from a subgraph to the outermost graph."""
    return f"{OUTER}.{_outward(module.__dict__[OUTER])}" if OUTER in module.__dict__ else ""


def _training_flag(module: fx.GraphModule, node: fx.Node) -> str:
    """Return the path of the `training` flag of an operator's module: parts of a model can be in eval mode."""
    stack = node.meta.get("nn_module_stack") or {}
    for path, _ in reversed(list(stack.values())):
        with suppress(AttributeError):
            outermost(module).get_submodule(path)
            return f"{_outward(module)}{path and f'{path}.'}training"
    return f"{_outward(module)}training"
