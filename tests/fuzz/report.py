"""What a run tried and what it found: counts by frontend and oracle, refusals by reason, faults by their looks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from tests.fuzz.oracles import FRONTENDS, ORACLES
from tests.fuzz.trying import BETWEEN, Fault, Outcome


@dataclass
class Report:
    """Counts that grow with every outcome."""

    command: str
    models: int = 0
    unfit: int = 0
    busy: float = 0.0
    states: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in FRONTENDS})
    refusals: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in FRONTENDS})
    passes: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in (*ORACLES, BETWEEN)})
    faults: dict[str, list[tuple[int, Fault]]] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)
    """Signature of a fault -> the test that was written for it."""

    def add(self, outcome: Outcome) -> list[Fault]:
        """Count an outcome; return its faults of a kind that is new."""
        self.busy += outcome.seconds
        if not outcome.fits:
            self.unfit += 1
            return []
        self.models += 1
        for frontend, state in outcome.states.items():
            kind, _, why = state.partition(": ")
            self.states[frontend][kind] += 1
            if kind == "refused":
                self.refusals[frontend][why] += 1
        for key, said in outcome.passes.items():
            name = key.partition(" ")[2]
            self.passes[name][said if said in ("passed", "failed") else "nothing to say"] += 1
        new = []
        for fault in outcome.faults:
            if fault.signature not in self.faults:
                new.append(fault)
            self.faults.setdefault(fault.signature, []).append((outcome.number, fault))
        return new

    @property
    def failing(self) -> int:
        """How many models have a fault."""
        return len({number for found in self.faults.values() for number, _ in found})

    def to_dict(self, seconds: float, workers: int) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "command": self.command,
            "torch": torch.__version__,
            "seconds": round(seconds),
            "workers": workers,
            "models": self.models,
            "unfit": self.unfit,
            "failing": self.failing,
            "seconds of one worker per model": round(self.busy / max(self.models, 1), 2),
            "frontends": {name: dict(counts.most_common()) for name, counts in self.states.items()},
            "refusals": {name: dict(counts.most_common()) for name, counts in self.refusals.items() if counts},
            "oracles": {name: dict(counts.most_common()) for name, counts in self.passes.items()},
            "faults": [
                {
                    "looks like": signature,
                    "models": sorted({number for number, _ in found}),
                    "saved": self.saved.get(signature),
                    "first": asdict(found[0][1]),
                }
                for signature, found in sorted(self.faults.items(), key=lambda item: -len(item[1]))
            ],
        }

    def markdown(self, seconds: float, workers: int) -> str:
        """Return a page of it."""
        kinds = ("captured", "refused", "not exportable", "failed")
        says = ("passed", "failed", "nothing to say")
        lines = [
            "# A run of the fuzzer",
            "",
            f"`{self.command}`, torch {torch.__version__}, {workers} workers, {seconds / 60:.0f} minutes: "
            f"{self.models} models, {self.failing} with a fault. [What is tried](../../docs/reliability.md).",
            "",
            *_table("frontend", ("tried", *kinds), {
                name: [counts.total(), *(counts[kind] for kind in kinds)] for name, counts in self.states.items()
            }),
            "",
            *_table("oracle", says, {
                name: [counts[said] for said in says] for name, counts in self.passes.items()
            }),
            "",
            "## Refusals",
            "",
            *_table("reason", tuple(self.refusals), {
                why: [counts[why] for counts in self.refusals.values()]
                for why, _ in sum(self.refusals.values(), Counter()).most_common(15)
            }),
            "",
            "## Faults",
            "",
            *(self._told() or ["None."]),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _told(self) -> list[str]:
        found = sorted(self.faults.items(), key=lambda item: -len(item[1]))
        return [f"* {len({number for number, _ in each})} models: {text.replace('|', '/')}" for text, each in found]

    def __str__(self) -> str:
        """Say it in some lines."""
        lines = [f"{self.models} models tried, {self.unfit} unfit, {self.failing} with a fault"]
        for name, counts in self.states.items():
            said = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
            lines.append(f"  {name}: tried {sum(counts.values())}: {said}")
            lines += [f"      {count} x {why}" for why, count in self.refusals[name].most_common(6)]
        for name, counts in self.passes.items():
            lines.append(f"  {name}: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
        for signature, found in sorted(self.faults.items(), key=lambda item: -len(item[1])):
            numbers = sorted({number for number, _ in found})
            lines.append(f"  FAULT in {len(numbers)} models ({', '.join(map(str, numbers[:5]))}): {signature}")
            lines.append(f"      {' '.join(found[0][1].message.split())[:300]}")
            if signature in self.saved:
                lines.append(f"      saved as {self.saved[signature]}")
        return "\n".join(lines)


def _table(first: str, heads: Sequence[str], rows: dict[str, list[int]]) -> list[str]:
    """Return a table of numbers in Markdown."""
    made = [f"| {first} | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    return made + [
        f"| {name.replace('|', '/')} | {' | '.join(f'{count:,}' for count in counts)} |"
        for name, counts in rows.items()
    ]
