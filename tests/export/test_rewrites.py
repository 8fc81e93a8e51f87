"""Rewrites of operators, run in PyTorch: numbers and gradients of the operator itself, also where values are equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from cpt_fx import noise
from cpt_fx.export import rewriting
from cpt_fx.export.functions import SCATTER_ADD, STOP, UNIFORM, WITH_GRADIENT_OF
from cpt_fx.export.rewrites import REWRITES

aten = torch.ops.aten
INFINITY = float("inf")


class _Valued(torch.autograd.Function):
    """A value with the gradient of another tensor: what the ONNX function of that name says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Seeds:
    def seed(self) -> tuple[Tensor, Tensor]:
        return torch.tensor([[7, -11]], dtype=torch.int32), torch.tensor([0])


def _call(name: str, inputs: tuple[Any, ...], like: Tensor, **attributes: Any) -> Tensor:
    """Run a function of our domain in PyTorch."""
    if name == STOP:
        x: Tensor = inputs[0]
        return x.detach()
    if name == WITH_GRADIENT_OF:
        assert inputs[0].shape == inputs[1].shape
        return _Valued.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    if name == SCATTER_ADD:
        return torch.scatter_add(torch.zeros_like(inputs[2]), -1, inputs[1], inputs[0])
    assert name == UNIFORM
    return noise.uniform(inputs[1][int(inputs[2])], inputs[0])


@pytest.fixture(autouse=True)
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "call", _call)


def _values(*shape: int) -> Tensor:
    """Return numbers of a coarse grid around 0: many are equal, some are 0 or on a bound."""
    made = torch.randint(-6, 7, shape, generator=torch.Generator().manual_seed(3)) / 4
    return made.requires_grad_()


def _compare(target: Any, *args: Any, **kwargs: Any) -> None:
    results = []
    for function in (target, lambda *given, **named: REWRITES[target](_Seeds(), *given, **named)):
        leaves: list[Tensor] = []

        def leaf(value: Any, leaves: list[Tensor] = leaves) -> Any:
            if isinstance(value, Tensor) and value.requires_grad:
                leaves.append(value.detach().clone().requires_grad_())
                return leaves[-1]
            return value

        made = function(*map(leaf, args), **{name: leaf(value) for name, value in kwargs.items()})
        made = list(made) if isinstance(made, (tuple, list)) else [made]
        values = [part for part in made if isinstance(part, Tensor) and part.is_floating_point()]
        weights = [torch.cos(torch.arange(part.numel(), dtype=part.dtype)).reshape(part.shape) for part in values]
        loss = sum((part * weight).sum() for part, weight in zip(values, weights, strict=True))
        assert isinstance(loss, Tensor)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append(([part.detach() for part in values], gradients))
    (values, gradients), (found, found_gradients) = results
    for expected, actual in (*zip(values, found, strict=True), *zip(gradients, found_gradients, strict=True)):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6, equal_nan=True)


UNARY = (
    "tan", "atan", "sinh", "cosh", "asinh", "erfc", "expm1", "exp2", "abs", "floor", "ceil", "round", "trunc", "sign",
    "frac", "selu", "celu", "elu", "softplus", "mish", "hardsigmoid", "hardswish", "hardtanh", "relu6", "hardshrink",
    "softshrink",
)  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_unary_operators_have_torchs_gradient_at_zero_and_at_bounds(name: str) -> None:
    x = torch.cat([_values(40).detach(), torch.tensor([-3.0, 3.0, 6.0, 0.5, -0.5, 1.0, -1.0])]).requires_grad_()
    _compare(getattr(aten, name).default, x)


@pytest.mark.parametrize("name", ["asin", "acos", "atanh"])
def test_inverse_functions_inside_their_domain(name: str) -> None:
    _compare(getattr(aten, name).default, (_values(40).detach() / 2).requires_grad_())


def test_acosh_above_one() -> None:
    _compare(aten.acosh.default, (_values(40).detach().abs() + 1.5).requires_grad_())


BINARY: list[tuple[Any, ...]] = [
    (aten.maximum.default,), (aten.minimum.default,), (aten.max.other,), (aten.min.other,), (aten.fmax.default,),
    (aten.fmin.default,), (aten.logaddexp.default,),
]  # fmt: skip


