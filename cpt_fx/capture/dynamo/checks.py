"""Run-time checks of what a single graph assumes about a call: functions that the graph calls."""

from __future__ import annotations

MADE = "this graph was captured"
ADVICE = "Call cpt_fx.single_graph with such example inputs, or the transformed model itself"


def check_same(given: object, other: object, name: str, other_name: str) -> None:
    """Raise if two arguments that were one tensor at capture are two tensors."""
    if given is not other:
        raise ValueError(f"{MADE} for one tensor as both {name} and {other_name}, got two. {ADVICE}")


def check_modes(modes: tuple[bool, ...], expected: tuple[bool, ...], names: tuple[str, ...]) -> None:
    """Raise if a module is in another mode than the graph was captured for."""
    for mode, wanted, name in zip(modes, expected, names, strict=True):
        if mode != wanted:
            ours, others = ("train", "evaluation") if wanted else ("eval", "training")
            raise RuntimeError(
                f"this graph was captured with {name} in {'training' if wanted else 'evaluation'} mode, and does what "
                f"{name} does there; it is in {others} mode now. Call {ours}() on {name}, or take another graph: "
                f"cpt_fx.single_graph of the transformed model after {'eval' if wanted else 'train'}()"
            )
