"""A failing model as a test: its source, and the oracle that says no."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.fuzz.trying import Fault, Outcome, examine

FOLDER = Path(__file__).parent / "failures"


def save(source: str, fault: Fault, folder: Path = FOLDER) -> Path:
    """Write a test that is red until the fault is mended."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"test_{hashlib.sha256((source + fault.oracle + fault.frontend).encode()).hexdigest()[:10]}.py"
    said = " ".join(fault.message.split())[:300].replace("\\", "/").replace('"', "'")
    text = (
        f'"""{fault.oracle}, {fault.frontend or "any frontend"}: {fault.kind}: {said}"""\n\n'
        "# ruff: noqa\n# mypy: ignore-errors\n\n"
        f"from pathlib import Path\n\nfrom tests.fuzz.saving import faults_of\n{source}\n\n"
        f"def test_it_is_mended(tmp_path: Path) -> None:\n"
        f"    assert not faults_of(Path(__file__), tmp_path, frontend={fault.frontend!r}, oracle={fault.oracle!r})\n"
    )
    path.write_text(text, encoding="utf-8")
    return path


def faults_of(file: Path, folder: Path, *, frontend: str, oracle: str) -> list[str]:
    """Try the model of a test again; return what is wrong with it."""
    source = file.read_text(encoding="utf-8").partition("\n\ndef test_it_is_mended")[0]
    outcome = examine(0, source, folder, frontends=frontends_for(frontend), chosen=(oracle,))
    assert outcome.fits, "the plain model does not run"
    return faults_like(outcome, frontend, oracle)


def frontends_for(frontend: str) -> tuple[str, ...]:
    """Return the frontends that a fault of one needs: to compare Dynamo with torch.fx takes both."""
    return (
        ("symbolic", "dynamo")
        if frontend == "dynamo"
        else (frontend,)
        if frontend
        else ("symbolic", "dynamo", "program")
    )


def faults_like(outcome: Outcome, frontend: str, oracle: str) -> list[str]:
    """Return what faults of one oracle in one frontend say."""
    found = [fault for fault in outcome.faults if frontend in ("", fault.frontend)]
    return [f"{fault.oracle}: {fault.kind}: {fault.message}" for fault in found if fault.oracle in (oracle, "process")]
