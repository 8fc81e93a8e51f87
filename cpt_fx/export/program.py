"""A transformed model as an ONNX graph: widths, seeds and running state are inputs, new state is an output."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.func import functional_call
from torch.utils import _pytree as pytree

from cpt_fx.errors import ExportError
from cpt_fx.export import refusals
from cpt_fx.export.functions import DOMAIN, OPSET
from cpt_fx.export.lowering import Lowering, Placed
from cpt_fx.export.normalize import normalize
from cpt_fx.export.rewrites import Rewriter, count_draws
from cpt_fx.layer_state import ranges
from cpt_fx.meta import STATE, Dial
from cpt_fx.standalone import precision_of

Loss = Callable[..., Tensor]
_WIDTHS, _RECORDS, _PRODUCTS = f"{STATE}.bits.", f"{STATE}.records.", f"{STATE}.products."
BITS = "bits."
"""Prefix of the inputs that hold widths: `bits.weight`."""
SEEDS = "seeds"
"""The input with a seed for each random draw of a step: int32, one row of two numbers each."""
LOSS, OUTPUT, TARGET = "loss", "output", "target"
NEXT = ".next"
"""Suffix of the outputs that hold running state as it is after a step."""


@dataclass(frozen=True)
class Call:
    """What a model is called with, and what its loss is computed from."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Tensor, ...] = ()
    loss: Loss | None = None


@dataclass(frozen=True)
class Graph:
    """An ONNX graph of a model in one mode, and the names of what goes in and comes out."""

    model: ir.Model
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    states: dict[str, str]
    """Buffers that the graph reads -> the output with their new value, or "" where they stay as they are."""
    draws: int
    """How many seeds a run takes: those of quantizers come first."""
    quantizer_draws: int
    placed: tuple[Placed, ...]
    program: ExportedProgram
    dials: dict[str, Dial]


class _Program(nn.Module):
    """A model's call with everything that changes from step to step passed in and handed back."""

    def __init__(self, model: fx.GraphModule, loss: Loss | None, *, plain: bool) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.plain = plain
        self.draws = 0
        self.placed: tuple[Placed, ...] = ()
        self.outputs: tuple[str, ...] = ()

    def forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], targets: tuple[Tensor, ...], bits: dict[str, Tensor],
        seeds: Tensor, state: dict[str, Tensor],
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the loss if there is one, the outputs, and the new state."""
        # Copies: what the model writes to a buffer becomes a value, and inputs stay what they are.
        new = {name: value.clone() for name, value in state.items()}
        tensors = {_WIDTHS + name: width for name, width in bits.items()} | new
        records = {id(buffer): name for name, buffer in self.model.named_buffers() if name.startswith(_RECORDS)}
        names = {key: name.removeprefix(_RECORDS) for key, name in records.items()}
        lowering = Lowering(seeds, names, gradients=self.model.training, plain=self.plain)
        with lowering:
            outputs = functional_call(self.model, tensors, args, kwargs)
            loss = () if self.loss is None else (self.loss(outputs, *targets),)
        self.draws, self.placed = lowering.draws, tuple(lowering.placed)
        named = dict(_named_outputs(outputs))
        self.outputs = tuple(named)
        return (*loss, tuple(named.values()), new)


class _Rewritten(nn.Module):
    """An exported program that runs with rewrites."""

    def __init__(self, program: ExportedProgram, draws: int) -> None:
        super().__init__()
        self.program = program
        self.draws = draws
        self.paths: dict[str, str] = {}
        """Names of parameters in the program -> below this module, where dots are not allowed."""
        for number, (name, value) in enumerate(program.named_parameters()):
            self.paths[name] = f"parameter_{number}"
            self.register_parameter(self.paths[name], value)

    def forward(self, *given: Any) -> Any:
        """Run the program's graph, node by node."""
        run = Rewriter(self.program.graph_module, self.draws)
        leaves = iter(pytree.tree_leaves(given))
        return run.run(*(self._value(spec, leaves) for spec in self.program.graph_signature.input_specs))

    def _value(self, spec: Any, given: Iterator[Any]) -> Any:
        if spec.kind is InputKind.USER_INPUT:
            return next(given)
        if spec.kind is InputKind.PARAMETER:
            return getattr(self, self.paths[spec.target])
        held = self.program.constants if spec.target in self.program.constants else self.program.state_dict
        return held[spec.target]


