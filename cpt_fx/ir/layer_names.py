"""Layer names: which operator of which module, the same in every capture of one model."""

from __future__ import annotations

import re

from torch import fx, nn

from cpt_fx.common.resources import OWN
from cpt_fx.ir.meta import NAME, module_path
from cpt_fx.ir.torch_private import DISPATCHING
from cpt_fx.operators import HIDING, OPERATOR_OF

NAMES = "cpt_fx_names"
"""Key in `GraphModule.meta` of the `Names` that all captures of one model share."""

OCCURRENCE = "cpt_fx_occurrence"
"""On a node of a graph that holds one operator only: its occurrence index at its place."""

Frame = tuple[str, int, str]
Place = tuple[tuple[Frame, ...], int]
"""Where in a module's code an operator is called, and its occurrence index there within one call of the module."""

_CALLING = (*OWN, *DISPATCHING)
"""Files whose frames are dropped: ours, and those of torch that dispatch operators."""
_FRAME = re.compile(r'^\s*File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
RESUMED = re.compile(r"^torch_dynamo_resume_in_(.*)_at_\d+$")


class Names:
    """Gives every operator a stable name: the path of its module, its kind, and a number where needed.

    A model may be captured many times: for training and evaluation, for other shapes, in pieces. The same line of a
    module's code gets the same name each time, because places in the code are numbered in the order in which they are
    first seen, and the numbers are kept. In a graph without stack traces, a place is only the occurrence index within
    one call of the module: a module that is called twice keeps one name, and with it one running range.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], dict[Place, int]] = {}
        self._whole: dict[str, tuple[str, Place]] = {}
        self.merged_ranges: dict[str, str] = {}
        """Running ranges that the pass `share` merged into others -> the range that each was merged into."""

    def name(self, path: str, op: str, place: Place, *, whole: bool) -> str:
        """Return the name of an operator; with `whole`, the module's first operator has the name of the module."""
        if whole and self._whole.setdefault(path, (op, place)) == (op, place):
            return path
        numbers = self._numbers.setdefault((path, op), {})
        if whole and not numbers and self._whole[path][0] == op:
            numbers[self._whole[path][1]] = 0
        number = numbers.setdefault(place, len(numbers))
        name = f"{op}_{number}" if number else op
        return f"{path}.{name}" if path else name


class NamesOfOneGraph:
    """Counts occurrences of each place within each call of a module, along one graph and its subgraphs."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._counts: dict[tuple[str, str, tuple[Frame, ...]], int] = {}

    def name(self, node: fx.Node, op: str, kind: type[nn.Module] | None) -> str:
        """Name the next operator of the graph; `kind` is the class of the module it belongs to."""
        path, call = module_path(node)
        layer = kind is not None and issubclass(kind, HIDING)
        op = node.meta.get(NAME, op)
        # Torch's own layers have one operator, or several with names: places in their code are not needed.
        frames = () if layer else frames_of(node.meta.get("stack_trace"))
        key = (call, op, frames)
        # A plain layer has one operator per call, whichever code calls it.
        is_plain = kind is not None and OPERATOR_OF.get(kind) == op
        count = 0 if is_plain else node.meta.get(OCCURRENCE, self._counts.get(key, 0))
        self._counts[key] = count + 1
        return self._names.name(path, op, (frames, count), whole=layer and NAME not in node.meta)


def frames_of(stack_trace: str | None) -> tuple[Frame, ...]:
    """Return the frames of a stack trace from the innermost `forward` on, as (file, line, function)."""
    found = [(file, int(line), RESUMED.sub(r"\1", name)) for file, line, name in _FRAME.findall(stack_trace or "")]
    # Calls of handle_torch_function, and the torch functions that make them, are not the model's code.
    over = [index for index, (_, _, name) in enumerate(found) if name == "handle_torch_function"]
    handing = {*over, *(index - 1 for index in over)}
    frames = [frame for index, frame in enumerate(found) if index not in handing and not frame[0].startswith(_CALLING)]
    starts = [index for index, (_, _, name) in enumerate(frames) if "forward" in name]
    return tuple(frames[starts[-1] if starts else 0 :])
