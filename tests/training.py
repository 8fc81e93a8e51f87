"""What the tests of transformed models share: one training step of any model, and comparison to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from cpt_fx.capture.standalone import precision_of
from cpt_fx.ir.state import Widths

Equal = Callable[["Tensor | None", "Tensor | None"], bool]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Walk through whatever a model returned."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


def fresh(value: Any) -> Any:
    """Copy inputs; floating ones become leaves that ask for a gradient."""
    if isinstance(value, Tensor):
        copy = value.detach().clone()
        return copy.requires_grad_() if copy.is_floating_point() else copy
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(fresh, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **{name: fresh(item) for name, item in vars(value).items()})
    return type(value)(map(fresh, value)) if isinstance(value, (tuple, list)) else value


def structure(value: Any) -> Any:
    """Return types and keys of a nested value, without its tensors."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return (type(value), {key: structure(item) for key, item in value.items()})
    if isinstance(value, (tuple, list)):
        return (type(value), [structure(item) for item in value])
    if dataclasses.is_dataclass(value):
        return (type(value), [structure(getattr(value, field.name)) for field in dataclasses.fields(value)])
    # An object that has no `==`, such as the cache that language models return, stands for its class.
    return type(value) if type(value).__eq__ is object.__eq__ else value  # type: ignore[comparison-overlap]


def loss_of(output: Any) -> Tensor:
    """Weigh every number a model returned differently, so that no gradient is the same everywhere by accident."""
    parts = []
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            weights = torch.cos(torch.arange(tensor.numel(), dtype=torch.float32)).view(tensor.shape)
            parts.append((tensor.float() * weights).sum())
    return torch.stack(parts).sum()


@dataclasses.dataclass
class Step:
    """What one training step left behind."""

    output: Any
    inputs: dict[str, Tensor | None]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    parameters: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor | None]:
        """Everything, by name."""
        outputs = {str(index): tensor for index, tensor in enumerate(tensors_in(self.output))}
        groups: dict[str, dict[str, Any]] = {
            "output": outputs,
            "input gradient": self.inputs,
            "gradient": self.gradients,
            "buffer": self.buffers,
            "parameter": self.parameters,
        }
        return {f"{kind} {name}": tensor for kind, group in groups.items() for name, tensor in group.items()}


def train_step(model: nn.Module, args: Any, kwargs: dict[str, Any], *, seed: int = 1, lr: float = 0.01) -> Step:
    """Run one step of SGD; `named_*` of ours are left out."""
    torch.manual_seed(seed)
    args, kwargs = fresh(args), fresh(kwargs)
    model.zero_grad()
    output = model(*args, **kwargs)
    loss_of(output).backward()
    gradients = {name: _copy(parameter.grad) for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(lr * parameter.grad)
    given = {str(index): tensor.grad for index, tensor in enumerate(tensors_in((args, kwargs)))}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers() if "cpt_fx" not in name}
    parameters = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return Step(output, given, gradients, buffers, parameters)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Equal to the last bit, in the same dtype, or both absent."""
    if ours is None or theirs is None:
        return ours is theirs
    return ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def check_same(ours: Step, theirs: Step, equal: Equal = same) -> None:
    """Compare two steps, to the last bit unless told otherwise."""
    assert structure(ours.output) == structure(theirs.output)
    left, right = ours.tensors(), theirs.tensors()
    assert {name for name in right if name not in left} == set()
    assert [name for name in right if not equal(left[name], right[name])] == []


def check_same_output(ours: Any, theirs: Any, equal: Equal = same) -> None:
    """Compare two outputs, to the last bit unless told otherwise."""
    assert structure(ours) == structure(theirs)
    pairs = zip(tensors_in(ours), tensors_in(theirs), strict=True)
    assert all(equal(left, right) for left, right in pairs)


def widths(model: nn.Module) -> dict[str, int]:
    """Return the widths a transformed model has now, by the name of their source."""
    return precision_of(model).now()


def show_widths(model: nn.Module, **widths: int) -> None:
    """Let a model run at other widths than its schedule says: what `verify` has to notice."""
    state = precision_of(model)
    for mode in ("in_training", "in_evaluation"):
        state.__dict__[mode] = Widths({**state.__dict__[mode].values, **widths}, state.device)


def counters(model: nn.Module) -> dict[str, Tensor]:
    """Return what every quantizer noted, by its name."""
    return dict(precision_of(model).counters.named_buffers())


def snapshot(model: nn.Module) -> Any:
    """Return everything that a careless transform might change in a model, for comparison with `==`."""
    tensors = [(name, id(tensor), tensor._version, tensor.requires_grad, tensor.grad is None)
               for name, tensor in (*model.named_parameters(), *model.named_buffers())]  # fmt: skip
    modules = [
        (name, id(module), sorted(module.__dict__), list(module._forward_hooks), list(module._forward_pre_hooks),
         list(module._modules), module.training, type(module))
        for name, module in model.named_modules(remove_duplicate=False)
    ]  # fmt: skip
    values = [
        {key: id(value) for key, value in module.__dict__.items() if not isinstance(value, bool)}
        for module in model.modules()
    ]
    return tensors, modules, values
