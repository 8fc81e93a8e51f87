"""One file that holds a training run: a line that says what it is, a line of JSON, arrays, and a checksum.

It is written beside its target and moved there when it is complete, so that there is always a whole file, also when
the process is killed. Nothing in it is code: numbers and JSON only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_MAGIC = b"cpt_fx training state, format "
_VERSION = 1
_DIGEST = hashlib.sha256().digest_size
_KINDS = "fiub"


class StateFileError(ValueError):
    """A file does not hold the state of a training run, or not that of this one."""


def write(path: Path, facts: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
    """Write facts (what JSON can say) and arrays; what was at the path stays until all is written."""
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"cannot save to {path}: there is no directory {path.parent}")
    listed = [[name, str(array.dtype), list(array.shape)] for name, array in arrays.items()]
    header = json.dumps({"facts": facts, "arrays": listed}).encode()
    # Always the same name: what a killed process left behind is written over by the next one.
    working = path.with_name(f".{path.name}.partial")
    try:
        with working.open("wb") as file:
            summed = hashlib.sha256()
            for part in (_MAGIC + str(_VERSION).encode() + b"\n", header + b"\n", *_lazily(arrays)):
                summed.update(part)
                file.write(part)
            file.write(summed.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(working, path)
    except BaseException:
        working.unlink(missing_ok=True)
        raise


def read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return facts and arrays, if every byte is as it was written."""
    data = memoryview(Path(path).read_bytes())
    first = bytes(data[: len(_MAGIC) + 20]).partition(b"\n")[0]
    if not first.startswith(_MAGIC):
        raise StateFileError(f"{path} was not written by Trainer.save: it begins with {bytes(data[:16])!r}")
    version = first.removeprefix(_MAGIC).decode(errors="replace")
    if version != str(_VERSION):
        raise StateFileError(f"{path} is of format {version}; this cpt_fx reads format {_VERSION}")
    body, digest = data[:-_DIGEST], bytes(data[-_DIGEST:])
    if hashlib.sha256(body).digest() != digest:
        raise StateFileError(f"{path} is damaged or cut short: its checksum does not fit. Load an earlier one")
    start = len(first) + 1
    end = bytes(body).index(b"\n", start)
    arrays: dict[str, Array] = {}
    place = end + 1
    try:
        header = json.loads(bytes(body[start:end]))
        for name, kind, shape in header["arrays"]:
            dtype = np.dtype(kind)
            if dtype.kind not in _KINDS:
                raise ValueError(f"{name} is of the kind {kind}, not of numbers")
            count = math.prod(shape)
            arrays[name] = np.frombuffer(body, dtype, count, place).reshape(shape)
            place += count * dtype.itemsize
        return dict(header["facts"]), arrays
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise StateFileError(f"{path} has a checksum that fits, but was not written by Trainer.save: {error}") from None


def _lazily(arrays: Mapping[str, Array]) -> Any:
    """Give the bytes of one array after the other: together they may be much."""
    for name, array in arrays.items():
        assert array.dtype.kind in _KINDS, name
        yield array.tobytes()
