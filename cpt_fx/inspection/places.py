"""Where a product comes from: a node of a graph, a line of the model's code, the operator whose backward pass it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import Function, FunctionCtx
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils import checkpoint

from cpt_fx.common.resources import OWN
from cpt_fx.common.torch_private import current_autograd_node
from cpt_fx.inspection.torch_private import run_backward
from cpt_fx.integer.ops import INTEGER_PRODUCTS
from cpt_fx.ir.contexts import TRANSFORMED
from cpt_fx.ir.layer_names import frames_of
from cpt_fx.ir.meta import DECISION, LEFT, Decision, get_attribute, module_path
from cpt_fx.ir.result import PART
from cpt_fx.ir.subgraphs import AUTHORS_OWN
from cpt_fx.operators import form_of

_TORCH = str(Path(torch.__file__).parent)
_APPLY: CodeType = vars(Function)["apply"].__func__.__code__
GENERATED = "<eval_with_key>"
_LISTING = ("net.py", "call")
"""File and name of the function that runs an operator unquantized and lists it: its local `reason` says why."""


class PlaceKind(Enum):
    """What is known about the place of a product."""

    DECISION = "a node with quantizers"
    LEFT = "a node that is listed as left"
    OUTSIDE = "a module outside of what was transformed"
    BACKWARD = "the backward pass of an operator"
    SECOND = "a node that a backward pass made: its own is a second one"
    NOWHERE = "code that no quantizer knows of"


@dataclass(frozen=True)
class Place:
    """Where a product comes from."""

    kind: PlaceKind
    name: str
    """The layer, or file and line."""
    node: fx.Node | None = None
    frame: FrameType | None = None
    """The frame of the graph's code, while it runs."""
    transformed: bool = False
    """Whether it runs under a torch.func transform, where an operator has an autograd node for each level."""
    recomputes: bool = False
    """Whether it is part of a forward pass that a backward pass recomputes."""
    applied: bool = False
    """Whether it is inside a `torch.autograd.Function`, which then has the latest autograd sequence number."""

    @property
    def decision(self) -> Decision | None:
        """The quantization decision for the node."""
        return None if self.node is None else self.node.meta.get(DECISION)

    @property
    def op(self) -> str:
        """The name of the node's operator."""
        target = None if self.node is None else self.node.target
        form = form_of(target)
        return str(getattr(target, "__name__", target)) if form is None else form.row.name

    @property
    def is_registered(self) -> bool:
        """Whether the node calls a registered operator, whose internal products are part of it."""
        form = None if self.node is None else form_of(self.node.target)
        return form is not None and form.row.registered


