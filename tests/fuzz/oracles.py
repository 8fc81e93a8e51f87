"""What has to hold for every model, in every frontend. Each oracle raises `Wrong` with what is wrong."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo
from torch._inductor import config as inductor

import cpt_fx
from cpt_fx.capture.standalone import transformed_in
from cpt_fx.formats import FULL_PRECISION, Format, Scheme
from cpt_fx.integer import choice
from cpt_fx.recipes import FAMILIES, Recipe, integer, resolve
from cpt_fx.schedules import Bits, Schedule, Static
from tests.fuzz.case import DECOMPOSED, UNITS, Case, Seen, Wrong, differences, loss_of, run
from tests.fuzz.census import BITS, Census
from tests.fuzz.options import nearest

FRONTENDS = ("symbolic", "dynamo", "auto", "program")
SEEDS = (5, 6, 7)
"""Rounding may push one value over the middle between two levels; hardly so with each of these inputs and losses."""
ONE_PRODUCT = 1e-5
NOT_COMPILED = ("output type", "state of random numbers")
"""What code that is compiled need not keep."""


_HALF = ((torch.bfloat16, "bfloat16"), (torch.float16, r"half\(\)"))
"""Types of half precision, the coarsest first, and how a model's source names them."""
_TURNS = 3


class Skipped(Exception):  # noqa: N818
    """An oracle has nothing to say about a model; the text says why."""


class NotExportable(Exception):  # noqa: N818
    """torch.export does not take the model, so there is no program to try."""


class Trial:
    """One model in one frontend."""

    def __init__(self, case: Case, frontend: str, plain: dict[str, Seen]) -> None:
        self.case, self.frontend, self.plain = case, frontend, plain
        self.schedule: Schedule = case.module.schedule()
        self.program: Any = None
        if frontend == "program":
            self.plain = self._export()
        self.result = self.transformed(self.schedule)
        self.shaky = False
        """Whether rounding moved it further than numbers may be off where an operator was decomposed."""

    def _export(self) -> dict[str, Seen]:
        """Export the model, run the program itself for comparison, and put its state back."""
        model = self.case.model().train()
        args, kwargs = self.case.inputs()
        try:
            with _quiet():
                self.program = torch.export.export(model, args, kwargs)
                # Also what no checkpoint holds: buffers that are not persistent change, too.
                held = (*model.named_parameters(), *model.named_buffers())
                self.before = {name: value.detach().clone() for name, value in held}
                reference = self.program.module(check_guards=False)
                seen, again = (
                    self._restored() and run(reference, self.case, "training", switch=False) for _ in range(2)
                )
        except Exception as error:
            raise NotExportable(f"{type(error).__name__}") from None
        self._restored()
        return {
            "training": {name: seen[name] for name in seen if not differences(_only(again, name), _only(seen, name))}
        }

    def _restored(self) -> Seen:
        state = {**self.program.state_dict, **self.program.constants}
        with torch.no_grad():
            for name, value in self.before.items():
                state[name].copy_(value)
        return {name: None for name in state}

    def restore(self) -> None:
        """Put the state of a program back: every result of it shares its tensors."""
        if self.program is not None:
            self._restored()

    def transformed(self, schedule: Schedule, **changes: Any) -> nn.Module:
        """Transform the model anew."""
        options = {**self.case.module.options(), **changes}
        if self.program is not None:
            self._restored()
            return cpt_fx.transform(self.program, schedule, **self._known(options))
        if "scale=None" in self.case.source or "deep=True" in self.case.source:
            # A graph of torch.fx is the one for what its examples pass.
            options["example_inputs"], options["example_kwargs"] = self.case.inputs()
        try:
            return cpt_fx.transform(self.case.model(), schedule, capture=self.frontend, **options)
        except cpt_fx.VerificationError as error:
            if not _says_only_off(error):
                raise
            # Rounding alone may move it further than the proof allows: whether it does is seen by `same`.
            return cpt_fx.transform(self.case.model(), schedule, capture=self.frontend, prove=False, **options)

    def _known(self, options: dict[str, Any]) -> dict[str, Any]:
        """Leave out patterns by a type of which the program holds no layer: that is refused, and rightly so."""
        stacks = [node.meta.get("nn_module_stack") or {} for node in self.program.graph.nodes]
        held = {str(kind) for stack in stacks for _, kind in stack.values()}

        def is_known(pattern: Any) -> bool:
            return not isinstance(pattern, type) or f"{pattern.__module__}.{pattern.__qualname__}" in held

        exclude, overrides = options.get("exclude", ()), options.get("overrides") or {}
        patterns = (exclude,) if isinstance(exclude, (str, type)) else exclude
        return options | {
            "exclude": tuple(filter(is_known, patterns)),
            "overrides": {pattern: value for pattern, value in overrides.items() if is_known(pattern)},
        }

    def run(self, model: nn.Module, kind: str, seed: int = 5) -> Seen:
        """Run something of this model."""
        with _quiet():
            return run(model, self.case, kind, seed)

    def within(self) -> float:
        """How far numbers may be off: not at all, unless a fused operator was decomposed.

        What is decomposed in half precision rounds there what the fused operator keeps in single precision. That is in
        all gradients before it, whatever type they have.
        """
        reports = cpt_fx.inspect(self.result).passes
        if not any(report.name == "decompose" and report.changed for report in reports):
            return 0.0
        half = next((torch.finfo(dtype).eps for dtype, text in _HALF if re.search(text, self.case.source)), 0.0)
        return max(DECOMPOSED, UNITS * half)

    def recipe(self) -> Recipe:
        """Return the recipe."""
        return resolve(self.case.module.options().get("recipe"))


