"""The sizes of a product, rounded: products of about the same size are measured once, on operands of such a size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Shape = tuple[int, ...]
_MOST = 1 << 29
"""Multiplications that a measurement makes at most: beyond, the ratio no longer changes."""


def rounded(kind: str, shape: Sequence[int]) -> Shape:
    """Return the sizes of a product, rounded to powers of two.

    Those of matrices are (batches, rows, inner, columns). Those of a convolution are (images, channels, height, width,
    filters) and, as they are, the height and width of the kernel, of its stride, its padding and its dilation.
    """
    if kind.startswith("conv2d"):
        return _of_convolution(kind, shape)
    batches, rows, inner, columns = _of_matrices(kind, shape)
    sizes = [_power(size) for size in (batches, rows, inner, columns)]
    # Fewest first: batches and rows are what a larger product has more of.
    for place in (0, 1, 3):
        while sizes[0] * sizes[1] * sizes[2] * sizes[3] > _MOST and sizes[place] > 64 ** (place > 0):
            sizes[place] //= 2
    return tuple(sizes)


def arguments(kind: str, sizes: Shape) -> tuple[Shape, Shape, list[Any], dict[str, Any]]:
    """Return the shapes of two operands for rounded sizes, and what else the function of `products` takes."""
    if kind.startswith("conv2d"):
        return _for_convolution(kind, sizes)
    batches, rows, inner, columns = sizes
    if kind == "linear_forward":
        return (batches * rows, inner), (columns, inner), [None], {}
    if kind == "linear_grad_input":
        return (batches * rows, inner), (inner, columns), [], {}
    if kind == "linear_grad_weight":
        return (inner, rows), (inner, columns), [], {}
    if kind == "matmul_forward":
        return (batches, rows, inner), (batches, inner, columns), [], {}
    if kind == "matmul_grad_left":
        return (batches, rows, inner), (batches, columns, inner), [(batches, rows, columns)], {}
    if kind == "matmul_grad_right":
        return (batches, inner, columns), (batches, inner, rows), [(batches, rows, columns)], {}
    raise ValueError(f"no product is called {kind!r}")


def _power(size: int) -> int:
    """Return the power of two next to a size, by ratio."""
    if size <= 1:
        return 1
    below = 1 << (size.bit_length() - 1)
    return below if size * size <= 2 * below * below else 2 * below


def _product(sizes: Sequence[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _of_matrices(kind: str, shape: Sequence[int]) -> Shape:
    """Return batches, rows, inner size and columns; a linear layer has one batch of many rows."""
    if kind == "linear_forward":
        return 1, _product(shape[:-3]), shape[-1], shape[-2]
    if kind == "linear_grad_input":
        return 1, _product(shape[:-3]), shape[-2], shape[-1]
    half = _split(kind, shape)
    a, b = shape[:half], shape[half:]
    if kind == "linear_grad_weight":
        return 1, a[-1], _product(a[:-1]), b[-1]
    batches = max(_product(a[:-2]), _product(b[:-2]))
    if kind == "matmul_forward":
        return batches, _size(a, -2), a[-1], _size(b, -1) if len(b) > 1 else 1
    if kind == "matmul_grad_left":
        return batches, _size(a, -2), _size(a, -1), _size(b, -2)
    if kind == "matmul_grad_right":
        return batches, _size(b, -1), _size(b, -2), _size(a, -1)
    raise ValueError(f"no product is called {kind!r}")


def _split(kind: str, shape: Sequence[int]) -> int:
    """Return how many of the sizes belong to the first operand: half, unless batches were broadcast."""
    summed = {"matmul_forward": (-1, -2), "matmul_grad_left": (-1, -1)}.get(kind, (-2, -2))
    middle = len(shape) // 2
    for half in sorted(range(1, len(shape)), key=lambda place: abs(place - middle)):
        a, b = shape[:half], shape[half:]
        if _size(a, summed[0] if len(a) > 1 else -1) == _size(b, summed[1] if len(b) > 1 else -1):
            return half
    return max(1, middle)


def _size(shape: Sequence[int], dim: int) -> int:
    """Return a size, 1 for a dim that a vector does not have."""
    return shape[dim] if -len(shape) <= dim else 1


def _of_convolution(kind: str, shape: Sequence[int]) -> Shape:
    first, second, geometry = shape[:4], shape[4:8], tuple(shape[8:14])
    if kind == "conv2d_grad_weight":
        # Gradient and images: the kernel is what both leave over.
        images, channels, size, filters = second[0], second[1], second[2:], first[1]
        kernel = tuple(_kernel(size[i], first[2 + i], geometry[i::2]) for i in (0, 1))
    elif kind == "conv2d_grad_input":
        filters, channels, kernel, images = second[0], second[1], tuple(second[2:]), first[0]
        size = [_input(first[2 + i], kernel[i], geometry[i::2]) for i in (0, 1)]
    else:
        images, channels, size, filters, kernel = first[0], first[1], first[2:], second[0], tuple(second[2:])
    # Large enough for the filter, whatever the rounding.
    high, wide = (max(_power(size[i]), geometry[4 + i] * (kernel[i] - 1) + 1) for i in (0, 1))
    images, channels, filters = _power(images), _power(channels), _power(filters)
    while images > 2 and images * channels * filters * high * wide * kernel[0] * kernel[1] > _MOST:
        images //= 2
    return (images, channels, high, wide, filters, *kernel, *geometry)


def _kernel(size: int, places: int, how: Sequence[int]) -> int:
    """Return the size of a filter from that of an image and from how many places it has: the smallest that fits."""
    stride, padding, dilation = how
    return max(1, (size + 2 * padding - places * stride) // dilation + 1)


def _input(places: int, kernel: int, how: Sequence[int]) -> int:
    stride, padding, dilation = how
    return max(1, (places - 1) * stride + dilation * (kernel - 1) + 1 - 2 * padding)


def _for_convolution(kind: str, sizes: Shape) -> tuple[Shape, Shape, list[Any], dict[str, Any]]:
    images, channels, high, wide, filters, *rest = sizes
    kernel, stride, padding, dilation = (tuple(rest[i : i + 2]) for i in (0, 2, 4, 6))
    named = {"stride": stride, "padding": padding, "dilation": dilation}
    x, w = (images, channels, high, wide), (filters, channels, *kernel)
    out = (
        (size + 2 * pad - gap * (length - 1) - 1) // step + 1
        for size, length, step, pad, gap in zip((high, wide), kernel, stride, padding, dilation, strict=True)
    )
    g = (images, filters, *out)
    if kind == "conv2d_forward":
        return x, w, [None], named
    if kind == "conv2d_grad_input":
        return g, w, [x], named
    if kind == "conv2d_grad_weight":
        return g, x, [w], named
    raise ValueError(f"no product is called {kind!r}")
