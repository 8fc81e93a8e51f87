"""Shared by all scripts here: where results are written, and what a result says about its origin."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from harness.machine import Machine, here

RESULTS = Path(__file__).parent / "results"


def about(command: str, threads: int) -> dict[str, Any]:
    """Return machine, versions, command and date, which every result holds."""
    return here(threads, command).to_dict()


def origin(found: Mapping[str, Any]) -> str:
    """Say in a line of Markdown where a result comes from."""
    machine = Machine(**{field.name: found[field.name] for field in fields(Machine)})
    return f"{machine.place}. `{machine.command}`"


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add --output."""
    parser.add_argument("--output", type=Path, default=RESULTS, metavar="DIR", help="where results go (%(default)s)")


def write(folder: Path, name: str, data: Mapping[str, Any], page: str) -> None:
    """Write a result as data and as a page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(data, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page, encoding="utf-8")


def read(folder: Path, name: str) -> dict[str, Any] | None:
    """Return a result that was written before, or None."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
