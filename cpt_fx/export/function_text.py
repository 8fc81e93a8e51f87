"""The bodies of the local functions, in ONNX's text form: the arithmetic of `numerics`, in its order."""

from __future__ import annotations

from cpt_fx.formats import FULL_PRECISION, Rounding, Scheme
from cpt_fx.noise import FIRST, GOLDEN, SECOND
from cpt_fx.numerics import SCALE_FLOOR

FLOAT, INT32, INT64, FLOAT64, UINT32, UINT64 = 1, 6, 7, 11, 12, 13
ROUND = "ROUND"
"""Stands in a grid for how codes are rounded."""


def constant(name: str, kind: str, value: object) -> str:
    """Return the line that makes a constant."""
    return f"{name} = Constant <value = {kind} {{{value}}}> ()\n"


ZERO = constant("zero", "float", 0.0)
MEASURE = """
    low = ReduceMin <noop_with_empty_axes = 1> (x, axes)
    high = ReduceMax <noop_with_empty_axes = 1> (x, axes)
    span = Sub (high, low)
"""
# Rows as one line each, of which the places behind the last element take that.
FILL = f"""
    {constant("fill_zero", "int64", 0)}
    {constant("fill_one", "int64", 1)}
    {constant("fill_line", "int64[1]", -1)}
    fill_shape = Shape (given)
    {constant("fill_from", "int64[1]", -2)}
    {constant("fill_to", "int64[1]", 2147483647)}
    fill_row_shape = Slice (fill_shape, fill_from, fill_to)
    fill_width = ReduceProd <keepdims = 0> (fill_row_shape)
    fill_width_1 = Reshape (fill_width, fill_line)
    fill_rows_shape = Concat <axis = 0> (fill_line, fill_width_1)
    fill_rows = Reshape (given, fill_rows_shape)
    fill_last = Sub (length, fill_one)
    fill_places = Range (fill_zero, fill_width, fill_one)
    fill_taken = Min (fill_places, fill_last)
    fill_filled = Gather <axis = 1> (fill_rows, fill_taken)
    x = Reshape (fill_filled, fill_shape)
"""
# Behind the last element there is zero again: what stands there would be added to the gradient of that.
UNFILL = """
    unfill_rows = Reshape (y, fill_rows_shape)
    unfill_real = Less (fill_places, length)
    unfill_cut = Where (unfill_real, unfill_rows, zero)
    result = Reshape (unfill_cut, fill_shape)
"""
WIDTH = f"""
    {constant("no_bits", "int64", 0)}
    {constant("one_bit", "int64", 1)}
    {constant("all_bits", "int64", FULL_PRECISION)}
    {ZERO}
    off = LessOrEqual (bits, no_bits)
    full = GreaterOrEqual (bits, all_bits)
    passes = Or (off, full)
    {constant("unit", "uint64", 1)}
    {constant("one", "float", 1.0)}
"""
_LEVELS = f"""
    width = Clip (bits, one_bit, all_bits)
    shift = Cast <to = {UINT64}> (width)
    power = BitShift <direction = "LEFT"> (unit, shift)
    count = Cast <to = {FLOAT}> (power)
    levels = Sub (count, one)
    {constant("floor", "float", SCALE_FLOOR)}
"""
GRIDS = {
    Scheme.AFFINE: f"""
        {_LEVELS}
        step = Div (span, levels)
        scale = Max (step, floor)
        shifted = Sub (x, low)
        places = Div (shifted, scale)
        clipped = Clip (places, zero, levels)
        ROUND
        scaled = Mul (codes, scale)
        values = Add (scaled, low)
    """,
    Scheme.AFFINE_INTEGER: f"""
        {_LEVELS}
        bottom = Min (low, zero)
        ceiling = Max (high, zero)
        reach = Sub (ceiling, bottom)
        step = Div (reach, levels)
        scale = Max (step, floor)
        below_zero = Neg (bottom)
        exact = Div (below_zero, scale)
        nearest = Round (exact)
        positive = Max (nearest, zero)
        offset = Min (positive, levels)
        lowest = Neg (offset)
        highest = Sub (levels, offset)
        places = Div (x, scale)
        raised = Max (places, lowest)
        clipped = Min (raised, highest)
        ROUND
        values = Mul (codes, scale)
    """,
    Scheme.SYMMETRIC: f"""
        single = Equal (bits, one_bit)
        singles = Cast <to = {FLOAT}> (single)
        {constant("two", "float", 2.0)}
        half = Div (singles, two)
        less = Sub (bits, one_bit)
        width = Clip (less, no_bits, all_bits)
        shift = Cast <to = {UINT64}> (width)
        power = BitShift <direction = "LEFT"> (unit, shift)
        count = Cast <to = {FLOAT}> (power)
        reach = Sub (count, one)
        below_zero = Neg (low)
        larger = Max (below_zero, high)
        amplitude = Max (larger, zero)
        steps = Add (reach, half)
        scale = Div (amplitude, steps)
        {constant("tiny", "float", "1.1754943508222875e-38")}
        divisor = Max (scale, tiny)
        exact = Div (x, divisor)
        places = Sub (exact, half)
        down = Neg (reach)
        lowest = Sub (down, singles)
        clipped = Clip (places, lowest, reach)
        ROUND
        centred = Add (codes, half)
        values = Mul (centred, scale)
    """,
}