def _only(seen: Seen, name: str) -> Seen:
    return {name: seen[name]}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _demand(found: list[str], what: str) -> None:
    if found:
        raise Wrong(f"{what}: {'; '.join(found[:4])}{' ...' if len(found) > 4 else ''}")


def same(t: Trial) -> None:
    """At 32 bits nothing is different: outputs, gradients, buffers, in training and evaluation, without gradients."""
    for kind, expected in t.plain.items():
        before = _state(t.result)
        with cpt_fx.at_bits(t.result, FULL_PRECISION):
            ours, within = t.run(t.result, kind), t.within()
            wrong = differences(ours, expected, within)
            if within and _are_only_off(wrong):
                t.shaky = True
                echo = _echo(t, t.result, kind, SEEDS[0], before, ours, within)
                wrong = differences(ours, expected, within, echo)
        _demand(wrong, f"{kind} at 32 bits")


def widths(t: Trial) -> None:
    """Every quantizer stands, and ran, at the width of the schedule's position, in training and in evaluation."""
    patterns = list(t.case.module.options().get("overrides") or {})
    if any(isinstance(pattern, type) for pattern in patterns):
        raise Skipped("layers are overridden by type")
    ran: dict[str, set[int]] = {}
    position = 0
    for step in (0, 1, 2, 5):
        t.schedule.step(step)
        position += step
        if t.schedule.position != position:
            raise Wrong(f"the schedule stands at {t.schedule.position}, not at {position}")
        for kind in ("training", "evaluation"):
            t.run(t.result, kind)
            planned = t.schedule.bits(position) if kind == "training" else t.schedule.evaluation_bits(position)
            found = []
            for view in cpt_fx.inspect(t.result).quantizers:
                if any(fnmatch.fnmatchcase(name, f"{pattern}*") for pattern in patterns for name in view.layers):
                    continue
                width = getattr(planned, "weight" if view.role == "bias" else view.role)
                if view.width_source.with_forward and planned.activation == 0:
                    width = 0
                seen = ran.setdefault(f"{view.graph} {view.node}", {BITS, FULL_PRECISION})
                seen.add(width)
                if view.bits != width:
                    found.append(f"{view} is at {view.bits} bits, not {width}")
                if not set(view.levels) <= seen:
                    found.append(f"{view} ran at {sorted(view.levels)}, the schedule says {sorted(seen)}")
                if any(count > _most_levels(view.format, bits) for bits, count in view.levels.items()):
                    found.append(f"{view} showed {view.levels}")
            _demand(found, f"{kind} at step {position}")


