"""One ONNX file that is there wholly or not at all, with its weights inside where they fit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
import onnx_ir as ir

from cpt_fx.errors import ExportError
from cpt_fx.export.directory import folder_beside

INLINE_LIMIT = 1_900_000_000
"""Bytes of weights that one file holds. A protobuf message ends at 2 GiB, and the graph needs room, too."""


class Target:
    """Where a model goes: written to a folder of its own first, checked there, then moved."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.path = path
        self.folder = folder

    def write(self, model: ir.Model) -> None:
        """Write and check a model. Weights of more than `INLINE_LIMIT` bytes go to a file `<name>.data` beside it."""
        weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
        made = self.folder / self.path.name
        ir.save(model, made, external_data=None if weights <= INLINE_LIMIT else self.data.name)
        # By its path: a model with weights in another file cannot be checked otherwise.
        onnx.checker.check_model(str(made), full_check=True)

    @property
    def data(self) -> Path:
        """The file that weights go to where they do not fit."""
        return self.path.with_name(self.path.name + ".data")

    @property
    def made(self) -> Path:
        """The finished model, before it is in its place."""
        return self.folder / self.path.name


@contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Target]:
    """Give a place to write a model to, which moves to `path` when all went well; what was there stays until then."""
    target = Path(os.path.abspath(path))
    if target.is_dir():
        raise ExportError(f"{target} is a directory: name a file, such as {target / 'model.onnx'}")
    if target.exists() and not overwrite:
        raise ExportError(f"{target} exists: name another file, or pass overwrite=True to replace it")
    folder = folder_beside(target)
    try:
        writing = Target(target, folder)
        try:
            yield writing
            # The weights first: a model without them could not be read.
            for name in (writing.data.name, target.name):
                if (folder / name).exists():
                    os.replace(folder / name, target.with_name(name))
        except OSError as error:
            raise ExportError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
