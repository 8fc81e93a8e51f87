"""Measurements as plain data, and the ratios computed from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from harness.catalog import CONTENDERS, REFERENCE, Contender, Settings
from harness.machine import Machine
from harness.targets import Verdict, verdicts


@dataclass(frozen=True)
class Spread:
    """The median of many ratios, and the range that contains eight in ten of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise values."""
        deciles = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), deciles[0], deciles[-1])


@dataclass(frozen=True, kw_only=True)
class Executed:
    """The products of one training step, forward and backward.

    `integer` and `floating` count kernels that multiplied, as the profiler saw them: whatever a contender claims,
    these ran. `forward` and `backward` are counted by cpt_fx itself: products between quantizers that ran, and
    gradients quantized; for integer execution, products that it counted on integers, of which backward has two each.
    """

    integer: int
    floating: int
    forward: int | None = None
    backward: int | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known about a contender besides its step time."""

    peak_bytes: int
    """The largest amount of memory that tensors hold in a step, weights and batch included."""
    saved_bytes: int | None = None
    """Bytes that autograd keeps for a batch: only for eager contenders, and batches that can be halved."""
    build_seconds: float
    compile_seconds: float | None = None
    graphs: int | None = None
    """Graphs handed to the compiler for the first step; more than one means that the model was split."""
    recompilations: int | None = None
    """Graphs compiled after the first step, while the widths followed the schedule."""
    widths: tuple[int, ...] = ()
    """Forward widths that the steps ran at."""
    executed: Executed


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender: seconds of each round and what else is known, or the reason why there is nothing."""

    contender: Contender
    seconds: tuple[float, ...] = ()
    facts: Facts | None = None
    reason: str | None = None

    @property
    def available(self) -> bool:
        """Whether it ran."""
        return self.reason is None

    @property
    def median_seconds(self) -> float:
        """The median step."""
        return statistics.median(self.seconds)

    def against(self, other: Row) -> Spread:
        """Return step times relative to another contender, round by round: what disturbs a round affects both."""
        return Spread.of([ours / theirs for ours, theirs in zip(self.seconds, other.seconds, strict=True)])

    def without(self, reason: str) -> Row:
        """Return the row of a contender that failed later."""
        return replace(self, seconds=(), facts=None, reason=reason)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A comparison on one model."""

    model: str
    about: str
    settings: Settings
    machine: Machine
    rows: tuple[Row, ...]
    verdicts: list[Verdict] = field(init=False)

    def __post_init__(self) -> None:
        """Compare with the targets."""
        object.__setattr__(self, "verdicts", verdicts(self.model, self.by_name))

    @property
    def by_name(self) -> dict[str, Row]:
        """The rows by the names of their contenders."""
        return {row.contender.name: row for row in self.rows}

    def ratio(self, row: Row, to: str = REFERENCE) -> Spread | None:
        """Return a step-time ratio if both ran."""
        other = self.by_name.get(to)
        return row.against(other) if row.available and other is not None and other.available else None

    def memory_ratio(self, row: Row, measure: str = "peak_bytes") -> float | None:
        """Return memory relative to the reference."""
        reference = self.by_name[REFERENCE]
        ours, theirs = (getattr(one.facts, measure, None) for one in (row, reference))
        return ours / theirs if ours and theirs else None

    def compiled_ratio(self, row: Row) -> Spread | None:
        """Return the step time of a compiled contender relative to compiled FP32."""
        return self.ratio(row, f"{REFERENCE}-compiled") if row.contender.compiled else None

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "model": self.model,
            "about": self.about,
            "settings": asdict(self.settings) | {"contenders": list(self.settings.contenders)},
            "machine": self.machine.to_dict(),
            "contenders": [self._row(row) for row in self.rows],
            "targets": [verdict.to_dict() for verdict in self.verdicts],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Result:
        """Return the comparison that `to_dict` described, with the current targets."""
        settings = Settings(**data["settings"] | {"contenders": tuple(data["settings"]["contenders"])})
        rows = tuple(_row_of(plain) for plain in data["contenders"])
        about, machine = data["about"], Machine(**data["machine"])
        return cls(model=data["model"], about=about, settings=settings, machine=machine, rows=rows)

    def _row(self, row: Row) -> dict[str, object]:
        plain: dict[str, object] = {
            "name": row.contender.name,
            "label": CONTENDERS[row.contender.name].label,
            "available": row.available,
            "reason": row.reason,
        }
        if row.facts is None:
            return plain
        ratio, compiled = self.ratio(row), self.compiled_ratio(row)
        facts = asdict(row.facts) | {"widths": list(row.facts.widths)}
        return plain | {
            "step_ratio": None if ratio is None else asdict(ratio),
            "step_ratio_to_compiled": None if compiled is None else asdict(compiled),
            "memory_ratio": self.memory_ratio(row),
            "saved_ratio": self.memory_ratio(row, "saved_bytes"),
            "seconds": list(row.seconds),
            **facts,
        }


def _row_of(plain: dict[str, Any]) -> Row:
    contender = CONTENDERS[plain["name"]]
    if not plain["available"]:
        return Row(contender=contender, reason=plain["reason"])
    known = {field.name: plain[field.name] for field in fields(Facts)}
    known |= {"widths": tuple(plain["widths"]), "executed": Executed(**plain["executed"])}
    return Row(contender=contender, seconds=tuple(plain["seconds"]), facts=Facts(**known))
