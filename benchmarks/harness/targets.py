"""Targets for speed and memory: one table, and how a target is compared with a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.catalog import CONTENDERS

if TYPE_CHECKING:
    from harness.results import Row

INTEGER = ("integer", "integer-compiled")
BF16 = ("bf16", "bf16-compiled")
TORCHAO = ("torchao", "torchao-compiled")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target: a `measure` of one contender against another, on the named models (on all if none is named).

    `step`, `memory` and `saved` are ratios that must be at most `limit`; `speedup` is the other's step time divided
    by the contender's, at least `limit`; `recompilations` is a count. Where several contenders are named, the fastest
    counts, on both sides.
    """

    models: tuple[str, ...]
    measure: str
    contender: tuple[str, ...]
    against: tuple[str, ...] = ()
    limit: float

    def __str__(self) -> str:
        """Say it in a line."""
        ours = _named(self.contender)
        if self.measure == "recompilations":
            return f"{ours}: compiled again at most {self.limit:g} times while widths change"
        theirs = _named(self.against)
        if self.measure == "speedup":
            return f"{ours}: at least {self.limit:g} x as fast as {theirs}"
        what = {"step": "step time", "memory": "peak memory", "saved": "memory kept for backward"}[self.measure]
        return f"{ours}: {what} at most {self.limit:g} x {theirs}"


RESNET, BERT = ("resnet74",), ("bert-small",)
SIMULATED, SIMULATED_COMPILED = ("simulated",), ("simulated-compiled",)
FP32, FP32_COMPILED = ("fp32",), ("fp32-compiled",)

TARGETS = (
    Target(models=RESNET, measure="step", contender=SIMULATED, against=FP32, limit=1.20),
    Target(models=RESNET, measure="step", contender=SIMULATED_COMPILED, against=FP32_COMPILED, limit=1.10),
    Target(models=BERT, measure="step", contender=SIMULATED_COMPILED, against=FP32_COMPILED, limit=1.15),
    Target(models=RESNET + BERT, measure="memory", contender=SIMULATED, against=FP32, limit=1.05),
    Target(models=RESNET + BERT, measure="memory", contender=SIMULATED_COMPILED, against=FP32_COMPILED, limit=1.05),
    Target(models=(), measure="recompilations", contender=SIMULATED_COMPILED, limit=0),
    Target(models=(), measure="recompilations", contender=("integer-compiled",), limit=0),
    Target(models=("bert-layer",), measure="speedup", contender=INTEGER, against=FP32, limit=2.5),
    Target(models=("bert-layer",), measure="speedup", contender=INTEGER, against=BF16, limit=1.1),
    Target(models=("bert-layer",), measure="speedup", contender=INTEGER, against=TORCHAO, limit=1.1),
    Target(models=("bottlenecks",), measure="speedup", contender=INTEGER, against=FP32, limit=1.3),
    Target(models=("linears",), measure="saved", contender=("integer",), against=FP32, limit=0.35),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A target and its measurement; `reason` says why there is none."""

    target: Target
    value: float | None = None
    reason: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None where nothing was measured."""
        if self.value is None:
            return None
        if self.target.measure == "speedup":
            return self.value >= self.target.limit
        return self.value <= self.target.limit

    @property
    def word(self) -> str:
        """One word for a table."""
        return {True: "met", False: "MISSED", None: "not measured"}[self.met]

    @property
    def measured(self) -> str:
        """What was measured, or why nothing was."""
        if self.value is None:
            return self.reason or ""
        return f"measured {self.value:{'g' if self.target.measure == 'recompilations' else '.2f'}}"

    def __str__(self) -> str:
        """Say it in a line."""
        return f"{self.target}: {self.measured}: {self.word}"

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        target = {
            "text": str(self.target),
            "measure": self.target.measure,
            "contender": list(self.target.contender),
            "against": list(self.target.against),
            "limit": self.target.limit,
        }
        return target | {"measured": self.value, "met": self.met, "reason": self.reason}


def verdicts(model: str, rows: Mapping[str, Row], targets: tuple[Target, ...] = TARGETS) -> list[Verdict]:
    """Compare all targets of a model with what was measured; contenders that were not requested have no targets."""
    return [
        _verdict(target, rows)
        for target in targets
        if (not target.models or model in target.models) and any(name in rows for name in target.contender)
    ]


def _verdict(target: Target, rows: Mapping[str, Row]) -> Verdict:
    ours = _fastest(target.contender, rows)
    if ours is None:
        return Verdict(target=target, reason=f"{_named(target.contender)} did not run")
    if target.measure == "recompilations":
        assert ours.facts is not None
        return Verdict(target=target, value=ours.facts.recompilations)
    theirs = _fastest(target.against, rows)
    if theirs is None:
        return Verdict(target=target, reason=f"{_named(target.against)} did not run")
    value = _value(target.measure, ours, theirs)
    return Verdict(target=target, value=value, reason=None if value is not None else "the batch cannot be halved")


def _value(measure: str, ours: Row, theirs: Row) -> float | None:
    assert ours.facts is not None and theirs.facts is not None
    if measure == "memory":
        return ours.facts.peak_bytes / theirs.facts.peak_bytes
    if measure == "saved":
        kept, others = ours.facts.saved_bytes, theirs.facts.saved_bytes
        return None if kept is None or not others else kept / others
    return theirs.against(ours).median if measure == "speedup" else ours.against(theirs).median


def _fastest(names: tuple[str, ...], rows: Mapping[str, Row]) -> Row | None:
    ran = [rows[name] for name in names if name in rows and rows[name].seconds]
    return min(ran, key=lambda row: row.median_seconds, default=None)


def _named(names: tuple[str, ...]) -> str:
    labels = [CONTENDERS[name].label for name in names]
    return labels[0] if len(labels) == 1 else f"{labels[0]} (the faster of eager and compiled)"