def _most_levels(format: Format, bits: int) -> int:
    """Documented: a float has two bits at least, and a sign, so that one of its codes is a second zero."""
    most: int = 2 ** max(bits, 2) - 1 if format.scheme is Scheme.FLOAT else 2**bits
    return most


def proof(t: Trial) -> None:
    """The package's own proof passes."""
    t.result.train()
    args, kwargs = t.case.inputs()
    with _quiet():
        torch.manual_seed(6)
        try:
            trains = any(
                value is not None for name, value in t.plain["training"].items() if name.startswith("gradient")
            )
            cpt_fx.inspect(t.result).verify(*args, gradients=trains, **kwargs)
        except cpt_fx.VerificationError as error:
            if t.shaky and _says_only_off(error):
                raise Skipped("rounding alone moves it further than the proof allows") from None
            if t.program is not None and "nn.utils.spectral_norm" in t.case.source and "a NaN or an inf" in str(error):
                lost = "torch.export loses that a hook makes a weight: its norm is one of quantized factors"
                raise Skipped(lost) from None
            raise Wrong(f"verify: {error}") from None


def _says_only_off(error: cpt_fx.VerificationError) -> bool:
    return all(" is off by " in line for line in str(error).splitlines()[1:11] if line.startswith("  "))


def census(t: Trial) -> None:
    """Every product that reaches ATen at two bits has operands on four levels, or is listed."""
    inspection = cpt_fx.inspect(t.result)
    formats = list(_formats(t))
    if any(0 < format.block < 16 for format in formats):
        raise Skipped("blocks are shorter than what can be counted")
    if re.search(r'"\w+, ?\w+, ?\w+->|multi_dot\(\[h, h|chain_matmul\(h, \S+, |kron', t.case.source):
        raise Skipped("products of three are not quantized in between")
    # What has one range, whatever its group, may be cut into blocks, too.
    ranges = frozenset((group, format.block) for format in formats for group in (format.group.value, "tensor"))
    counted = Census(ranges or frozenset({("tensor", 0)}), 2**BITS)
    t.result.train()
    args, kwargs = t.case.inputs()
    with _quiet(), contextlib.ExitStack() as stack:
        for _, part in transformed_in(t.result):
            stack.enter_context(part.state.at(BITS))
        torch.manual_seed(6)
        with counted:
            loss = loss_of(t.result(*args, **kwargs))
            counted.backward = True
            if loss is not None:
                loss.backward()
    gradients = all(rule.gradient for family in FAMILIES if (rule := t.recipe().rule(family)))
    if not gradients or '"gradient": None' in t.case.source:
        counted.unquantized = [item for item in counted.unquantized if not item.backward]
    listed = {item.op for item in (*inspection.uncovered, *cpt_fx.inspect(t.result).uncovered)}
    left = [str(item) for item in counted.unquantized if not _listed(item.name, listed)]
    _demand(left, f"not quantized at {BITS} bits, and listed are {sorted(listed)}")
    if counted.products and counted.undecided and not listed and not inspection.quantizers:
        raise Wrong(f"{counted.products} products reached ATen, with no quantizer and nothing listed")


def _listed(name: str, listed: set[str]) -> bool:
    """Whether one of the listed operators may be what an operator of ATen comes from."""
    convolves = "conv" in name
    return any(("conv" in op) == convolves or op[:1].isupper() or op in ("checkpoint", "") for op in listed)


def _formats(t: Trial) -> Iterator[Format]:
    recipe = t.recipe()
    yield from (
        format
        for family in FAMILIES
        if (rule := recipe.rule(family)) is not None
        for format in (rule.input, rule.weight, rule.bias, rule.gradient)
        if format is not None
    )
    yield from (view.format for view in cpt_fx.inspect(t.result).quantizers)