def states_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a transformed model that its numbers depend on: not its widths, not its records."""
    ours = (_WIDTHS, _RECORDS, _PRODUCTS)
    return {name: buffer for name, buffer in model.named_buffers() if not name.startswith(ours)}


def widths_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that hold the widths of a transformed model, by the names of their dials."""
    return {name.removeprefix(_WIDTHS): width for name, width in model.named_buffers() if name.startswith(_WIDTHS)}


def trace(model: fx.GraphModule, call: Call, *, dynamic_batch: bool = True, plain: bool = False) -> Graph:
    """Trace a transformed graph in the mode it is in; gradients are quantized where it is in training.

    `plain` makes quantizers nodes that say which one they are: for a caller that replaces them.
    """
    _check_execution(model)
    _check_learned(model)
    refusals.check_modules(model)
    state, bits = states_of(model), widths_of(model)
    given = (call.args, call.kwargs, call.targets, bits)
    program = _Program(model, call.loss, plain=plain)
    with torch.no_grad():
        program(*given, _seeds(1), state)
    draws = program.draws
    shapes = _dynamic(given, state) if dynamic_batch else None
    first = _exported(program, (*given, _seeds(max(draws, 1)), state), shapes)
    total = draws + count_draws(first.graph_module)
    second = _Rewritten(first, draws)
    exported = torch.export.export(
        second,
        (*given, _seeds(max(total, 1)), state),
        dynamic_shapes=None if shapes is None else (shapes,),
        strict=False,
    )
    with _quiet(), refusals.converting(exported):
        made = torch.onnx.export(exported, dynamo=True, optimize=False, opset_version=OPSET, verbose=False)
    assert made is not None
    graph: ir.Model = made.model
    placed = program.placed
    inputs = _input_names(model, call)
    targets = _numbered(TARGET, len(call.targets))
    outputs = program.outputs
    _name_inputs(graph, second.paths, (*inputs, *targets, *(BITS + name for name in bits), SEEDS, *state))
    normalize(graph)
    _name_outputs(graph, (*((LOSS,) if call.loss else ()), *outputs, *(name + NEXT for name in state)))
    changed = _drop_unchanged(graph, tuple(state))
    _name_quantizers(graph, placed)
    return Graph(
        model=graph,
        inputs=inputs,
        targets=targets,
        outputs=outputs,
        parameters=tuple(name.removeprefix("model.") for name in second.paths),
        states={name: name + NEXT if name in changed else "" for name in state},
        draws=total,
        quantizer_draws=draws,
        placed=placed,
        program=first,
        dials=dict(precision_of(model).dials),
    )


def _check_execution(model: nn.Module) -> None:
    if any(name.startswith(_PRODUCTS) for name, _ in model.named_buffers()):
        raise ExportError(
            "the model multiplies on integers, by operators that ONNX does not have: transform it with "
            'execution="simulated" and recipe="integer", which has the same formats'
        )


def _check_learned(model: nn.Module) -> None:
    """Refuse ranges that are to be learned and have no value yet: a graph cannot give them one."""
    for name, low, _, weight in ranges(model):
        if isinstance(low, nn.Parameter) and not float(weight):
            raise ExportError(f"{name} is learned and has no value yet: run one batch in training first")


def _exported(program: nn.Module, arguments: tuple[Any, ...], shapes: Any) -> ExportedProgram:
    try:
        return torch.export.export(program, arguments, dynamic_shapes=shapes, strict=False)
    except ExportError:
        raise
    except Exception as error:  # of many types, RuntimeError among them
        if shapes is None:
            raise ExportError(f"torch.export cannot follow the model: {_said(error)}") from error
        _exported(program, arguments, None)
        raise ExportError(
            f"the model can be exported for the batch of the example inputs, but not for any ({_said(error)}): pass "
            "dynamic_batch=False"
        ) from error


