"""The measurements as text: one row for each contender, for the terminal, the page and the README."""

from __future__ import annotations

from harness.results import Result, Row, Spread

HEADINGS = (
    "contender", "step", "10 to 90 %", "of compiled", "peak memory", "kept", "compile, s", "graphs", "recompiled",
    "int8", "floating", "quantized",
)  # fmt: skip
TIMES = 6
"""Columns of the first of the two tables in a terminal; the second table has the others."""
LEGEND = (
    "step: relative to FP32 eager, the median over the rounds, and where eight in ten of them lie",
    "of compiled: relative to compiled FP32",
    "peak memory, kept: relative to FP32 eager; kept is what a batch leaves for its backward pass",
    "graphs: compiled for the first step; 0: the compiler gave up, it runs eager; recompiled: later, as widths changed",
    "int8, floating: kernels that multiplied in one step, as the profiler saw them; native ones as they were counted",
    "quantized: products of the model between quantizers that ran + gradients quantized; integer: counted on integers",
)
NOTHING = "–"


def cells(result: Result, row: Row) -> tuple[str, ...]:
    """Return a row of the table; for a contender that did not run, its name and the reason."""
    if row.facts is None:
        return (row.contender.label, f"not available: {row.reason}")
    facts, ratio = row.facts, result.ratio(row)
    done = facts.executed
    return (
        row.contender.label,
        _median(ratio),
        NOTHING if ratio is None else f"{ratio.low:.2f} to {ratio.high:.2f}",
        _median(result.compiled_ratio(row)),
        _number(result.memory_ratio(row), ".2f"),
        _number(result.memory_ratio(row, "saved_bytes"), ".2f"),
        _number(facts.compile_seconds, ".1f"),
        _number(facts.graphs, "d"),
        # Without changing widths nothing could be compiled again.
        _number(facts.recompilations, "d") if facts.widths else NOTHING,
        str(done.integer),
        str(done.floating),
        NOTHING if done.forward is None else f"{done.forward} + {done.backward}",
    )


def tables(result: Result) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """Return headings and rows of two tables, each narrow enough for a terminal."""
    rows = [cells(result, row) for row in result.rows]
    times = [
        row[:TIMES] if len(row) == len(HEADINGS) else (*row[:1], "not available", *[""] * (TIMES - 2)) for row in rows
    ]
    others = [(row[0], *row[TIMES:]) for row in rows if len(row) == len(HEADINGS)]
    return [(HEADINGS[:TIMES], times), ((HEADINGS[0], *HEADINGS[TIMES:]), others)]


def missing(result: Result) -> list[str]:
    """Return a sentence for each contender that did not run."""
    return [": ".join(cells(result, row)) for row in result.rows if not row.available]


def scale(result: Result) -> str:
    """Return the step time and memory of the reference, which ratios do not show."""
    row = next(row for row in result.rows if row.contender.name == "fp32")
    if row.facts is None:
        return "FP32 eager did not run, so there are no ratios."
    return (
        f"FP32 eager: {1e3 * row.median_seconds:.1f} ms a step, {row.facts.peak_bytes / 2**20:.1f} MiB at its peak. "
        f"{result.settings.steps} rounds; {widths(result)}."
    )


def widths(result: Result) -> str:
    """Return at which widths the steps ran."""
    settings = result.settings
    if settings.schedule == "static":
        return f"{settings.q_max} bits throughout"
    return f"schedule {settings.schedule}, {settings.q_min} to {settings.q_max} bits"


def markdown(result: Result) -> str:
    """Return the table as Markdown."""
    rows = [HEADINGS, ("---", *["---:"] * (len(HEADINGS) - 1)), *(cells(result, row) for row in result.rows)]
    filled = ((*row, *[""] * (len(HEADINGS) - len(row))) for row in rows)
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in filled)


def _median(spread: Spread | None) -> str:
    return NOTHING if spread is None else f"{spread.median:.2f}"


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else f"{value:{form}}"
