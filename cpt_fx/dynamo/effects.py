"""What code does to Python objects while it runs: Dynamo does that beside its graph, one graph alone cannot."""

from __future__ import annotations

from typing import Any

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

from cpt_fx.capture.base import CaptureError


def refuse_effects(effects: SideEffects) -> None:
    """Refuse code that changes Python objects: Dynamo does that beside the graph."""
    if effects.tensor_hooks:
        raise CaptureError("forward registers a hook on a tensor, which is no part of a graph")
    for variable in effects.id_to_variable.values():
        if not effects.is_modified(variable) or isinstance(
            variable.mutation_type, (AttributeMutationNew, ValueMutationNew)
        ):
            continue
        stored = effects.store_attr_mutations.get(variable, {})
        owner = variable.value if stored and hasattr(variable, "value") else None
        names = [name for name, value in stored.items() if not _unchanged(owner, name, value)]
        if names:
            what = f"the forward of {type(owner).__name__} stores something in {', '.join(f'self.{n}' for n in names)}"
        elif stored:
            continue
        else:
            what = f"forward changes {_said(variable)}"
        raise CaptureError(
            f"{what}, which one graph would not do on every call. Return it, or keep it in a buffer that is updated "
            "in place"
        )


def _unchanged(owner: Any, name: str, value: Any) -> bool:
    """Whether code stored what was there already."""
    try:
        new, old = value.as_python_constant(), getattr(owner, name)
    except Exception:  # not a constant, or nothing there
        return False
    return type(new) is type(old) and bool(new == old)


def _said(variable: Any) -> str:
    source = getattr(variable, "source", None)
    text = getattr(source, "name", "") or "of its own"
    for ours, theirs in (("L['forward'].__self__", "self"), ("._modules['", "."), ("L['kwargs']", "kwargs"),
                         ("L['args']", "args")):  # fmt: skip
        text = text.replace(ours, theirs)
    return text.replace("']", "")