class ProductPlaces:
    """Finds the place in a model that the running code belongs to."""

    def __init__(self, model: nn.Module) -> None:
        self._names: dict[int, str] = {}
        self._inside: set[int] = set()
        for name, module in model.named_modules():
            self._names[id(module)] = name or "(root)"
            if PART in module.__dict__:
                self._inside |= {id(part) for part in module.modules()}
        self._lines: dict[CodeType, dict[int, fx.Node]] = {}
        self._left_subgraphs: dict[int, fx.Node] = {}

    def now(self) -> Place:
        """Return the place of the calling code; inside a backward pass, only frames since its start count."""
        line, own, layer, again = "", "", 0, False
        backward = current_autograd_node() is not None
        for frame in frames():
            code = frame.f_code
            file = code.co_filename
            if file.startswith(GENERATED):
                found = self._node(frame)
                place = None if found is None else self._of_node(found, frame, backward)
                # Foreign code that runs inside an operator (a mode, a hook) is not part of the operator.
                if place is not None and not (line and place.kind is PlaceKind.DECISION and not place.is_registered):
                    return place
                if found is not None and not line:
                    line = _line_of(found)
            elif code is run_backward.__code__ and backward:
                break
            elif file.startswith(OWN) and (Path(file).name, code.co_name) == _LISTING:
                given = frame.f_locals
                if given.get("reason"):
                    caller = given.get("caller")
                    transformed = caller is not None and caller.function is None
                    return Place(PlaceKind.LEFT, given["function"].name if caller is None else caller.path,
                                 transformed=transformed)  # fmt: skip
            elif file == checkpoint.__file__:
                again = again or backward
            if file.startswith(OWN):
                continue
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(first, SpectralNorm):
                return Place(PlaceKind.LEFT, "")  # listed for every layer that has one
            if isinstance(first, nn.Module) and id(first) in self._names and not layer:
                layer = id(first)
            if isinstance(first, FunctionCtx) and backward:
                line, own = "", own or f"{file}:{frame.f_lineno}"  # the backward pass of an operator
            elif not line and not file.startswith((_TORCH, "<")):
                line = f"{file}:{frame.f_lineno}"
        else:
            backward = False
        name = self._names.get(layer, "")
        if backward and not again and not line:
            return Place(PlaceKind.BACKWARD, own)
        if layer and layer not in self._inside:
            return Place(PlaceKind.OUTSIDE, name, recomputes=again)
        return Place(PlaceKind.NOWHERE, ", ".join(filter(None, (name, line))), recomputes=again)

    def _of_node(self, node: fx.Node, frame: FrameType, backward: bool) -> Place | None:
        if DECISION in node.meta:
            return Place(PlaceKind.DECISION, node.meta[DECISION].layer, node, frame, recomputes=backward)
        if LEFT in node.meta:
            transformed = node.meta[LEFT] == TRANSFORMED
            return Place(PlaceKind.LEFT, module_path(node)[0], node, transformed=transformed, recomputes=backward)
        return None

    def _node(self, frame: FrameType) -> fx.Node | None:
        """Return the node whose line of generated code runs; in the subgraph of a node left as it is, that node."""
        lines = self._lines.get(frame.f_code)
        if lines is None:
            module = frame.f_locals.get("self")
            lines = self._lines[frame.f_code] = {}
            if isinstance(module, fx.GraphModule):
                lines |= nodes_by_line(module)
                self._note_subgraphs(module)
            if id(module) in self._left_subgraphs:
                lines |= dict.fromkeys(lines, self._left_subgraphs[id(module)])
        return lines.get(frame.f_lineno)

    def _note_subgraphs(self, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.target in AUTHORS_OWN and LEFT in node.meta:
                for read in node.all_input_nodes:
                    subgraph = get_attribute(module, str(read.target)) if read.op == "get_attr" else None
                    if isinstance(subgraph, fx.GraphModule):
                        self._left_subgraphs[id(subgraph)] = node


def _line_of(node: fx.Node) -> str:
    """Return the file and line of the model's code that a node comes from."""
    frames = frames_of(node.meta.get("stack_trace"))
    where = f"{frames[-1][0]}:{frames[-1][1]}" if frames else f"{node.name} of a graph"
    return ", ".join(filter(None, (module_path(node)[0], where)))


def frames() -> Iterator[FrameType]:
    """Yield the frames of the callers of the calling function, innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def applied() -> bool:
    """Whether the caller runs inside a `torch.autograd.Function`, without generated code in between."""
    for frame in frames():
        if frame.f_code is _APPLY or frame.f_code.co_filename.startswith(GENERATED):
            return frame.f_code is _APPLY
    return False


def nodes_by_line(module: fx.GraphModule) -> dict[int, fx.Node]:
    """Return the node on each line of a graph's generated code."""
    nodes = list(module.graph.nodes)
    return {
        line + module._prologue_start: nodes[index]
        for line, index in (module._lineno_map or {}).items()
        if index is not None and index < len(nodes)
    }


def operands_at(place: Place) -> list[Any]:
    """Return the values of a node's quantized factors while it runs."""
    decision, node = place.decision, place.node
    assert decision is not None and node is not None and place.frame is not None
    values = place.frame.f_locals
    lowered = node.target in INTEGER_PRODUCTS
    found = []
    for number, operand in enumerate(item for item in decision.operands if item.role != "bias" and not item.node):
        value = node.args[2 * number] if lowered else operand.value(node)
        found.append(values.get(value.name) if isinstance(value, fx.Node) else value)
    return found