def _said(error: Exception) -> str:
    """Return the line of torch's message that says what is wrong."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "specialized it" in line), (lines or [type(error).__name__])[0])


def _seeds(count: int) -> Tensor:
    return torch.zeros(count, 2, dtype=torch.int32)


def _dynamic(given: tuple[Any, ...], state: dict[str, Tensor]) -> tuple[Any, ...]:
    batch = torch.export.Dim("batch")

    def batched(value: Any) -> Any:
        return {0: batch} if isinstance(value, Tensor) and value.ndim else None

    args, kwargs, targets, bits = given
    return (
        *(pytree.tree_map(batched, part) for part in (args, kwargs, targets)),
        *(pytree.tree_map(lambda _: None, part) for part in (bits, _seeds(1), state)),
    )


def _numbered(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}_{index}" for index in range(count))


def _input_names(model: fx.GraphModule, call: Call) -> tuple[str, ...]:
    """Name tensors as the arguments of `forward` are called; those inside one argument are numbered."""
    names: list[str] = []
    positional = inspect.signature(model.forward).bind_partial(*call.args).arguments
    # In the order of the call, which is that of the inputs: arguments by name may come in any.
    for name, value in (*positional.items(), *call.kwargs.items()):
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        names += [name] if isinstance(value, Tensor) else [f"{name}_{index}" for index in range(len(leaves))]
    return tuple(names)


def _named_outputs(value: Any, name: str = OUTPUT) -> Iterator[tuple[str, Tensor]]:
    """Give the tensors that a model returns, by the model's own names where it has some, else by number.

    What is no tensor, such as None or a number, is not the graph's to return.
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named_outputs(item, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _named_outputs(item, f"{name}_{index}")
    elif is_dataclass(value):
        for field in fields(value):
            yield from _named_outputs(getattr(value, field.name), f"{name}.{field.name}")
    elif not isinstance(value, (int, float, complex, bool, str, bytes, type(None))):
        raise ExportError(
            f"the model returns {type(value).__name__}, which a graph cannot: let it return tensors in tuples, lists, "
            "dicts or dataclasses"
        )


def _name_inputs(model: ir.Model, paths: dict[str, str], names: tuple[str, ...]) -> None:
    graph = model.graph
    assert len(graph.inputs) == len(names), (len(graph.inputs), names)
    parameters = {path: name.removeprefix("model.") for name, path in paths.items()}
    for value in list(graph.initializers.values()):
        name = str(value.name)
        if name in parameters:
            graph.initializers.pop(name)
            value.name = parameters[name]
            graph.register_initializer(value)
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name


def _name_outputs(model: ir.Model, names: tuple[str, ...]) -> None:
    """Name the outputs, each a value of its own: a model may return one twice, or an input as it is."""
    graph = model.graph
    assert len(graph.outputs) == len(names), (len(graph.outputs), names)
    seen: set[ir.Value] = set()
    for index, (value, name) in enumerate(zip(tuple(graph.outputs), names, strict=True)):
        if value in seen or value.producer() is None:
            node = ir.node("Identity", [value])
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(value)
        graph.outputs[index].name = name


def _name_quantizers(model: ir.Model, placed: tuple[Placed, ...]) -> None:
    """Call the nodes of quantizers as they are called in the rewritten graph: both are in the order of execution."""
    expected = {one.kind.gradient_name if one.is_gradient else one.kind.name for one in placed}
    nodes = [node for node in model.graph if node.domain == DOMAIN and node.op_type in expected]
    if len(nodes) != len(placed):
        # Nobody reads what some of them make.
        return
    times: dict[str, int] = {}
    for node, one in zip(nodes, placed, strict=True):
        number = times.get(one.name, 0)
        times[one.name] = number + 1
        node.name = f"{one.name}_{number}" if number else one.name


def _drop_unchanged(model: ir.Model, states: tuple[str, ...]) -> set[str]:
    """Take away outputs that hand back a state as it came; return the states that change."""
    changed = set()
    for value in list(model.graph.outputs):
        name = str(value.name)
        state = name.removesuffix(NEXT)
        if not name.endswith(NEXT) or state not in states:
            continue
        node = value.producer()
        if node is not None and node.op_type == "Identity" and node.inputs[0] and node.inputs[0].name == state:
            model.graph.outputs.remove(value)
            model.graph.remove(node, safe=True)
        else:
            changed.add(state)
    return changed


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to itself what the exporter says about its own insides and about packages that are not there."""
    logger = logging.getLogger("torch.onnx")
    before, logger.level = logger.level, logging.ERROR
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        logger.setLevel(before)
