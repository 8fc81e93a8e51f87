"""What makes a transformed model faithful, checked stage by stage: for the tests, and for the table in the docs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.errors import TransformError
from cpt_fx.schedules import Schedule, Sequence, Static
from tests.training import Equal, Step, check_same, check_same_output, fresh, same, snapshot, tensors_in, train_step
from tests.zoo.any_model import Entry, seed_everything

DECOMPOSED = 1e-5
"""How far numbers may be from the original's, relative to the largest, where a fused operator had to be decomposed."""


def first_exact_then_four_bits() -> Schedule:
    """One step at 32 bits, where everything must be as it was, then steps at 4: one capture serves both."""
    return Sequence([Static(32, total_steps=1), Static(4, total_steps=3)])


def stages(entry: Entry, frontend: str = "auto") -> Iterator[str]:
    """Put a model through everything that is promised. Each stage is named before it runs; one that fails raises."""
    (model, args, kwargs), (reference, more, others) = entry.build(), entry.build()
    schedule = first_exact_then_four_bits()
    options: dict[str, Any] = {"capture": frontend}
    if frontend == "export":  # the one that cannot do without
        # Copies, since the examples of some models are views of each other.
        options |= {"example_inputs": fresh(args), "example_kwargs": fresh(kwargs)}
    yield "transform"
    if entry.refused is not None:
        _check_refusal(entry.refused, model, schedule, options)
        return
    before, names = snapshot(model), list(reference.state_dict())
    result = cpt_fx.transform(model, schedule, **options)
    assert snapshot(model) == before, "transform changed the original"
    _check_names(result, names)
    yield "training step"
    ours, theirs = step(result, args, kwargs), step(reference, more, others)
    equal = comparison(result, theirs, rounding=entry.rounding)
    check_same(ours, theirs, equal)
    assert snapshot(model)[1:] == before[1:], "the training step changed the original's Python state"
    (_, args, kwargs), (_, more, others) = entry.build(3), entry.build(3)
    yield "evaluation"  # at once of another batch size: one capture less
    check_same_output(evaluate(result, args, kwargs), evaluate(reference, more, others), equal)
    yield "another batch size"
    check_same(step(result, args, kwargs), step(reference, more, others), equal)
    yield "checkpoint"
    _check_names(result, names)
    yield "4 bits"
    schedule.step()
    for seed in (5, 6):
        _check_finite(step(result, args, kwargs, seed))
    yield "proof"
    _check_proof(result)


def step(model: nn.Module, args: Any, kwargs: dict[str, Any], seed: int = 1) -> Step:
    """Take a training step with every generator seeded, also those of Python and numpy."""
    seed_everything(seed)
    return train_step(model.train(), args, kwargs, seed=seed)


def evaluate(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what a model says in evaluation mode."""
    seed_everything(1)
    with torch.no_grad():
        return model.eval()(*fresh(args), **fresh(kwargs))


def comparison(result: nn.Module, expected: Step, *, rounding: bool) -> Equal:
    """To the last bit, or to rounding where the report says that an operator was decomposed."""
    if not rounding and not any(
        report.name == "decompose" and report.changed for report in cpt_fx.inspect(result).passes
    ):
        return same
    # Some gradients are nothing but rounding, such as that of a key's bias: they are measured by the larger ones.
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values() if gradient is not None)
    return partial(close, floor=0.01 * largest)


def close(ours: Tensor | None, theirs: Tensor | None, floor: float) -> bool:
    """Equal up to rounding in a different order, relative to the largest element, which counts as `floor` at least."""
    if ours is None or theirs is None:
        return ours is theirs
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if not ours.is_floating_point():
        return torch.equal(ours, theirs)
    scale = max(float(theirs.detach().abs().max()), floor) if theirs.numel() else floor
    return bool(((ours - theirs).abs() <= DECOMPOSED * scale).all())


def _check_refusal(expected: str, model: nn.Module, schedule: Schedule, options: dict[str, Any]) -> None:
    try:
        cpt_fx.transform(model, schedule, **options)
    except TransformError as error:
        assert expected in str(error), f"refused, but for another reason: {error}"
    else:
        raise AssertionError("it should have been refused")


def _check_names(result: nn.Module, names: list[str]) -> None:
    ours = [name for name in result.state_dict() if "cpt_fx" not in name]
    assert ours == names, "the state_dict has other keys"


def _check_finite(taken: Step) -> None:
    tensors = [*tensors_in(taken.output), *(grad for grad in taken.gradients.values() if grad is not None)]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors), "numbers at 4 bits are not finite"


def _check_proof(result: nn.Module) -> None:
    """Every quantizer ran and kept to its levels; what is in full precision says why."""
    inspection = cpt_fx.inspect(result)
    assert inspection.quantizers, "nothing is quantized"
    result.train()
    inspection.verify()
    assert all(item.reason for item in inspection.uncovered), "something is uncovered without a reason"