def round_trips(t: Trial) -> None:
    """A copy, a pickle, a loaded checkpoint and what `revert` returns have the numbers of what they were made of."""
    way = ("deepcopy", "pickle", "state_dict", "revert")[len(t.case.source) % 4]
    expected = None
    if way == "revert":
        if "persistent=False" in t.case.source or t.frontend == "program":
            raise Skipped("there is no plain model with the same state")
        reverted = cpt_fx.revert(t.result)
        plain = t.case.model()
        plain.load_state_dict(reverted.state_dict())
        for kind in ("evaluation", "training"):
            _demand(differences(run(reverted, t.case, kind), run(plain, t.case, kind)), f"{kind} of the reverted model")
        return
    if way in ("deepcopy", "pickle"):
        plain = t.case.model()
        run(plain, t.case, "training")  # as the result has: spectral norm's weight is then none that torch copies
        try:
            copy.deepcopy(plain) if way == "deepcopy" else pickle.dumps((plain, t.case.module.schedule()))
        except Exception:
            raise Skipped("the plain model, or its schedule, cannot be copied that way") from None
        other = copy.deepcopy(t.result) if way == "deepcopy" else pickle.loads(pickle.dumps(t.result))
    else:
        if "persistent=False" in t.case.source or t.frontend == "program":
            raise Skipped("a checkpoint does not hold all of the model")
        other = t.transformed(t.case.module.schedule())
        _load(t, other)
    for kind in ("evaluation", "training", "evaluation"):
        expected, found = t.run(t.result, kind), t.run(other, kind)
        _demand(differences(found, expected), f"{kind} after {way}")


def _load(t: Trial, other: nn.Module) -> None:
    state = copy.deepcopy(t.result.state_dict())
    if any(key not in other.state_dict() for key in state):
        t.run(other, "training")  # ranges come with the first call
    other.load_state_dict(state)


COMPILED = ("training", "evaluation without gradients")


def compiled(t: Trial) -> None:
    """Under torch.compile the numbers are those of eager mode."""
    if not t.case.deterministic:
        raise Skipped("rounding is random")
    if "print(" in t.case.source:
        raise Skipped("prints")
    backend = "inductor" if len(t.case.source) % 199 == 0 else "aot_eager"
    eager, result = t.transformed(Static(4)), t.transformed(Static(4))
    fast: Any = torch.compile(result, backend=backend)
    with inductor.patch(fallback_random=True):  # else inductor draws dropout by a generator of its own
        try:
            _alike(t, eager, fast, f"compiled by {backend}", COMPILED)
        except Exception:
            if _torch_does_not(t, backend):
                raise Skipped("torch compiles the plain model to other numbers, too") from None
            raise


def _torch_does_not(t: Trial, backend: str) -> bool:
    """Whether compiling the plain model changes its numbers, or fails: masks of dropout, windows of `unfold`."""
    plain = t.case.model()
    try:
        with dynamo.patch(allow_rnn=True):  # as we do
            fast: Any = torch.compile(copy.deepcopy(plain), backend=backend)
            _alike(t, plain, fast, "", COMPILED)
    except Exception:
        return True
    return False


def integers(t: Trial) -> None:
    """Products on integers give the numbers of simulated ones, up to rounding."""
    if "bfloat16" in t.case.source or "half()" in t.case.source or "double()" in t.case.source:
        raise Skipped("not in float32 throughout")
    # At 8 bits hardly a product of grid points lies in the middle between two levels, as it does at 4.
    recipe, bits = nearest(integer()), Bits(8, 8, 8)
    changes = {"recipe": recipe, "overrides": None}
    whole = t.transformed(Static(bits), execution="integer", **changes)
    simulated = t.transformed(Static(bits), **changes)
    with choice.chosen("always"):
        _alike(t, simulated, whole, "on integers", ("training", "evaluation"))


def _alike(t: Trial, expected: nn.Module, found: nn.Module, what: str, kinds: tuple[str, ...]) -> None:
    """Compare two results on several inputs: wrong is what is off with each of them."""
    echo: dict[str, float] = {}
    for kind in kinds:
        wrong: list[str] = []
        for seed in SEEDS:
            t.restore()
            before = _state(expected)
            one = t.run(expected, kind, seed)
            t.restore()
            other = {name.replace("_orig_mod.", ""): value for name, value in t.run(found, kind, seed).items()}
            other |= {name: one[name] for name in NOT_COMPILED}  # compilers draw dropout in their own way
            wrong = differences(other, one, ONE_PRODUCT)
            if _are_only_off(wrong):
                # Buffers keep what rounding did to them in training.
                moved = _echo(t, expected, kind, seed, before, one, ONE_PRODUCT)
                echo = {name: max(far, echo.get(name, 0.0)) for name, far in moved.items()}
                wrong = differences(other, one, ONE_PRODUCT, echo)
            if not _are_only_off(wrong):
                break
        _demand(wrong, f"{kind} {what}")


