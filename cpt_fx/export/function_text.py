"""The bodies of the local functions, in ONNX's text form: the arithmetic of `numerics`, in its order."""

from __future__ import annotations

from cpt_fx.formats import FULL_PRECISION, Rounding, Scheme, Specials
from cpt_fx.noise import FIRST, GOLDEN, SECOND
from cpt_fx.numerics import SCALE_FLOOR

FLOAT, INT32, INT64, FLOAT64, UINT32, UINT64 = 1, 6, 7, 11, 12, 13
ROUND = "ROUND"
"""Stands in a grid for how codes are rounded."""


def _constant(name: str, kind: str, value: object) -> str:
    return f"{name} = Constant <value = {kind} {{{value}}}> ()\n"


ZERO = _constant("zero", "float", 0.0)
MEASURE = """
    low = ReduceMin <noop_with_empty_axes = 1> (x, axes)
    high = ReduceMax <noop_with_empty_axes = 1> (x, axes)
    span = Sub (high, low)
"""
# Rows as one line each, of which the places behind the last element take that.
FILL = f"""
    {_constant("fill_zero", "int64", 0)}
    {_constant("fill_one", "int64", 1)}
    {_constant("fill_line", "int64[1]", -1)}
    fill_shape = Shape (given)
    {_constant("fill_from", "int64[1]", -2)}
    {_constant("fill_to", "int64[1]", 2147483647)}
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
    {_constant("no_bits", "int64", 0)}
    {_constant("one_bit", "int64", 1)}
    {_constant("all_bits", "int64", FULL_PRECISION)}
    {ZERO}
    off = LessOrEqual (bits, no_bits)
    full = GreaterOrEqual (bits, all_bits)
    passes = Or (off, full)
    {_constant("unit", "uint64", 1)}
    {_constant("one", "float", 1.0)}
"""
_LEVELS = f"""
    width = Clip (bits, one_bit, all_bits)
    shift = Cast <to = {UINT64}> (width)
    power = BitShift <direction = "LEFT"> (unit, shift)
    count = Cast <to = {FLOAT}> (power)
    levels = Sub (count, one)
    {_constant("floor", "float", SCALE_FLOOR)}
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
        {_constant("two", "float", 2.0)}
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
        {_constant("tiny", "float", "1.1754943508222875e-38")}
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
# GatherND, since ORT's optimizer breaks on many Gather of one tensor (two nodes of one name). torch shifts signed
# numbers with their sign, ONNX shifts unsigned ones: the sign is filled in.
NOISE = f"""
    {_constant("first", "int64[1]", 0)}
    {_constant("second", "int64[1]", 1)}
    {_constant("golden", "int64", GOLDEN)}
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
    {_constant("none", "int32", 0)}
    {_constant("places_16", "uint32", 16)}
    {_constant("fill_16", "int32", -(1 << 16))}
    plain_0 = Cast <to = {UINT32}> (hash_0)
    moved_0 = BitShift <direction = "RIGHT"> (plain_0, places_16)
    back_0 = Cast <to = {INT32}> (moved_0)
    negative_0 = Less (hash_0, none)
    sign_0 = Where (negative_0, fill_16, none)
    folding_0 = BitwiseOr (back_0, sign_0)
    folded_0 = BitwiseXor (hash_0, folding_0)
    {_constant("factor_1", "int32", FIRST)}
    product_1 = Mul (folded_0, factor_1)
    hash_1 = BitwiseXor (product_1, seed_1)
    {_constant("places_15", "uint32", 15)}
    {_constant("fill_15", "int32", -(1 << 17))}
    plain_1 = Cast <to = {UINT32}> (hash_1)
    moved_1 = BitShift <direction = "RIGHT"> (plain_1, places_15)
    back_1 = Cast <to = {INT32}> (moved_1)
    negative_1 = Less (hash_1, none)
    sign_1 = Where (negative_1, fill_15, none)
    folding_1 = BitwiseOr (back_1, sign_1)
    folded_1 = BitwiseXor (hash_1, folding_1)
    {_constant("factor_2", "int32", SECOND)}
    hash_2 = Mul (folded_1, factor_2)
    {_constant("upper", "int32", -256)}
    kept_bits = BitwiseAnd (hash_2, upper)
    number = Cast <to = {FLOAT}> (kept_bits)
    {_constant("unit_32", "float", 2.0**-32)}
    {_constant("middle", "float", 0.5)}
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
        {_constant("line_shape", "int64[1]", -1)}
        {_constant("last_place", "int64", -1)}
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
    if not corrected:
        return """
            low = Identity (zero_point)
            span = Identity (range)
            high = Add (low, span)
        """
    return """
        seen = Greater (weight, zero)
        average_low = Div (zero_point, weight)
        average_span = Div (range, weight)
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


def _power_of_two(name: str, exponent: str) -> str:
    """Return what computes 2**exponent exactly, for a whole number of any sign: shifts end at 2**63."""
    return f"""
        {name}_size = Abs ({exponent})
        {name}_third = Div ({name}_size, three)
        {name}_two_thirds = Add ({name}_third, {name}_third)
        {name}_rest = Sub ({name}_size, {name}_two_thirds)
        {name}_places_a = Cast <to = {UINT64}> ({name}_third)
        {name}_places_b = Cast <to = {UINT64}> ({name}_rest)
        {name}_a = BitShift <direction = "LEFT"> (unit, {name}_places_a)
        {name}_b = BitShift <direction = "LEFT"> (unit, {name}_places_b)
        {name}_c = Cast <to = {FLOAT64}> ({name}_a)
        {name}_d = Cast <to = {FLOAT64}> ({name}_b)
        {name}_square = Mul ({name}_c, {name}_c)
        {name}_large = Mul ({name}_square, {name}_d)
        {name}_small = Reciprocal ({name}_large)
        {name}_below = Less ({exponent}, no_bits)
        {name}_either = Where ({name}_below, {name}_small, {name}_large)
        {name} = Cast <to = {FLOAT}> ({name}_either)
    """


def _floor_to_power_of_two(name: str, value: str) -> str:
    """Return what takes the largest power of two that is not above a magnitude; zero stays zero.

    The logarithm may be off by one step next to a power of two: what it gives is compared and mended.
    """
    return f"""
        {name}_size = Abs ({value})
        {name}_wide = Cast <to = {FLOAT64}> ({name}_size)
        {name}_log = Log ({name}_wide)
        {name}_log_2 = Div ({name}_log, log_of_two)
        {name}_floor = Floor ({name}_log_2)
        {name}_guess = Pow (wide_two, {name}_floor)
        {name}_half = Div ({name}_guess, wide_two)
        {name}_over = Greater ({name}_guess, {name}_wide)
        {name}_down = Where ({name}_over, {name}_half, {name}_guess)
        {name}_double = Mul ({name}_down, wide_two)
        {name}_fits = LessOrEqual ({name}_double, {name}_wide)
        {name}_up = Where ({name}_fits, {name}_double, {name}_down)
        {name}_none = Equal ({name}_wide, wide_zero)
        {name}_final = Where ({name}_none, wide_zero, {name}_up)
        {name} = Cast <to = {FLOAT}> ({name}_final)
    """


def floating_grid(exponent: int, specials: Specials, *, blocks: bool) -> str:
    """Return the grid of a floating point format, of which `exponent` bits are exponent where the width allows it."""
    lines = f"""
        {_constant("two_bits", "int64", 2)}
        {_constant("three", "int64", 3)}
        {_constant("most_exponent", "int64", exponent)}
        {_constant("last_exponent", "int64", 127)}
        {_constant("two", "float", 2.0)}
        {_constant("tiny", "float", "1.1754943508222875e-38")}
        {_constant("wide_zero", "double", 0.0)}
        {_constant("wide_two", "double", 2.0)}
        log_of_two = Log (wide_two)
        width = Clip (bits, two_bits, all_bits)
        fields = Sub (width, one_bit)
        exponent_bits = Min (fields, most_exponent)
        mantissa_bits = Sub (fields, exponent_bits)
        half_range = Sub (exponent_bits, one_bit)
        {_shifted("half_count", "half_range")}
        bias = Sub (half_count, one_bit)
        {_shifted("code_count", "exponent_bits")}
        last_code = Sub (code_count, one_bit)
        top_0 = Sub (last_code, bias)
        minus_mantissa = Neg (mantissa_bits)
        {_power_of_two("ulp", "minus_mantissa")}
    """
    if specials is Specials.IEEE:
        lines += """
            several = Greater (exponent_bits, one_bit)
            reserved = Sub (top_0, one_bit)
            top_1 = Where (several, reserved, top_0)
        """
    else:
        lines += "top_1 = Identity (top_0)\n"
    lines += f"""
        top = Min (top_1, last_exponent)
        {_power_of_two("top_power", "top")}
        mantissa_end = Sub (two, ulp)
        largest_0 = Mul (top_power, mantissa_end)
    """
    if specials is Specials.FN:
        lines += f"""
            has_mantissa = Greater (mantissa_bits, no_bits)
            two_ulp = Mul (two, ulp)
            shorter_end = Sub (two, two_ulp)
            shorter = Mul (top_power, shorter_end)
            top_below = Sub (top, one_bit)
            {_power_of_two("power_below", "top_below")}
            below_all_ones = Where (has_mantissa, shorter, power_below)
            wide_enough = Greater (fields, one_bit)
            largest = Where (wide_enough, below_all_ones, largest_0)
        """
    else:
        lines += "largest = Identity (largest_0)\n"
    lines += """
        below_zero = Neg (low)
        larger = Max (below_zero, high)
        amplitude = Max (larger, zero)
    """
    if blocks:
        lines += f"""
            {_floor_to_power_of_two("block_power", "amplitude")}
            {_floor_to_power_of_two("format_power", "largest")}
            scale_0 = Div (block_power, format_power)
        """
    else:
        lines += "scale_0 = Div (amplitude, largest)\n"
    return (
        lines
        + f"""
        scale = Max (scale_0, tiny)
        smallest_exponent = Sub (one_bit, bias)
        {_power_of_two("smallest", "smallest_exponent")}
        lowest = Neg (largest)
        exact = Div (x, scale)
        scaled = Clip (exact, lowest, largest)
        {_floor_to_power_of_two("binade", "scaled")}
        normal = Max (binade, smallest)
        step = Mul (normal, ulp)
        places = Div (scaled, step)
        highest_code = Div (largest, step)
        lowest_code = Neg (highest_code)
        raised = Max (places, lowest_code)
        clipped = Min (raised, highest_code)
        ROUND
        unscaled = Mul (codes, step)
        values = Mul (unscaled, scale)
    """
    )


def _shifted(name: str, places: str) -> str:
    """Return what computes 2**places as a whole number."""
    return f"""
        {name}_places = Cast <to = {UINT64}> ({places})
        {name}_power = BitShift <direction = "LEFT"> (unit, {name}_places)
        {name} = Cast <to = {INT64}> ({name}_power)
    """