def _folded(number: int, places: int) -> str:
    """Return what mixes the upper bits of a hash into the lower ones.

    torch shifts signed numbers with their sign, ONNX shifts unsigned ones: the sign is filled in.
    """
    return f"""
        {constant(f"places_{number}", "uint32", places)}
        {constant(f"fill_{number}", "int32", -(1 << (32 - places)))}
        plain_{number} = Cast <to = {UINT32}> (hash_{number})
        moved_{number} = BitShift <direction = "RIGHT"> (plain_{number}, places_{number})
        back_{number} = Cast <to = {INT32}> (moved_{number})
        negative_{number} = Less (hash_{number}, none)
        sign_{number} = Where (negative_{number}, fill_{number}, none)
        folding_{number} = BitwiseOr (back_{number}, sign_{number})
        folded_{number} = BitwiseXor (hash_{number}, folding_{number})
    """


# GatherND, since ORT's optimizer breaks on many Gather of one tensor (two nodes of one name).
NOISE = f"""
    {constant("first", "int64[1]", 0)}
    {constant("second", "int64[1]", 1)}
    {constant("golden", "int64", GOLDEN)}
    place_0 = Concat <axis = 0> (draw, first)
    place_1 = Concat <axis = 0> (draw, second)
    seed_0 = GatherND (seeds, place_0)
    seed_1 = GatherND (seeds, place_1)
    start = Cast <to = {INT64}> (seed_0)
    elements = Size (x)
    distance = Mul (elements, golden)
    end = Add (start, distance)
    line = Range (start, end, golden)
    shape = Shape (x)
    grid = Reshape (line, shape)
    hash_0 = Cast <to = {INT32}> (grid)
    {constant("none", "int32", 0)}
    {_folded(0, 16)}
    {constant("factor_1", "int32", FIRST)}
    product_1 = Mul (folded_0, factor_1)
    hash_1 = BitwiseXor (product_1, seed_1)
    {_folded(1, 15)}
    {constant("factor_2", "int32", SECOND)}
    hash_2 = Mul (folded_1, factor_2)
    {constant("upper", "int32", -256)}
    kept_bits = BitwiseAnd (hash_2, upper)
    number = Cast <to = {FLOAT}> (kept_bits)
    {constant("unit_32", "float", 2.0**-32)}
    {constant("middle", "float", 0.5)}
    centred_noise = Mul (number, unit_32)
    noise = Add (centred_noise, middle)
"""
ROUNDINGS = {
    Rounding.NEAREST: "codes = Round (clipped)",
    Rounding.STOCHASTIC: f"""
        below = Floor (clipped)
        fraction = Sub (clipped, below)
        goes_up = Less (noise, fraction)
        up = Cast <to = {FLOAT}> (goes_up)
        codes = Add (below, up)
    """,
}