State = list[tuple[Tensor, Tensor]]
"""Tensors of a model, and what they held."""


def _state(model: nn.Module) -> State:
    return [(held, held.detach().clone()) for held in (*model.parameters(), *model.buffers())]


def _put_back(state: State) -> None:
    with torch.no_grad():
        for held, value in state:
            held.copy_(value)


def _echo(
    t: Trial, model: nn.Module, kind: str, seed: int, before: State, one: Seen, within: float
) -> dict[str, float]:
    """Say how far everything moves where each parameter is scaled by a number next to 1, a tenth of what is allowed.

    That keeps the codes of weights, and rounds what comes after them otherwise. Products of codes lie exactly in the
    middle between two levels more often than numbers do: where each sum has a single term, it is `a * b / m` of codes,
    and with an even `m` a half is no accident. Then rounding alone tells which level is taken, with any input. The mean
    of what was normalized is nothing but rounding, too.
    """
    after, chance = _state(model), torch.Generator().manual_seed(seed)
    moved: dict[str, float] = {}
    for _ in range(_TURNS):
        _put_back(before)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + within / 10 * float(torch.randn((), generator=chance)))
        for name, value in t.run(model, kind, seed).items():
            first = one[name]
            if first is not None and value is not None and first.is_floating_point() and first.numel():
                moved[name] = max(moved.get(name, 0.0), float((value.double() - first.double()).abs().max()))
    _put_back(after)
    return moved


def _are_only_off(wrong: list[str]) -> bool:
    """Whether something is wrong, and nothing but numbers."""
    return bool(wrong) and all(re.search(r"off by [\d.e+-]+", text) for text in wrong)


def alike(symbolic: Trial, dynamo: Trial) -> None:
    """Two frontends quantize the same, list the same, and compute the same."""
    hides = re.search(r"nn\.(LSTM|GRU|RNN|MultiheadAttention|Transformer)", symbolic.case.source)
    if hides:
        raise Skipped("torch.fx keeps layers whole that Dynamo opens")
    if "is_compiling" in symbolic.case.source:
        raise Skipped("asks whether it is compiled")

    # Anew: the census has run these operator by operator, where nothing is shared.
    results = {t: t.transformed(Static(4)) for t in (symbolic, dynamo)}
    for t, result in results.items():
        t.run(result, "training")

    def places(t: Trial) -> list[str]:
        quantizers = cpt_fx.inspect(results[t]).quantizers
        return sorted({f"{layer} {view.role} {view.operand} {view.op}" for view in quantizers for layer in view.layers})

    def listed(t: Trial) -> list[str]:
        return sorted(
            {f"{item.layer} {item.op} {item.operand} {item.by_choice}" for item in cpt_fx.inspect(results[t]).uncovered}
        )

    for what, of in (("quantized", places), ("uncovered", listed)):
        ours, theirs = of(symbolic), of(dynamo)
        only = [f"{text} (torch.fx only)" for text in ours if text not in theirs]
        only += [f"{text} (Dynamo only)" for text in theirs if text not in ours]
        _demand(only, what)
    if symbolic.case.deterministic:
        _alike(symbolic, results[symbolic], results[dynamo], "by Dynamo", ("training",))


ORACLES: dict[str, tuple[Callable[[Trial], None], float]] = {
    "same": (same, 1.0),
    "widths": (widths, 0.5),
    "proof": (proof, 1.0),
    "round trips": (round_trips, 0.35),
    "compiled": (compiled, 0.05),
    "integers": (integers, 0.12),
    "census": (census, 1.0),
}
"""Each with the share of models that it looks at."""
