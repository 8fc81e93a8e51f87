"""The body of a floating point format, in ONNX's text form: `numerics._floating`, in its order."""

from __future__ import annotations

from cpt_fx.export.function_text import FLOAT, FLOAT64, INT64, UINT64, constant
from cpt_fx.formats import Specials


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
        {constant("two_bits", "int64", 2)}
        {constant("three", "int64", 3)}
        {constant("most_exponent", "int64", exponent)}
        {constant("last_exponent", "int64", 127)}
        {constant("two", "float", 2.0)}
        {constant("tiny", "float", "1.1754943508222875e-38")}
        {constant("wide_zero", "double", 0.0)}
        {constant("wide_two", "double", 2.0)}
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
