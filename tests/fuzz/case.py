"""A model as a file of source: loaded as any other module is, run, and compared with itself."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.model import plain_input
from tests.fuzz.scope import Unfit

Seen = dict[str, Tensor | None]
KINDS = ("training", "evaluation", "training without gradients", "evaluation without gradients")
DECOMPOSED = 1e-5
UNITS = 8
"""How many roundings of its type a number may be off in half precision, where one operator was computed in several."""
ECHOED = 5
"""How many times as far as rounding moved it in a few tries a number may be off."""


class Wrong(AssertionError):  # noqa: N818
    """An oracle says no."""


@dataclasses.dataclass
class Case:
    """A drawn model, loaded."""

    source: str
    path: Path
    module: types.ModuleType

    @classmethod
    def load(cls, source: str, folder: Path) -> Case:
        """Write source to a file of its own and import it: `inspect`, Dynamo and tracebacks want to read it there."""
        name = f"drawn_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
        path = folder / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return cls(source, path, module)

    def close(self) -> None:
        """Forget the file."""
        sys.modules.pop(self.module.__name__, None)
        self.path.unlink(missing_ok=True)

    def model(self) -> nn.Module:
        """Make the model: the same numbers each time."""
        torch.manual_seed(11)
        model = self.module.Model()
        assert isinstance(model, nn.Module)
        return model

    def inputs(self, seed: int = 5) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make the inputs anew; floating ones ask for a gradient."""
        torch.manual_seed(seed)
        args, kwargs = self.module.inputs()
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                plain_input(value)
        return args, kwargs

    @property
    def deterministic(self) -> bool:
        """Whether quantizers draw no random numbers."""
        options = self.source.partition("def options()")[2]
        return "stochastic" not in options and ("nearest(" in options or "recipes." not in options)


def tensors_in(value: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    """Walk through what a model returned, plain values included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{index}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name), f"{name}.{field.name}")
    else:
        yield name, value


def loss_of(output: Any, seed: int = 5) -> Tensor | None:
    """Weigh every number of an output differently; None where nothing asks for a gradient.

    Another seed weighs otherwise: gradients of what is linear in its inputs do not depend on these.
    """
    parts = []
    for _, tensor in tensors_in(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_floating_point():
            weights = torch.cos(torch.arange(tensor.numel(), dtype=torch.float64) + seed).view(tensor.shape)
            parts.append((tensor.double() * weights).sum())
    return torch.stack(parts).sum() if parts else None


def run(model: nn.Module, case: Case, kind: str, seed: int = 5, *, switch: bool = True) -> Seen:
    """Call a model in one of the ways; return everything that can be seen of it."""
    if switch:
        model.train("training" in kind)
    for parameter in model.parameters():
        parameter.grad = None
    args, kwargs = case.inputs(seed)
    torch.manual_seed(seed + 1)
    seen: Seen = {}
    with torch.set_grad_enabled("without" not in kind), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model(*args, **kwargs)
        loss = loss_of(output, seed)
        if loss is not None:
            loss.backward()
    seen["output type"] = torch.tensor([len(type(output).__name__)])
    for name, value in tensors_in(output):
        seen[name] = value.detach().clone() if isinstance(value, Tensor) else _plain(value)
        if isinstance(value, Tensor) and "without" not in kind:
            seen[f"{name} asks for gradients"] = torch.tensor(value.requires_grad)
    for name, parameter in model.named_parameters():
        if "cpt_fx" not in name:
            seen[f"gradient {name}"] = None if parameter.grad is None else parameter.grad.clone()
    for index, value in enumerate((*args, *kwargs.values())):
        if isinstance(value, Tensor):
            seen[f"gradient of input {index}"] = None if value.grad is None else value.grad.clone()
    # Quantizers at full precision draw nothing: what the model draws afterwards would be another number.
    seen["state of random numbers"] = torch.get_rng_state()
    seen |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers() if "cpt_fx" not in name}
    return seen


def _plain(value: Any) -> Tensor | None:
    return torch.tensor(float(value)) if isinstance(value, (int, float)) else None


def differences(ours: Seen, theirs: Seen, within: float = 0.0, echo: Mapping[str, float] | None = None) -> list[str]:
    """Say where two runs differ: by a bit, or by more than some part of the largest number where that is allowed.

    `echo` is how far rounding moves some numbers by itself, in a few tries.
    """
    found = [f"{name} is missing" for name in theirs if name not in ours]
    largest = max((_largest(value) for name, value in theirs.items() if name.startswith("gradient")), default=0.0)
    output = max((_largest(value) for name, value in theirs.items() if _is_output(name, value)), default=0.0)
    for name, value in theirs.items():
        mine = ours.get(name)
        if name not in ours or (value is None and mine is None):
            continue
        if value is None or mine is None:
            found.append(f"{name} is {'nothing' if mine is None else 'there'}, and should be the other way round")
        elif (mine.dtype, mine.shape) != (value.dtype, value.shape):
            found.append(f"{name} is {mine.dtype} {tuple(mine.shape)}, not {value.dtype} {tuple(value.shape)}")
        elif not bool(((mine == value) | (mine.isnan() & value.isnan())).all()):
            off = float((mine.double() - value.double()).nan_to_num(0.0).abs().max())
            if not torch.equal(mine.isnan(), value.isnan()):
                off = float("inf")
            # Some gradients are nothing but rounding, and so is a sum of normalized rows that is returned beside them.
            beside = 0.01 * largest if name.startswith("gradient") else output if name.startswith("output") else 0.0
            scale = max(_largest(value), beside)
            allowed = 0.0
            if within and value.is_floating_point():
                moved = ECHOED * (echo or {}).get(name, 0.0)
                allowed = max(max(within, UNITS * torch.finfo(value.dtype).eps) * scale, moved)
            if not off <= allowed:
                found.append(f"{name} is off by {off / max(scale, 1e-30):.2g} of the largest")
    return found


def _is_output(name: str, value: Tensor | None) -> bool:
    told = name == "output type" or name.endswith("asks for gradients")
    return name.startswith("output") and not told and value is not None and value.is_floating_point()


def _largest(value: Tensor | None) -> float:
    return float(value.double().abs().nan_to_num(0.0).max()) if value is not None and value.numel() else 0.0


def plain_runs(case: Case) -> dict[str, Seen]:
    """Run the plain model twice in each way; keep what both agree on. One that is no good raises `Unfit`."""
    found: dict[str, Seen] = {}
    try:
        first, second = case.model(), case.model()
        for kind in KINDS:
            one, two = run(first, case, kind), run(second, case, kind)
            steady = {name for name in one if not differences({name: one[name]}, {name: two[name]})}
            found[kind] = {name: value for name, value in one.items() if name in steady}
    except Exception as error:
        raise Unfit(f"{type(error).__name__}: {error}") from error
    for seen in found.values():
        if not all(value is None or bool(value.isfinite().all()) for value in seen.values()):
            raise Unfit("numbers are not finite")
        if max(map(_largest, seen.values())) > 1e5:
            raise Unfit("numbers are too large")
    return found
