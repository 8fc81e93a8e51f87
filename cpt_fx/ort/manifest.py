"""`manifest.json`: what is in an exported directory; it is read before anything else, and every field is checked."""

from __future__ import annotations

import hashlib
import json
import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from cpt_fx.common.files import digest
from cpt_fx.errors import ExportError
from cpt_fx.ir.meta import WidthSource

NAME = "manifest.json"
VERSION = 5
GRADIENTS, CLIPPING, FIRST_UPDATE, UPDATE = "gradients.onnx", "clipping.onnx", "first_update.onnx", "update.onnx"
EVALUATION, VALUES, DATA = "evaluation.onnx", "values.onnx", "values.data"
SEEDS = "seeds"
"""The input with a seed for each random draw of a step: int32, one row of two numbers each."""
LOSS, OUTPUT, TARGET = "loss", "output", "target"
NEXT = ".next"
"""Suffix of the outputs that hold the new value of the input of that name."""
GRADIENT, MORE = ".grad", "accumulate"
"""Suffix of the inputs with accumulated gradients, and the input that says whether to add to them: a bool."""
LEARNING_RATE, STEP, GRADIENT_SCALE = "learning_rate", "step", "gradient_scale"
"""Inputs: float64, one for each group; float64, the number of updates before; float32, the factor of the gradients:
1 over the number of accumulated steps, so that the update uses their mean."""
MAX_VALUE, MAX_NORM = "max_value", "max_norm"
"""Inputs of `clipping.onnx`: float32, the limits of gradients after multiplication by `gradient_scale`."""
FILES = (GRADIENTS, CLIPPING, FIRST_UPDATE, UPDATE, EVALUATION, VALUES, DATA)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An input, an output or a stored tensor."""

    name: str
    dtype: str
    """Its name in NumPy."""
    shape: tuple[int | str, ...]
    """A dynamic size is given by name; equal names are equal sizes."""


@dataclass(frozen=True, kw_only=True)
class State(Tensor):
    """A buffer of the model or a tensor of the optimizer's state; a graph that changes `x` returns output `x.next`."""

    swaps: bool
    """Whether the new value needs separate memory: the graph may read the old one after it wrote the new one."""


@dataclass(frozen=True, kw_only=True)
class Parameter(Tensor):
    """A parameter, under its name in PyTorch, with all names of the same tensor and its optimizer group.

    Group -1: the optimizer does not hold it, and it does not change.
    """

    trainable: bool
    names: tuple[str, ...]
    group: int = 0


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer: its class, the learning rate and the settings of each group, and its state."""

    name: str
    learning_rates: tuple[float, ...]
    settings: tuple[dict[str, str], ...] = ()
    """The `repr` of each group's options: `{"betas": "(0.9, 0.999)"}`."""
    remembered: tuple[State, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that `cpt_fx.ort.Trainer` has to know about a directory."""

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    """Outputs of the evaluation graph after the loss, which is called `loss` in both graphs."""
    width_sources: dict[str, WidthSource]
    """Inputs that hold a bit-width (int64, 0-dim) -> the source that it follows."""
    seeds: int
    """Rows of the gradient graph's input `seeds` (int32, rows x 2), drawn for each step; 0 if it has none."""
    parameters: tuple[Parameter, ...]
    states: tuple[State, ...]
    optimizer: Optimizer
    loss: str
    schedule: str
    """`repr` of the schedule that the model was transformed with; any other may drive the training."""
    evaluation_seeds: int = 0
    """The same for the evaluation graph, if the model draws random numbers even then."""
    least: dict[str, int] = field(default_factory=dict)
    """The smallest sizes with which the model trains, by name."""
    choices: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Inputs that are indices: the size of the indexed dim, then the index that is ignored, if there is one."""
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
        """The inputs of a step: the model's, then the targets."""
        return (*self.inputs, *self.targets)

    def write(self, directory: Path) -> None:
        """Write the file, with a digest of its contents."""
        values = asdict(self)
        text = json.dumps(values | {"digest": digest_of(values)}, indent=1)
        (directory / NAME).write_text(text + "\n", encoding="utf-8")


def read(directory: Path) -> Manifest:
    """Read the manifest of a directory; refuse one that is damaged, of another version, or not written by cpt_fx."""
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
    """Refuse a directory in which a file is missing or was changed."""
    for name in FILES:
        path = directory / name
        if not path.is_file():
            raise ExportError(f"{path} is missing: export again")
        if digest(path) != manifest.digests.get(name):
            raise ExportError(f"{path} is not as it was written (its checksum differs): export again")


def digest_of(values: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest's values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _checked(kind: Any, value: Any, place: str) -> Any:
    """Convert a JSON value to the type that a field is declared with; refuse anything else."""
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
