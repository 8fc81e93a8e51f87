"""The bodies of the local functions, as `expressions`: the arithmetic of `numerics`, in its order."""

from __future__ import annotations

from cpt_fx.formats import FULL_PRECISION, Rounding, Scheme, Specials
from cpt_fx.noise import BITS, DROPPED, FOLD, ROUNDS, STEP

ROUND = "ROUND"
"""Stands in a grid for how codes are rounded."""
FLOOR = "FLOOR"
"""Stands in a grid for its smallest step."""
TINY = 1.1754943508222875e-38

MEASURE = """
    low = ReduceMin(x, axes, noop_with_empty_axes=1)
    high = ReduceMax(x, axes, noop_with_empty_axes=1)
    span = high - low
"""
WIDTH = f"""
    passes = bits <= 0 or bits >= {FULL_PRECISION}
"""
_LEVELS = f"""
    levels = float32(uint64(1) << uint64(Clip(bits, 1, {FULL_PRECISION}))) - 1.0
"""
GRIDS = {
    Scheme.AFFINE: f"""
        {_LEVELS}
        scale = Max(span / levels, FLOOR)
        clipped = Clip((x - low) / Max(scale, {TINY}), 0.0, levels)
        ROUND
        values = codes * scale + low
    """,
    Scheme.AFFINE_INTEGER: f"""
        {_LEVELS}
        bottom = Min(low, 0.0)
        scale = (Max(high, 0.0) - bottom) / levels
        divisor = Max(scale, {TINY})
        offset = Min(Max(Round(-bottom / divisor), 0.0), levels)
        clipped = Min(Max(x / divisor, -offset), levels - offset)
        ROUND
        values = codes * scale
    """,
    Scheme.SYMMETRIC: f"""
        singles = float32(bits == 1)
        half = singles / 2.0
        reach = float32(uint64(1) << uint64(Clip(bits - 1, 0, {FULL_PRECISION}))) - 1.0
        scale = Max(Max(-low, high), 0.0) / (reach + half)
        clipped = Clip(x / Max(scale, {TINY}) - half, -reach - singles, reach)
        ROUND
        values = (codes + half) * scale
    """,
}


def _round(number: int) -> str:
    """Return one round of the hash: the next number of it."""
    value = f"hash_{number}"
    folded = f"({value} + {value} / {1 << FOLD})"
    return f"hash_{number + 1} = {folded} * ({value} + {value} + factor) % {1 << BITS}\n"


# GatherND, since ORT's optimizer breaks on many Gather of one tensor (two nodes of one name). Sums, products, quotients
# and remainders of integers only: kernels for CUDA have no others.
NOISE = f"""
    start = int64(GatherND(seeds, Concat(draw, int64([0]), axis=0))) % {1 << BITS}
    second_seed = int64(GatherND(seeds, Concat(draw, int64([1]), axis=0))) % {1 << BITS}
    folded_seed = second_seed + second_seed / {1 << FOLD}
    factor = folded_seed + folded_seed + 1
    line = Range(start, start + Size(x) * {STEP}, {STEP})
    hash_0 = Reshape(line, Shape(x)) % {1 << BITS}
    {"".join(map(_round, range(ROUNDS)))}
    noise = float32(hash_{ROUNDS} / {1 << DROPPED}) * {2.0 ** (DROPPED - BITS)}
"""
ROUNDINGS = {
    Rounding.NEAREST: "codes = Round(clipped)",
    Rounding.STOCHASTIC: """
        below = Floor(clipped)
        codes = below + float32(noise < clipped - below)
    """,
}


def measure_all(*, percentile: bool) -> str:
    """Return what measures the range of a whole tensor, as numbers without dims."""
    if not percentile:
        return """
            batch_low = ReduceMin(x, keepdims=0)
            batch_high = ReduceMax(x, keepdims=0)
            batch_span = batch_high - batch_low
        """
    return """
        line_of_x = Reshape(x, int64([-1]))
        cut = int64(float64(Size(x)) * float64(Constant(value_float=attribute.percentile)))
        how_many = Reshape(cut + 1, int64([-1]))
        lowest_values, low_places = TopK(line_of_x, how_many, largest=0)
        highest_values, high_places = TopK(line_of_x, how_many, largest=1)
        batch_low = Gather(lowest_values, -1)
        batch_high = Gather(highest_values, -1)
        batch_span = batch_high - batch_low
    """


def learn(*, when_off: bool) -> str:
    """Return what lets a running range learn from a batch, while the batch is quantized by its own range.

    ONNX does not say whether a minimum sees a NaN: zero times each element does.
    """
    lines = f"""
        poison = ReduceSum(x * 0.0, keepdims=0)
        low = batch_low + poison
        high = batch_high + poison
        span = high - low
        finite = Abs(low + span) <= 3.4028234663852886e38
        learns = {"finite" if when_off else "bits > 0 and finite"}
        kept = Constant(value_float=attribute.kept)
        taken = Constant(value_float=attribute.taken)
    """
    for name, value in (("zero_point", "low"), ("range", "span"), ("weight", "1.0")):
        lines += f"new_{name} = Where(learns, {name} * kept + {value} * taken, {name})\n"
    return lines


