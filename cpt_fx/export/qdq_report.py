"""What `export.qdq` made of a model: exact, converted or left in floating point, and how far outputs are off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cpt_fx.export.qdq_formats import CONVERTED, EXACT

ADVICE = (
    "What recipes.default() quantizes is exported exactly: symmetric weights per channel, activations with an integer "
    "zero point and a running range."
)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What became of one quantizer."""

    layer: str
    operand: str
    role: str
    format: str
    """How it was trained."""
    bits: int
    status: str
    """`"exact"`, `"converted"` or `"float"`."""
    error: float
    """Norm of the difference between what PyTorch and the file make of the examples there, relative to PyTorch's."""
    note: str = ""

    def __str__(self) -> str:
        """Say it in one line."""
        error = "" if self.status == EXACT else f" {self.error:.2%}"
        note = f": {self.note}" if self.note else ""
        return f"{self.layer} {self.operand} ({self.format}, {self.bits} bits): {self.status}{error}{note}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One output of the file in ONNX Runtime against PyTorch at the same widths, on the examples."""

    output: str
    maximum: float
    mean: float
    largest: float
    """Largest magnitude of the output itself."""
    agreement: float | None = None
    """Part of the rows whose largest element is the same one, for outputs of two dims."""

    def __str__(self) -> str:
        """Say it in one line."""
        same = "" if self.agreement is None else f", the same class for {self.agreement:.1%} of the rows"
        off = f"differs by {self.maximum:.3g} at most, {self.mean:.3g} on average"
        return f"{self.output}: {off}, of {self.largest:.3g}{same}"


@dataclass(frozen=True, kw_only=True)
class QdqReport:
    """What was written, and how true it is to the trained model. Printed, it is a summary."""

    path: Path
    quantizers: tuple[Converted, ...]
    outputs: tuple[Difference, ...]
    runtime: str
    """What the outputs come from."""
    opset: int

    @property
    def exact(self) -> bool:
        """Whether every quantizer is in the file exactly as it was trained."""
        return all(item.status == EXACT for item in self.quantizers)

    def __str__(self) -> str:
        """Return the counts, everything that is not exact, and the difference of the outputs."""
        return "\n".join(self._lines())

    def _lines(self) -> Sequence[str]:
        others = [item for item in self.quantizers if item.status != EXACT]
        exact = len(self.quantizers) - len(others)
        converted = sum(item.status == CONVERTED for item in others)
        counts = f"{exact} exact, {converted} converted, {len(others) - converted} left in floating point"
        lines = [f"{self.path}: {len(self.quantizers)} quantizers: {counts}"]
        lines += [f"  {item}" for item in others]
        lines += [f"  {ADVICE}"] if others else []
        lines += [f"  {item}" for item in self.outputs]
        return [*lines, f"  {self.runtime}"]
