"""A transformed model as an ONNX graph: bit-widths, seeds and running state are inputs, new state is an output."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call

from cpt_fx.capture.standalone import precision_of
from cpt_fx.common.torch_private import pytree
from cpt_fx.errors import ExportError
from cpt_fx.export.functions import QuantizerKind
from cpt_fx.export.lowering import QUANTIZER, Lowering
from cpt_fx.export.operators import drawing
from cpt_fx.export.recording import choices, convert, normalize, record
from cpt_fx.export.refusals import UnsupportedError, check_modules, layer_of
from cpt_fx.ir.layer_state import ranges
from cpt_fx.ir.meta import STATE, WidthSource
from cpt_fx.ort.manifest import GRADIENT, LOSS, MORE, NEXT, OUTPUT, SEEDS, TARGET

_WIDTHS, _COUNTERS, _PRODUCTS = f"{STATE}.bits.", f"{STATE}.counters.", f"{STATE}.products."
BITS = "bits."
"""Prefix of the inputs that hold bit-widths: `bits.weight`."""


@dataclass(frozen=True)
class Call:
    """The arguments of a model, and the targets and the function of its loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor, ...] = ()
    loss: Callable[..., Tensor] | None = None


@dataclass(frozen=True)
class Graph:
    """An ONNX graph of a model in one mode, and the names of its inputs and outputs."""

    model: ir.Model
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: dict[str, tuple[str, ...]]
    """Parameters by input name -> all names that each has in the model."""
    gradients: tuple[str, ...]
    """The parameters that receive a gradient from the loss."""
    states: dict[str, str]
    """Buffers that the graph reads or writes -> the output with the new value, or "" if it does not change."""
    draws: int
    """Number of seeds that a run takes."""
    kinds: dict[str, QuantizerKind]
    """The kinds of quantizers that are called, by function name."""
    still: frozenset[tuple[str, int]]
    """Dims that the graph is specialized for: the name of an input, and a dim."""
    least: dict[tuple[str, int], int]
    """The smallest valid size of a dim, if that is more than two."""
    width_sources: dict[str, WidthSource]
    """Inputs that hold a bit-width, and the source that each follows."""
    choices: dict[str, tuple[int, ...]]
    """Inputs that are indices: the size of the indexed dim, then the index that is ignored, if there is one."""


class _Step:
    """A model's call as a pure function: everything that changes from step to step is passed in and returned."""

    def __init__(self, model: fx.GraphModule, call: Call, *, gradients: bool, plain: bool) -> None:
        self.model, self.loss, self.gradients, self.plain = model, call.loss, gradients, plain
        self.outputs: tuple[str, ...] = ()
        self.reached: tuple[str, ...] = ()
        self.lowering: Lowering
        self.names = {id(buffer): name for name, buffer in precision_of(model).counters.named_buffers()}
        self.trains = [name for name, value in model.named_parameters() if value.requires_grad]
        first: dict[int, str] = {}
        self.places = {
            f"{path}.{key}".removeprefix("."): first.setdefault(id(value), f"{path}.{key}".removeprefix("."))
            for path, layer in model.named_modules()
            for key, value in (*layer._parameters.items(), *layer._buffers.items())
            if value is not None
        }
        """Path of each tensor -> its first path. A shared layer counts once: `functional_call` would not restore what
        it replaces in a layer that has two names."""

    def __call__(
        self, parameters: dict[str, Tensor], state: dict[str, Tensor], bits: dict[str, Tensor], seeds: Tensor,
        sums: dict[str, Tensor], more: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any],
        targets: tuple[Tensor, ...],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the loss if there is one, the outputs, the new state, and the accumulated gradients."""
        # Copies, which the model may write to: the inputs must not change.
        new = {name: value.clone() for name, value in state.items()}
        tensors = {_WIDTHS + name: width for name, width in bits.items()} | new | parameters
        if self.gradients:
            leaves = {name: parameters[name].detach().requires_grad_() for name in self.trains}
            tensors |= leaves
        versions = {name: value._version for name, value in tensors.items()}
        self.lowering = Lowering(seeds, self.names, gradients=self.gradients, plain=self.plain)
        with self.lowering, torch.set_grad_enabled(self.gradients):
            placed = {place: tensors[name] for place, name in self.places.items() if name in tensors}
            outputs = functional_call(self.model, placed, args, kwargs, tie_weights=False)
            loss: tuple[Tensor, ...] = () if self.loss is None else (self.loss(outputs, *targets),)
        written = [name for name in self.trains if tensors[name]._version != versions[name]]
        if self.gradients and written:
            raise ExportError(
                f"{written[0]} is a parameter that the forward pass writes to, as max_norm of an embedding does: only "
                "the optimizer may"
            )
        if not self.gradients:
            named = dict(named_outputs(outputs))
            self.outputs = tuple(named)
            return loss, tuple(named.values()), new, ()
        if not loss[0].requires_grad:
            raise ExportError("no parameter that requires a gradient is used by the model: there is nothing to train")
        found = torch.autograd.grad(loss[0], list(leaves.values()), allow_unused=True)
        reached = {name: gradient for name, gradient in zip(leaves, found, strict=True) if gradient is not None}
        self.reached = tuple(reached)
        added = tuple(torch.where(more, sums[name] + gradient, gradient) for name, gradient in reached.items())
        return tuple(part.detach() for part in loss), (), new, added


def states_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a transformed model that affect its results: all but bit-widths and counters."""
    ours = (_WIDTHS, _COUNTERS, _PRODUCTS)
    return {name: buffer for name, buffer in model.named_buffers() if not name.startswith(ours)}


