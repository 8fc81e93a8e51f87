"""What becomes of one call in a model: quantized, reported, refused, or silent, by each frontend."""

from __future__ import annotations

import itertools
import linecache
import warnings
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import cpt_fx
from cpt_fx.errors import TransformError
from cpt_fx.formats import Format, Rounding
from cpt_fx.recipes import Recipe, Rule
from cpt_fx.schedules import Static
from tests.operators.entries import Call
from tests.operators.seen import Product, Products

FRONTENDS = ("symbolic", "dynamo", "between", "auto", "program")
"""`between`: Dynamo, with the call in code that it leaves to Python. `program`: what torch.export made of the model."""

GOOD = ("quantized", "reported", "refused", "nothing")
_WHOLE = Format()
_RULE = Rule(input=_WHOLE, weight=_WHOLE, gradient=Format(rounding=Rounding.STOCHASTIC))
RECIPE = Recipe(name="census", conv=_RULE, linear=_RULE, matmul=_RULE, attention=_RULE, recurrent=_RULE)
"""One range for a tensor, so that levels can be counted; a float zero point, so that hardly a product has as few."""
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Verdict:
    """What one frontend makes of a call.

    `quantized`: all that multiplies has its factors on a grid. `reported`: the rest is in `inspect(result).uncovered`.
    `refused`: an error that says why. `nothing`: it multiplies nothing here, and nothing is said. Others are faults:
    `silent` where a product in full precision is not mentioned, `wrong` where the numbers at 32 bits are others,
    `broken` where there is an error of another kind.
    """

    kind: str
    detail: str = ""
    torn: bool = False
    """Reported, but with quantizers as well."""

    def __str__(self) -> str:
        """Say it in one line."""
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


@dataclass(frozen=True)
class Run:
    """What one forward and backward pass gave."""

    gradients: bool
    forward: list[Product]
    backward: list[Product]
    results: list[Tensor]

    @property
    def products(self) -> list[Product]:
        return [*self.forward, *self.backward]


def model_of(call: Call, *, between: bool = False, weight: int = 1) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a module whose forward makes the call, and its inputs.

    The floating tensor number `weight` is a parameter, the others are inputs. Numbers and flags stand in the code. A
    linear layer goes along, so that there is always something to quantize.
    """
    torch.manual_seed(0)
    names: dict[str, Any] = {"function": call.function}
    inputs: list[Tensor] = []
    parameters: dict[str, nn.Parameter] = {}
    floating = itertools.count()
    with_weight = call.layer is None and not call.out

    def spell(value: Any) -> str:
        if isinstance(value, Tensor):
            value = _copied(value)
            if (value.is_floating_point() or value.is_complex()) and next(floating) == weight and with_weight:
                parameters["weight"] = nn.Parameter(value)
                return "self.weight"
            inputs.append(value)
            return f"x{len(inputs) - 1}"
        if type(value) in (list, tuple):
            return f"[{', '.join(map(spell, value))}]"
        name = f"constant{len(names)}"
        names[name] = value
        return name

    spelled = [spell(value) for value in call.args]
    if call.writes and spelled:
        spelled[0] = f"{spelled[0]}.clone()"
    spelled += [f"{key}={spell(value)}" for key, value in call.kwargs.items()]
    called = "function" if call.layer is None else "self.layer"
    model = _compiled(names, called, spelled, len(inputs), between)()
    for name, parameter in parameters.items():
        setattr(model, name, parameter)
    if call.layer is not None:
        model.layer = call.layer()
    return model, (*inputs, torch.randn(3, 7))


def _compiled(names: dict[str, Any], called: str, spelled: list[str], inputs: int, between: bool) -> type[nn.Module]:
    """Write the module's code, so that every frontend reads plain Python."""
    arguments = ", ".join(["self", *(f"x{place}" for place in range(inputs)), "beside"])
    line = f"{called}({', '.join(spelled)})" if not between else f"aside({', '.join([called, *spelled])})"
    source = (
        "def aside(function, *args, **kwargs):\n    return function(*args, **kwargs)\n\n\n"
        f"def forward({arguments}):\n    made = {line}\n    return made, self.companion(beside)\n"
    )
    file = f"<call {next(_NUMBERS)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    if between:
        names["aside"] = torch.compiler.disable(names["aside"])

    def start(self: Any) -> None:
        nn.Module.__init__(self)
        self.companion = nn.Linear(7, 11)

    return type("Caller", (nn.Module,), {"__init__": start, "forward": names["forward"], "__module__": __name__})


def _copied(value: Tensor) -> Tensor:
    return value.detach().clone()


