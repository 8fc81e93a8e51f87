"""Codes and products of codes, by kernels and by torch's operators, against sums in int64 and float64."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpt_fx import native
from cpt_fx.formats import Rounding, Scheme
from cpt_fx.integer import kernels, products
from cpt_fx.integer.codes import Codes, quantize_codes
from cpt_fx.integer.kernels import Geometry, Pair
from cpt_fx.integer.products import Options
from cpt_fx.quantizers import noise
from cpt_fx.quantizers.numerics import Grid, quantize

SYMMETRIC = Grid(scheme=Scheme.SYMMETRIC)
RANDOM = SYMMETRIC._replace(rounding=Rounding.STOCHASTIC)
NEEDS_KERNELS = pytest.mark.skipif(native.load("integer_products.cpp") is None, reason="no kernels on this machine")


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with kernels and without."""
    with native.disabled() if request.param == "torch" else fenced():
        yield request.param


@contextmanager
def fenced() -> Iterator[None]:
    """Let kernels write into the middle of larger pieces of memory, and see that they touch nothing else."""
    fences: list[Tensor] = []

    def new(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        size = torch.Size(shape).numel()
        memory = torch.full((size + 512,), 77, dtype=dtype)
        fences.extend((memory[:256], memory[256 + size :]))
        return memory[256 : 256 + size].view(tuple(shape))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_new", new)
        yield
    assert all(bool(fence.eq(77).all()) for fence in fences)


def codes(*shape: int, seed: int = 0, scale: float = 0.03) -> Codes:
    """Codes of all sizes, with a scale that is not a power of two."""
    generator = torch.Generator().manual_seed(seed)
    return Codes(torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator), torch.tensor(scale))


def exact(result: Tensor, sums: Tensor, a: Codes, b: Codes) -> None:
    """Sums of integers, each multiplied once by the product of the scales."""
    assert result.dtype is torch.float32
    assert torch.equal(result, sums.to(torch.float32) * (a.scale * b.scale))


# Codes


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [1e-42, 1e-30, 1.0, 1e37])
def test_codes_are_those_of_the_simulated_quantizer(way: str, bits: int, size: float) -> None:
    x = torch.randn(37, 53, generator=torch.Generator().manual_seed(bits)) * size
    found = quantize_codes(x, bits, SYMMETRIC)
    assert found.values.dtype is torch.int8 and found.values.shape == x.shape
    assert found.scale.dtype is torch.float32 and found.scale.shape == ()
    assert torch.equal(found.dequantized(), quantize(x, torch.tensor(bits), SYMMETRIC))


@pytest.mark.parametrize("bits", range(1, 9))
def test_random_rounding_is_that_of_the_simulated_quantizer(
    way: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = noise.new_seed(torch.device("cpu"))
    monkeypatch.setattr("cpt_fx.quantizers.numerics.new_seed", lambda device: seed)
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(bits))
    found = quantize_codes(x, bits, RANDOM, seed)
    expected = quantize(x, torch.tensor(bits), RANDOM)
    assert torch.equal(found.dequantized(), expected)


def test_noise_rounds_up_what_is_larger_than_it(way: str) -> None:
    seed = torch.tensor([3, 4], dtype=torch.int32)
    x = noise.uniform(seed, torch.empty(1001))
    x[-1] = 127
    assert not quantize_codes(x, 8, RANDOM, seed).values[:-1].any()
    larger = x.nextafter(torch.tensor(2.0))
    larger[-1] = 127
    assert quantize_codes(larger, 8, RANDOM, seed).values[:-1].eq(1).all()


@NEEDS_KERNELS
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=200),
    st.integers(1, 8),
    st.booleans(),
)
def test_kernel_and_torch_give_the_same_codes(numbers: list[float], bits: int, random: bool) -> None:
    x = torch.tensor(numbers)
    seed = torch.tensor([123, -456], dtype=torch.int32)
    grid = RANDOM if random else SYMMETRIC
    ours = quantize_codes(x, bits, grid, seed if random else None)
    with native.disabled():
        theirs = quantize_codes(x, bits, grid, seed if random else None)
    assert torch.equal(ours.values, theirs.values)
    assert torch.equal(ours.scale.nan_to_num(-1.0), theirs.scale.nan_to_num(-1.0))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_poisons_every_product(way: str, poison: float) -> None:
    x = torch.randn(5, 8)
    x[2, 3] = poison
    found = quantize_codes(x, 8, SYMMETRIC)
    assert found.scale.isnan()
    assert quantize(x, torch.tensor(8), SYMMETRIC).isnan().all()
    assert products.linear_forward(found, codes(3, 8)).isnan().all()
    assert products.linear_grad_weight(found, codes(5, 4)).isnan().all()
    assert products.bias_grad(found).isnan().all()


