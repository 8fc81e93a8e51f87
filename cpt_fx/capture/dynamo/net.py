"""Quantizes products between Dynamo's graphs, in eager code: each such call becomes a graph of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from cpt_fx.capture.base import over, patched
from cpt_fx.capture.dynamo.callers import Caller, caller_of
from cpt_fx.capture.dynamo.torch_private import eval_frame
from cpt_fx.capture.tree import TreePlaces
from cpt_fx.common.functorch import is_transformed
from cpt_fx.common.torch_private import pytree
from cpt_fx.ir.contexts import TRANSFORMED
from cpt_fx.ir.layer_names import OCCURRENCE
from cpt_fx.ir.meta import WEIGHT, is_transposed
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.operators import form_of, multiplies, why_left

if TYPE_CHECKING:
    from cpt_fx.capture.dynamo.engine import DynamoEngine

_HELD = (Tensor, *fx.node.base_types, type(None), type(...), slice, range)
"""Types of values that the arguments of a node may hold."""
VARIANTS = 32
"""Maximum number of cached graphs per call site: numeric arguments that keep changing would need ever more of them."""


class Net(TorchFunctionMode):
    """The mode under which a model with graph breaks runs, except inside rewritten graphs and while Dynamo traces."""

    def __init__(self, owner: DynamoEngine) -> None:
        super().__init__()
        self.owner = owner
        self.resting = 0
        self._graphs: dict[Hashable, dict[Hashable, QuantizedGraphModule]] = {}
        self._weights: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._neighbours: dict[Hashable, dict[tuple[int, ...], int]] = {}

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Suspend the net: a rewritten graph has its own quantizers."""
        self.resting += 1
        try:
            yield
        finally:
            self.resting -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run calls that multiply through quantized graphs."""
        if torch.compiler.is_compiling() or self.resting:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        result = _quantized(self, func, args, kwargs) if multiplies(func, args, kwargs) else func(*args, **kwargs)
        self._note(result, args, kwargs)
        return result

    def _note(self, result: Any, args: Any, kwargs: Any) -> None:
        """Record results computed from parameters alone as weights, as in a graph."""
        first = args[0] if args else None
        if not self.is_weight(first[0] if isinstance(first, (list, tuple)) and first else first):
            return
        if all(self.is_weight(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            self._weights.update((made, True) for made in pytree.tree_leaves(result) if isinstance(made, Tensor))
        elif isinstance(first, Tensor) and (result is None or result is first):
            self._weights.pop(first, None)  # something else was written to it

    def is_weight(self, value: Any) -> bool:
        """Return whether a value is a parameter, or computed from parameters alone."""
        return isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and value in self._weights)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator through its own graph, which is made at the first call from this place."""
        places = self.owner.places
        caller = caller_of(places)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        reason = TRANSFORMED if is_transformed() else ""
        if caller.function is not None:
            reason = f"the backward of {caller.function} is its author's own"
        elif not reason and not all(isinstance(leaf, _HELD) for leaf in leaves):
            reason = why_left(func) or "it is called with what no graph can hold"
        if reason:
            self.owner.leave(caller.path, str(getattr(func, "__name__", func)), reason)
            return func(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        graphs = self._graphs.setdefault((func, caller), {})
        key = (spec, tuple(self._kind(leaf, places) for leaf in leaves))
        view = graphs.get(key)
        if view is not None:
            return self._run(view, tensors)
        view = self._graph(func, leaves, spec, caller)
        try:
            result = self._run(view, tensors)
        except Exception:
            # The operator rejects its operands; the caller may expect the error.
            self.owner.forget_last()
            raise
        if len(graphs) < VARIANTS:
            graphs[key] = view
        else:
            self.owner.forget_last()
        return result

    def _run(self, view: QuantizedGraphModule, tensors: list[Tensor]) -> Any:
        self.owner.runs += 1
        with self.asleep():
            return view.forward(*tensors)[0]

    def _graph(
        self, func: Callable[..., Any], leaves: list[Any], spec: pytree.TreeSpec, caller: Caller
    ) -> QuantizedGraphModule:
        """Make a graph of one operator and rewrite it."""
        places = self.owner.places
        graph = fx.Graph()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = iter([graph.placeholder(f"x{place}") for place in range(len(tensors))])
        values = [
            self._value(graph, leaf, next(inputs), places) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        names = [places.tensor(leaf) for leaf in tensors if isinstance(leaf, nn.Parameter)]
        path = caller.path or next((name.rpartition(".")[0] for name in names if name), "")
        args, kwargs = pytree.tree_unflatten(values, spec)
        node = graph.call_function(func, tuple(args), kwargs)
        node.meta["nn_module_stack"] = places.stack(path)
        node.meta["stack_trace"] = caller.trace
        # Operators on one line are distinguished by their occurrence index.
        neighbours = self._neighbours.setdefault((func, caller.path, caller.trace), {})
        node.meta[OCCURRENCE] = neighbours.setdefault(caller.steps, len(neighbours))
        graph.output((node,))
        view = over(self.owner.root, self.owner.state, self.owner.names, graph)
        self.owner.rewrite(view, "")
        for made in graph.nodes:
            made.meta.pop("example_value", None)  # it would keep an activation and its history alive
        return view

    def _value(self, graph: fx.Graph, tensor: Tensor, node: fx.Node, places: TreePlaces) -> fx.Node:
        """Return the node for an operand: a tensor of the model by its name, any other as an input."""
        name = places.tensor(tensor)
        if name is not None:
            return graph.create_node("get_attr", name)
        node.meta["example_value"] = tensor
        if self.is_weight(tensor):
            node.meta[WEIGHT] = True
        return node

    def _kind(self, leaf: Any, places: TreePlaces) -> Hashable:
        """Return what an argument adds to the cache key of a graph: a tensor's name, its dims and dtype, or a value."""
        if isinstance(leaf, Tensor):
            return places.tensor(leaf) or (leaf.ndim, leaf.dtype, self.is_weight(leaf) and 1 + is_transposed(leaf))
        return leaf if isinstance(leaf, Hashable) else repr(leaf)


# Dynamo handles the mode while it traces; the frame itself is not to be captured.
eval_frame.skip_code(Net.__torch_function__.__code__)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _quantized(net: Net, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a call outside of any compiler's trace."""
    return net.call(func, args, kwargs)


@contextmanager
def noticed_scripts(engine: DynamoEngine) -> Iterator[None]:
    """Record TorchScript functions that multiply in the model's own code as uncovered: they cannot be rewritten."""
    kind: Any = torch.jit.ScriptFunction
    plain = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if engine.runs_here() and any(map(_is_product, re.findall(r"aten::\w+", str(function.inlined_graph)))):
            reason = "a TorchScript function: its code is compiled and cannot be rewritten"
            engine.leave(caller_of(engine.places).path, function.name, reason)
        return plain(function, *args, **kwargs)

    with patched({(kind, "__call__"): call}):
        yield


def _is_product(name: str) -> bool:
    form = form_of(name)
    return form is not None and form.row.when is None and bool(form.row.left or form.row.factors)
