"""A census of products at few bits: checks that everything that multiplies has quantized operands.

A dispatch mode sees every ATen operator that runs, whoever calls it, and changes nothing. Quantizers register their
results. A product is accepted if its operands are such results, or hold only values that quantizers produced; if it
belongs to a node whose own operands do; or if the node is listed as left in full precision. All others are unknown.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partialmethod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import FunctionCtx

from cpt_fx.capture.base import patched
from cpt_fx.capture.standalone import transformed_in
from cpt_fx.common import torch_private as private
from cpt_fx.common.compilers import skip_frame
from cpt_fx.common.functorch import plain
from cpt_fx.common.resources import OWN
from cpt_fx.inspection.levels import Grids
from cpt_fx.inspection.places import Place, PlaceKind, ProductPlaces, applied, operands_at
from cpt_fx.inspection.torch_private import disabled_torch_dispatch, has_computed_kernel, pop_mode, push_mode
from cpt_fx.inspection.views import OF_A_SECOND
from cpt_fx.ir.meta import BY_DECISION, LEFT, Uncovered
from cpt_fx.ir.result import sessions_in
from cpt_fx.operators import factors, form_of, why_left
from cpt_fx.quantizers.counters import LOOKING
from cpt_fx.quantizers.numerics import Grid
from cpt_fx.quantizers.widths import LOOKS_ON

INSIDE = "the code of this operator multiplies what it has computed itself: that stays in full precision"
OF_INTEGERS = "a product of integers, which no quantizer rounds"
NO_GRADIENT = "nothing quantizes the gradient of its result"
HOOKED = "a hook of the model's own changes it after it was quantized"
_LEVELS = 4
"""How many autograd nodes one operator may have under torch.func transforms."""
_VIEWS = (
    "Alias", "Expand", "Permute", "Select", "Slice", "Squeeze", "TBackward", "Transpose", "Unsqueeze", "UnsafeView",
    "View",
)  # fmt: skip
"""Prefixes of the names of autograd nodes that return a view."""
_ONE_AT_A_TIME = threading.RLock()
"""Lock: a census patches functions of the whole process, and must restore them before the next one patches them."""
_CLOSED = ("aten", "prim", "prims", "profiler", "cpt_fx", "c10d")
"""Namespaces whose operators are not looked into: those that multiply are known by name."""


@dataclass
class Unknown:
    """A product with unquantized operands that no entry of `uncovered` explains."""

    op: str
    place: str
    """The layer, or file and line of the model's code."""
    direction: str
    """`forward` or `backward`."""
    shapes: tuple[tuple[int, ...], ...] = field(compare=False)
    operands: tuple[int, ...] = field(compare=False)
    """Which operands are not quantized, by their position among the factors."""
    times: int = field(default=1, compare=False)

    def __str__(self) -> str:
        """Describe it in one line."""
        shapes = " and ".join("x".join(map(str, shape)) or "a number" for shape in self.shapes)
        words = ("first", "second", "third")
        which = " and ".join(words[at] if at < len(words) else f"{at + 1}th" for at in self.operands)
        often = f", {self.times} times" if self.times > 1 else ""
        return (
            f"{self.place or '(root)'}: {self.op} of {shapes} in the {self.direction} pass{often}: its {which} operand "
            "comes from no quantizer, and no entry of `uncovered` says why"
        )


@contextmanager
def census(model: nn.Module) -> Iterator[Seen]:
    """Watch everything that multiplies inside a `with` block, in all threads that run there."""
    with _ONE_AT_A_TIME:
        seen = Seen(ProductPlaces(model))
        LOOKING.append(seen.quantized)
        try:
            with _in_every_thread(seen), _hooks_noted(seen), _Watch(seen):
                yield seen
        finally:
            LOOKING.remove(seen.quantized)
            seen.is_open = False


def list_what_runs(model: nn.Module, seen: Seen) -> None:
    """Add the products that only a run reveals to `uncovered`; report those that should be listed and are not."""
    said = [item for _, part in transformed_in(model) for item in part.history().uncovered]
    places, reasons = {(item.layer, item.op) for item in said}, {(item.layer, item.reason) for item in said}
    for (layer, op), found in seen.undecided.items():
        if (layer, op) not in places:
            seen.unknown.append(found)
    for place in seen.left.values():
        assert place.node is not None
        reason = place.node.meta[LEFT]
        if reason != BY_DECISION and (place.name, reason) not in reasons:
            seen.put_down(place, place.op, reason, "")
    for item, graph in seen.listed.items():
        for _, session in sessions_in(model):
            known = graph is None or any(module.graph is graph for module in session.graphs())
            if known and hasattr(session, "left") and item not in session.left:
                session.left.append(item)