def trace(
    model: fx.GraphModule, call: Call, *, gradients: bool = False, trained: Container[str] | None = None,
    dynamic_batch: bool = True, plain: bool = False,
) -> Graph:  # fmt: skip
    """Trace a transformed graph in the mode it is in, with or without its backward pass.

    `trained` are the parameters to compute gradients of: by default all that require one. `plain` traces each
    quantizer as a node that holds only its name, for a caller that replaces it.
    """
    _check_execution(model)
    _check_learned(model)
    check_modules(model)
    state = states_of(model)
    bits = {name.removeprefix(_WIDTHS): width for name, width in model.named_buffers() if name.startswith(_WIDTHS)}
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    step = _Step(model, call, gradients=gradients, plain=plain)
    step.trains = [name for name in step.trains if trained is None or name in trained]
    sums = {name: torch.zeros_like(parameters[name]) for name in step.trains} if gradients else {}
    fixed = (parameters, state, bits, torch.zeros(1, 2, dtype=torch.int32), sums, torch.zeros((), dtype=torch.bool))
    given = (call.args, call.kwargs, call.targets)
    varying = (*(pytree.tree_map(lambda _: False, part) for part in fixed),
               *(pytree.tree_map(lambda _: dynamic_batch, part) for part in given))  # fmt: skip
    arguments = (*fixed, *given)
    try:
        drawn = drawing(lambda like: step.lowering.uniform(like))
        recorded, places, least = record(step, arguments, varying, drawn, whole=not gradients)
        graph, more = convert(recorded, arguments, places)
    except UnsupportedError as error:
        layer = layer_of(model, call, error.operator)
        raise UnsupportedError(f"{layer}: {error.operator}" if layer else error.operator, error.reason) from error
    targets = _numbered(TARGET, len(call.targets))
    taken = {*parameters, *state, *targets, SEEDS, MORE, LOSS, OUTPUT}
    inputs = tuple(f"{name}_input" if name in taken else name for name in _input_names(model, call))
    # A layer of the model may also be called `bits`.
    prefix = BITS if taken.isdisjoint(BITS + name for name in bits) else f"{STATE}.{BITS}"
    widths = tuple(prefix + name for name in bits)
    names = (*parameters, *state, *widths, SEEDS,
             *(name + GRADIENT for name in sums), MORE, *inputs, *targets)  # fmt: skip
    loss = (LOSS,) if call.loss else ()
    returned = (*loss, *step.outputs, *(name + NEXT for name in state),
                *(name + GRADIENT + NEXT for name in step.reached))  # fmt: skip
    _check_names(names + returned)
    for place, name in zip(graph.graph.inputs, names, strict=True):
        place.name = name
    if not plain:
        _name_quantizers(graph)
    normalize(graph)
    name_outputs(graph, returned)
    changed = _drop_unchanged(graph, tuple(state))
    drop_unused(graph, (*inputs, *targets))
    used = {str(value.name): value for value in graph.graph.inputs}
    if SEEDS in used:
        used[SEEDS].shape = ir.Shape([step.lowering.draws, 2])  # known only after tracing
    known: dict[Tensor, list[str]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        known.setdefault(value, []).append(name)
    return Graph(
        model=graph,
        inputs=inputs,
        targets=targets,
        outputs=step.outputs,
        parameters={names[0]: tuple(names) for names in known.values() if names[0] in used},
        gradients=step.reached,
        states={name: name + NEXT if name in changed else "" for name in state if name in used or name in changed},
        draws=step.lowering.draws if SEEDS in used else 0,
        kinds=step.lowering.kinds,
        still=frozenset((names[place], dim) for place, dim in places | more),
        least={(names[place], dim): size for (place, dim), size in least.items()},
        width_sources={prefix + name: source for name, source in precision_of(model).width_sources.items()},
        choices={
            names[place]: allowed for place, allowed in choices(recorded).items() if names[place] in inputs + targets
        },
    )


def _check_execution(model: nn.Module) -> None:
    if any(name.startswith(_PRODUCTS) for name, _ in model.named_buffers()):
        raise ExportError(
            "the model multiplies on integers, by operators that ONNX does not have: transform it with "
            'execution="simulated" and recipe="integer", which has the same formats'
        )


def _check_learned(model: nn.Module) -> None:
    """Refuse learned ranges that have no value yet: a graph cannot initialize them."""
    for name, low, _, weight in ranges(model):
        if isinstance(low, nn.Parameter) and not float(weight):
            raise ExportError(f"{name} is learned and has no value yet: run one batch in training first")


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}_{index}" for index in range(count))


