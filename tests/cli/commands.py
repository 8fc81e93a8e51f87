"""Calls of the command `cpt-fx`, and what they print."""

import json
from typing import Any

import pytest

from cpt_fx.cli import main

Capture = pytest.CaptureFixture[str]


def call(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr, however the command ended."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def data(capsys: Capture, *arguments: str) -> Any:
    code, out, err = call(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def refused(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """Returns the exit code and what was said."""
    code, out, err = call(capsys, *arguments)
    assert out == ""
    assert "Traceback" not in err
    return code, err.strip()
