"""One update of the parameters, traced from the optimizer itself: each parameter is one node of the graph.

Optimizers of torch treat parameters one by one, so that one function serves all of a group that have as many dims. The
first update is a graph of its own: what an optimizer remembers comes up in it.
"""

from __future__ import annotations

import builtins
import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cpt_fx.errors import ExportError, nearest
from cpt_fx.export import manifest as files
from cpt_fx.export.local_functions import DOMAIN, as_function
from cpt_fx.export.manifest import State
from cpt_fx.export.program import GRADIENT, NEXT
from cpt_fx.export.recording import OPSET, Table

IR_VERSION = 10
LEARNING_RATE, STEP, GRADIENT_SCALE = "learning_rate", "step", "gradient_scale"
"""Inputs: float64, one for each group; float64, how many updates there were before; float32, what gradients are
multiplied with: 1 over the number of steps they were summed over, so that the update is of their mean."""
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
    names: dict[int, list[str]] = {}
    for key, value in parameters.items():
        names.setdefault(id(value), []).append(key)
    members: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ExportError(
                    f"the optimizer's parameter group {index} holds a parameter of shape {tuple(parameter.shape)} that "
                    "is not one of the exported model: make the optimizer over model.parameters()"
                )
            members |= dict.fromkeys(names[id(parameter)], index)
    if not any(parameters[key].requires_grad for key in members):
        raise ExportError("the optimizer holds no parameter that requires a gradient: there is nothing to train")
    return optimizer, members


def trace_updates(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], groups: Mapping[str, int]
) -> Updates:
    """Trace the update of some parameters, by name, each with the group that it is in."""
    if not parameters:
        raise ExportError("the optimizer holds no parameter that the loss depends on: there is nothing to train")
    made: dict[Any, _Function | None] = {}
    chosen: dict[str, _Function] = {}
    graphs = [_Graph(len(optimizer.param_groups)) for _ in range(2)]
    for name, parameter in parameters.items():
        group = groups[name]
        key: Any = (group, parameter.ndim)
        label = f"{type(optimizer).__name__}_{group}_{parameter.ndim}d"
        if key not in made:
            try:
                made[key] = _Function(optimizer, group, parameter, label)
            except _SizesMatterError:
                made[key] = None
        function = made[key]
        if function is None:
            key = (group, tuple(parameter.shape))
            if key not in made:
                sizes = "x".join(map(str, parameter.shape))
                made[key] = _Function(optimizer, group, parameter, f"{label}_{sizes}", exact=True)
            function = made[key]
        assert function is not None
        chosen[name] = function
        for graph, is_first in zip(graphs, (True, False), strict=True):
            graph.update(name, parameter, function, group, first=is_first)
    remembered, initial = [], {}
    for name, parameter in parameters.items():
        function = chosen[name]
        given = optimizer.state.get(parameter, {})
        for key, value in function.states.items():
            full = f"{name}.{key}"
            shape = _shape(value, parameter)
            dtype = str(value.dtype).removeprefix("torch.")
            tensor = files.Tensor(name=full, dtype=dtype, shape=shape)
            remembered.append(State(tensor=tensor, swaps=key in function.late))
            if key in given:
                initial[full] = given[key].detach().cpu().numpy().copy()
    first, later = (graph.finished() for graph in graphs)
    return Updates(first, later, tuple(remembered), initial)


