"""Every schedule and every static baseline trains in every one of the five domains; no model's code knows of it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.script import SCHEDULES, Script

import cpt_fx
from cpt_fx.schedules import FULL_PRECISION

DOMAINS = (
    "image_classification",
    "object_detection",
    "node_classification",
    "language_model",
    "entailment",
)
STEPS = 12
"""Two cycles of six steps: every schedule goes through every width from q_min to q_max, or nearly."""


def script(domain: str) -> Script:
    made = importlib.import_module(domain).SCRIPT
    assert isinstance(made, Script)
    return made


def cases() -> Iterator[Any]:
    """Each schedule in each domain: two in the default run, half of the rest in the slow tests."""
    for place, domain in enumerate(DOMAINS):
        for number, name in enumerate(SCHEDULES):
            marks = [] if number % 6 == 0 else [pytest.mark.slow if (place + number) % 2 else pytest.mark.long]
            yield pytest.param(domain, name, marks=marks)


@pytest.mark.parametrize(("domain", "name"), [*cases()])
def test_it_trains(domain: str, name: str) -> None:
    torch.set_num_threads(1)
    options = ["--fast", "--schedule", name, "--steps", f"{STEPS}", "--cycles", "2", "--q-min", "4", "--q-max", "7"]
    made = script(domain)
    task, schedule, outcome = made.run(made.options(options))
    assert len(outcome.losses) == STEPS
    assert all(math.isfinite(loss) for loss in outcome.losses)
    assert math.isfinite(outcome.metrics[task.metric])
    proof = cpt_fx.inspect(outcome.model).verify()  # raises where a quantizer did not run, or made too many levels
    assert proof.quantizers
    trained = {width for width in schedule.trajectory()[:, 0].tolist() if width != FULL_PRECISION}
    assert proof.proven == bool(trained), "at 32 bits nothing is rounded, and nothing proven"
    assert trained <= set(proof.widths)


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_model_is_what_its_library_makes(domain: str) -> None:
    """A task's model is a plain module: nothing of cpt_fx is in it, or in the code that it is made of."""
    made = script(domain)
    model = made.make_task(made.options(["--fast"])).model()
    for module in model.modules():
        assert not type(module).__module__.startswith("cpt_fx")
    assert not any("cpt_fx" in name for name, _ in model.named_buffers())


@pytest.mark.parametrize("domain", DOMAINS)
def test_presets_are_published_settings(domain: str) -> None:
    """Every preset names options that exist, the published way to quantize, and how long a run is."""
    made = script(domain)
    assert made.presets
    for name in made.presets:
        options = made.options(["--preset", name])
        assert options.steps or options.epochs, name
        assert 2 < options.q_min < options.q_max <= 8, name
        assert options.recipe in (None, "paper"), name
