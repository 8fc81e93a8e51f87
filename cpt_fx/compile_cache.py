"""A mark in the keys of torch's compile caches, so that an upgrade of cpt_fx does not run the old code.

Compilers keep what they made of a graph, on disk, under the names of its operators. What ours do, and so what was
traced through them, may change from one version to the next.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch


def mark() -> None:
    """Add a hash of the modules that compilers trace through to the tag that torch has for such purposes."""
    folder = Path(__file__).parent
    sources = sorted((*folder.glob("*.py"), *(folder / "integer").glob("*.py")))
    code = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    torch.compiler.config.cache_key_tag += f" cpt_fx:{code}"
