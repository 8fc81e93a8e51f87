"""Reads the reference numbers in tests/golden: an index of cases (JSON) beside the arrays they name (NPZ)."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

DIRECTORY = Path(__file__).parent / "golden"

Case = dict[str, Any]
Array = npt.NDArray[Any]


@cache
def load(name: str) -> dict[str, Any]:
    """The whole of golden/<name>.json. Shared between tests: do not write to it."""
    data = json.loads((DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


@cache
def arrays(name: str) -> Mapping[str, Array]:
    """All arrays of golden/<name>.npz by key. Shared between tests: do not write to them."""
    with np.load(DIRECTORY / f"{name}.npz", allow_pickle=False) as archive:
        found = {key: archive[key] for key in archive.files}
    for array in found.values():
        array.flags.writeable = False
    return found


def cases(name: str, **fields: Any) -> list[Case]:
    """The cases of golden/<name>.json whose fields have the given values; no such case is an error."""
    found = [case for case in load(name)["cases"] if all(case.get(key) == value for key, value in fields.items())]
    if not found:
        raise LookupError(f"golden/{name}.json has no case with {fields}")
    return found


def case_id(case: Case) -> str:
    """A readable parametrize id, for cases with and without an id of their own."""
    if "id" in case:
        return str(case["id"])
    return "-".join(f"{value}" for value in case.values() if isinstance(value, str | int | float))


def tensors(name: str, case: Case) -> dict[str, torch.Tensor]:
    """A case's arrays as fresh tensors, by their short names."""
    stored = arrays(name)
    return {short: torch.tensor(stored[entry["key"]]) for short, entry in case["arrays"].items()}


def tensor(name: str, key: str) -> torch.Tensor:
    """One array of golden/<name>.npz as a fresh tensor."""
    return torch.tensor(arrays(name)[key])


def decode(bits: Sequence[Any], encoding: str) -> list[int]:
    """The integer per step, from a plain list or from [[bits, run length], ...]."""
    if encoding == "list":
        return [int(bit) for bit in bits]
    if encoding == "rle":
        return [int(bit) for bit, length in bits for _ in range(length)]
    raise ValueError(f"unknown encoding {encoding!r}")
