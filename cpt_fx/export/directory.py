"""Directories and files that are there wholly or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpt_fx.errors import ExportError
from cpt_fx.files import umask


@contextmanager
def new_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a directory to write to that takes its place when all went well; what was there stays until then."""
    target = Path(os.path.abspath(target))
    if target.exists() and not target.is_dir():
        raise ExportError(f"{target} is a file: name a directory")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ExportError(f"{target} is not empty: name another directory, or pass overwrite=True to replace it")
    working = folder_beside(target)
    try:
        yield working
        _put(working, target)
    finally:
        shutil.rmtree(working, ignore_errors=True)


def folder_beside(target: Path) -> Path:
    """Make a folder for what is on its way to a target."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ExportError(f"cannot write to {target.parent}: {error.strerror or error}") from error


def _put(made: Path, target: Path) -> None:
    """Move a finished directory to its place; whatever fails, one of both is there."""
    # mkdtemp keeps others out; an export is like any other file of the user's.
    made.chmod(0o777 & ~umask())
    if not target.exists():
        made.rename(target)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)) / "old"
    target.rename(old)
    try:
        made.rename(target)
    except OSError:
        old.rename(target)
        raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()
