"""Files and directories that are written completely or not at all, and the hashes of files."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpt_fx.errors import ExportError


def replace(path: Path, content: str | bytes) -> None:
    """Write a file atomically: it is moved here from a temporary folder, so that a reader never sees half of it."""
    # In a folder, because a temporary file itself could be read by its owner only.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        working = Path(folder, path.name)
        working.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(working, path)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Let one process, and one thread of it, in at a time; yield False where the file system or the system cannot."""
    try:
        import fcntl  # not on every system
    except ImportError:
        yield False
        return
    with path.open("w") as lock:  # a process that dies lets go of it
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            alone = False
        else:
            alone = True
        yield alone


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


@contextmanager
def new_directory(target: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary directory that replaces `target` on success; the old contents stay until then."""
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
            # Put the old directory back.
            if old.exists():
                old.rename(target)
            raise


def folder_beside(target: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary directory beside a target."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise ExportError(f"cannot write to {target.parent}: {error.strerror or error}") from error


@contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary path to write a model to, which replaces `path` on success; the old file stays until then."""
    target = Path(os.path.abspath(path))
    if target.is_dir():
        raise ExportError(f"{target} is a directory: name a file, such as {target / 'model.onnx'}")
    data = target.with_name(f"{target.name}.data")
    for place in (target, data):
        if place.exists() and not overwrite:
            raise ExportError(f"{place} exists: name another file, or pass overwrite=True to replace it")
    with folder_beside(target) as folder:
        try:
            yield Path(folder, target.name)
            # The weights (`model.onnx.data`) first: without them the model cannot be read.
            made = sorted(Path(folder).iterdir(), reverse=True)
            for file in made:
                os.replace(file, target.with_name(file.name))
            if len(made) == 1:
                data.unlink(missing_ok=True)  # the weights of the model that was here before
        except OSError as error:
            raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
