"""Where the package is on disk: its code and the files that it ships; no other module looks up its own path."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
OWN = tuple(os.path.join(folder, "") for folder in (_PACKAGE, (_PACKAGE / "passes").resolve()))
"""The folders with the code of the package; in a checkout, the passes are beside it."""


def shipped(name: str) -> Path:
    """Return the path of a file of the package, such as `schedules/measured.json`."""
    return _PACKAGE / name


def digest_of_code() -> str:
    """Return a hash of all code of the package."""
    sources = {source.resolve() for folder in OWN for source in Path(folder).rglob("*.py")}
    return hashlib.sha256(b"".join(sorted(source.read_bytes() for source in sources))).hexdigest()[:16]
