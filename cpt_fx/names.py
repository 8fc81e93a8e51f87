"""The names of layers: which operator of which module, the same in every capture of one model."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx, nn

from cpt_fx.meta import NAME, module_path
from cpt_fx.operators import HIDING, OPERATOR_OF

NAMES = "cpt_fx_names"
"""Key in `GraphModule.meta` of the registry that all captures of one model share."""

NTH = "cpt_fx_nth"
"""On a node of a graph that holds one operator only: the how manieth it is at its place."""

Frame = tuple[str, int, str]
Place = tuple[tuple[Frame, ...], int]
"""Where in a module's code an operator stands, and the how manieth it is there within one call of the module."""

_OWN = (str(Path(__file__).parent), torch._ops.__file__, torch._tensor.__file__)
"""Files whose code calls the operators of others."""
_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
RESUMED = re.compile(r"^torch_dynamo_resume_in_(.*)_at_\d+$")


class Names:
    """Gives every operator a name that stays: the path of its module, its kind, and a number where needed.

    A model may be captured many times: for training and evaluation, for other shapes, in pieces. The same line of a
    module's code gets the same name each time, because numbers are given to places in the code in the order in which
    they are first seen, and remembered. Where a graph does not know its places, the place is the count within one
    call of the module: a module that is called twice keeps one name, and with it one running range.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], dict[Place, int]] = {}
        self._whole: dict[str, tuple[str, Place]] = {}
        self.merged_ranges: dict[str, str] = {}
        """Running ranges of layers that read one tensor: which was merged into which."""

    def name(self, path: str, op: str, place: Place, *, whole: bool) -> str:
        """Return the name of an operator at a place; with `whole`, the module's first operator is the module itself."""
        if whole and self._whole.setdefault(path, (op, place)) == (op, place):
            return path
        numbers = self._numbers.setdefault((path, op), {})
        if whole and not numbers and self._whole[path][0] == op:
            numbers[self._whole[path][1]] = 0
        number = numbers.setdefault(place, len(numbers))
        name = f"{op}_{number}" if number else op
        return f"{path}.{name}" if path else name


class NamesOfOneGraph:
    """Counts, along one graph and its bodies, how often a place was passed within each call of a module."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._counts: dict[tuple[str, str, tuple[Frame, ...]], int] = {}

    def name(self, node: fx.Node, op: str, kind: type[nn.Module] | None) -> str:
        """Name the next operator of the graph; `kind` is the class of the module it belongs to."""
        path, call = module_path(node)
        layer = kind is not None and issubclass(kind, HIDING)
        op = node.meta.get(NAME, op)
        # A layer of torch's own has one operator, or several that are named; its code says nothing about the model.
        frames = () if layer else frames_of(node.meta.get("stack_trace"))
        key = (call, op, frames)
        # A plain layer has one operator per call, however its code is reached.
        count = 0 if kind is not None and OPERATOR_OF.get(kind) == op else node.meta.get(NTH, self._counts.get(key, 0))
        self._counts[key] = count + 1
        return self._names.name(path, op, (frames, count), whole=layer and NAME not in node.meta)


def frames_of(stack_trace: str | None) -> tuple[Frame, ...]:
    """Return the frames of a stack trace from the innermost `forward` on, as (file, line, function)."""
    found = [(file, int(line), RESUMED.sub(r"\1", name)) for file, line, name in _FRAME.findall(stack_trace or "")]
    # A function of torch that hands itself over, and our mode that takes it, are no part of the model's code.
    over = [index for index, (_, _, name) in enumerate(found) if name == "handle_torch_function"]
    handing = {*over, *(index - 1 for index in over)}
    frames = [frame for index, frame in enumerate(found) if index not in handing and not frame[0].startswith(_OWN)]
    starts = [index for index, (_, _, name) in enumerate(frames) if "forward" in name]
    return tuple(frames[starts[-1] if starts else 0 :])
