"""The optimizer's update as ONNX graphs, traced from the torch optimizer: one node for each parameter.

Torch optimizers treat parameters one by one, so that one function serves all parameters of a group with the same
rank. The first update has a graph of its own: it creates the optimizer's state.
"""

from __future__ import annotations

import builtins
import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tape import Tape
from torch import Tensor

from cpt_fx.capture.base import patched
from cpt_fx.common.arrays import array_of
from cpt_fx.errors import ExportError, nearest
from cpt_fx.export.functions import DOMAIN, as_function
from cpt_fx.export.lowering import Calls
from cpt_fx.export.recording import OPSET, Table
from cpt_fx.ort import manifest as files
from cpt_fx.ort.manifest import GRADIENT, GRADIENT_SCALE, LEARNING_RATE, MAX_NORM, MAX_VALUE, NEXT, STEP, State

_IR_VERSION = 10
_STEP_STATE = "step"
"""The state key of torch's step counts: all parameters have the same count, which is an input."""
_DEFAULTS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Updates:
    """The graphs of the first update and of later ones, and the optimizer state that they pass on."""

    first: ir.Model
    later: ir.Model
    remembered: tuple[State, ...]
    """Tensors of the optimizer's state: `conv.weight.exp_avg`."""
    initial: dict[str, Any]
    """Their values, if they are set before the first update."""