def test_zeros_have_codes(way: str) -> None:
    found = quantize_codes(torch.zeros(3, 4), 8, SYMMETRIC)
    assert not found.dequantized().any()
    assert not products.linear_forward(found, codes(3, 4)).any()


@pytest.mark.parametrize("grid", [SYMMETRIC, RANDOM])
def test_codes_of_views_lie_where_their_elements_do(way: str, grid: Grid) -> None:
    seed = torch.tensor([1, 2], dtype=torch.int32) if grid is RANDOM else None
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    for view in (x.permute(2, 0, 1), x[:, ::2], x[:1].expand(3, 5, 4), x.to(memory_format=torch.contiguous_format).mT):
        found = quantize_codes(view, 8, grid, seed)
        plain = quantize_codes(view.contiguous(), 8, grid, seed)
        assert torch.equal(found.values, plain.values) and torch.equal(found.scale, plain.scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_codes_of_other_types(dtype: torch.dtype) -> None:
    x = torch.randn(9, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = quantize_codes(x, 5, SYMMETRIC)
    assert torch.equal(found.dequantized().to(dtype), quantize(x, torch.tensor(5), SYMMETRIC))


def test_codes_in_groups() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    found = quantize_codes(x, 6, SYMMETRIC._replace(keep=(0,)))
    assert found.scale.shape == (4, 1)
    assert torch.equal(found.dequantized(), quantize(x, torch.tensor(6), SYMMETRIC._replace(keep=(0,))))


def test_what_has_no_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 8 bits, got bits=9"):
        quantize_codes(torch.ones(2), 9, SYMMETRIC)


def test_nothing_has_no_codes() -> None:
    found = quantize_codes(torch.empty(0, 3), 8, SYMMETRIC)
    assert found.values.shape == (0, 3) and found.scale == 0


# Linear

SHAPES = [(1, 1, 1), (3, 5, 7), (6, 4, 64), (17, 33, 50), (2, 1, 9), (9, 130, 1), (65, 257, 129), (0, 3, 2), (2, 0, 3)]


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_linear(way: str, rows: int, inner: int, columns: int) -> None:
    x, w, g = codes(2, rows, inner), codes(columns, inner, seed=1, scale=0.7), codes(2, rows, columns, seed=2)
    xs, ws, gs = (c.values.to(torch.int64) for c in (x, w, g))
    exact(products.linear_forward(x, w), xs @ ws.t(), x, w)
    exact(products.linear_grad_input(g, w), gs @ ws, g, w)
    flat = gs.reshape(2 * rows, columns).t() @ xs.reshape(2 * rows, inner)
    exact(products.linear_grad_weight(g, x), flat, g, x)
    expected = gs.sum((0, 1)).to(torch.float32) * g.scale
    assert torch.equal(products.bias_grad(g), expected)


def test_linear_of_a_vector(way: str) -> None:
    x, w = codes(5), codes(3, 5, seed=1)
    exact(products.linear_forward(x, w), w.values.to(torch.int64) @ x.values.to(torch.int64), x, w)
    of_rows = Codes(w.values, torch.tensor([[0.1], [0.2], [0.3]]))
    expected = x.dequantized() @ of_rows.dequantized().t()
    torch.testing.assert_close(products.linear_forward(x, of_rows), expected)


def test_bias_is_added_after_scaling(way: str) -> None:
    x, w, bias = codes(4, 9), codes(3, 9, seed=1), torch.randn(3)
    assert torch.equal(products.linear_forward(x, w, Options(bias)), products.linear_forward(x, w) + bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_results_of_other_types(way: str, dtype: torch.dtype) -> None:
    x, w, bias = codes(4, 9, scale=0.001), codes(3, 9, seed=1), torch.randn(3)
    result = products.linear_forward(x, w, Options(bias), dtype)
    assert result.dtype is dtype
    torch.testing.assert_close(result, products.linear_forward(x, w, Options(bias)).to(dtype))


@settings(deadline=None, max_examples=80)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 140), st.integers(1, 140)),
    st.sampled_from(["plain", "turned", "strided"]),
    st.sampled_from(["plain", "turned", "strided"]),
    st.booleans(),
)
def test_matrices_of_any_layout(sizes: tuple[int, int, int], first: str, second: str, by_kernel: bool) -> None:
    rows, inner, columns = sizes

    def laid_out(shape: tuple[int, int], layout: str, seed: int) -> Tensor:
        if layout == "turned":
            return codes(shape[1], shape[0], seed=seed).values.t()
        return codes(shape[0], 2 * shape[1], seed=seed).values[:, ::2] if layout == "strided" else codes(*shape).values

    a, b = laid_out((rows, inner), first, 0), laid_out((inner, columns), second, 1)
    expected = a.to(torch.int64) @ b.to(torch.int64)
    with fenced() if by_kernel else native.disabled():
        one = torch.ones((), dtype=torch.float64)
        result = products.matmul_forward(Codes(a, one), Codes(b, one), dtype=torch.float64)
        assert torch.equal(result.to(torch.int64), expected)