@pytest.mark.parametrize("target", [target for (target, *_) in BINARY], ids=str)
def test_of_two_tensors_with_equal_elements_and_repeated_ones(target: Any) -> None:
    _compare(target, _values(5, 40), _values(40).detach().roll(1).requires_grad_())


@pytest.mark.parametrize(
    "target", [aten.remainder.Tensor, aten.fmod.Tensor, aten.atan2.default, aten.hypot.default], ids=str
)
def test_of_two_tensors_apart_from_zero(target: Any) -> None:
    _compare(
        target, (_values(40).detach() + 0.1).requires_grad_(), (_values(40).detach().roll(1) + 0.3).requires_grad_()
    )


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_whole_quotients_have_zero_gradients_not_none(mode: str) -> None:
    divisor = (_values(40).detach() + 0.3).requires_grad_()
    _compare(aten.div.Tensor_mode, _values(40), divisor, rounding_mode=mode)


def test_products_with_logarithms_and_sinc() -> None:
    positive = (_values(40).detach().roll(1).abs() + 0.5).requires_grad_()
    _compare(aten.xlogy.Tensor, _values(40), positive)
    _compare(aten.sinc.default, _values(40))
    _compare(aten.lerp.Tensor, _values(40), positive, _values(40).detach().roll(5).requires_grad_())


def test_powers() -> None:
    base = (_values(60).detach().abs() + 0.25).requires_grad_()
    _compare(aten.pow.Tensor_Tensor, base, _values(60).detach().roll(7).requires_grad_())
    _compare(aten.pow.Scalar, 1.7, _values(60))
    for exponent in (0.5, -1.5, 4, 0):
        _compare(aten.pow.Tensor_Scalar, base, exponent)
    whole = torch.full((60,), 2.0)
    _compare(aten.pow.Tensor_Tensor, _values(60), whole)


@pytest.mark.parametrize(
    "bounds",
    [(-0.5, 0.5), (None, 0.25), (0.0, None), ("low", "high"), ("low", None), (None, "high"), ("high", "low")],
    ids=str,
)
def test_clamp_at_and_between_bounds_also_crossed_ones(bounds: tuple[Any, Any]) -> None:
    named = {
        "low": _values(40).detach().roll(3).requires_grad_(),
        "high": _values(40).detach().roll(9).requires_grad_(),
    }
    given = [named.get(bound, bound) if isinstance(bound, str) else bound for bound in bounds]
    target = aten.clamp.Tensor if any(isinstance(bound, Tensor) for bound in given) else aten.clamp.default
    _compare(target, _values(40), *given)


REDUCTIONS: list[tuple[Any, ...]] = [
    (aten.amax.default, [1]), (aten.amax.default, [1, 2], True), (aten.amin.default, [0]), (aten.amax.default,),
    (aten.max.default,), (aten.min.default,), (aten.max.dim, 1), (aten.min.dim, 2, True), (aten.prod.dim_int, 1),
    (aten.prod.dim_int, 2, True), (aten.prod.default,), (aten.cumsum.default, 1), (aten.cumprod.default, 2),
    (aten.logcumsumexp.default, 1), (aten.linalg_vector_norm.default, 2.0, [1]),
    (aten.linalg_vector_norm.default, 1.0, [1], True), (aten.linalg_vector_norm.default, 3.0, [0, 2]),
    (aten.linalg_vector_norm.default, INFINITY, [1]), (aten.linalg_vector_norm.default, -INFINITY, [1]),
]  # fmt: skip


@pytest.mark.parametrize("call", REDUCTIONS, ids=lambda call: f"{call[0]}{call[1:]}")
def test_reductions_share_gradients_between_equal_elements_as_torch_does(call: tuple[Any, ...]) -> None:
    target, *options = call
    _compare(target, _values(3, 5, 7), *options)
    _compare(target, torch.zeros(2, 3, 4).requires_grad_(), *options)


@pytest.mark.parametrize("call", [(aten.sort.default, 1), (aten.topk.default, 2, 1), (aten.kthvalue.default, 2, 1),
                                  (aten.median.dim, 1), (aten.median.default,)], ids=str)  # fmt: skip
