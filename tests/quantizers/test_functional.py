"""fake_quantize and quantize_gradient as functions: gradients, widths that pass, odd shapes, and bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cpt_fx.formats import Scheme
from cpt_fx.functional import fake_quantize, quantize_gradient

FORMATS: list[dict[str, Any]] = [
    {"scheme": "affine"},
    {"scheme": "affine_integer"},
    {"scheme": "symmetric"},
    {"scheme": "float", "exponent": 3},
    {"scheme": "float", "exponent": 2, "block": 4},
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def name(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values())


def quantized(x: Tensor, bits: int = 4, **options: Any) -> Tensor:
    return fake_quantize(x.detach(), bits, **options)


def gradient_of(function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf), leaf, upstream)
    return gradient


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("options", FORMATS, ids=name)
def test_gradients_pass_straight_through(options: dict[str, Any], rounding: str) -> None:
    x, upstream = torch.randn(5, 8), torch.randn(5, 8)
    gradient = gradient_of(lambda leaf: fake_quantize(leaf, 3, rounding=rounding, **options), x, upstream)
    assert torch.equal(gradient, upstream)


def test_clamped_values_keep_their_gradient() -> None:
    """No mask: the published straight-through passes everything, and the range gets nothing."""
    x, upstream = torch.randn(50), torch.randn(50)
    ends = torch.tensor(-0.125, requires_grad=True), torch.tensor(0.25, requires_grad=True)
    leaf = x.clone().requires_grad_()
    result = fake_quantize(leaf, 3, range=ends)
    assert float(result.detach().min()) == -0.125 and float(result.detach().max()) == 0.125
    result.backward(upstream)
    assert leaf.grad is not None and torch.equal(leaf.grad, upstream)
    assert ends[0].grad is None and ends[1].grad is None


@pytest.mark.parametrize("options", [*FORMATS, {"range": (-1.0, 2.0)}], ids=name)
def test_nothing_is_saved_for_backward(options: dict[str, Any]) -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(4, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fake_quantize(x, 3, **options)
        if "range" not in options:
            quantize_gradient(x, 3, **options)
        assert saved == []
        _ = x * x  # the hooks do see what other ops save
    assert len(saved) == 2


@pytest.mark.parametrize("options", FORMATS, ids=name)
def test_double_backward(options: dict[str, Any]) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = quantized(x, **options)
    (first,) = torch.autograd.grad(fake_quantize(x, 4, **options).pow(3).sum(), x, create_graph=True)
    assert torch.equal(first.detach(), 3 * y**2)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * y)


def test_double_backward_through_the_gradient_quantizer() -> None:
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    cube = quantize_gradient(x, 3, rounding="nearest").pow(3).sum()
    (first,) = torch.autograd.grad(cube, x, create_graph=True)
    assert torch.equal(first.detach(), quantized(3 * x**2, 3))
    # Backward of backward: 1 passes the quantizer straight through, then times 6 x goes through it once more.
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, quantized(6 * x, 3))


@pytest.mark.parametrize("options", FORMATS, ids=name)
@pytest.mark.parametrize("leaf", [True, False])
def test_only_what_flows_through_the_result_is_quantized(leaf: bool, options: dict[str, Any]) -> None:
    source = torch.randn(4, 8, requires_grad=True)
    x = source if leaf else source * 1
    one, two = torch.randn(4, 8), torch.randn(4, 8)
    result = quantize_gradient(x, 3, rounding="nearest", **options)
    assert torch.equal(result, x)
    ((result * one).sum() + (x * two).sum()).backward()
    assert source.grad is not None
    assert torch.equal(source.grad, quantized(one, 3, **options) + two)


@pytest.mark.parametrize("op", [quantize_gradient, torch.ops.cpt_fx.quantize_gradient.default])
def test_hooks_do_not_pile_up_on_leaves(op: Callable[..., Tensor]) -> None:
    """Two bits of a quantized gradient of four bits are not two bits of the gradient."""
    leaf = torch.randn(30, requires_grad=True)
    upstream = torch.randn(30)
    for bits in (4, 3, 2):
        (gradient,) = torch.autograd.grad(op(leaf, torch.tensor(bits), rounding="nearest"), leaf, upstream)
        assert torch.equal(gradient, quantized(upstream, bits))
    assert len(leaf._backward_hooks or ()) == 0
    (gradient,) = torch.autograd.grad(leaf.sum(), leaf)
    assert torch.equal(gradient, torch.ones(30))


def test_inplace_on_the_result_leaves_x_alone() -> None:
    x = torch.zeros(4)
    for result in (quantize_gradient(x, 3), fake_quantize(x, 32), fake_quantize(x, 3)):
        result.add_(1)
        assert not x.any()
    tracked = torch.zeros(4, requires_grad=True)
    quantize_gradient(tracked, 3).add_(1)
    assert not tracked.detach().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, 32])
def test_full_precision_is_the_identity_bit_for_bit(dtype: torch.dtype, width: int) -> None:
    special = [0.0, -0.0, math.nan, math.inf, -math.inf, 1e-42, 65504.0, 0.1]
    x = torch.cat((torch.tensor(special), torch.randn(50))).to(dtype)
    raw = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    for options in FORMATS:
        for bits in (width, torch.tensor(width), torch.tensor(width, dtype=torch.int32)):
            result = fake_quantize(x, bits, **options)
            assert torch.equal(result.view(raw), x.view(raw))
            leaf = torch.zeros_like(x, requires_grad=True)
            (gradient,) = torch.autograd.grad(quantize_gradient(leaf, bits, **options), leaf, x)
            assert torch.equal(gradient.view(raw), x.view(raw))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
@pytest.mark.parametrize("options", FORMATS, ids=name)
def test_bits_as_int_or_tensor(options: dict[str, Any], dtype: torch.dtype) -> None:
    x = torch.randn(5, 8)
    for bits in (2, 5, 8, 16):
        assert torch.equal(fake_quantize(x, torch.tensor(bits, dtype=dtype), **options), quantized(x, bits, **options))


def test_bits_are_read_when_the_gradient_arrives() -> None:
    """The node holds the tensor, not its value: a schedule may have moved on."""
    bits, upstream = torch.tensor(2), torch.randn(20)
    x = torch.zeros(20, requires_grad=True)
    result = quantize_gradient(x, bits, rounding="nearest")
    bits.fill_(8)
    result.backward(upstream)
    assert x.grad is not None and torch.equal(x.grad, quantized(upstream, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", FORMATS, ids=name)
def test_empty_and_0_dim_tensors(options: dict[str, Any], dtype: torch.dtype) -> None:
    for shape in ((0,), (0, 3), (3, 0), (2, 0, 4)):
        empty = torch.empty(shape, dtype=dtype, requires_grad=True)
        result = fake_quantize(empty, 4, keep=(0,), **options)
        assert (result.shape, result.dtype) == (shape, dtype)
        quantize_gradient(result, 4, **options).sum().backward()
        assert empty.grad is not None and empty.grad.shape == shape
    for value in (0.0, 1.5, -3.0):
        x = torch.tensor(value, dtype=dtype)
        result = fake_quantize(x, 4, **options)
        assert result.shape == () and result.dtype == dtype
        assert gradient_of(lambda leaf: quantize_gradient(leaf, 4, **options), x, x).shape == ()
        if options["scheme"] in ("affine", "symmetric"):
            # An affine group of one is its own zero point. Elsewhere it is the end of the grid: an ulp or two.
            torch.testing.assert_close(result, x, rtol=0 if options["scheme"] == "affine" else 3e-7, atol=0)


def test_every_dim_kept() -> None:
    x = torch.randn(3, 4)
    assert torch.equal(fake_quantize(x, 2, keep=(0, 1)), x)
    assert torch.equal(fake_quantize(x, 2, over=()), x)
    torch.testing.assert_close(fake_quantize(x, 2, keep=(0, 1), scheme="symmetric"), x, rtol=3e-7, atol=0)


def test_no_grad_and_inference_mode() -> None:
    x = torch.randn(4, 5, requires_grad=True)
    expected = quantized(x)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(fake_quantize(x, 4), expected)
            assert torch.equal(quantize_gradient(x, 4), x)
            assert not fake_quantize(x, 4).requires_grad and not quantize_gradient(x, 4).requires_grad
    assert fake_quantize(x, 4).requires_grad and quantize_gradient(x, 4).requires_grad


@pytest.mark.parametrize("options", FORMATS, ids=name)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_torch_func(options: dict[str, Any]) -> None:
    x, weight = torch.randn(3, 8), torch.randn(3, 8)

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return (fake_quantize(x, 4, **options) * weight).sum()

    def backward(x: Tensor, weight: Tensor) -> Tensor:
        return (quantize_gradient(x, 4, rounding="nearest", **options) * weight).sum()

    rows = quantized(x, keep=(0,), **options)
    assert torch.equal(torch.func.vmap(lambda row: fake_quantize(row, 4, **options))(x), rows)
    assert torch.equal(torch.func.grad(loss)(x, weight), weight)
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(x, weight), weight)
    assert torch.equal(torch.func.grad(backward)(x, weight), quantized(weight, **options))
    per_row = quantized(weight, keep=(0,), **options)
    assert torch.equal(torch.func.vmap(torch.func.grad(backward))(x, weight), per_row)
    output, tangent, *_ = torch.func.jvp(lambda x: fake_quantize(x, 4, **options), (x,), (weight,))
    assert torch.equal(output, quantized(x, **options)) and torch.equal(tangent, weight)
    assert torch.equal(torch.func.jacrev(lambda v: fake_quantize(v, 4, **options))(x[0]), torch.eye(8))
    assert torch.equal(
        torch.func.hessian(lambda v: fake_quantize(v, 4, **options).square().sum())(x[0]), 2 * torch.eye(8)
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_gradient_quantizer_inside_vmap_has_a_range_for_each_sample() -> None:
    x, weight = torch.randn(3, 8), torch.randn(3, 8)
    rows = torch.stack([fake_quantize(row, 4) for row in weight])

    def loss(x: Tensor) -> Tensor:
        made: Tensor = torch.func.vmap(lambda row: quantize_gradient(row, 4, rounding="nearest"))(x)
        return (made * weight).sum()

    assert torch.equal(torch.func.grad(loss)(x), rows)
    loss(x.requires_grad_()).backward()
    assert x.grad is not None and torch.equal(x.grad, rows)


def test_vmap_draws_as_asked() -> None:
    x = torch.rand(1, 40).expand(2, 40)
    with pytest.warns(UserWarning, match="performance drop"):
        draws = torch.func.vmap(lambda row: fake_quantize(row, 2, rounding="stochastic"), randomness="different")(x)
    assert not torch.equal(draws[0], draws[1])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = fake_quantize(self.linear.weight, 4, keep=(0,))
        return quantize_gradient(nn.functional.linear(x, weight, self.linear.bias), 4, rounding="nearest")


def test_functional_call() -> None:
    net, x = Net(), torch.randn(2, 5)
    parameters = {key: value.detach() * 2 for key, value in net.named_parameters()}
    result = torch.func.functional_call(net, parameters, (x,))
    expected = nn.functional.linear(x, quantized(parameters["linear.weight"], keep=(0,)), parameters["linear.bias"])
    assert torch.equal(result, expected)
    gradients = torch.func.grad(lambda p: torch.func.functional_call(net, p, (x,)).square().sum())(parameters)
    assert torch.equal(gradients["linear.bias"], quantized(2 * expected).sum(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_quantizers_alone(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5)
    with torch.autocast("cpu", dtype=dtype):
        for options in FORMATS:
            assert torch.equal(fake_quantize(x, 4, **options), quantized(x, **options))
        product = quantize_gradient(fake_quantize(x, 4) @ x.t(), 4)
        assert product.dtype == dtype and fake_quantize(product, 4).dtype == dtype


@pytest.mark.parametrize("quantize", [fake_quantize, quantize_gradient])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((torch.ones(3, dtype=torch.int32), 4), {}, TypeError, "only floating point tensors .*, got torch.int32"),
        ((torch.ones(3), 33), {}, ValueError, "bits must be between 0 and 32, got 33"),
        ((torch.ones(3), -1), {}, ValueError, "bits must be between 0 and 32, got -1"),
        ((torch.ones(3), 4.0), {}, TypeError, "bits must be an int or a 0-dim tensor, got 4.0"),
        ((torch.ones(3), True), {}, TypeError, "got True"),
        ((torch.ones(3), "8"), {}, TypeError, "got '8'"),
        ((torch.ones(3), torch.ones(2)), {}, ValueError, r"got a tensor of shape \(2,\)"),
        ((torch.ones(3), 4), {"keep": (1,)}, ValueError, "keep names dim 1, but the tensor has 1 dims"),
        ((torch.ones(3), 4), {"keep": (-2,)}, ValueError, "keep names dim -2"),
        ((torch.ones(3), 4), {"over": (1,)}, ValueError, "over names dim 1, but the tensor has 1 dims"),
        ((torch.ones(3), 4), {"keep": (0,), "over": (0,)}, ValueError, "give keep= or over=, not both"),
        ((torch.ones(3), 4), {"scheme": "afine"}, ValueError, 'scheme must be one of .*Did you mean "affine"'),
        ((torch.ones(3), 4), {"rounding": "stochastik"}, ValueError, 'Did you mean "stochastic"'),
        ((torch.ones(3), 4), {"scheme": "float"}, ValueError, "needs exponent between 1 and 8, got 0"),
        ((torch.ones(3), 4), {"scheme": "float", "exponent": 9}, ValueError, "got 9"),
        ((torch.ones(3), 4), {"exponent": 2}, ValueError, "exponent belongs to scheme='float'"),
        ((torch.ones(3), 4), {"block": -1}, ValueError, "block must be 0"),
        ((torch.ones(3), 1), {"scheme": "float", "exponent": 2}, ValueError, "needs at least 2 bits, got 1"),
        ((torch.ones(3), np.int64(1)), {"scheme": "float", "exponent": 2}, ValueError, "needs at least 2 bits, got 1"),
        ((torch.ones(3), 4), {"scheme": "float", "exponent": 2, "specials": "fnu"}, ValueError, 'Did you mean "fn"'),
    ],
)  # fmt: skip
def test_bad_input(
    quantize: Any, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantize(*arguments, **options)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (3.0, {}, TypeError, r"range must be a pair \(zero_point, range\), got 3.0"),
        ((1.0, 2.0, 3.0), {}, TypeError, "range must be a pair"),
        ((0.0, 1.0), {"block": 2}, ValueError, "range= cannot be combined with block=2"),
        ((torch.zeros(1, 3), 1.0), {}, ValueError, r"range must broadcast to the shape \(3,\) of x, got \(1, 3\)"),
        ((0.0, torch.ones(2)), {}, ValueError, r"got \(2,\)"),
    ],
)
def test_bad_range(given: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fake_quantize(torch.ones(3), 4, range=given, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_range(dtype: torch.dtype) -> None:
    x = torch.tensor([[-9.0, 0.4, 1.0], [0.0, 2.6, 9.0]], dtype=dtype)
    assert fake_quantize(x, 2, range=(0, 3)).tolist() == [[0, 0, 1], [0, 3, 3]]
    low = torch.tensor([[-3], [0]], dtype=torch.float16)
    assert fake_quantize(x, 2, range=(low, 3)).tolist() == [[-3, 0, 0], [0, 3, 3]]
    assert fake_quantize(x, 2, range=(-3.0, 3.0), scheme="symmetric").tolist() == [[-3, 0, 0], [0, 3, 3]]


def test_a_given_range_clamps_what_is_not_finite() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    for options in FORMATS[:4]:
        result = fake_quantize(x, 8, range=(-2.0, 4.0), **options)
        assert bool(result[:2].isfinite().all()) and result[0] > 0 > result[1] and bool(result[2].isnan())
        assert abs(float(result[3]) - 1) < 0.05


def test_the_public_defaults_are_the_published_quantizer() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(
        fake_quantize(x, 3), fake_quantize(x, 3, scheme=Scheme.AFFINE.value, keep=(), rounding="nearest")
    )
    spread = gradient_of(lambda leaf: quantize_gradient(leaf, 3), torch.zeros(4, 6), x)
    step = (x.max() - x.min()) / 7
    assert not torch.equal(spread, quantized(x, 3))
    assert bool(((spread - x).abs() < step * (1 + 1e-5)).all())


@pytest.mark.parametrize("bits", [torch.tensor(4.5), torch.tensor(-1), torch.tensor(True)])
def test_a_width_tensor_holds_a_whole_number(bits: Tensor) -> None:
    with pytest.raises(ValueError, match="bits must hold a whole number that is not negative"):
        fake_quantize(torch.randn(4), bits)


def test_widths_beyond_full_precision_are_the_identity() -> None:
    x = torch.randn(8)
    assert torch.equal(fake_quantize(x, torch.tensor(40)), x)


@pytest.mark.parametrize(("keep", "error", "message"), [
    ((0, -2), ValueError, "keep names a dim twice"),
    (0, TypeError, r"keep must be a sequence of dims such as \(0,\), got 0"),
    ((2,), ValueError, "keep names dim 2"),
])  # fmt: skip
def test_keep_is_checked(keep: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fake_quantize(torch.randn(3, 4), 4, keep=keep)


def test_only_tensors_are_quantized() -> None:
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        fake_quantize([1.0, 2.0], 4)  # type: ignore[arg-type]
