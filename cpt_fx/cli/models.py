"""`cpt-fx demo`, and the subcommands for a model given by a Python reference: `inspect` and `range-test`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpt_fx.cli import common
from cpt_fx.cli.common import Commands, UsageError, build_schedule, command, print_json, print_table
from cpt_fx.study.training import find

if TYPE_CHECKING:
    from torch import nn

RECIPE = "default"
FAST_STEPS = 80


def add_demo(commands: Commands) -> None:
    """Declare `demo`, which needs no model of the user's."""
    made = command(commands, "demo", run_demo)
    made.add_argument("--fast", action="store_true", help=f"{FAST_STEPS} steps: a few seconds, to see that it runs")
    folder = Path("cpt-fx-demo")
    made.add_argument("--output", type=Path, default=folder, metavar="DIR", help="where the report goes (%(default)s)")
    common.add_schedule(made)
    made.add_argument("--steps", type=int, metavar="N", help="training steps of each run (default: 1600)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: %(default)s)")
    common.add_json(made)


def add(commands: Commands) -> None:
    """Declare `inspect` and `range-test`."""
    made = command(commands, "inspect", run_inspect)
    add_model(made)
    made.add_argument("--html", type=Path, metavar="FILE", help="write a page on which the graph can be explored")
    made.add_argument("--svg", type=Path, metavar="FILE", help="write a drawing of the graph")
    made = command(commands, "range-test", run_range_test)
    add_model(made, scheduled=False)
    made.add_argument("--widths", type=int, nargs=2, default=(2, 8), metavar=("LOW", "HIGH"), help="(default: 2 8)")
    made.add_argument("--steps", type=int, default=50, metavar="N", help="steps at each width (default: %(default)s)")
    counts = "of the progress in full precision that counts (default: %(default)s)"
    made.add_argument("--threshold", type=float, default=0.8, metavar="SHARE", help=counts)
    made.add_argument("--gradient", type=int, default=8, metavar="BITS", help="width of gradients (%(default)s)")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the losses (needs matplotlib)")


def add_model(parser: argparse.ArgumentParser, *, scheduled: bool = True) -> None:
    """Add the reference to a model, the options of its transformation, and --json."""
    place = "file.py:callable, or package.module:callable from the current folder or installed"
    parser.add_argument("model", metavar="REFERENCE", help=place)
    if scheduled:
        common.add_schedule(parser)
        common.add_range(parser)
    parser.add_argument("--recipe", default=RECIPE, metavar="NAME", help="preset of formats (default: %(default)s)")
    alone = "module or glob left alone; may be repeated"
    parser.add_argument("--exclude", action="append", default=[], metavar="NAME", help=alone)
    common.add_json(parser)


def run_demo(options: argparse.Namespace) -> None:
    """Train a small net under a schedule and under static q_max.

    Train a small residual net on real images, once under a schedule and once under static q_max. Takes about a
    minute on two cores and downloads nothing; ends with a table and an HTML report.
    Needs scikit-learn and matplotlib: pip install "cpt_fx[demo]".

    example:
      cpt-fx demo --schedule RR --seed 1 --output report
    """
    common.check_folder("--output", options.output)
    from cpt_fx import demo
    from cpt_fx.inspection import inspect
    from cpt_fx.study.range_test import bar

    steps = FAST_STEPS if options.fast else demo.DemoSettings.steps
    steps = steps if options.steps is None else options.steps
    with common.told_as_usage():
        settings = demo.DemoSettings(schedule=options.schedule, seed=options.seed, steps=steps)
    with bar("demo", 2 * steps) as advance:
        runs = demo.run_demo(settings, advance)
    inspection = inspect(runs[0].model)
    proof = inspection.verify()
    path = demo.write_report(runs, settings, inspection, proof, options.output)
    if options.json:
        print_json({"runs": [one.to_dict() for one in runs], "proof": proof.to_dict(), "report": str(path)})
        return
    print_table(demo.HEADINGS, [*map(demo.results, runs)])
    print(f"proven for {runs[0].name}, with evaluations among the runs: {proof}")
    print(f"report: {path}")