def test_sorting_sends_gradients_back(call: tuple[Any, ...]) -> None:
    target, *options = call
    _compare(target, torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).requires_grad_(), *options)


POOLED: list[tuple[Any, ...]] = [
    (aten.avg_pool2d.default, [3, 2], [2, 1], [1, 0], True),
    (aten.avg_pool2d.default, [3, 3], [2, 2], [1, 1], True, False),
    (aten.avg_pool2d.default, [2, 2], [2, 2], [0, 0], False, True, 3), (aten.avg_pool1d.default, [3], [2], [1], True),
    (aten.adaptive_avg_pool2d.default, [3, 5]), (aten.adaptive_avg_pool2d.default, [1, 1]),
    (aten.adaptive_max_pool2d.default, [3, 5]), (aten.pixel_unshuffle.default, 1), (aten.flip.default, [1, 3]),
    (aten.pad.default, [2, 1, 0, 2], "reflect"), (aten.pad.default, [2, 1, 0, 2], "replicate"),
    (aten.pad.default, [2, 1, 0, 2], "circular"), (aten.roll.default, [2, -1], [2, 3]), (aten.roll.default, [3]),
]  # fmt: skip


@pytest.mark.parametrize("call", POOLED, ids=lambda call: f"{call[0]}{call[1:]}")
def test_pooling_padding_and_moving(call: tuple[Any, ...]) -> None:
    target, *options = call
    x = torch.randn(2, 3, 8, 7, generator=torch.Generator().manual_seed(0))
    _compare(target, (x[0] if target is aten.avg_pool1d.default else x).requires_grad_(), *options)


RESIZED: list[tuple[Any, ...]] = [
    (aten.upsample_nearest2d.vec, [7, 11], None), (aten.upsample_nearest2d.vec, None, [1.7, 2.3]),
    (aten.upsample_bilinear2d.vec, [7, 3], False, None), (aten.upsample_bilinear2d.vec, None, True, [1.7, 2.3]),
    (aten.upsample_bicubic2d.vec, [9, 3], False, None), (aten._upsample_nearest_exact2d.vec, [7, 3], None),
    (aten._upsample_bilinear2d_aa.vec, [3, 2], False, None),
    (aten.upsample_bilinear2d.default, [7, 8], False, 1.75, 2.0),
]  # fmt: skip


@pytest.mark.parametrize("call", RESIZED, ids=lambda call: f"{call[0]}{call[1:]}")
def test_resizing_is_the_same_linear_map(call: tuple[Any, ...]) -> None:
    target, *options = call
    _compare(target, torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(), *options)


TRANSPOSED: list[tuple[Any, ...]] = [
    ((4, 6, 3), aten.conv_transpose1d.default, [2], [1], [1], 1, [1]),
    ((4, 3, 3, 2), aten.conv_transpose2d.input, [2, 3], [1, 0], [0, 1], 2, [2, 1]),
    ((4, 3, 2, 2, 3), aten.conv_transpose3d.input, [1, 2, 2], [0, 1, 2], [0, 0, 1], 2, [1, 1, 2]),
]  # fmt: skip


@pytest.mark.parametrize("call", TRANSPOSED, ids=lambda call: f"{call[1]}{call[2:]}")
def test_transposed_convolutions(call: tuple[Any, ...]) -> None:
    shape, target, *options = call
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 4, *(5,) * (len(shape) - 2), generator=generator).requires_grad_()
    weight = torch.randn(shape, generator=generator).requires_grad_()
    bias = torch.randn(shape[1] * options[3], generator=generator).requires_grad_()
    _compare(target, x, weight, bias, *options)


def test_grouped_convolutions_in_three_dims() -> None:
    x, weight = torch.randn(2, 4, 5, 5, 5).requires_grad_(), torch.randn(6, 2, 3, 3, 3).requires_grad_()
    _compare(aten.conv3d.default, x, weight, torch.randn(6).requires_grad_(), [2, 1, 2], [1, 1, 0], [1, 1, 1], 2)


