"""Write quantization decisions to node metadata; the graph itself does not change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from cpt_fx.formats import Format, Group
from cpt_fx.ir.aggregations import (
    MAKERS,
    carries_no_message,
    is_one_of,
    normalizes_softmax,
    parametrization_of,
    result_of,
    row_in_graph,
)
from cpt_fx.ir.aliasing import overwritten
from cpt_fx.ir.contexts import TRANSFORMED, Regions
from cpt_fx.ir.layer_names import NAMES, Names, NamesOfOneGraph, frames_of
from cpt_fx.ir.meta import (
    BY_DECISION,
    CALLED,
    DECISION,
    FAMILY,
    LEFT,
    Decision,
    Operand,
    Uncovered,
    WidthSource,
    argument,
    around,
    example_of,
    module_path,
    module_stack,
)
from cpt_fx.ir.pass_base import Report
from cpt_fx.ir.result import plain_class
from cpt_fx.ir.state import Precision
from cpt_fx.ir.subgraphs import AUTHORS_OWN, calls_of, given_quantized, has_quantizers, multiplies, outermost, state_of
from cpt_fx.ir.values import WeightTracker, is_read
from cpt_fx.operators import HIDING, MULTIPLY, Index, Row, form_of, returns_one_tensor, row_of, why_left
from cpt_fx.operators.around import ADDS
from cpt_fx.operators.groups import einsum_group, group_of
from cpt_fx.overrides import SELECTED, Choices, ChoosingPass, Pattern, Selected, shown
from cpt_fx.recipes import Rule
from cpt_fx.schedules import Bits

MAKES_A_WEIGHT = "part of a parametrization: it makes a weight, which is quantized where a layer multiplies it"
BETWEEN = "it multiplies its operands one after the other: what it makes in between stays in full precision"
NOT_ONE = "it does not return one tensor: its gradients stay in full precision"
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
OF_SOFTMAX = "part of a softmax over neighbours, which stays in full precision: it sums scores, not messages"


@dataclass(frozen=True)
class Annotate(ChoosingPass):
    """Decide for every operator that multiplies how it is quantized, or why it is not.

    Decisions are `Decision`s in `node.meta`; the report lists what stays in full precision, with the reason.
    """

    name: ClassVar[str] = "annotate"
    requires: ClassVar[str] = "normalized"
    reaches: ClassVar[str | None] = "annotated"
    whole: ClassVar[bool] = True

    def run(self, module: fx.GraphModule) -> Report:
        """Walk the graph once, in order, entering each subgraph at the first node that runs it."""
        selected: Selected = module.meta.get(SELECTED) or Selected()
        choices = Choices(self, outermost(module), selected)
        if choices.recipe.not_finite == "raise":
            state_of(module).raises = True
        walk = _Walk(module, choices)
        walk.graph(module)
        selected.layers.update(dict.fromkeys(walk.layers))
        # Where several graphs share `Selected`, the session checks the patterns over all of them.
        notes = () if SELECTED in module.meta else selected.check(walk.kinds.items())
        return Report(self.name, walk.decided, notes, tuple(walk.uncovered))


class _Walk:
    """One walk over a graph: names layers, tracks which values are weights, decides."""

    def __init__(self, module: fx.GraphModule, choices: Choices) -> None:
        self.choices = choices
        self.recipe = choices.recipe
        self.regions = Regions()
        self.values = WeightTracker(module)
        self.layers: list[str] = []
        self.uncovered: list[Uncovered] = []
        self.decided = 0
        self._names = NamesOfOneGraph(module.meta.get(NAMES, Names()))
        self._walked: set[fx.GraphModule] = set()
        self._given: dict[fx.Node, fx.Node] = {}
        self.kinds: dict[str, type[nn.Module] | None] = {
            path: _kind_of(child) for path, child in module.named_modules(remove_duplicate=False)
        }
        """Class of every module that the graph knows, by path."""

    def graph(self, module: fx.GraphModule) -> None:
        """Visit every node of a graph, and each of its subgraphs at the first node that runs it."""
        self._walked.add(module)
        outer, self.values.module = self.values.module, module
        self._given |= given_quantized(module)
        for node in module.graph.nodes:
            self.visit(node)
            if DECISION not in node.meta and row_of(node):
                node.meta.setdefault(LEFT, BY_DECISION)
            for call in calls_of(module, node):
                self.values.enter(call)
                if call.subgraph not in self._walked:
                    self.graph(call.subgraph)
        self.values.module = outer

    def visit(self, node: fx.Node) -> None:
        """Decide about one node."""
        self.kinds.update((path, kind) for path, kind in module_stack(node) if kind is not None)
        self.regions.visit(node)
        self.values.visit(node)
        if self._makes_a_weight(node):
            return
        spec = row_in_graph(node, self.recipe, self.values.weights, self.values.trained)
        if spec is None:
            self._report_hidden(node)
            return
        if spec.family == "aggregation" and carries_no_message(node, spec, self.values.trained):
            return
        family = self._family(node, spec)
        layer = self._names.name(node, spec.name, self.kinds.get(module_path(node)[0]))
        self.layers.append(layer)
        if DECISION in node.meta and has_quantizers(node, self._given):
            return  # insert has carried out an earlier decision, which stands
        node.meta.pop(DECISION, None)
        if self._is_excluded(node, layer, spec.name):
            return
        if self.regions.transformed:
            self._leave(node, layer, spec.name, TRANSFORMED)
            return
        rule, selecting = self.choices.rule(family, layer, around(node))
        if rule is None:
            if family in (*MULTIPLY, "aggregation"):
                reason = f"recipe {self.recipe.name!r} leaves {family} in full precision"
                # Sums multiply nothing, so a recipe without a rule for them leaves them by choice.
                self.uncovered.append(Uncovered(layer, spec.name, reason, by_choice=family == "aggregation"))
            return
        if family == "aggregation" and normalizes_softmax(node, spec):
            self.uncovered.append(Uncovered(layer, spec.name, OF_SOFTMAX, by_choice=True))
            return
        self._decide(node, spec, family, layer, rule, selecting)
        self._note_effects(node, selecting)

    def _makes_a_weight(self, node: fx.Node) -> bool:
        """Return whether a node is part of a parametrization; list it as uncovered if it multiplies."""
        found = parametrization_of(node, self.kinds)
        if found is None:
            return False
        self.values.weights.add(node)
        if form_of(node.target) or found[1] in MAKERS:
            self._list_maker(*found)
            node.meta[LEFT] = MAKES_A_WEIGHT
        return True

    def _list_maker(self, layer: str, kind: str) -> None:
        self.layers.append(layer)
        item = Uncovered(layer, kind, MAKES_A_WEIGHT, by_choice=True)
        if item not in self.uncovered:
            self.uncovered.append(item)

    def _note_effects(self, node: fx.Node, selecting: list[Pattern]) -> None:
        """Record which of the bit-widths that overrides set for single roles have a quantizer."""
        decision: Decision | None = node.meta.get(DECISION)
        roles = set() if decision is None else {operand.role for operand in decision.operands}
        if decision is not None and decision.gradient is not None:
            roles.add("gradient")
        for pattern in selecting:
            for role, _ in self.choices.overrides[pattern].widths:
                idle = self.choices.changes.idle
                idle[pattern, role] = idle.get((pattern, role), True) and role not in roles

    def _is_excluded(self, node: fx.Node, layer: str, op: str) -> bool:
        """Return whether the user excluded an operator; if so, list it as uncovered."""
        found = self.choices.exclude.matches(layer, around(node))
        if found:
            reason = f"excluded by {', '.join(map(shown, found))}"
            self.uncovered.append(Uncovered(layer, op, reason, by_choice=True))
        return bool(found)

    def _decide(self, node: fx.Node, spec: Row, family: str, layer: str, rule: Rule, selecting: list[Pattern]) -> None:
        operands, places = [], self._operands(node, spec)
        for index, name, kind in places:
            operand = self._operand(node, spec, family, index, name, kind, rule)
            if isinstance(operand, Operand):
                operands.append(operand)
            elif operand:
                self.uncovered.append(Uncovered(layer, spec.name, operand, name, by_choice=rule.messages_only))
        in_turn = spec.between and len(places) > 2
        if in_turn:
            self.uncovered.append(Uncovered(layer, spec.name, BETWEEN))
        has_bias = any(item.role == "bias" for item in operands)
        complete = spec.family not in ("matmul", "aggregation") and (spec.name != "linear" or has_bias)
        added = self._bias_after(node) if family == "linear" and rule.bias and not complete else None
        if added is not None and rule.bias is not None:
            index = 0 if added.args[1] is node else 1
            operands.append(Operand(index, "bias", "bias", rule.bias, (), None, added.name))
        gradient = None if self.regions.infers else rule.gradient
        if gradient is not None and not returns_one_tensor(node.target):
            self.uncovered.append(Uncovered(layer, spec.name, NOT_ONE, "gradient"))
            gradient = None
        if not operands and rule.gradient is None:
            return
        aggregates = family == "aggregation" or rule.messages_only
        output = result_of(node, spec, aggregates=aggregates) if added is None else added
        sources = {role: WidthSource(role) for role in Bits._fields}
        sources["gradient"] = WidthSource("gradient", with_forward=rule.gradient_with_forward)
        for pattern in selecting:
            sources = self.choices.overrides[pattern].width_sources(sources)
        node.meta[DECISION] = Decision(
            layer=layer,
            op=spec.name,
            family=family,
            operands=tuple(operands),
            gradient=gradient,
            width_sources=tuple(sources.items()),
            gradient_name=output.name,
            return_quantized=rule.return_quantized,
            in_turn=in_turn,
        )
        self.decided += 1

    def _bias_after(self, node: fx.Node) -> fx.Node | None:
        """Return the addition of a parameter vector that makes a product a linear layer with bias, or None."""
        users = list(node.users)
        if self.recipe.bias_add is not None or len(users) != 1 or not is_one_of(users[0], ADDS) or users[0].kwargs:
            return None
        others = [arg for arg in users[0].args if arg is not node]
        other = others[0] if len(others) == 1 else None
        if not isinstance(other, fx.Node) or not is_read(other) or len(users[0].args) != 2:
            return None
        value = self.values.tensor(other)
        is_vector = isinstance(value, torch.Tensor) and value.ndim == 1
        return users[0] if self.values.is_weight(other) and is_vector else None

    def _operands(self, node: fx.Node, spec: Row) -> list[tuple[Index, str, str]]:
        """List the tensors an operator multiplies, as (index, name, kind)."""
        found: list[tuple[Index, str, str]] = []
        for index, kind in spec.operands:
            given, name = node.args[index] if index < len(node.args) else None, spec.arguments[index]
            if isinstance(given, (list, tuple)):
                found += [((index, place), f"{name}{place}", kind) for place in range(len(given))]
            elif isinstance(given, fx.Node):
                found.append((index, name, kind))
        if spec.variadic is not None:
            places: Iterable[Index] = range(spec.variadic, len(node.args))
            first = node.args[spec.variadic] if places else ()
            if spec.name == "einsum" and node.args and isinstance(node.args[0], fx.Node):
                # The sublist form: tensor, axes, tensor, axes, ..., axes of the result.
                places = range(0, len(node.args) - 1, 2)
            elif isinstance(first, (list, tuple)):
                places = [(spec.variadic, i) for i in range(len(first))]
            found += [(place, f"operand{i}", "either") for i, place in enumerate(places)]
        return found

    def _operand(
        self, node: fx.Node, spec: Row, family: str, index: Index, name: str, kind: str, rule: Rule
    ) -> Operand | str | None:
        """Return the decision for one operand, a reason if it is not quantized, or None if it needs neither."""
        value = argument(node, index)
        if not isinstance(value, fx.Node):
            return None
        if spec.family == "embedding" and value in overwritten(node, {}):
            return f"{spec.name} overwrites it: what it writes must go to the tensor itself"
        is_weight = value in self.values.weights
        example = example_of(value)
        held = self.values.tensor(value) if example is None else example
        if kind == "sparse" or (isinstance(held, torch.Tensor) and held.layout in _SPARSE):
            return None if family == "aggregation" else "a sparse operand is passed on as it is"
        if kind == "bias":
            if not is_weight:
                # Added to the product, not a factor of it.
                return None
            role, chosen = "bias", rule.bias
        elif kind == "weight" or is_weight:
            role, chosen = ("bias", rule.bias) if spec.family == "bias_add" else ("weight", rule.weight)
        else:
            role, chosen = "activation", rule.input
        left = kind == "either" and name in ("input", "mat1", "operand0")
        if rule.messages_only and left and value not in self.values.trained:
            return "the left operand is the adjacency, not a message"
        if chosen is None:
            return None if role == "bias" else f"the recipe has no format for the {role} of this family"
        fitting = replace(chosen, group=Group.TENSOR) if kind == "coefficients" else self._fitting(chosen, value)
        groups = group_of(spec, index, fitting)
        if spec.name == "einsum" and isinstance(index, int) and isinstance(node.args[0], str):
            groups = einsum_group(node.args[0], index - 1, fitting) or groups
        if spec.name == "vecdot" and fitting.group is Group.CHANNEL:
            groups = ((), (node.kwargs.get("dim", -1),))  # type: ignore[assignment]
        if fitting.group is Group.ROW and is_weight and self.values.is_transposed(value):
            # Dim 0 as stored is the last dim after a transpose.
            groups = ((-1,), None)
        keep, over = groups
        return Operand(index, name, role, fitting, keep, over)

    def _fitting(self, chosen: Format, value: fx.Node) -> Format:
        """Return the format, with one range per tensor for a known vector: `reduced_dims` gives vectors one anyway."""
        if is_read(value) and chosen.group in (Group.ROW, Group.CHANNEL) and not chosen.block:
            tensor = self.values.tensor(value)
            if isinstance(tensor, torch.Tensor) and tensor.ndim < 2:
                return replace(chosen, group=Group.TENSOR)
        return chosen

    def _family(self, node: fx.Node, spec: Row) -> str:
        """Return the family of an operator; a product with a parameter is a linear layer, however it is written."""
        if FAMILY in node.meta:
            return str(node.meta[FAMILY])
        products = spec.family == "matmul" or spec.name in ("sparse_mm", "sparse_addmm")
        if products and any(used in self.values.weights for used in node.all_input_nodes):
            return "linear"
        return spec.family

    def _report_hidden(self, node: fx.Node) -> None:
        """Report calls that multiply, or may multiply, where no quantizer can be inserted."""
        path, module = module_path(node)[0], self.values.module
        layer = module.get_submodule(str(node.target)) if node.op == "call_module" else module
        if CALLED in node.meta and any(isinstance(hook, SpectralNorm) for hook in layer._forward_pre_hooks.values()):
            self._list_maker(str(node.target), SpectralNorm.__name__)
        if node.op == "call_module" and CALLED not in node.meta:
            inside = sorted({type(child).__name__ for child in layer.modules() if isinstance(child, HIDING)})
            if inside:
                self.layers.append(str(node.target))
                reason = f"{type(layer).__name__} is called as a whole; inside it: {', '.join(inside)}"
                self._leave(node, str(node.target), type(layer).__name__, reason)
        if node.op not in ("call_function", "call_method"):
            return
        if node.target in AUTHORS_OWN:
            if multiplies(module, node):
                place = "".join(f" ({file}:{line})" for file, line, _ in frames_of(node.meta.get("stack_trace"))[-1:])
                own = f"the backward of a custom autograd.Function is its author's own{place}"
                self._leave(node, path, "autograd.Function", f"{own}: both passes stay as they are")
        elif reason := why_left(node.target, node.args, node.kwargs):
            form = form_of(node.target)
            name = form.row.name if form is not None else str(getattr(node.target, "__name__", node.target))
            self._leave(node, path, name, node.meta.get(LEFT, reason))

    def _leave(self, node: fx.Node, layer: str, op: str, reason: str) -> None:
        node.meta[LEFT] = reason
        if not self._is_excluded(node, layer, op):
            self.uncovered.append(Uncovered(layer, op, reason))


def _kind_of(module: nn.Module) -> type[nn.Module] | None:
    """Return the user's class of a module; None for a bare `nn.Module`, a GraphModule and our state module."""
    bare = type(module) is nn.Module or isinstance(module, (Precision, fx.GraphModule))
    return None if bare else plain_class(type(module))
