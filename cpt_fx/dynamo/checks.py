"""What one graph takes for granted about a call, checked when it runs: functions that stand in the graph."""

from __future__ import annotations

from typing import Any

MADE = "this graph was captured"
ADVICE = "Call cpt_fx.single_graph with such example inputs, or the transformed model itself"


def check_form(given: object, form: Any, name: str) -> None:
    """Refuse an argument of other keys, or of another length, than the graph was captured for."""
    if form_of(given) != form:
        raise ValueError(f"{MADE} for {name} in the form {_form(form)}, got {_form(form_of(given))}. {ADVICE}")


def check_same(given: object, other: object, name: str, other_name: str) -> None:
    """Refuse two tensors where the graph was captured for one that is passed twice."""
    if given is not other:
        raise ValueError(f"{MADE} for one tensor as both {name} and {other_name}, got two. {ADVICE}")


def form_of(value: Any) -> Any:
    """Return types, lengths and keys of nested containers as plain data; None for what is in them."""
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *map(form_of, value))
    if isinstance(value, dict):
        return ("dict", *((key, form_of(item)) for key, item in value.items()))
    return None


def _form(form: Any) -> str:
    if form is None:
        return "_"
    kind, *items = form
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_form(item)}" for key, item in items) + "}"
    return f"{kind}({', '.join(map(_form, items))})"


def check_modes(modes: tuple[bool, ...], expected: tuple[bool, ...], names: tuple[str, ...]) -> None:
    """Refuse to run in a mode that the graph was not captured for."""
    for mode, wanted, name in zip(modes, expected, names, strict=True):
        if mode != wanted:
            ours, others = ("train", "evaluation") if wanted else ("eval", "training")
            raise RuntimeError(
                f"this graph was captured with {name} in {'training' if wanted else 'evaluation'} mode, and does what "
                f"{name} does there; it is in {others} mode now. Call {ours}() on {name}, or take another graph: "
                f"cpt_fx.single_graph of the transformed model after {'eval' if wanted else 'train'}()"
            )