@NEEDS_KERNELS
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    x, w, g = codes(2, 8, 30, 31), codes(20, 8, 3, 3, seed=1), codes(2, 20, 30, 31, seed=2)
    a, b = codes(301, 5000), codes(5000, 97, seed=3)
    torch.set_num_threads(threads)
    try:
        exact(products.matmul_forward(a, b), (a.values.double() @ b.values.double()), a, b)
        _check_convolution(x, w, g, (1, 1), (1, 1), (1, 1))
    finally:
        torch.set_num_threads(before)


def test_extremes_at_the_longest_sum(way: str) -> None:
    """All codes at their ends: 133,144 products fit into 31 bits, one more does not."""
    for length in (kernels.LONGEST_SUM, kernels.LONGEST_SUM + 1, 2 * kernels.LONGEST_SUM + 5):
        ends = Codes(torch.full((2, length), 127, dtype=torch.int8), torch.tensor(1.0))
        other = Codes(torch.tensor([[127], [-127]], dtype=torch.int8).expand(2, length).contiguous(), torch.tensor(1.0))
        result = products.linear_forward(ends, other)
        assert torch.equal(result, torch.tensor([[1.0, -1.0]]).expand(2, 2) * float(127 * 127 * length))


# Matmul


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((4, 5), (5, 6)), ((5,), (5, 6)), ((4, 5), (5,)), ((5,), (5,)), ((2, 4, 5), (5,)), ((5,), (2, 5, 3)),
        ((2, 3, 4, 5), (2, 3, 5, 6)), ((2, 3, 4, 5), (5, 6)), ((2, 3, 4, 5), (3, 5, 6)), ((1, 4, 5), (7, 5, 6)),
        ((2, 1, 4, 5), (3, 5, 6)), ((2, 2, 2, 4, 5), (2, 2, 2, 5, 1)), ((3, 64, 20), (3, 20, 70)), ((0, 4, 5), (5, 6)),
    ],
)  # fmt: skip
def test_matmul(way: str, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    a, b = codes(*a_shape), codes(*b_shape, seed=1)
    left, right = (c.values.double().requires_grad_() for c in (a, b))
    out = left @ right
    exact(products.matmul_forward(a, b), out.detach(), a, b)
    g = codes(*out.shape, seed=2)
    out.backward(g.values.double())
    _near(products.matmul_grad_left(g, b, Options(shape=a_shape)), left.grad, g, b)
    _near(products.matmul_grad_right(g, a, Options(shape=b_shape)), right.grad, g, a)


def _near(result: Tensor, sums: Tensor | None, a: Codes, b: Codes) -> None:
    """Up to rounding, since gradients of what was broadcast are sums of several products."""
    assert sums is not None
    torch.testing.assert_close(result.double(), sums * (a.scale * b.scale).double(), rtol=1e-6, atol=1e-5)


@NEEDS_KERNELS
def test_a_batch_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of attention are small: a call for each, or a start of the threads, would cost more than they do."""
    calls: list[tuple[int, ...]] = []

    class Counting:
        def cpt_fx_product(self, *arguments: Any) -> None:
            calls.append(arguments[3:8])

    monkeypatch.setattr(native, "load", lambda name: Counting())
    q, k, g = codes(4, 12, 197, 64), codes(4, 12, 197, 64, seed=1), codes(4, 12, 197, 197, seed=2)
    products.matmul_forward(q, Codes(k.values.mT, k.scale))
    products.matmul_grad_left(g, Codes(k.values.mT, k.scale), Options(shape=(4, 12, 197, 64)))
    products.matmul_grad_right(g, q, Options(shape=(4, 12, 64, 197)))
    assert calls == [(4, 12, 197, 64, 197), (4, 12, 197, 197, 64), (4, 12, 64, 197, 197)]


def test_heads_are_multiplied_where_they_lie(way: str) -> None:
    """Attention: batches and heads in two dims that are not neighbours in memory."""
    q, k = codes(2, 9, 3, 8), codes(2, 9, 3, 8, seed=1)
    q, k = Codes(q.values.transpose(1, 2), q.scale), Codes(k.values.permute(0, 2, 3, 1), k.scale)
    exact(products.matmul_forward(q, k), q.values.to(torch.int64) @ k.values.to(torch.int64), q, k)


# Convolutions


def _check_convolution(x: Codes, w: Codes, g: Codes, stride: Pair, padding: Pair, dilation: Pair) -> None:
    """In float64 sums of integers are exact, whatever the algorithm."""
    how = Geometry(stride, padding, dilation)
    xs, ws = (c.values.double().requires_grad_() for c in (x, w))
    out = F.conv2d(xs, ws, None, *how)
    out.backward(g.values.double())
    assert xs.grad is not None and ws.grad is not None
    exact(products.conv2d_forward(x, w, Options(geometry=how)), out.detach(), x, w)
    exact(products.conv2d_grad_input(g, w, Options(None, x.values.shape, how)), xs.grad, g, w)
    exact(products.conv2d_grad_weight(g, x, Options(None, w.values.shape, how)), ws.grad, g, x)
    bias = torch.randn(w.values.shape[0])
    with_bias = products.conv2d_forward(x, w, Options(bias, geometry=how))
    assert torch.equal(with_bias, products.conv2d_forward(x, w, Options(geometry=how)) + bias[:, None, None])


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_convolutions_of_any_shape(data: st.DataObject) -> None:
    draw: Callable[..., int] = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    kernel, stride, dilation = ((draw(1, top), draw(1, top)) for top in (4, 3, 2))
    padding = (draw(0, 4), draw(0, 4))
    size = [max(draw(1, 40), dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]) for i in (0, 1)]
    x, w = codes(draw(1, 3), draw(1, 9), *size), codes(draw(1, 14), 1, *kernel)
    w = codes(w.values.shape[0], x.values.shape[1], *kernel, seed=1)
    out = Geometry(stride, padding, dilation).output_size(size, kernel)
    g = codes(x.values.shape[0], w.values.shape[0], *out, seed=2)
    with fenced() if data.draw(st.booleans(), label="by kernel") else native.disabled():
        _check_convolution(x, w, g, stride, padding, dilation)


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "stride", "padding"),
    [
        ((2, 64, 28, 28), (16, 64, 1, 1), 1, 0),
        ((2, 16, 56, 56), (16, 16, 3, 3), 1, 1),
        ((2, 16, 56, 56), (32, 16, 3, 3), 2, 1),
        ((2, 16, 56, 56), (32, 16, 1, 1), 2, 0),
        ((1, 3, 64, 64), (16, 3, 7, 7), 2, 3),
        ((3, 300, 9, 9), (7, 300, 1, 1), 1, 0),
        ((1, 2, 1, 9000), (3, 2, 1, 5), 1, 2),
    ],
)
def test_convolutions_of_networks(
    way: str, x_shape: tuple[int, ...], w_shape: tuple[int, ...], stride: int, padding: int
) -> None:
    x, w = codes(*x_shape), codes(*w_shape, seed=1)
    pads = (0 if x_shape[2] == 1 else padding, padding)
    out = Geometry((stride, stride), pads).output_size(x_shape[2:], w_shape[2:])
    _check_convolution(x, w, codes(x_shape[0], w_shape[0], *out, seed=2), (stride, stride), pads, (1, 1))


@pytest.mark.parametrize("images", [1, 2, 5])
def test_convolution_of_sequences(way: str, images: int) -> None:
    """One row, of which a plane is as long as the sequence, while the result is shorter."""
    x, w, g = codes(images, 3, 1, 9), codes(6, 3, 1, 3, seed=1), codes(images, 6, 1, 7, seed=2)
    _check_convolution(x, w, g, (1, 1), (0, 0), (1, 1))


def test_convolution_whose_patches_are_a_view_of_the_image(way: str) -> None:
    """One image, one channel, a filter of one column: the rows of that view overlap."""
    x, w, g = codes(1, 1, 22, 66), codes(6, 1, 3, 1, seed=1), codes(1, 6, 26, 66, seed=2)
    _check_convolution(x, w, g, (1, 1), (3, 0), (1, 1))


def test_convolution_of_images_stored_by_channels_last(way: str) -> None:
    x, w = codes(2, 5, 8, 9), codes(4, 5, 3, 3, seed=1)
    last = Codes(x.values.contiguous(memory_format=torch.channels_last), x.scale)
    assert torch.equal(products.conv2d_forward(last, w), products.conv2d_forward(x, w))


def test_the_gradient_of_a_filter_may_sum_more_than_32_bits_hold(way: str) -> None:
    """2 x 300 x 300 products of the largest codes."""
    ends = Codes(torch.full((2, 1, 300, 300), 127, dtype=torch.int8), torch.tensor(1.0))
    result = products.conv2d_grad_weight(ends, ends, Options(shape=(1, 1, 1, 1)))
    assert result.item() == float(torch.tensor(float(2 * 300 * 300 * 127 * 127)))


def test_convolution_of_nothing(way: str) -> None:
    x, w = codes(0, 3, 5, 5), codes(4, 3, 3, 3)
    result = products.conv2d_forward(x, w)
    assert result.shape == (0, 4, 3, 3)
    assert not products.conv2d_grad_weight(codes(*result.shape), x, Options(shape=w.values.shape)).any()


# Scales


def test_scales_of_groups_that_factor_out() -> None:
    x = quantize_codes(torch.randn(6, 5), 8, SYMMETRIC._replace(keep=(0,)))
    w = quantize_codes(torch.randn(4, 5), 8, SYMMETRIC._replace(keep=(0,)))
    numbers = x.dequantized().double() @ w.dequantized().double().t()
    torch.testing.assert_close(products.linear_forward(x, w).double(), numbers, rtol=1e-5, atol=1e-6)


def test_scales_that_do_not_factor_out_are_refused() -> None:
    g, w = codes(6, 4), quantize_codes(torch.randn(4, 5), 8, SYMMETRIC._replace(keep=(0,)))
    with pytest.raises(ValueError, match=r"linear_grad_input sums over dims .* second operand"):
        products.linear_grad_input(g, w)


@pytest.mark.slow
def test_sums_are_exact_on_every_processor() -> None:
    """Without kernels: torch's product of int8 matrices loses what does not fit 16 bits where VNNI is missing."""
    code = """
import torch
from cpt_fx.integer.codes import Codes
from cpt_fx.integer.products import linear_forward
x, w = torch.full((8, 64), 127, dtype=torch.int8), torch.full((8, 64), -127, dtype=torch.int8)
print(int(linear_forward(Codes(x, torch.ones(())), Codes(w, torch.ones(()))).unique()))
"""
    processor = {"ONEDNN_MAX_CPU_ISA": "AVX2", "CPT_FX_NATIVE": "0"}
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | processor, capture_output=True, text=True)
    assert run.stdout.strip() == str(-64 * 127 * 127), run.stderr