def run_inspect(options: argparse.Namespace) -> None:
    """What is quantized in a model, and what is not.

    Transform a model and show its quantizers. The callable takes no arguments and returns a model, or
    (model, example_inputs), a tuple of arguments or a dict of them by name; with inputs, a dry run proves that
    every quantizer quantizes.

    example:
      cpt-fx inspect mypackage.models:make --schedule CR --html graph.html
    """
    schedule = build_schedule(options.schedule, options)
    model, inputs, named = model_and_inputs(options.model, load(options.model))
    from cpt_fx.api import transform
    from cpt_fx.inspection import inspect
    from cpt_fx.inspection.verification import verify

    examples: dict[str, Any] = {"example_inputs": inputs, "example_kwargs": named, "prove": False}
    result = transform(model, schedule, recipe=options.recipe, exclude=options.exclude, **examples)
    inspection = inspect(result)
    proof = verify(result, inputs or (), named or {}, gradients=True, source=model) if inputs or named else None
    inspection = dataclasses.replace(inspection, shown=proof)
    for path, write in ((options.html, inspection.html), (options.svg, inspection.svg)):
        if path is not None:
            write(path)
            print(f"wrote {path}", file=sys.stderr)
    if options.json:
        print_json(inspection.to_dict() | {"proof": None if proof is None else proof.to_dict()})
        return
    common.show(inspection)
    if proof is not None:
        print(f"{'proven' if proof.proven else 'not all proven'}, by a dry run: {proof}")


def run_range_test(options: argparse.Namespace) -> None:
    """Find q_min for a model and its data.

    Train copies of a model for a few steps at each width, and report the smallest one that makes progress.
    The callable takes no arguments and returns (model, data) or (model, data, loss): data is a list or a
    DataLoader of batches, loss a function of the model and a batch (default: cross entropy of (x, labels)).

    example:
      cpt-fx range-test mypackage.training:make --widths 2 8 --threshold 0.9
    """
    low, high = options.widths
    if low > high:
        raise UsageError(f"--widths takes the lowest width first, got {low} {high}")
    from cpt_fx.study.range_test import check_settings, default_loss, range_test

    widths = range(low, high + 1)
    with common.told_as_usage():
        check_settings(widths, options.steps, options.threshold, options.gradient, options.seed)
    made = load(options.model)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"{options.model} must return (model, data) or (model, data, loss), got {_kind(made)}")
    model, data, loss = made if len(made) == 3 else (*made, default_loss)
    result = range_test(
        model, data, loss=loss, widths=widths, steps_per_width=options.steps, threshold=options.threshold,
        gradient=options.gradient, recipe=options.recipe, exclude=options.exclude, seed=options.seed,
    )  # fmt: skip
    if options.plot is not None:
        result.plot(options.plot)
        print(f"wrote {options.plot}", file=sys.stderr)
    common.answer(options, result.to_dict, result)


def load(reference: str) -> Any:
    """Return what a reference names; anything callable that is not a model is called."""
    if not all(reference.rpartition(":")):
        raise UsageError(f"a reference looks like file.py:callable or package.module:callable, got {reference!r}")
    found, _ = find(reference)
    from torch import nn

    # Instances of modules are callable, but only their classes are meant to be called here.
    if isinstance(found, nn.Module) or not callable(found):
        return found
    try:
        return found()
    except Exception as error:
        raise RuntimeError(f"{reference} raised {type(error).__name__}: {error}") from error


def model_and_inputs(reference: str, made: Any) -> tuple[nn.Module, tuple[Any, ...] | None, dict[str, Any] | None]:
    """Return the model that a reference led to, and its inputs if there are any: by position, or else by name."""
    from torch import Tensor, nn

    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{reference} must return a model or (model, example_inputs), got {_kind(made)}")
    if isinstance(inputs, dict):
        return model, None, inputs
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if inputs is not None and not isinstance(inputs, tuple):
        raise ValueError(f"{reference} must return example_inputs as a tuple, got {_kind(inputs)}")
    return model, inputs, None


def _kind(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return type(value).__name__
