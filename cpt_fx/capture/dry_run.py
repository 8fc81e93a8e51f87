"""Dry runs of a model: buffers, parameters, gradients, random state and modes are restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from cpt_fx.capture.side_effects import run_aside, unchanged
from cpt_fx.errors import TransformError
from cpt_fx.ir.layer_state import own
from cpt_fx.ir.result import sessions_in


def eager_model(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers of torch.compile and of data parallelism."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def is_sharded(kind: type) -> bool:
    """Return whether a class was made by `fully_shard`; its modules gather their parameters for each pass."""
    return any(base.__name__ == "FSDPModule" for base in kind.__mro__)


@contextmanager
def dry_run(model: nn.Module) -> Iterator[None]:
    """Run the block as a dry run: replace all buffers by copies, and undo all effects on exit.

    The original buffers are never written, so that a pending backward pass finds them as its forward pass left them.
    Parameters are not copied; one that the model's own code overwrites gets its values back. Ranges and counters that
    a capture inside the block adds are reset. Calls inside are not the user's: reminders do not count them, and they
    cause no evaluation warnings.
    """
    sessions = [session for _, session in sessions_in(model)]
    states = [session.state for session in sessions]
    hidden = (module for state in states for module in state.modules())
    everything = {id(module): module for module in (*model.modules(), *hidden)}.values()
    modules = [(module, module._buffers.copy(), module.training) for module in everything]
    counted = {id(holder) for state in states for holder in (state.counters, state.products)}
    known = {id(tensor) for module, *_ in modules for tensor in own(module).values()}
    copies: dict[int, Tensor] = {}
    devices = sorted({value.device.index for value in model.parameters() if value.device.type == "cuda"})
    # Reshard before snapshot and restore: what `fully_shard` gathers is freed later, and must not be written then.
    sharded: list[Any] = [one for one in model.modules() if is_sharded(type(one))]
    with ExitStack() as stack:
        for session in sessions:
            stack.callback(setattr, session, "looking", session.looking)
            session.looking = True
        for one in sharded:
            one.reshard()
        stack.enter_context(unchanged(model, values=True))
        for one in sharded:
            stack.callback(one.reshard)
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(torch.compiler.set_stance("default", force_backend="eager"))
        try:
            for module, buffers, _ in modules:
                # In the existing dicts: others may hold references to them.
                for name, buffer in buffers.items():
                    if buffer is not None:
                        copied = buffer.detach().clone().requires_grad_(buffer.requires_grad and buffer.is_leaf)
                        module._buffers[name] = copies.setdefault(id(buffer), copied)
            yield
        finally:
            for module, buffers, training in modules:
                module._buffers.update(buffers)
                made = [tensor for tensor in own(module).values() if id(tensor) not in known]
                if id(module) in counted:
                    made += [one for name, one in module._buffers.items() if one is not None and name not in buffers]
                for tensor in made:
                    tensor.detach().zero_()
                module.training = training


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in a model's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def called(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a model; raise errors with a short message, since torch's own may print whole tensors."""
    # A graph module's own __call__ prints its generated code before it raises.
    call = nn.Module.__call__ if isinstance(model, fx.GraphModule) else type(model).__call__
    try:
        return run_aside(call, (model, *args), kwargs)
    except TransformError:
        raise  # a refusal with a message of our own
    except Exception as error:
        if len(args) == 1 and not kwargs and isinstance(args[0], (tuple, list)):
            raise TypeError("verify takes the model's arguments themselves: verify(x), not verify((x,))") from None
        # The error of an operator that got a wrong type prints the value in full after its first line.
        shows_values = "tensor(" in str(error) or "instead found type" in str(error)
        said = (str(error).splitlines() or [""])[0].partition("tensor(")[0].strip()
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise ValueError(f"the model does not run on the inputs given to verify: {said[:300]}") from (
            None if shows_values else error
        )
