"""One update of the parameters, traced from the optimizer itself: each parameter is one node of the graph.

Optimizers of torch treat parameters one by one, so that one function serves all of a group that have as many dims. The
first update is a graph of its own: what an optimizer remembers comes up in it.
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
from torch.overrides import TorchFunctionMode

from cpt_fx.arrays import array_of
from cpt_fx.errors import ExportError, nearest
from cpt_fx.export import manifest as files
from cpt_fx.export.local_functions import DOMAIN, as_function, in_place_of
from cpt_fx.export.manifest import State
from cpt_fx.export.program import GRADIENT, NEXT
from cpt_fx.export.recording import OPSET, Table

_IR_VERSION = 10
LEARNING_RATE, STEP, GRADIENT_SCALE = "learning_rate", "step", "gradient_scale"
"""Inputs: float64, one for each group; float64, how many updates there were before; float32, what gradients are
multiplied with: 1 over the number of steps they were summed over, so that the update is of their mean."""
MAX_VALUE, MAX_NORM = "max_value", "max_norm"
"""Inputs of `clipping.onnx`: float32, the limits of gradients after `gradient_scale`."""
_STEP_STATE = "step"
"""Where optimizers of torch count: all parameters have the same count, which is an input."""
_DEFAULTS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass(frozen=True)
class Updates:
    """The graphs of the first update and of later ones, and what is remembered in between."""

    first: ir.Model
    later: ir.Model
    remembered: tuple[State, ...]
    """Tensors that an update leaves for the next: `conv.weight.exp_avg`."""
    initial: dict[str, Any]
    """Those that have a value before the first one."""


def resolve_optimizer(
    optimizer: str | torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> tuple[torch.optim.Optimizer, dict[str, int]]:
    """Return the optimizer that `optimizer=` means, and the group of each parameter that it holds.

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
    """Trace the update of some parameters, by name, each with the group that it is in."""
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
        # One function serves all parameters with as many dims, if what is remembered has no sizes of its own.
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
    """The update of one parameter as two local functions: with nothing remembered, if it is new, and with something."""

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
    """Return what an update makes of a parameter, and of what is remembered of it."""
    parameter = parameter.clone()
    parameter.grad = gradient * scale
    optimizer = copy.copy(optimizer)
    options = {**optimizer.param_groups[group], "params": [parameter]}
    wanted = {"foreach": False, "fused": False, "capturable": True, "differentiable": False}
    options |= {key: value for key, value in wanted.items() if key in options}
    # SGD takes a learning rate that is a tensor only if it seems to want a gradient.
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
    """Return a power as float64 has it: that of float32, as the exporter writes it, is too coarse for 0.999 ** step."""
    return torch.exp(power * math.log(base)) if base else (power == 0).to(power.dtype)


def _clamp_(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Clamp by one limit after the other: a whole number and one that is not are too much for the exporter."""
    if low is not None:
        x.clamp_min_(float(low))
    return x if high is None else x.clamp_max_(float(high))


_TABLE: Table = {torch.ops.aten.pow.Scalar: _power, torch.ops.aten.clamp_.default: _clamp_}


class _Numbers(TorchFunctionMode):
    """Lets numbers that an optimizer computes from tensors stay tensors, which a trace can follow."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace what asks for a number."""
        kwargs = dict(kwargs or {})
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
    """Let a choice among numbers take tensors, too."""

    def choose(*values: Any, **options: Any) -> Any:
        if not any(isinstance(value, Tensor) for value in values):
            return plain(*values, **options)
        return reduce(better, (v if isinstance(v, Tensor) else torch.full((), v) for v in values))

    return choose


@contextmanager
def _as_if_compiling() -> Iterator[None]:
    """Let an optimizer take the way that compilers can follow, with its counts in float64, as Python's numbers are."""
    full_like, dtype = torch.full_like, torch.get_default_dtype()

    def filled(x: Tensor, value: Any, **options: Any) -> Tensor:
        return torch.ones_like(x, **options) * value if isinstance(value, Tensor) else full_like(x, value, **options)

    torch.set_default_dtype(torch.float64)
    try:
        with _Numbers(), in_place_of(
            (builtins, "min", _chosen(torch.minimum, min)), (builtins, "max", _chosen(torch.maximum, max)),
            (torch, "full_like", filled), (torch.compiler, "_is_compiling_flag", True),
        ):  # fmt: skip
            yield
    finally:
        torch.set_default_dtype(dtype)


def _read_late(function: ir.Function, start: int, keys: tuple[str, ...]) -> set[str]:
    """Return what may be read after its new value was written: the two need places of their own."""
    late = set()
    for index, key in enumerate(keys):
        old, writer = function.inputs[start + index], function.outputs[1 + index].producer()
        before: set[ir.Node | None] = set()
        waiting = [writer]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in before:
                before.add(node)
                waiting += [value.producer() for value in node.inputs if value is not None]
        if any(node not in before for node, _ in old.uses()):
            late.add(key)
    return late


class _Graph:
    """A graph of updates in the making."""

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
        """Add the update of a parameter; `is_new`: with nothing remembered yet."""
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
    """Return an input or an output."""
    kind = ir.TensorType(ir.DataType.from_numpy(np.dtype(dtype)))
    return ir.Value(name=name, type=kind, shape=ir.Shape(shape))


def model_of(
    name: str, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], nodes: Iterable[ir.Node],
    functions: Iterable[ir.Function] = (), held: Sequence[ir.Value] = (),
) -> ir.Model:  # fmt: skip
    """Return a graph of our own as a model."""
    versions = {"": OPSET, DOMAIN: 1} if functions else {"": OPSET}
    graph = ir.Graph(inputs, outputs, nodes=nodes, initializers=held, opset_imports=versions, name=name)
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="cpt_fx", functions=list(functions))


def clipping_graph(shapes: Mapping[str, Iterable[int]]) -> ir.Model:
    """Return the graph that limits gradients before an update, as `clip_grad_value_` does, then `clip_grad_norm_`."""
    limit, norm, scale = numbers = [value_of(name, "float32") for name in (MAX_VALUE, MAX_NORM, GRADIENT_SCALE)]
    gradients = {name: value_of(name + GRADIENT, "float32", shape) for name, shape in shapes.items()}
    tape = Tape()
    high = tape.op("Div", [limit, scale])
    low = tape.op("Neg", [high])
    limited = {name: tape.op("Clip", [gradient, low, high]) for name, gradient in gradients.items()}
    squares = [tape.op("ReduceSumSquare", [value], {"keepdims": 0}) for value in limited.values()]
    total = tape.op("Mul", [tape.op("Sqrt", [tape.op("Sum", squares)]), scale])
    small, one = (tape.op("Constant", [], {"value_float": number}) for number in (1e-6, 1.0))
    factor = tape.op("Min", [tape.op("Div", [norm, tape.op("Add", [total, small])]), one])
    outputs = []
    for name, value in limited.items():
        outputs.append(tape.op("Mul", [value, factor]))
        outputs[-1].name, outputs[-1].shape = name + GRADIENT + NEXT, gradients[name].shape
        outputs[-1].type = gradients[name].type
    return model_of("clipping", [*numbers, *gradients.values()], outputs, tape.nodes)
