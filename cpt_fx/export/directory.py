"""Directories and files that are there wholly or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpt_fx.errors import ExportError


@contextmanager
def new_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a directory to write to that takes its place when all went well; what was there stays until then."""
    target = Path(os.path.abspath(target))
    if target.exists() and not target.is_dir():
        raise ExportError(f"{target} is a file: name a directory")
    if target.is_dir() and any(target.iterdir()) and not overwrite:
        raise ExportError(f"{target} is not empty: name another directory, or pass overwrite=True to replace it")
    with folder_beside(target) as folder:
        made, old = Path(folder, "made"), Path(folder, "old")
        made.mkdir()
        yield made
        if target.exists():
            target.rename(old)
        try:
            made.rename(target)
        except OSError:
            # Whatever fails, one of both is there.
            if old.exists():
                old.rename(target)
            raise


def folder_beside(target: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a folder for what is on its way to a target."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ExportError(f"cannot write to {target.parent}: {error.strerror or error}") from error


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


@contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """Give a path to write a model to, which moves to `path` when all went well; what was there stays until then."""
    target = Path(os.path.abspath(path))
    if target.is_dir():
        raise ExportError(f"{target} is a directory: name a file, such as {target / 'model.onnx'}")
    if target.exists() and not overwrite:
        raise ExportError(f"{target} exists: name another file, or pass overwrite=True to replace it")
    with folder_beside(target) as folder:
        try:
            yield Path(folder, target.name)
            # The weights first, `model.onnx.data`: a model without them could not be read.
            for made in sorted(Path(folder).iterdir(), reverse=True):
                os.replace(made, target.with_name(made.name))
        except OSError as error:
            raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