def resolve_optimizer(
    optimizer: str | torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[torch.optim.Optimizer, dict[str, int]]:
    """Return the optimizer that `optimizer=` stands for, and the group index of each parameter that it holds.

    Args:
        optimizer: a name, for torch's defaults (and a learning rate of 0.01 for "sgd"), or a fresh optimizer.
        parameters: the model's parameters by name, each under all its names.
    """
    if isinstance(optimizer, str):
        if optimizer not in _DEFAULTS:
            listed = ", ".join(f'"{name}"' for name in _DEFAULTS)
            raise ExportError(
                f"optimizer={optimizer!r} is not known.{nearest(optimizer, _DEFAULTS)} Please pass {listed}, or an "
                "optimizer of torch over the model's parameters"
            )
        optimizer = _DEFAULTS[optimizer](list({id(value): value for value in parameters.values()}.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ExportError(f"optimizer= must be a name or an optimizer of torch, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ExportError("LBFGS runs the model inside of its update, which no graph can do: pass another optimizer")
    if any(float(state.get(_STEP_STATE, 1)) for state in optimizer.state.values() if state):
        raise ExportError(
            f"the {type(optimizer).__name__} passed has done steps already, and what it remembers of them would be "
            "lost: pass a fresh one"
        )
    known = {id(value) for value in parameters.values()}
    group_of: dict[int, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ExportError(
                    f"the optimizer's parameter group {index} holds a parameter of shape {tuple(parameter.shape)} that "
                    "is not one of the exported model: make the optimizer over model.parameters()"
                )
            group_of[id(parameter)] = index
    members = {name: group_of[id(value)] for name, value in parameters.items() if id(value) in group_of}
    if not any(parameters[key].requires_grad for key in members):
        raise ExportError("the optimizer holds no parameter that requires a gradient: there is nothing to train")
    return optimizer, members


def trace_updates(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], groups: Mapping[str, int]
) -> Updates:
    """Trace the update of parameters, by name, each with the index of its group."""
    if not parameters:
        raise ExportError("the optimizer holds no parameter that the loss depends on: there is nothing to train")
    made: dict[str, _Function] = {}
    first, later = (_Graph(len(optimizer.param_groups)) for _ in range(2))
    remembered: list[State] = []
    initial: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32:
            kind = _dtype(parameter)
            raise ExportError(f"the parameter {name} is of {kind}: exported models train in float32 (model.float())")
        group, given = groups[name], optimizer.state.get(parameter, {})
        numbers = torch.zeros((2,), dtype=torch.float64)
        example = (parameter.detach(), torch.zeros_like(parameter), *numbers.unbind(), torch.ones(()))
        state = given or _updated(optimizer, group, {}, *example)[1]
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and key != _STEP_STATE}
        # One function serves all parameters of a rank, unless state tensors have shapes of their own.
        exact = any(value.ndim and value.shape != parameter.shape for value in tensors.values())
        sizes = "_" + "x".join(map(str, parameter.shape)) if exact else ""
        label = f"{type(optimizer).__name__}_{group}_{parameter.ndim}d{sizes}"
        if label not in made:
            made[label] = _Function(optimizer, group, example, state, tensors, label, is_new=not given, exact=exact)
        own = files.Tensor(name=name, dtype="float32", shape=tuple(parameter.shape))
        function = made[label]
        states = [
            State(name=f"{name}.{key}", dtype=_dtype(value), shape=tuple(value.shape), swaps=key in function.late)
            for key, value in tensors.items()
        ]
        first.update(own, group, function.first or function.later, states, is_new=not given)
        later.update(own, group, function.later, states)
        remembered += states
        if given:
            initial |= {f"{name}.{key}": array_of(value).copy() for key, value in tensors.items()}
    return Updates(first.finished(), later.finished(), tuple(remembered), initial)


class _Function:
    """The update of one parameter as two local functions: one without state, if it is new, and one with state."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: int, example: tuple[Tensor, ...], state: Mapping[str, Any],
        tensors: Mapping[str, Tensor], name: str, *, is_new: bool, exact: bool,
    ) -> None:  # fmt: skip
        keys, count = tuple(tensors), len(example)
        constants = {key: None if key == _STEP_STATE else value for key, value in state.items() if key not in tensors}

        def run(before: Mapping[str, Any], *given: Tensor) -> tuple[Tensor, ...]:
            new, after = _updated(optimizer, group, before, *given)
            return new, *(after[key].detach() for key in keys)

        def later(*given: Tensor) -> tuple[Tensor, ...]:
            return run(constants | dict(zip(keys, given[count:], strict=True)), *given[:count])

        self.first: ir.Function | None = None
        if is_new:
            self.first = as_function(f"{name}_first", partial(run, {}), example, _TABLE, exact=exact)
        self.later = as_function(name, later, (*example, *tensors.values()), _TABLE, exact=exact)
        self.late = _read_late(self.later, count, keys)


def _updated(
    optimizer: torch.optim.Optimizer, group: int, state: Mapping[str, Any],
    parameter: Tensor, gradient: Tensor, rate: Tensor, step: Tensor, scale: Tensor,
) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
    """Return a parameter and its optimizer state after an update."""
    parameter = parameter.clone()
    parameter.grad = gradient * scale
    optimizer = copy.copy(optimizer)
    options = {**optimizer.param_groups[group], "params": [parameter]}
    wanted = {"foreach": False, "fused": False, "capturable": True, "differentiable": False}
    options |= {key: value for key, value in wanted.items() if key in options}
    # SGD accepts a learning rate that is a tensor only if it requires a gradient.
    optimizer.param_groups = [options | {"lr": rate.clone().requires_grad_()}]
    optimizer.state = defaultdict(dict)
    if state:
        own = {**state, _STEP_STATE: step} if _STEP_STATE in state else state
        optimizer.state[parameter] = {
            k: value.clone() if isinstance(value, Tensor) else value for k, value in own.items()
        }
    with _as_if_compiling(), torch.no_grad():
        type(optimizer).step(optimizer)
    return parameter.detach(), optimizer.state[parameter]


def _power(base: float, power: Tensor) -> Tensor:
    """Compute a power in float64: in float32, as the exporter writes it, 0.999 ** step is too coarse."""
    return torch.exp(power * math.log(base)) if base else (power == 0).to(power.dtype)


def _clamp_(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Clamp by one limit after the other: the exporter fails where one is an integer and the other is not."""
    if low is not None:
        x.clamp_min_(float(low))
    return x if high is None else x.clamp_max_(float(high))


_TABLE: Table = {torch.ops.aten.pow.Scalar: _power, torch.ops.aten.clamp_.default: _clamp_}


def _with_numbers(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Keep numbers that an optimizer computes from tensors as tensors, so that they can be traced."""
    if func is Tensor.item:
        return args[0]
    if func in (Tensor.add_, Tensor.addcdiv_, Tensor.addcmul_, Tensor.sub_):
        factor = kwargs.get("alpha", kwargs.get("value"))
        if isinstance(factor, Tensor):
            x, *others = args
            if func in (Tensor.addcdiv_, Tensor.addcmul_):
                others = [others[0] / others[1] if func is Tensor.addcdiv_ else others[0] * others[1]]
            product = others[0] * factor
            return x.sub_(product) if func is Tensor.sub_ else x.add_(product)
    return func(*args, **kwargs)


def _chosen(better: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Make `min` or `max` accept tensors as well."""

    def choose(*values: Any, **options: Any) -> Any:
        if not any(isinstance(value, Tensor) for value in values):
            return plain(*values, **options)
        return reduce(better, (v if isinstance(v, Tensor) else torch.full((), v) for v in values))

    return choose


@contextmanager
def _as_if_compiling() -> Iterator[None]:
    """Make an optimizer take its traceable code path, with step counts in float64, like Python's numbers."""
    full_like, dtype = torch.full_like, torch.get_default_dtype()

    def filled(x: Tensor, value: Any, **options: Any) -> Tensor:
        return torch.ones_like(x, **options) * value if isinstance(value, Tensor) else full_like(x, value, **options)

    replaced = {
        (builtins, "min"): _chosen(torch.minimum, min),
        (builtins, "max"): _chosen(torch.maximum, max),
        (torch, "full_like"): filled,
        (torch.compiler, "_is_compiling_flag"): True,
    }
    torch.set_default_dtype(torch.float64)
    try:
        with Calls(_with_numbers), patched(replaced):
            yield
    finally:
        torch.set_default_dtype(dtype)


def _read_late(function: ir.Function, start: int, keys: tuple[str, ...]) -> set[str]:
    """Return the state that may be read after its new value is written, so that old and new need separate memory."""
    before: dict[ir.Node | None, set[ir.Node]] = {None: set()}
    for node in function:
        before[node] = {node}.union(*(before[value.producer()] for value in node.inputs if value is not None))
    ends = zip(keys, function.inputs[start:], function.outputs[1:], strict=True)
    return {key for key, old, new in ends if not {node for node, _ in old.uses()} <= before[new.producer()]}


class _Graph:
    """Builder of an update graph."""

    def __init__(self, groups: int) -> None:
        rates = value_of(LEARNING_RATE, "float64", (groups,))
        self.numbers = (value_of(STEP, "float64"), value_of(GRADIENT_SCALE, "float32"))
        self.inputs = [rates, *self.numbers]
        self.outputs: list[ir.Value] = []
        tape = Tape()
        places = [tape.op("Constant", [], {"value_ints": [group]}) for group in range(groups)]
        self.rates = [tape.op("GatherND", [rates, place]) for place in places]
        self.nodes = list(tape.nodes)
        self.functions: dict[Any, ir.Function] = {}

    def update(
        self, own: files.Tensor, group: int, function: ir.Function, states: Iterable[files.Tensor], *,
        is_new: bool = False,
    ) -> None:  # fmt: skip
        """Add the update of a parameter; `is_new`: without optimizer state yet."""
        value, gradient = value_of(own.name, own.dtype, own.shape), value_of(own.name + GRADIENT, own.dtype, own.shape)
        held = [] if is_new else [value_of(state.name, state.dtype, state.shape) for state in states]
        node = ir.node(
            function.name, [value, gradient, self.rates[group], *self.numbers, *held], domain=DOMAIN,
            outputs=[value_of(tensor.name + NEXT, tensor.dtype, tensor.shape) for tensor in (own, *states)],
            name=f"update {own.name}",
        )  # fmt: skip
        self.functions[function.identifier()] = function
        self.inputs += [value, gradient, *held]
        self.nodes.append(node)
        self.outputs += node.outputs

    def finished(self) -> ir.Model:
        """Return the graph."""
        return model_of("update", self.inputs, self.outputs, self.nodes, self.functions.values())


def _dtype(state: Tensor) -> str:
    return str(state.dtype).removeprefix("torch.")


def value_of(name: str, dtype: str, shape: Iterable[int | str] = ()) -> ir.Value:
    """Return an input or output of a graph."""
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    return ir.Value(name=name, type=kind, shape=ir.Shape(shape))


def model_of(
    name: str, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], nodes: Iterable[ir.Node],
    functions: Iterable[ir.Function] = (), held: Sequence[ir.Value] = (),
) -> ir.Model:  # fmt: skip
    """Return a model with a graph of our own."""
    versions = {"": OPSET, DOMAIN: 1} if functions else {"": OPSET}
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=held, opset_imports=versions, name=name)
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="cpt_fx", functions=list(functions))


def clipping_graph(shapes: Mapping[str, Iterable[int]]) -> ir.Model:
    """Return the graph that clips gradients before an update, as `clip_grad_value_` does, then `clip_grad_norm_`."""
    limit, norm, scale = numbers = [value_of(name, "float32") for name in (MAX_VALUE, MAX_NORM, GRADIENT_SCALE)]
    gradients = [value_of(name + GRADIENT, "float32", shape) for name, shape in shapes.items()]
    tape = Tape()
    high = tape.op("Div", [limit, scale])
    low = tape.op("Neg", [high])
    limited = [tape.op("Clip", [gradient, low, high]) for gradient in gradients]
    squares = [tape.op("ReduceSumSquare", [value], {"keepdims": 0}) for value in limited]
    total = tape.op("Mul", [tape.op("Sqrt", [tape.op("Sum", squares)]), scale])
    small, one = (tape.op("Constant", [], {"value_float": number}) for number in (1e-6, 1.0))
    factor = tape.op("Min", [tape.op("Div", [norm, tape.op("Add", [total, small])]), one])
    scaled = [
        ir.node("Mul", [value, factor], outputs=[value_of(name + GRADIENT + NEXT, "float32", shape)])
        for (name, shape), value in zip(shapes.items(), limited, strict=True)
    ]
    return model_of("clipping", [*numbers, *gradients], [node.outputs[0] for node in scaled], [*tape.nodes, *scaled])