def run(model: nn.Module, inputs: tuple[Any, ...], *, gradients: bool) -> Run:
    """Run a model on copies of its inputs, and back from a weighted sum of its results, watching."""
    leaves = [_copied(value) if isinstance(value, Tensor) else value for value in inputs]
    floating = [leaf for leaf in leaves if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())]
    for leaf in floating[:-1] if gradients else ():  # the last one goes to the layer beside
        leaf.requires_grad_()
    torch.manual_seed(0)
    with torch.set_grad_enabled(gradients):
        with Products() as forward:
            made = model(*leaves)
        results = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor)]
        trained = [result for result in results if result.requires_grad]
        wanted = [leaf for leaf in (*floating, *model.parameters()) if leaf.requires_grad]
        with Products() as backward:
            if trained:
                losses = [_weighted(result) for result in trained]
                grads = torch.autograd.grad(losses, wanted, allow_unused=True)
                results += [grad for grad in grads if grad is not None]
    return Run(gradients, forward.seen, backward.seen, [result.detach() for result in results])


def _weighted(result: Tensor) -> Tensor:
    """Weights are random: the gradient of a plain sum is one number, on which nothing can be seen."""
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    if result.layout is not torch.strided:
        result, weights = result.to_dense(), weights
    real = result.real + result.imag if result.is_complex() else result
    return (real.float() * weights).sum()


def plain(call: Call, weight: int = 1) -> Run | None:
    """Run the call in the plain model; None where torch itself refuses it."""
    for gradients in (False,) if call.out else (True, False):
        model, inputs = model_of(call, weight=weight)
        with suppress(Exception):
            return run(model, inputs, gradients=gradients)
    return None


def multiplies(found: Run) -> bool:
    """Whether something other than the layer beside it multiplies: that has one product forward and one back."""
    return len(found.forward) > 1 or len(found.backward) > 1


def judge(call: Call, frontend: str, expected: Run, weight: int = 1) -> Verdict:
    """Transform the model, run it at 2 bits and at 32, and look."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch._dynamo.reset()
            return _judged(call, frontend, expected, weight)
        except (TransformError, _RefusedError) as error:
            return Verdict("refused", str(error).splitlines()[0])
        except Exception as error:
            return Verdict("broken", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")


class _RefusedError(Exception):
    """torch.export refuses the model: nothing of the package's."""


def _judged(call: Call, frontend: str, expected: Run, weight: int) -> Verdict:
    model, inputs = model_of(call, between=frontend == "between", weight=weight)
    result = _transformed(model, inputs, frontend)
    gradients = expected.gradients
    run(result, inputs, gradients=gradients)  # captures
    found = run(result, inputs, gradients=gradients)
    off = sorted({str(product) for product in found.products if product.off_grid})
    inspection = cpt_fx.inspect(result)
    uncovered = [item for item in inspection.uncovered if "companion" not in item.layer]
    made = [item for item in inspection.quantizers if "companion" not in " ".join(item.layers)]
    with cpt_fx.at_bits(result, cpt_fx.schedules.Bits(32, 32, 32)):
        difference = _difference(expected.results, run(result, inputs, gradients=gradients).results)
    if difference:
        return Verdict("wrong", difference)
    if off and not uncovered:
        return Verdict("silent", f"{', '.join(off)} not on a grid" + (f"; {len(made)} quantizers" if made else ""))
    if uncovered:
        return Verdict("reported", "; ".join(sorted({f"{item.op}: {item.reason}" for item in uncovered})), bool(made))
    if multiplies(found) and not made:
        return Verdict("silent", "no quantizer, and nothing reported")
    return Verdict("quantized") if made else Verdict("nothing")


def _transformed(model: nn.Module, inputs: tuple[Any, ...], frontend: str) -> nn.Module:
    schedule = Static(2)
    if frontend == "program":
        try:
            model = torch.export.export(model, inputs)  # type: ignore[assignment]
        except Exception as error:
            raise _RefusedError(f"torch.export: {type(error).__name__}") from None
        return cpt_fx.transform(model, schedule, recipe=RECIPE)
    capture = "dynamo" if frontend == "between" else frontend
    return cpt_fx.transform(model, schedule, recipe=RECIPE, capture=capture)


def _difference(expected: list[Tensor], found: list[Tensor]) -> str:
    """Say how numbers at 32 bits differ from the plain model's, beyond rounding."""
    if len(expected) != len(found):
        return f"{len(found)} results and gradients at 32 bits, the plain model has {len(expected)}"
    for place, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"result {place} is {tuple(other.shape)} {other.dtype}, not {tuple(one.shape)} {one.dtype}"
        one, other = _dense(one), _dense(other)
        near = 1e-5 * float(one.nan_to_num(0, 0, 0).abs().max()) if one.numel() else 0.0
        if not torch.allclose(one, other, rtol=1e-3, atol=near, equal_nan=True):
            return f"result {place} differs at 32 bits"
    return ""


def _dense(value: Tensor) -> Tensor:
    value = value if value.layout is torch.strided else value.to_dense()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)
