"""`cpt-fx schedules`, `plot` and `cost`: the subcommands that need no model. None of them imports torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cpt_fx.cli import common
from cpt_fx.cli.common import Commands, build_schedule, command, print_json, print_table
from cpt_fx.schedules import NAMES, Cyclic, Schedule, mean_costs, relative_cost, savings_group
from cpt_fx.schedules.plot import new_figure


def add(commands: Commands) -> None:
    """Declare the subcommands."""
    made = command(commands, "schedules", run_schedules)
    common.add_range(made)
    common.add_json(made)
    made = command(commands, "plot", run_plot)
    _add_names(made)
    made.add_argument("--output", type=Path, metavar="FILE", help="PNG, SVG or PDF (default: NAME.png, schedules.png)")
    common.add_range(made)
    made = command(commands, "cost", run_cost)
    _add_names(made)
    common.add_range(made)
    common.add_json(made)


def _add_names(parser: argparse.ArgumentParser) -> None:
    told = "schedules (default: all ten)"
    parser.add_argument("names", nargs="*", type=common.schedule_name, metavar="NAME", help=told)


def run_schedules(options: argparse.Namespace) -> None:
    """List the ten schedules.

    List the ten published schedules: how they cycle, and how much they save against static q_max.

    example:
      cpt-fx schedules --q-min 4 --q-max 8
    """
    rows = []
    for name in NAMES:
        schedule = build_schedule(name, options)
        assert isinstance(schedule, Cyclic)
        form = {"profile": str(schedule.profile), "pattern": schedule.pattern, "reflection": schedule.reflection}
        saving = {"savings_group": savings_group(name), "relative_cost": relative_cost(schedule)}
        rows.append({"name": name, **form, **saving})
    lines = [(*(str(value or "") for value in list(row.values())[:-1]), f"{row['relative_cost']:.3f}") for row in rows]
    headings = ("name", "profile", "pattern", "reflection", "saving", "cost")
    note = f"cost: BitOps relative to static {options.q_max} bits"
    _answer(options, {"schedules": rows}, headings, lines, note, words=5)


def run_cost(options: argparse.Namespace) -> None:
    """What a schedule saves.

    The mean cost of a training step in BitOps, by the published formula, for any model: relative to full
    precision (32 bits), and to training at static q_max.

    example:
      cpt-fx cost CR --q-min 3 --q-max 8 --steps 64000 --cycles 8
    """
    rows = [_cost(name, build_schedule(name, options)) for name in dict.fromkeys(options.names or NAMES)]
    static = _cost(f"static {options.q_max}", build_schedule("static", options))
    columns = ("mean_bits", "forward", "backward", "step", "relative")
    headings = ("schedule", "mean bits", "forward", "backward", "step", f"of static {options.q_max}", "saving")
    lines = [
        (str(row["name"]), *(f"{row[key]:.3f}" for key in columns), f"{100 * float(row['saving']):.1f} %")
        for row in (*rows, static)
    ]
    note = "forward, backward, step: BitOps relative to 32 bits"
    _answer(options, {"costs": rows, "static": static}, headings, lines, note)


def run_plot(options: argparse.Namespace) -> None:
    """Draw a schedule, or all ten.

    Draw the bits of each training step. Needs matplotlib: pip install "cpt_fx[viz]".

    example:
      cpt-fx plot CR RR --q-min 3 --q-max 8 --steps 64000 --output two.svg
    """
    names = list(dict.fromkeys(options.names or NAMES))
    schedules = {name: build_schedule(name, options) for name in names}
    path = options.output or Path(f"{names[0]}.png" if len(names) == 1 else "schedules.png")
    columns = min(len(names), 2)
    rows = -(-len(names) // columns)
    figure = new_figure(6 * columns, 2.2 * rows + 0.6)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for name, ax in zip(names, axes.flat, strict=False):
        schedules[name].plot(ax=ax)
        ax.set_title(name, loc="left", fontsize="medium", fontweight="bold")
        ax.label_outer()
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), fontsize="small", frameon=False)
    figure.savefig(path)
    print(f"wrote {path}")


def _cost(name: str, schedule: Schedule) -> dict[str, str | float]:
    costs, relative = mean_costs(schedule), relative_cost(schedule)
    parts = {"forward": costs.forward, "backward": costs.backward, "step": costs.average}
    return {"name": name, "mean_bits": costs.mean_bits, **parts, "relative": relative, "saving": 1 - relative}


def _answer(
    options: argparse.Namespace, data: dict[str, Any], headings: Sequence[str], lines: Sequence[Sequence[str]],
    note: str, words: int = 1,
) -> None:  # fmt: skip
    """Print data with --json, else a table and a note, together with the requested schedule settings."""
    low, high, steps, cycles = options.q_min, options.q_max, options.steps, options.cycles
    if options.json:
        gradient = high if options.q_grad is None else options.q_grad
        asked = {"q_min": low, "q_max": high, "q_grad": gradient, "total_steps": steps, "cycles": cycles}
        print_json({"schedule": asked, **data})
    else:
        print_table(headings, lines, words)
        print(f"{note}; {low} to {high} bits, {steps} steps, {cycles} cycles")