class _Function:
    """The update of one parameter as two local functions: with nothing remembered, and with something."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: int, parameter: Tensor, name: str, *, exact: bool = False
    ) -> None:
        self.exact = exact
        self.optimizer, self.group = optimizer, optimizer.param_groups[group]
        self.states: dict[str, Tensor] = {}
        self.constants: dict[str, Any] = {}
        given = (parameter.detach(), torch.zeros_like(parameter), torch.zeros((), dtype=torch.float64),
                 torch.zeros((), dtype=torch.float64), torch.ones(()))  # fmt: skip
        initial = optimizer.state.get(parameter) or {}
        self.first: ir.Function | None = None
        if initial:
            self._keep(initial)
        else:
            self.first = as_function(f"{name}_first", partial(self._run, {}, keep=True), given, _TABLE, exact=exact)
        held = tuple(torch.zeros(_shape(value, parameter), dtype=value.dtype) for value in self.states.values())

        def later(p: Tensor, g: Tensor, rate: Tensor, step: Tensor, scale: Tensor, *values: Tensor) -> Any:
            state = self.constants | dict(zip(self.states, values, strict=True))
            return self._run(state, p, g, rate, step, scale)

        self.later = as_function(name, later, (*given, *held), _TABLE, exact=exact)
        self.late = _read_late(self.later, len(given), tuple(self.states))

    def _keep(self, state: Mapping[str, Any]) -> None:
        """Note what is remembered: on a trace without fixed sizes only what has those of the parameter, or none."""
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        self.states = {key: value for key, value in tensors.items() if key != _STEP_STATE}
        self.constants = {
            key: None if key in tensors else value for key, value in state.items() if key not in self.states
        }

    def _run(
        self, state: Mapping[str, Any], parameter: Tensor, gradient: Tensor, rate: Tensor, step: Tensor, scale: Tensor,
        *, keep: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        parameter = parameter.clone()
        parameter.grad = gradient * scale
        optimizer = copy.copy(self.optimizer)
        options: dict[str, Any] = {"foreach": False, "fused": False, "capturable": True, "differentiable": False}
        options = {key: value for key, value in options.items() if key in self.group}
        # SGD takes a learning rate that is a tensor only if it seems to want a gradient.
        rate = rate.clone().requires_grad_()
        optimizer.param_groups = [{**self.group, **options, "lr": rate, "params": [parameter]}]
        optimizer.state = defaultdict(dict)
        if state:
            own = {**state, _STEP_STATE: step} if _STEP_STATE in state else state
            optimizer.state[parameter] = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()
            }
        with _as_if_compiling(type(optimizer)), torch.no_grad():
            type(optimizer).step(optimizer)
        after = optimizer.state[parameter]
        if keep:
            tensors = [value for value in after.values() if isinstance(value, Tensor) and value.ndim]
            if not self.exact and any(value.shape != parameter.shape for value in tensors):
                raise _SizesMatterError
            self._keep(after)
        return parameter.detach(), *(after[key].detach() for key in self.states)


def _power(base: float, power: Tensor) -> Tensor:
    """Return a power as float64 has it: that of float32, as the exporter writes it, is too coarse for 0.999 ** step."""
    return torch.exp(power * math.log(base)) if base else (power == 0).to(power.dtype)


def _clamp_(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    """Clamp by one limit after the other: a whole number and one that is not are too much for the exporter."""
    if low is not None:
        x.clamp_min_(float(low))
    return x if high is None else x.clamp_max_(float(high))


_TABLE: Table = {torch.ops.aten.pow.Scalar: _power, torch.ops.aten.clamp_.default: _clamp_}


class _SizesMatterError(Exception):
    """What an optimizer remembers has sizes of its own: it treats parameters by their shapes."""


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


@contextmanager
def _as_if_compiling(kind: Any) -> Iterator[None]:
    """Let an optimizer take the way that compilers can follow, with its counts in float64, as Python's numbers are."""

    def chosen(better: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*values: Any, **options: Any) -> Any:
            if not any(isinstance(value, Tensor) for value in values):
                return plain(*values, **options)
            first, *others = (value if isinstance(value, Tensor) else torch.full((), value) for value in values)
            for other in others:
                first = better(first, other)
            return first

        return choose

    names = inspect.unwrap(kind.step).__globals__
    dtype, compiling = torch.get_default_dtype(), torch.compiler._is_compiling_flag
    with ExitStack() as stack:
        for name, better in (("min", torch.minimum), ("max", torch.maximum)):
            if name not in names:
                names[name] = chosen(better, getattr(builtins, name))
                stack.callback(names.pop, name)
        full_like = torch.full_like
        stack.callback(setattr, torch, "full_like", full_like)
        torch.full_like = lambda x, value, **options: (
            torch.ones_like(x, **options) * value if isinstance(value, Tensor) else full_like(x, value, **options)
        )
        stack.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float64)
        stack.callback(setattr, torch.compiler, "_is_compiling_flag", compiling)
        torch.compiler._is_compiling_flag = True
        stack.enter_context(_Numbers())
        yield


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
        self.rates = _value(LEARNING_RATE, ir.DataType.DOUBLE, (groups,))
        self.step = _value(STEP, ir.DataType.DOUBLE, ())
        self.scale = _value(GRADIENT_SCALE, ir.DataType.FLOAT, ())
        self.inputs = [self.rates, self.step, self.scale]
        self.outputs: list[ir.Value] = []
        self.nodes: list[ir.Node] = []
        self.functions: dict[Any, ir.Function] = {}
        self._rates: dict[int, ir.Value] = {}

    def rate(self, group: int) -> ir.Value:
        """Return the learning rate of a group."""
        if group not in self._rates:
            place = ir.node("Constant", [], {"value_ints": [group]})
            node = ir.node("GatherND", [self.rates, place.outputs[0]])
            node.outputs[0].name = f"{LEARNING_RATE}.{group}"
            self.nodes += [place, node]
            self._rates[group] = node.outputs[0]
        return self._rates[group]

    def update(self, name: str, parameter: Tensor, function: _Function, group: int, *, first: bool) -> None:
        """Add the update of a parameter."""
        if parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ExportError(f"the parameter {name} is of {kind}: exported models train in float32 (model.float())")
        called = function.first if first and function.first else function.later
        self.functions[called.identifier()] = called
        value = _value(name, ir.DataType.FLOAT, parameter.shape)
        gradient = _value(name + GRADIENT, ir.DataType.FLOAT, parameter.shape)
        shapes = {key: _shape(state, parameter) for key, state in function.states.items()}
        kinds = {
            key: ir.DataType.DOUBLE if state.dtype == torch.float64 else ir.DataType.FLOAT
            for key, state in function.states.items()
        }
        held = (
            []
            if called is function.first
            else [_value(f"{name}.{key}", kinds[key], shape) for key, shape in shapes.items()]
        )
        self.inputs += [value, gradient, *held]
        node = ir.node(
            called.name, [value, gradient, self.rate(group), self.step, self.scale, *held], domain=DOMAIN,
            num_outputs=1 + len(shapes), name=f"update {name}",
        )  # fmt: skip
        names = [name, *(f"{name}.{key}" for key in shapes)]
        types = [ir.DataType.FLOAT, *kinds.values()]
        for output, key, kind, shape in zip(
            node.outputs, names, types, (parameter.shape, *shapes.values()), strict=True
        ):
            output.name, output.type, output.shape = key + NEXT, ir.TensorType(kind), ir.Shape(shape)
        self.nodes.append(node)
        self.outputs += node.outputs

    def finished(self) -> ir.Model:
        """Return the graph."""
        graph = ir.Graph(
            self.inputs, self.outputs, nodes=self.nodes, opset_imports={"": OPSET, DOMAIN: 1}, name="update"
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="cpt_fx", functions=list(self.functions.values()))


def _shape(state: Tensor, parameter: Tensor) -> tuple[int, ...]:
    """Return the sizes of what is remembered of a parameter, where the trace may have left them open."""
    own = tuple(state.shape)
    return own if all(isinstance(size, int) for size in own) else tuple(parameter.shape)


def _value(name: str, kind: ir.DataType, shape: Iterable[int]) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(shape))
