"""Files that are complete or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def replace(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and move it there, so that a reader never sees half of it."""
    data = content.encode() if isinstance(content, str) else content
    handle, working = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(working, 0o666 & ~umask())
        os.replace(working, path)
    except BaseException:
        Path(working).unlink(missing_ok=True)
        raise


def umask() -> int:
    """Return the mask that an ordinary file gets; temporary ones are for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
