"""What is in an exported directory: `manifest.json`, read before anything else is, and checked word by word."""

from __future__ import annotations

import hashlib
import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from cpt_fx.errors import ExportError
from cpt_fx.export.directory import digest
from cpt_fx.meta import Dial

NAME = "manifest.json"
VERSION = 4
GRADIENTS, CLIPPING, FIRST_UPDATE, UPDATE = "gradients.onnx", "clipping.onnx", "first_update.onnx", "update.onnx"
EVALUATION, VALUES, DATA = "evaluation.onnx", "values.onnx", "values.data"
FILES = (GRADIENTS, CLIPPING, FIRST_UPDATE, UPDATE, EVALUATION, VALUES, DATA)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor that goes in or comes out."""

    name: str
    dtype: str
    """As numpy calls it."""
    shape: tuple[int | str, ...]
    """A size that varies from call to call has a name, which is the same wherever the size is."""


@dataclass(frozen=True, kw_only=True)
class State(Tensor):
    """A buffer of the model, or what an optimizer remembers. A graph that changes `x` returns it as output `x.next`."""

    swaps: bool
    """Whether the new value needs a place of its own: the graph may read the old one after it wrote the new one."""


@dataclass(frozen=True, kw_only=True)
class Parameter(Tensor):
    """A parameter, under its name in PyTorch, with all names of the same tensor and its optimizer group.

    Group -1: the optimizer does not hold it, and it stays as it is.
    """

    trainable: bool
    names: tuple[str, ...]
    group: int = 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How parameters are updated: by which class, with which learning rate in each group, and what it remembers."""

    name: str
    learning_rates: tuple[float, ...]
    settings: tuple[dict[str, str], ...] = ()
    """Of each group, as Python writes them: `{"betas": "(0.9, 0.999)"}`."""
    remembered: tuple[State, ...] = ()


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
    """Rows of the gradient graph's input `seeds` (int32, rows x 2), drawn anew for each step; 0: it has none."""
    parameters: tuple[Parameter, ...]
    states: tuple[State, ...]
    optimizer: Optimizer
    loss: str
    schedule: str
    """`repr` of the schedule that the model was transformed with; any other may drive the training."""
    evaluation_seeds: int = 0
    """The same rows of the evaluation graph, where the model draws even then."""
    least: dict[str, int] = field(default_factory=dict)
    """Sizes below which the model does not train."""
    choices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Inputs that choose by number: from how many, and a number that chooses nothing, if there is one."""
    versions: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 of every other file."""
    format: int = VERSION

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The model's own tensors: parameters, then buffers."""
        return (*self.parameters, *self.states)

    @property
    def taken(self) -> tuple[Tensor, ...]:
        """What a step is called with: the model's inputs, then the targets."""
        return (*self.inputs, *self.targets)

    def write(self, directory: Path) -> None:
        """Write the file, with a digest of what it says."""
        values = asdict(self)
        text = json.dumps(values | {"digest": digest_of(values)}, indent=1)
        (directory / NAME).write_text(text + "\n", encoding="utf-8")


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
        why = " (its gradients come from ONNX Runtime's own builder)" if found == 1 else ""
        said = f"{directory} was written in format {found}{why}"
        raise ExportError(f"{said}; this cpt_fx reads format {VERSION}: export again")
    if values.pop("digest", None) != digest_of(values):
        raise ExportError(f"{path} is not as it was written (its digest differs): export again")
    try:
        made: Manifest = _checked(Manifest, values, "manifest")
    except (ValueError, TypeError) as error:
        raise ExportError(f"{path} is damaged ({error}): export again") from None
    return made


def check_files(directory: Path, manifest: Manifest) -> None:
    """Refuse a directory where a file is missing, or is not the one that was written."""
    for name in FILES:
        path = directory / name
        if not path.is_file():
            raise ExportError(f"{path} is missing: export again")
        if digest(path) != manifest.digests.get(name):
            raise ExportError(f"{path} is not as it was written (its checksum differs): export again")


def digest_of(values: dict[str, Any]) -> str:
    """Return the SHA-256 of what a manifest says."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _checked(kind: Any, value: Any, place: str) -> Any:
    """Return a value of JSON as the type that a field is declared with; refuse anything else."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        names = {item.name for item in fields(kind)}
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"{place} does not have the entries {', '.join(sorted(names))}")
        hints = typing.get_type_hints(kind)
        return kind(**{name: _checked(hints[name], value[name], f"{place}.{name}") for name in names})
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_checked(inner[0], item, f"{place}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _checked(inner[1], item, f"{place}[{key!r}]") for key, item in value.items()}
    if origin in (types.UnionType, typing.Union):
        if type(value) in inner:
            return value
    elif kind is Any or type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{place} is {value!r}")