EQUATIONS = (
    ("bij,bkj->bik", (2, 3, 4), (2, 5, 4)), ("bqhd,bkhd->bhqk", (2, 3, 2, 4), (2, 5, 2, 4)),
    ("bi,bj,bk->bijk", (2, 3), (2, 4), (2, 5)), ("ii->", (3, 3)), ("bii->b", (2, 3, 3)),
    ("ij,jk,kl->il", (2, 3), (3, 4), (4, 5)),
    ("...ij,...jk->...ik", (2, 3, 4), (2, 4, 5)), ("ij,ij", (2, 3), (2, 3)), ("i,j->ij", (2,), (3,)),
    ("ba,cb", (2, 3), (4, 2)),
    ("bij->bj", (2, 3, 4)), ("i,i->", (3,), (3,)), ("bik,ij->bjk", (2, 3, 4), (3, 5)),
)  # fmt: skip


@pytest.mark.parametrize("call", EQUATIONS, ids=lambda call: str(call[0]))
def test_einsum(call: tuple[Any, ...]) -> None:
    equation, *shapes = call
    leaves = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_() for shape in shapes]
    expected = torch.einsum(equation, *leaves)
    found = REWRITES[aten.einsum.default](_Seeds(), equation, leaves)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.cos().sum(), leaves), torch.autograd.grad(expected.cos().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "shapes", [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((4, 2, 3), (3,)), ((3,), (4, 3, 2))], ids=str
)
def test_products_of_vectors(shapes: tuple[tuple[int, ...], ...]) -> None:
    _compare(aten.matmul.default, *(torch.randn(shape).requires_grad_() for shape in shapes))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(reduction: int, smoothing: float, weighted: bool) -> None:
    logits = _values(8, 3)
    weight = torch.tensor([0.2, 1.0, 3.0]) if weighted else None
    target = torch.tensor([0, 1, -100, 2, 1, 1, -100, 0])
    _compare(aten.cross_entropy_loss.default, logits, target, weight, reduction, -100, smoothing)
    _compare(aten.cross_entropy_loss.default, logits, logits.detach().softmax(1), weight, reduction, -100, smoothing)
    maps = _values(2, 3, 4)
    _compare(aten.cross_entropy_loss.default, maps, target.reshape(2, 4), weight, reduction, -100, smoothing)


@pytest.mark.parametrize(
    "target", [aten.huber_loss.default, aten.smooth_l1_loss.default, aten.l1_loss.default], ids=str
)
def test_losses_at_their_corners(target: Any) -> None:
    options = () if target is aten.l1_loss.default else (0.5,)
    _compare(target, _values(40), _values(40).detach().roll(1).requires_grad_(), 1, *options)


def test_binary_cross_entropies() -> None:
    labels = torch.arange(40.0) % 2
    probabilities = torch.cat([_values(38).detach().sigmoid(), torch.tensor([0.0, 1.0])]).requires_grad_()
    _compare(aten.binary_cross_entropy.default, probabilities, labels)
    weight = torch.rand(40)
    _compare(aten.binary_cross_entropy_with_logits.default, _values(40), labels, weight, 2 * weight)
    far = torch.tensor([-200.0, 200.0, 0.0]).requires_grad_()
    _compare(aten.binary_cross_entropy_with_logits.default, far, torch.tensor([1.0, 0.0, 0.5]))


def test_scattering() -> None:
    x, parts, index = (
        _values(4, 5),
        torch.randn(3, 5).requires_grad_(),
        torch.tensor([[0, 3, 3, 1, 0], [2, 3, 0, 1, 1], [0] * 5]),
    )
    _compare(aten.scatter_add.default, x, 0, index, parts)
    _compare(aten.scatter_reduce.two, x, 0, index, parts, "sum", include_self=False)
    _compare(aten.index_add.default, x, 0, torch.tensor([1, 1, 3]), parts, alpha=0.5)
    _compare(aten.index_put.default, x, [None, torch.tensor([1, 1, 3, 0])], torch.randn(4, 4).requires_grad_(), True)


def test_padding_row_of_an_embedding_learns_nothing() -> None:
    _compare(aten.embedding.default, _values(7, 5), torch.tensor([[0, 2, 2], [3, 2, 6]]), 2)


def test_normalization_without_weights() -> None:
    x = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    _compare(aten.layer_norm.default, x, [3, 3])
    _compare(aten.group_norm.default, x, 2, torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_())
    _compare(aten.instance_norm.default, x, None, None, None, None, True, 0.1, 1e-5, False)