def recall(*, corrected: bool) -> str:
    """Return what reads a running range; before it has learned anything, the tensor's own serves."""
    share = " / weight" if corrected else ""
    return f"""
        seen = weight > 0.0
        average_low = zero_point{share}
        average_span = range{share}
        low = Where(seen, average_low, batch_low)
        span = Where(seen, average_span, batch_span)
        high = Where(seen, average_low + average_span, batch_high)
    """


# What `ops.LearnedRange` says of the gradients.
LEARNED_GRADIENT = f"""
    {_LEVELS}
    u = (x - low) / Max(span / levels, {TINY})
    above = u > levels
    outside = above or u < 0.0
    inside = not outside
    dx = Where(inside or passes, dy, 0.0)
    slope = Where(inside, (Round(u) - u) / levels, float32(above))
    share = Where(passes, 0.0, Reciprocal(Sqrt(levels * float32(Size(x)))))
    dspan = ReduceSum(dy * slope, keepdims=0) * share
    dlow = ReduceSum(Where(outside, dy, 0.0), keepdims=0) * share
"""


def _power_of_two(name: str, exponent: str) -> str:
    """Return what computes 2**exponent exactly, for a whole number of any sign: shifts end at 2**63."""
    return f"""
        {name}_third = Abs({exponent}) / 3
        {name}_root = float64({_shifted(f"{name}_third")})
        {name}_rest = float64({_shifted(f"Abs({exponent}) - ({name}_third + {name}_third)")})
        {name}_large = {name}_root * {name}_root * {name}_rest
        {name} = float32(Where({exponent} < 0, Reciprocal({name}_large), {name}_large))
    """


def _floor_to_power_of_two(name: str, value: str) -> str:
    """Return what takes the largest power of two that is not above a magnitude; zero stays zero.

    The logarithm may be off by one step next to a power of two: what it gives is compared and mended.
    """
    return f"""
        {name}_wide = float64(Abs({value}))
        {name}_guess = Pow(float64(2.0), Floor(Log({name}_wide) / Log(float64(2.0))))
        {name}_down = Where({name}_guess > {name}_wide, {name}_guess / float64(2.0), {name}_guess)
        {name}_double = {name}_down * float64(2.0)
        {name}_up = Where({name}_double <= {name}_wide, {name}_double, {name}_down)
        {name} = float32(Where({name}_wide == float64(0.0), float64(0.0), {name}_up))
    """


def _shifted(places: str) -> str:
    """Return what computes 2**places as a whole number."""
    return f"(uint64(1) << uint64({places}))"


def floating_grid(exponent: int, specials: Specials, *, blocks: bool) -> str:
    """Return the grid of a floating point format: `numerics._floating`, in its order.

    `exponent` bits are exponent where the width allows it.
    """
    reserved = "Where(exponent_bits > 1, top_0 - 1, top_0)" if specials is Specials.IEEE else "top_0"
    lines = f"""
        fields = Clip(bits, 2, {FULL_PRECISION}) - 1
        exponent_bits = Min(fields, {exponent})
        mantissa_bits = fields - exponent_bits
        bias = int64({_shifted("exponent_bits - 1")}) - 1
        top_0 = int64({_shifted("exponent_bits")}) - 1 - bias
        minus_mantissa = -mantissa_bits
        {_power_of_two("ulp", "minus_mantissa")}
        top = Min({reserved}, 127)
        {_power_of_two("top_power", "top")}
        largest_0 = top_power * (2.0 - ulp)
    """
    if specials is Specials.FN:
        lines += f"""
            top_below = top - 1
            {_power_of_two("power_below", "top_below")}
            below_all_ones = Where(mantissa_bits > 0, top_power * (2.0 - 2.0 * ulp), power_below)
            largest = Where(fields > 1, below_all_ones, largest_0)
        """
    else:
        lines += "largest = largest_0\n"
    lines += "amplitude = Max(Max(-low, high), 0.0)\n"
    if blocks:
        lines += f"""
            {_floor_to_power_of_two("block_power", "amplitude")}
            {_floor_to_power_of_two("format_power", "largest")}
            scale_0 = block_power / format_power
        """
    else:
        lines += "scale_0 = amplitude / largest\n"
    return f"""
        {lines}
        scale = Max(scale_0, {TINY})
        smallest_exponent = 1 - bias
        {_power_of_two("smallest", "smallest_exponent")}
        scaled = Clip(x / scale, -largest, largest)
        {_floor_to_power_of_two("binade", "scaled")}
        step = Max(binade, smallest) * ulp
        highest_code = largest / step
        clipped = Min(Max(scaled / step, -highest_code), highest_code)
        ROUND
        values = codes * step * scale
    """
