"""What is in an exported directory: `manifest.json`, read before anything else is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cpt_fx.errors import ExportError
from cpt_fx.meta import Dial

NAME = "manifest.json"
VERSION = 1
TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT = (
    "training_model.onnx",
    "eval_model.onnx",
    "optimizer_model.onnx",
    "checkpoint",
)
FILES = (TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that goes in or comes out: dims that vary from call to call are None."""

    name: str
    dtype: str
    """As numpy calls it."""
    shape: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class State:
    """A buffer of the model. The training graph returns its new value as output `next`, where it changes it."""

    tensor: Tensor
    next: str = ""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter, under its name in PyTorch, with other names of the same tensor, and its optimizer group.

    Group -1: the optimizer does not hold it, and it stays as it is.
    """

    tensor: Tensor
    trainable: bool
    also: tuple[str, ...] = ()
    group: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything `cpt_fx.ort.Trainer` has to know about a directory."""

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    """Outputs of the evaluation graph after the loss, which is called `loss` in both graphs."""
    dials: dict[str, Dial]
    """Inputs that hold a width (int64, no dims) -> what it follows."""
    seeds: int
    """Rows of the training graph's input `seeds` (int32, rows x 2), drawn anew for each step; 0: it has none."""
    parameters: tuple[Parameter, ...]
    states: tuple[State, ...]
    optimizer: dict[str, Any]
    """`{"name": "adamw", "groups": [{"lr": ..., "betas": ..., ...}], "states": ["exp_avg", "exp_avg_sq"]}`."""
    loss: str
    schedule: str
    """`repr` of the schedule that the model was transformed with; any other may drive the training."""
    dynamic_batch: bool
    versions: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every other file."""
    format: int = VERSION

    def write(self, directory: Path) -> None:
        """Write the file."""
        (directory / NAME).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read(directory: Path) -> Manifest:
    """Read the manifest of a directory; say what is wrong where it is none of ours, or of another version."""
    path = directory / NAME
    if not directory.is_dir():
        raise ExportError(f"{directory} is not a directory: pass the one that export.ort_training wrote")
    if not path.is_file():
        raise ExportError(f"{directory} holds no {NAME}: it was not written by export.ort_training, or not to its end")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is damaged ({error}): export again") from None
    found = values.get("format") if isinstance(values, dict) else None
    if found != VERSION:
        raise ExportError(
            f"{directory} was written in format {found}, by cpt_fx {_version_of(values)}; this cpt_fx reads format "
            f"{VERSION}: export again"
        )
    try:
        return Manifest(
            **values
            | {
                **{name: tuple(map(_tensor, values[name])) for name in ("inputs", "targets", "outputs")},
                "dials": {name: Dial(**dial) for name, dial in values["dials"].items()},
                "parameters": tuple(
                    Parameter(**item | {"tensor": _tensor(item["tensor"]), "also": tuple(item["also"])})
                    for item in values["parameters"]
                ),
                "states": tuple(State(**item | {"tensor": _tensor(item["tensor"])}) for item in values["states"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise ExportError(f"{path} is damaged ({error!r}): export again") from None


def _tensor(values: dict[str, Any]) -> Tensor:
    return Tensor(**values | {"shape": tuple(values["shape"])})


def _version_of(values: object) -> str:
    versions = values.get("versions") if isinstance(values, dict) else None
    return str(versions.get("cpt_fx", "unknown")) if isinstance(versions, dict) else "unknown"