def _input_names(model: fx.GraphModule, call: Call) -> tuple[str, ...]:
    """Name input tensors after the arguments of `forward`; those inside one argument are numbered."""
    names: list[str] = []
    positional = inspect.signature(model.forward).bind_partial(*call.args).arguments
    # In the order of the call, which is that of the inputs: keyword arguments may come in any order.
    for name, value in (*positional.items(), *call.kwargs.items()):
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        names += [name] if isinstance(value, Tensor) else [f"{name}_{index}" for index in range(len(leaves))]
    return tuple(names)


def _check_names(names: tuple[str, ...]) -> None:
    """Refuse a model with a name that the graph uses for something else."""
    for name, times in Counter(names).items():
        if times > 1:
            raise ExportError(
                f"{name!r} would be the name of two inputs or outputs, one of the model's own and one of every export: "
                "rename that part of the model"
            )


def named_outputs(value: Any, name: str = OUTPUT) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a model returns, named after keys and fields where there are some, else by number.

    Values that are not tensors, such as None or numbers, are skipped.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_outputs(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from named_outputs(item, f"{name}_{index}")
    elif is_dataclass(value):
        for field in fields(value):
            yield from named_outputs(getattr(value, field.name), f"{name}.{field.name}")
    elif not isinstance(value, (int, float, complex, bool, str, bytes, type(None))):
        raise ExportError(
            f"the model returns {type(value).__name__}, which a graph cannot: let it return tensors in tuples, lists, "
            "dicts or dataclasses"
        )


def drop_unused(model: ir.Model, called_with: Container[str | None]) -> None:
    """Remove unused inputs, except those that the model is called with."""
    for value in list(model.graph.inputs):
        if value.name not in called_with and not value.uses() and value not in model.graph.outputs:
            model.graph.inputs.remove(value)


def name_outputs(model: ir.Model, names: tuple[str, ...], *, apart_from: str = "") -> None:
    """Name the outputs, each as a separate value: a model may return a value twice, or an input unchanged.

    Values that an operator of the type `apart_from` reads are also kept separate from the outputs.
    """
    graph = model.graph
    assert len(graph.outputs) == len(names), (len(graph.outputs), names)
    seen: set[ir.Value] = set()
    for index, (value, name) in enumerate(zip(tuple(graph.outputs), names, strict=True)):
        read = any(user.op_type == apart_from for user, _ in value.uses())
        if value in seen or value.producer() is None or read:
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(value)
        graph.outputs[index].name = name


def _name_quantizers(model: ir.Model) -> None:
    """Name the nodes of quantizers as in the rewritten graph."""
    for node in model.graph:
        if QUANTIZER in node.attributes:
            node.name = node.attributes.pop(QUANTIZER).as_string()


def _drop_unchanged(model: ir.Model, states: tuple[str, ...]) -> set[str]:
    """Remove outputs that return a state unchanged; return the states that change."""
    outputs = {str(value.name): value for value in model.graph.outputs}
    changed = set(states)
    for state in states:
        node = outputs[state + NEXT].producer()
        assert node is not None  # see `name_outputs`
        if node.op_type == "Identity" and node.inputs[0] and node.inputs[0].name == state:
            model.graph.outputs.remove(outputs[state + NEXT])
            model.graph.remove(node, safe=True)
            changed.remove(state)
    return changed
