"""Optimizers for ONNX Runtime: what `optimizer=` may be, and the ONNX graph that does one update.

The graph has one readable node for each parameter, a local function in the domain `cpt_fx`: `AdamW`, `SGDMomentum`. Its
arithmetic follows torch's own, operation by operation; learning rates, bias corrections and everything else that is one
number are computed in float64, as torch computes them in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from cpt_fx.errors import ExportError, nearest
from cpt_fx.export.functions import DOMAIN, OPSET, parsed
from cpt_fx.export.manifest import Parameter

IR_VERSION = 10
LEARNING_RATE, STEP, GRADIENT_SCALE = "learning_rate", "step", "gradient_scale"
"""Inputs: float64, one for each group; int64, the number of the update, from 1; float32, what gradients are multiplied
with: 1 over the number of steps they were summed over, so that the update is of their mean."""
GRADIENT = "_grad.accumulation.buffer"
"""Suffix of the inputs that hold gradients: those that the training graph writes."""
NEXT = ".next"
"""Suffix of the outputs that hold new values. They may be written over the inputs: no operator reads an input after
the one that writes its new value."""

_DEFAULTS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_NAMES: dict[type, str] = {torch.optim.SGD: "sgd", torch.optim.Adam: "adam", torch.optim.AdamW: "adamw"}
_FIELDS = {
    "sgd": ("lr", "momentum", "dampening", "nesterov", "weight_decay"),
    "adam": ("lr", "betas", "eps", "weight_decay"),
    "adamw": ("lr", "betas", "eps", "weight_decay"),
}
_HELP = (
    'pass "sgd", "adam", "adamw", or an instance of torch.optim.SGD, Adam or AdamW over the model\'s parameters; any '
    "other optimizer of torch can drive the training from outside (Trainer.torch_parameters)"
)


@dataclass(frozen=True)
class Optimizer:
    """How parameters are updated: an algorithm, and groups of parameters with their hyperparameters."""

    name: str
    groups: tuple[dict[str, Any], ...]
    members: dict[str, int]
    """Names of parameters -> the group that each belongs to. Those that are not here stay as they are."""

    @property
    def states(self) -> tuple[str, ...]:
        """What is remembered from update to update for a parameter, by torch's names."""
        return max((_kind(self.name, options).states for options in self.groups), key=len, default=())

    def group_of(self, names: Iterable[str]) -> int:
        """Return the group of a parameter that has these names; -1 if it is in none."""
        return next((self.members[name] for name in names if name in self.members), -1)

    def to_dict(self) -> dict[str, Any]:
        """Return what the manifest says of the optimizer."""
        groups = [
            {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
            for options in self.groups
        ]
        return {"name": self.name, "groups": groups, "states": list(self.states)}


def resolve_optimizer(
    optimizer: str | torch.optim.Optimizer | Optimizer, parameters: Mapping[str, Tensor]
) -> Optimizer:
    """Read what was passed as `optimizer=`.

    Args:
        optimizer: a name, for torch's defaults (and a learning rate of 0.01 for "sgd"), or a fresh torch optimizer.
        parameters: the model's parameters by name, each under all its names. A torch optimizer's own are found among
            them by identity; those that it does not hold stay as they are.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if isinstance(optimizer, str):
        if optimizer not in _DEFAULTS:
            raise ExportError(f"optimizer={optimizer!r} is not known.{nearest(optimizer, _DEFAULTS)} Please {_HELP}")
        optimizer = _DEFAULTS[optimizer](list({id(value): value for value in parameters.values()}.values()))
    name = _NAMES.get(type(optimizer)) if isinstance(optimizer, torch.optim.Optimizer) else None
    if name is None or not isinstance(optimizer, torch.optim.Optimizer):
        raise ExportError(f"optimizer= is of type {type(optimizer).__name__}, which cannot be exported: {_HELP}")
    if any(optimizer.state.values()):
        raise ExportError(
            f"the {type(optimizer).__name__} passed has done steps already, and what it remembers of them would be "
            "lost: pass a fresh one"
        )
    names: dict[int, list[str]] = {}
    for key, value in parameters.items():
        names.setdefault(id(value), []).append(key)
    members: dict[str, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        _check_group(index, group, names)
        members |= {key: index for parameter in group["params"] for key in names[id(parameter)]}
    if not any(parameters[key].requires_grad for key in members):
        raise ExportError("the optimizer holds no parameter that requires a gradient: there is nothing to train")
    groups = ({field: _plain(group[field]) for field in _FIELDS[name]} for group in optimizer.param_groups)
    return Optimizer(name, tuple(groups), members)


def _check_group(index: int, group: dict[str, Any], names: dict[int, list[str]]) -> None:
    for field in ("maximize", "amsgrad"):
        if group.get(field):
            raise ExportError(f"{field}=True of the optimizer's parameter group {index} cannot be exported")
    for parameter in group["params"]:
        if id(parameter) not in names:
            raise ExportError(
                f"the optimizer's parameter group {index} holds a parameter of shape {tuple(parameter.shape)} that is "
                "not one of the exported model: make the optimizer over model.parameters()"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    return value if isinstance(value, bool) else float(value)


def optimizer_model(optimizer: Optimizer, parameters: Iterable[Parameter]) -> onnx.ModelProto:
    """Return the graph of one update of those parameters that are trainable and in a group.

    Inputs are `learning_rate`, `step`, `gradient_scale`, and for each parameter its value, its gradient and what is
    remembered, as in `conv.weight`, `conv.weight_grad.accumulation.buffer`, `conv.weight.momentum_buffer`. Outputs are
    the new values, as in `conv.weight.next`, `conv.weight.momentum_buffer.next`.
    """
    inputs = [
        helper.make_tensor_value_info(LEARNING_RATE, TensorProto.DOUBLE, [len(optimizer.groups)]),
        helper.make_tensor_value_info(STEP, TensorProto.INT64, []),
        helper.make_tensor_value_info(GRADIENT_SCALE, TensorProto.FLOAT, []),
    ]
    outputs: list[onnx.ValueInfoProto] = []
    nodes: list[onnx.NodeProto] = []
    kinds = [_kind(optimizer.name, options) for options in optimizer.groups]
    members = [parameter for parameter in parameters if parameter.trainable and parameter.group >= 0]
    for index in sorted({parameter.group for parameter in members}):
        nodes += _rate_of(index)
    for parameter in members:
        kind, name, shape = kinds[parameter.group], parameter.tensor.name, parameter.tensor.shape
        if parameter.tensor.dtype != "float32":
            raise ExportError(
                f"the parameter {name} is of {parameter.tensor.dtype}: training in ONNX Runtime is in float32; call "
                "model.float() first"
            )
        states = [f"{name}.{state}" for state in kind.states]
        new = [key + NEXT for key in (name, *states)]
        taken = (name, name + GRADIENT, *states)
        inputs += [helper.make_tensor_value_info(key, TensorProto.FLOAT, shape) for key in taken]
        outputs += [helper.make_tensor_value_info(key, TensorProto.FLOAT, shape) for key in new]
        rate = f"{LEARNING_RATE}.{parameter.group}"
        node = helper.make_node(
            kind.name, [*taken, rate, STEP, GRADIENT_SCALE], new, name=f"{kind.name} {name}", domain=DOMAIN
        )
        node.attribute.extend(helper.make_attribute(key, value) for key, value in kind.attributes.items())
        nodes.append(node)
    functions = {kind.name: kind.function() for kind in kinds}
    model = helper.make_model(
        helper.make_graph(nodes, f"{optimizer.name} update", inputs, outputs),
        functions=list(functions.values()),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        ir_version=IR_VERSION,
        producer_name="cpt_fx",
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def _rate_of(index: int) -> list[onnx.NodeProto]:
    """Return the nodes that take a group's learning rate out of all of them."""
    place, rate = f"group.{index}", f"{LEARNING_RATE}.{index}"
    return [
        helper.make_node("Constant", [], [place], name=place, value_ints=[index]),
        helper.make_node("GatherND", [LEARNING_RATE, place], [rate], name=rate),
    ]


@dataclass(frozen=True)
class _Kind:
    """One function: its name, what it remembers, its body, and the attributes of its nodes."""

    name: str
    states: tuple[str, ...]
    body: str
    attributes: dict[str, onnx.TensorProto]

    def function(self) -> onnx.FunctionProto:
        inputs = ["p", "gradient", *self.states, "rate", "step", "scale"]
        outputs = ["new_p", *(f"new_{state}" for state in self.states)]
        given = "".join(f"{name} = Constant(value=attribute.{name})\n" for name in self.attributes)
        return parsed(self.name, inputs, outputs, given + _COMMON + self.body, self.attributes)


def _kind(name: str, options: Mapping[str, Any]) -> _Kind:
    """Return the function for the hyperparameters of a group."""
    if name != "sgd":
        beta_1, beta_2 = options["betas"]
        numbers = {"beta_1": beta_1, "beta_2": beta_2, "eps": options["eps"], "weight_decay": options["weight_decay"]}
        decay, call = (_DECOUPLED, "AdamW") if name == "adamw" else (_L2, "Adam")
        return _Kind(call, ("exp_avg", "exp_avg_sq"), decay + _ADAM, _doubles(numbers))
    numbers = {"weight_decay": options["weight_decay"]}
    if not options["momentum"]:
        return _Kind("SGD", (), _L2 + _SGD.replace("MOVE", "g"), _doubles(numbers))
    numbers |= {"momentum": options["momentum"], "dampening": options["dampening"]}
    if options["nesterov"]:
        body = _L2 + _MOMENTUM + _NESTEROV + _SGD.replace("MOVE", "ahead")
        return _Kind("SGDNesterov", ("momentum_buffer",), body, _doubles(numbers))
    body = _L2 + _MOMENTUM + _SGD.replace("MOVE", "new_momentum_buffer")
    return _Kind("SGDMomentum", ("momentum_buffer",), body, _doubles(numbers))


def _doubles(numbers: Mapping[str, float]) -> dict[str, onnx.TensorProto]:
    """Return attributes that hold float64: those of ONNX's own kind are float32, too coarse for 1 - 0.999 ** step."""
    return {name: helper.make_tensor(name, TensorProto.DOUBLE, [], [value]) for name, value in numbers.items()}


_COMMON = """
    one = float64(1.0)
    mean = gradient * scale
"""
_L2 = """
    g = mean + p * float32(weight_decay)
    start = p
"""
_DECOUPLED = """
    g = mean
    start = p * float32(one - rate * weight_decay)
"""
_ADAM = """
    t = float64(step)
    length = rate / (one - Pow(beta_1, t))
    root_2 = Sqrt(one - Pow(beta_2, t))
    new_exp_avg = exp_avg * float32(beta_1) + g * float32(one - beta_1)
    new_exp_avg_sq = exp_avg_sq * float32(beta_2) + g * float32(one - beta_2) * g
    divisor = Sqrt(new_exp_avg_sq) / float32(root_2) + float32(eps)
    new_p = start - new_exp_avg * float32(length) / divisor
"""
# The first update takes the gradient whole, dampened later ones in part.
_MOMENTUM = """
    later = momentum_buffer * float32(momentum) + g * float32(one - dampening)
    new_momentum_buffer = Where(step == 1, g, later)
"""
_NESTEROV = """
    ahead = g + new_momentum_buffer * float32(momentum)
"""
_SGD = """
    new_p = start - MOVE * float32(rate)
"""