def measure_all(*, percentile: bool) -> str:
    """Return what measures the range of a whole tensor, as numbers without dims."""
    if not percentile:
        return """
            batch_low = ReduceMin <keepdims = 0> (x)
            batch_high = ReduceMax <keepdims = 0> (x)
            batch_span = Sub (batch_high, batch_low)
        """
    return f"""
        {constant("line_shape", "int64[1]", -1)}
        {constant("last_place", "int64", -1)}
        line_of_x = Reshape (x, line_shape)
        size_of_x = Size (x)
        size = Cast <to = {FLOAT64}> (size_of_x)
        part = Constant <value_float: float = @percentile> ()
        tail = Cast <to = {FLOAT64}> (part)
        outside = Mul (size, tail)
        cut = Cast <to = {INT64}> (outside)
        kept_count = Add (cut, one_bit)
        how_many = Reshape (kept_count, line_shape)
        lowest_values, low_places = TopK <largest = 0> (line_of_x, how_many)
        highest_values, high_places = TopK <largest = 1> (line_of_x, how_many)
        batch_low = Gather (lowest_values, last_place)
        batch_high = Gather (highest_values, last_place)
        batch_span = Sub (batch_high, batch_low)
    """


def learn(*, when_off: bool) -> str:
    """Return what lets a running range learn from a batch, and uses the batch's own."""
    on = "learns = Constant <value = bool {1}> ()" if when_off else "learns = Greater (bits, no_bits)"
    lines = f"""
        low = Identity (batch_low)
        high = Identity (batch_high)
        span = Identity (batch_span)
        {on}
        kept = Constant <value_float: float = @kept> ()
        taken = Constant <value_float: float = @taken> ()
    """
    for name, value in (("zero_point", "low"), ("range", "span"), ("weight", "one")):
        lines += f"""
            {name}_rest = Mul ({name}, kept)
            {name}_share = Mul ({value}, taken)
            {name}_sum = Add ({name}_rest, {name}_share)
            new_{name} = Where (learns, {name}_sum, {name})
        """
    return lines


def recall(*, corrected: bool) -> str:
    """Return what reads a running range; before it has learned anything, the tensor's own serves."""
    average = """
        average_low = Div (zero_point, weight)
        average_span = Div (range, weight)
    """
    as_it_is = """
        average_low = Identity (zero_point)
        average_span = Identity (range)
    """
    return f"""
        seen = Greater (weight, zero)
        {average if corrected else as_it_is}
        average_high = Add (average_low, average_span)
        low = Where (seen, average_low, batch_low)
        span = Where (seen, average_span, batch_span)
        high = Where (seen, average_high, batch_high)
    """


# What `learned.LearnedRange` says of the gradients.
LEARNED_GRADIENT = f"""
    {_LEVELS}
    exact = Div (span, levels)
    scale = Max (exact, floor)
    shifted = Sub (x, low)
    u = Div (shifted, scale)
    above = Greater (u, levels)
    below = Less (u, zero)
    outside = Or (above, below)
    inside = Not (outside)
    reaches = Or (inside, passes)
    dx = Where (reaches, dy, zero)
    code = Round (u)
    error = Sub (code, u)
    within = Div (error, levels)
    beyond = Cast <to = {FLOAT}> (above)
    slope = Where (inside, within, beyond)
    size_of_x = Size (x)
    size = Cast <to = {FLOAT}> (size_of_x)
    spread = Mul (levels, size)
    root = Sqrt (spread)
    rate = Reciprocal (root)
    share = Where (passes, zero, rate)
    sloped = Mul (dy, slope)
    slopes = ReduceSum <keepdims = 0> (sloped)
    dspan = Mul (slopes, share)
    moved = Where (outside, dy, zero)
    moves = ReduceSum <keepdims = 0> (moved)
    dlow = Mul (moves, share)
"""