class _Watch(private.TorchDispatchMode):
    """Sees every operator that reaches ATen."""

    supports_higher_order_operators = True

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have Dynamo, and the graphs it compiles, ignore this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler; the frame is skipped below

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the operands of an operator, and run it."""
        kwargs = kwargs or {}
        if types and any(kind.__torch_dispatch__ is not disabled_torch_dispatch for kind in types):
            return NotImplemented  # a tensor subclass: the operators it dispatches to are checked
        if not isinstance(func, private.OpOverload):
            if form_of(func) is not None:  # flex attention: query, key and value come first
                self.seen.product(func, list(args[:3]))
            return func(*self._watched(args), **self._watched(kwargs))
        positions, is_composite, writes = _what_is(func)
        if is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        with torch.DisableTorchFunction():
            if positions and self.seen.is_open:
                self.seen.product(func, [args[place] for place in positions if place < len(args)])
            if func.namespace not in _CLOSED and not positions:
                self.seen.operator(func)
                result = self._decomposed(func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            for place in writes:
                written = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
                self.seen.grids.forget(written)
            self.seen.numbered = _sequence()
        return result

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a custom operator so that the operators its code calls are seen."""
        devices = {leaf.device.type for leaf in private.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        key = getattr(torch.DispatchKey, max(devices, default="").upper(), None)
        if key is None or not has_computed_kernel(func.name(), key.name):
            return func(*args, **kwargs)
        with self:
            return func.redispatch(torch.DispatchKeySet(key), *args, **kwargs)

    def _watched(self, values: Any) -> Any:
        """Wrap the functions given to a higher-order operator, so that the operators in them are seen too."""

        def wrapped(value: Any) -> Any:
            if not callable(value) or isinstance(value, (type, Tensor)):
                return value

            def call(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return value(*args, **kwargs)

            return call

        return private.pytree.tree_map(wrapped, values)


setattr(_Watch, LOOKS_ON, True)
skip_frame(_Watch.__torch_dispatch__.__code__, inside=True)


@cache
def _what_is(func: Any) -> tuple[tuple[int, ...], bool, tuple[int | str, ...]]:
    """Return the positions of an operator's factors, whether it decomposes into others, and what it writes to."""
    positions: tuple[int, ...] = factors(func)
    writes = tuple(
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    composite = private.has_kernel(func.name(), "CompositeImplicitAutograd")
    return positions, bool(composite and not positions and func._can_decompose()), writes


@dataclass
class Seen:
    """What a census has seen so far."""

    places: ProductPlaces
    is_open: bool = True
    products: int = 0
    listed: dict[Uncovered, fx.Graph | None] = field(default_factory=dict)
    """Products left unquantized for a known reason (second backward pass, integers, ...), with their graph."""
    undecided: dict[tuple[str, str], Unknown] = field(default_factory=dict)
    """By layer and operator, products of nodes with factors that no quantization decision covers."""
    left: dict[fx.Node, Place] = field(default_factory=dict)
    """Nodes that multiplied unquantized operands, and are marked as left in full precision."""
    grids: Grids = field(default_factory=Grids)
    unknown: list[Unknown] = field(default_factory=list)
    """Products with unquantized operands that nothing explains."""
    problems: list[str] = field(default_factory=list)
    """Quantizers with more levels in one of their ranges than their width allows."""
    values: dict[int, int] = field(default_factory=dict)
    """By the id of its counters, how many values a quantizer has rounded: 0 if it ran on empty tensors only."""
    hooked: set[int] = field(default_factory=set)
    """Autograd sequence numbers of results that the model's own code registers hooks on: they run after a quantizer."""
    numbered: int = 0
    """The next autograd sequence number after the latest operator."""
    _outside: dict[str, set[str]] = field(default_factory=dict)
    _made: dict[int, tuple[Place, int]] = field(default_factory=dict)
    """By its autograd sequence number, the place of a product, and how many of its operands were not quantized."""
    _inside: set[Any] = field(default_factory=set)
    """Nodes that make several products of their operands, or multiply what they compute from them."""

    @property
    def outside(self) -> tuple[str, ...]:
        """Modules that multiply outside of the transformed parts, with their operators."""
        return tuple(f"{name} ({', '.join(sorted(ops))})" for name, ops in self._outside.items())

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be checked, or proves nothing."""
        notes = [
            f"products of {why} tensors were not looked at: they hold no values" for why in sorted(self.grids.unread)
        ]
        if self.grids.single:
            notes.append(
                f"{self.grids.single} times a range had a single element: to quantize one number changes nothing"
            )
        return tuple(notes)

    def quantized(self, result: Tensor, bits: int | None, grid: Grid, counters: Tensor | None) -> None:
        """Register the result of a quantizer."""
        if counters is not None:
            self.values[id(counters)] = self.values.get(id(counters), 0) + result.numel()
        with torch.DisableTorchFunction(), torch.no_grad(), private.disable_current_modes():
            fits = self.grids.add(plain(result), bits, grid)
        if not fits:
            said = f"a quantizer shows more levels in one of its ranges than {bits} bits have"
            self.problems.append(f"{self.places.now().name}: {said}")

    def product(self, func: Any, operands: list[Any]) -> None:
        """Check the operands of a product."""
        keeps_graph = torch.is_grad_enabled()
        with torch.no_grad():
            if not any(isinstance(one, (list, tuple)) or _counts(one) for one in operands):
                self._aside(func, OF_INTEGERS)
                return
            self.products += 1
            loose = tuple(number for number, operand in enumerate(operands) if not self.grids.hold(operand))
            node: Any = private.current_autograd_node()
            if node is None:
                self._forward(func, operands, loose, self.places.now())
            elif loose or keeps_graph:
                self._backward(func, operands, loose, self.places.now(), node._sequence_nr(), keeps_graph)

    def operator(self, func: Any) -> None:
        """List a custom operator, whose products may be hidden."""
        if reason := why_left(func):
            self._aside(func, reason)

    def _aside(self, func: Any, reason: str) -> None:
        """List an operator that cannot be quantized, unless its node or module is already marked as such."""
        place = self.places.now()
        if place.kind in (PlaceKind.DECISION, PlaceKind.NOWHERE):
            self.put_down(place, _short(func), reason, "")

    def _forward(self, func: Any, operands: list[Any], loose: tuple[int, ...], place: Place) -> None:
        kept = replace(place, frame=None, applied=applied())
        number = _sequence() - 1
        first = number - _LEVELS + 1
        if not place.transformed:
            # After a write to its base, a view gets a new node, created after that of the operator that reads it.
            first = min(number, max(first, self.numbered))
        for one in range(number, first - 1, -1):
            self._made.setdefault(one, (kept, len(loose)))
        if not loose:
            return
        if place.kind is PlaceKind.LEFT:
            if place.node is not None:
                self.left.setdefault(place.node, place)
            return
        if place.kind is PlaceKind.DECISION and all(map(self.grids.hold, known := operands_at(place))):
            assert place.decision is not None
            if place.is_registered:
                self.put_down(place, place.decision.op, INSIDE, "")
            if len(operands) <= len(known):  # the recipe leaves no factor unquantized
                self._inside.add(place.node)
            elif all(getattr(operands[number], "layout", None) is torch.strided for number in loose):
                found = self._unknown(func, operands, loose, place, "forward")
                self.undecided.setdefault((place.decision.layer, place.decision.op), found)
            return
        self._report(func, operands, loose, place, "forward")

    def _backward(
        self, func: Any, operands: list[Any], loose: tuple[int, ...], place: Place, number: int, keeps_graph: bool
    ) -> None:
        if place.recomputes:
            self._forward(func, operands, loose, place)
            return
        came, allowed = place, 0
        if place.kind is PlaceKind.BACKWARD:
            unknown = Place(PlaceKind.NOWHERE, place.name or _name_of_node()), 0
            came, allowed = self._made.get(number, unknown)
            if isinstance(private.current_autograd_node(), FunctionCtx) and not came.applied:
                came, allowed = unknown  # the number belongs to a node made after the function, not inside it
            if keeps_graph:
                second = came if came.kind is PlaceKind.LEFT else Place(PlaceKind.SECOND, came.name, came.node)
                self._made.setdefault(_sequence() - 1, (second, 0))
        if not loose or came.kind is PlaceKind.LEFT:
            return
        if came.kind is PlaceKind.SECOND or (place.kind is PlaceKind.BACKWARD and number in self.hooked):
            op = _short(func) if came.decision is None else came.decision.op
            self.put_down(came, op, OF_A_SECOND if came.kind is PlaceKind.SECOND else HOOKED)
        elif came.decision is None or len(loose) > self._allowed(came, allowed):
            if came.decision is not None and came.is_registered:
                self.put_down(came, came.decision.op, INSIDE)
            else:
                self._report(func, operands, loose, came, "backward")
        elif came.decision.gradient is None:
            self.put_down(came, came.decision.op, NO_GRADIENT)

    def put_down(self, place: Place, op: str, reason: str, operand: str = "gradient") -> None:
        """List a product that is left unquantized, with the reason."""
        graph = None if place.node is None else place.node.graph
        self.listed[Uncovered(place.name, op, reason, operand, by_choice=True)] = graph

    def _allowed(self, place: Place, forward: int) -> int:
        """Return how many operands of a backward product may be unquantized; `forward` were in the forward pass.

        These are the operands that the recipe leaves, and gradients: of the result, and of intermediate results.
        """
        if place.node in self._inside:
            return 9
        assert place.decision is not None
        return forward + (place.decision.gradient is None or place.decision.in_turn)

    def _report(self, func: Any, operands: list[Any], loose: tuple[int, ...], place: Place, direction: str) -> None:
        if place.kind is PlaceKind.OUTSIDE:
            self._outside.setdefault(place.name, set()).add(_short(func))
            return
        found = self._unknown(func, operands, loose, place, direction)
        if found in self.unknown:
            self.unknown[self.unknown.index(found)].times += 1
        else:
            self.unknown.append(found)

    def _unknown(self, func: Any, operands: list[Any], loose: tuple[int, ...], place: Place, direction: str) -> Unknown:
        dense = (operand for operand in operands if isinstance(operand, Tensor) and not operand.is_nested)
        shapes = tuple(tuple(operand.shape) for operand in dense)
        return Unknown(_short(func), place.name, direction, shapes, loose)


def _sequence() -> int:
    """Return the sequence number of the next autograd node; the running operator has the number before it."""
    number: int = private.get_sequence_number()
    return number


def _counts(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _short(func: Any) -> str:
    return str(getattr(func, "__name__", func)).partition(".")[0]


def _name_of_node() -> str:
    node = private.current_autograd_node()
    return "" if node is None else f"the backward pass of {node.name().removesuffix('Backward0')}"


@contextmanager
def _hooks_noted(seen: Seen) -> Iterator[None]:
    """Note which tensors the model's own code registers hooks on."""
    register: Any = Tensor.register_hook

    def noted(tensor: Tensor, hook: Any) -> Any:
        node = tensor.grad_fn
        if node is not None and not sys._getframe(1).f_code.co_filename.startswith(OWN):
            seen.hooked.add(node._sequence_nr())
            while node is not None and node.name().startswith(_VIEWS):  # of the product's result
                node = node.next_functions[0][0]
                seen.hooked |= set() if node is None else {node._sequence_nr()}
        return register(tensor, hook)

    with patched({(Tensor, "register_hook"): noted}):
        yield


@contextmanager
def _in_every_thread(seen: Seen) -> Iterator[None]:
    """Also watch threads that start in the meantime, and tasks submitted to thread pools."""

    def watched(task: Any, run: Callable[..., Any], *args: Any) -> Any:
        # Pushed directly: `with` also sets flags of the whole process.
        if not seen.is_open or private.dispatch_depth():
            return run(task, *args)
        push_mode(_Watch(seen))
        try:
            return run(task, *args)
        finally:
            pop_mode()

    places: list[tuple[Any, str]] = [(threading.Thread, "_bootstrap_inner"), (pool._WorkItem, "run")]
    with patched({(kind, name): partialmethod(watched, getattr(kind, name)) for kind, name in places}):
        yield
