"""The command line of every script: options, presets, training, a table at the end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import cpt_fx
from cpt_fx import recipes
from cpt_fx.errors import nearest
from cpt_fx.schedules import NAMES, Schedule, Static, named
from support.ranges import range_of
from support.task import Task
from support.training import Outcome, fit

Options = Mapping[str, Any]
PERIODS = ("exact", "published", "published-imagenet")
SCHEDULES = (*NAMES, "static", "full")
UNIVERSAL = ("checkpoint", "save_every", "schedule", "fast", "preset", "range_test")
"""Options that do not change the result of a run, or that the schedule already stands for."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """A domain on the command line, and as the `train(schedule, seed)` of a study."""

    description: str
    make_task: Callable[[argparse.Namespace], Task]
    presets: Mapping[str, Options]
    """Options by name for each preset: they replace defaults, and given options replace them."""
    fast: Options
    add_options: Callable[[argparse.ArgumentParser], None] | None = None

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of all options."""
        made = argparse.ArgumentParser(
            description=self.description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        add = made.add_argument
        add("--fast", action="store_true", help="a few steps on data that need no fetching")
        add("--preset", choices=sorted(self.presets), help="settings of a published run, which options can change")
        data = made.add_argument_group("model and data")
        data.add_argument("--data", help="the name of a small dataset, or a path to a real one")
        data.add_argument("--model", help="which model to train")
        data.add_argument(
            "--recipe", help=f"how to quantize: {', '.join(recipes.PRESETS)} (default: the published way)"
        )
        data.add_argument("--execution", choices=("simulated", "integer"), default="simulated")
        data.add_argument("--compile", action="store_true", help="train the compiled model")
        bits = made.add_argument_group("schedule")
        bits.add_argument("--schedule", choices=SCHEDULES, default="CR", help="default: %(default)s")
        bits.add_argument("--q-min", type=int, default=3, metavar="BITS", help="default: %(default)s")
        bits.add_argument("--q-max", type=int, default=8, metavar="BITS", help="default: %(default)s")
        bits.add_argument("--q-grad", type=int, metavar="BITS", help="default: q_max")
        bits.add_argument("--cycles", type=int, default=8, help="default: %(default)s")
        bits.add_argument(
            "--period",
            choices=PERIODS,
            default="exact",
            help="steps of a cycle: exact, so that cycles fill the run (default); or as published, whole steps and one "
            "more; or whole steps alone, as published for ImageNet",
        )
        bits.add_argument(
            "--eval-bits", default="q_max", metavar="BITS", help="a width, q_max (default) or current, as published"
        )
        run = made.add_argument_group("run")
        length = run.add_mutually_exclusive_group()
        length.add_argument("--steps", type=int, help="optimizer steps")
        length.add_argument("--epochs", type=int, action=Epochs)
        run.add_argument("--batch", type=int, help="examples in a batch")
        run.add_argument("--lr", type=float)
        run.add_argument("--weight-decay", type=float, default=0.0)
        run.add_argument("--hold-rate", action="store_true", help="in studies: hold the rate during a first deficit")
        run.add_argument("--seed", type=int, default=0)
        run.add_argument("--evaluations", type=int, default=0, metavar="N", help="evaluate N times on the way")
        run.add_argument(
            "--checkpoint", type=Path, metavar="FILE", help="write it on the way, go on from it if it exists"
        )
        run.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints (default: a tenth)")
        run.add_argument("--threads", type=int, help="threads of torch (default: torch's own)")
        run.add_argument(
            "--range-test",
            type=int,
            metavar="N",
            help="instead of a run: train N steps at each width from 2 to 8 and say which is the smallest that trains",
        )
        if self.add_options is not None:
            self.add_options(made)
        return made

    def options(self, typed: list[str] | None = None, **given: Any) -> argparse.Namespace:
        """Return all options: the defaults, changed by a preset, by --fast, and last by what is typed or given."""
        parser = self.parser()
        known = vars(parser.parse_args([]))
        for name in given:
            if name not in known:
                raise TypeError(f"there is no option {name!r}.{nearest(name, known)}")
        first = argparse.Namespace(**(known | given)) if typed is None else parser.parse_args(typed)
        if first.preset is not None:
            if first.preset not in self.presets:
                raise ValueError(f"unknown preset {first.preset!r}; there are {sorted(self.presets)}")
            parser.set_defaults(**self._checked(self.presets[first.preset], known))
        if first.fast:
            parser.set_defaults(**self._checked(self.fast, known))
        result = parser.parse_args(typed or [])
        vars(result).update(given)
        return result

    @staticmethod
    def _checked(options: Options, known: Mapping[str, Any]) -> dict[str, Any]:
        for name in options:
            if name not in known:
                raise AssertionError(f"a preset sets {name!r}, which is not an option")
        return dict(options)

    def run(self, options: argparse.Namespace, bar: bool = False) -> tuple[Task, Schedule, Outcome]:
        """Train what the options describe."""
        task = self.task(options)
        steps = options.steps or (options.epochs or 0) * task.steps_per_epoch
        if steps < 1:
            raise ValueError("say how long the run is: --steps or --epochs")
        schedule = make_schedule(options, steps)
        return task, schedule, self._fit(task, schedule, options, bar)

    def train(self, schedule: Schedule, seed: int = 0, **given: Any) -> dict[str, float]:
        """Train under a schedule, whose `total_steps` are the run, and return the metrics: what a study calls."""
        options = self.options(**given, seed=seed)
        return self._fit(self.task(options), schedule, options, False).metrics

    def main(self, typed: list[str] | None = None) -> None:
        """Run as a command."""
        options = self.options(sys.argv[1:] if typed is None else typed)
        try:
            if options.range_test is not None:
                print(range_of(self.task(options), steps=options.range_test, seed=options.seed))
                return
            task, schedule, outcome = self.run(options, bar=True)
        except (ImportError, OSError, TypeError, ValueError) as error:
            sys.exit(f"error: {error}")
        show(task, schedule, outcome)

    def task(self, options: argparse.Namespace) -> Task:
        """Return the task that the options describe."""
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        task = self.make_task(options)
        if options.recipe is not None:
            task.recipe = recipes.resolve(options.recipe)
        return task

    def _fit(self, task: Task, schedule: Schedule, options: argparse.Namespace, bar: bool) -> Outcome:
        return fit(
            task,
            schedule,
            seed=options.seed,
            checkpoint=options.checkpoint,
            save_every=options.save_every,
            evaluations=options.evaluations,
            bar=bar,
            execution=options.execution,
            compile=options.compile,
            hold_rate=options.hold_rate,
            identity={name: _plain(value) for name, value in vars(options).items() if name not in UNIVERSAL},
        )


class Epochs(argparse.Action):
    """Epochs given on the command line replace the steps of a preset."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        """Store them."""
        namespace.epochs, namespace.steps = values, None


def make_schedule(options: argparse.Namespace, steps: int) -> Schedule:
    """Return the schedule that the options describe."""
    if options.schedule == "full":
        return Static(cpt_fx.schedules.FULL_PRECISION, total_steps=steps)
    if options.schedule == "static":
        return Static(options.q_max, options.q_grad, total_steps=steps)
    whole = steps // options.cycles
    return named(
        options.schedule,
        q_min=options.q_min,
        q_max=options.q_max,
        total_steps=steps,
        cycles=options.cycles,
        q_grad=options.q_grad,
        period={"exact": None, "published": whole + 1, "published-imagenet": max(whole, 1)}[options.period],
        eval_bits=_eval_bits(options.eval_bits),
    )


def _eval_bits(text: str) -> int | str | None:
    """Return what a schedule takes for the widths of evaluation."""
    if text in ("q_max", "current"):
        return None if text == "q_max" else text
    if not text.isdecimal():
        raise ValueError(f"--eval-bits must be a width, q_max or current, got {text!r}")
    return int(text)


def show(task: Task, schedule: Schedule, outcome: Outcome) -> None:
    """Print a summary of the quantization, and the table of results."""
    print(cpt_fx.inspect(outcome.model).verify())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("steps", "bits", "training loss", *outcome.metrics):
        table.add_column(heading, justify="right")
    for steps, metrics in outcome.curve:
        recent = outcome.losses[max(0, steps - max(len(outcome.losses) // 20, 1)) : steps]
        loss = f"{sum(recent) / len(recent):.4f}" if recent else ""
        table.add_row(f"{steps}", f"{schedule.bits(steps - 1).weight}", loss, *(f"{v:.4f}" for v in metrics.values()))
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    cost = cpt_fx.schedules.mean_costs(schedule).average
    went_on = f", resumed at step {outcome.resumed_at}" if outcome.resumed_at else ""
    print(
        f"{task.metric} {outcome.metrics[task.metric]:.4f} ({task.better} is better) after {schedule.total_steps} "
        f"steps of {schedule!r} in {outcome.seconds:.1f} s{went_on}; BitOps {100 * cost:.1f} % of full precision, by "
        "the published formula"
    )


def _plain(value: object) -> object:
    """Return an option in a form that a checkpoint can hold."""
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
