"""Attention, decomposed: the numbers of the fused operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from cpt_fx.ir.meta import QUANTIZER
from cpt_fx.ir.module import QuantizedGraphModule
from cpt_fx.operators import why_left
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import paper
from cpt_fx.schedules import Bits, Static
from tests.decompose.fused_graphs import GraphMaker, assert_close, decomposed, multi_head, results

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "negative scale": {"scale": -0.3},
    "no scale": {"scale": 0.0},
    "dropout": {"dropout_p": 0.4},
    "causal dropout": {"is_causal": True, "dropout_p": 0.2},
}


def attention(masked: bool = False, **options: Any) -> QuantizedGraphModule:
    make = GraphMaker()
    q, k, v = make.inputs("q", "k", "v")
    given: dict[str, Any] = {"attn_mask": make.inputs("mask")[0]} if masked else {}
    return make.finish(make.call(F.scaled_dot_product_attention, q, k, v, **given, **options))


def heads(length: int = 5, source: int = 5, *, batch: tuple[int, ...] = (2, 4), width: int = 6) -> list[Tensor]:
    return [torch.randn(*batch, size, width) for size in (length, source, source)]


def compare(plain: QuantizedGraphModule, *inputs: Tensor, tolerance: float = 1e-5) -> None:
    ours = decomposed(plain)
    assert not any(why_left(node.target) for node in ours.graph.nodes)
    assert_close(results(ours, *inputs), results(plain, *inputs), tolerance)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(5, 5), (3, 7), (7, 3), (1, 1)], ids=str)
def test_the_numbers_are_those_of_the_fused_operator(case: str, shape: tuple[int, int]) -> None:
    compare(attention(**CASES[case]), *heads(*shape))


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_the_math_kernel_to_the_bit(case: str) -> None:
    inputs = heads(4, 6)
    with sdpa_kernel(SDPBackend.MATH):
        plain = attention(**CASES[case])
        for mine, other in zip(results(decomposed(plain), *inputs), results(plain, *inputs), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dims", [(3, 7), (1, 3, 7), (2, 1, 3, 7), (2, 4, 3, 7), (1, 1, 1, 7), (4, 3, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_broadcast(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    mask = torch.randn(dims)
    mask = mask > -0.5 if dtype is torch.bool else mask
    compare(attention(masked=True), *heads(3, 7), mask)
    compare(attention(masked=True, dropout_p=0.3), *heads(3, 7), mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_rows_that_attend_to_nothing_are_zero(dtype: torch.dtype) -> None:
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1] = False
    if dtype is not torch.bool:
        mask = torch.zeros(3, 7).masked_fill(~mask, -torch.inf)
    inputs = [*heads(3, 7), mask]
    if dtype is not torch.bool:
        # The gradient of an added -inf is not a number anyone asks for.
        inputs[3].requires_grad_(False)
    plain = attention(masked=True)
    got = [y for y in results(decomposed(plain), *inputs[:3], mask)[:4]]
    assert_close(got, results(plain, *inputs[:3], mask)[:4])
    assert not got[0][..., 1, :].any()
    assert all(value.isfinite().all() for value in got)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_query_attention(groups: int) -> None:
    q, _, _ = heads(3, 7)
    k, v = torch.randn(2, groups, 7, 6), torch.randn(2, groups, 7, 6)
    compare(attention(enable_gqa=True), q, k, v)
    compare(attention(enable_gqa=True, is_causal=True, dropout_p=0.2), q, k, v)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3, 4)], ids=str)
def test_any_rank(batch: tuple[int, ...]) -> None:
    compare(attention(is_causal=True), *heads(batch=batch))


def test_values_may_be_wider_than_keys() -> None:
    q, k, _ = heads(3, 7)
    compare(attention(), q, k, torch.randn(2, 4, 7, 9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    compare(attention(is_causal=True), *(x.to(dtype) for x in heads()), tolerance=tolerance)


def test_half_precision_does_not_overflow() -> None:
    inputs = [(60 * torch.ones_like(x)).to(torch.float16) for x in heads(width=64)]
    assert decomposed(attention())(*inputs).isfinite().all()


def test_a_mask_and_a_causal_one_are_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="not both"):
        decomposed(attention(masked=True, is_causal=True))(*heads(), torch.ones(5, 5, dtype=torch.bool))


def test_flags_that_are_known_at_run_time_only() -> None:
    """Symbolic graphs read the mode of a module when they run."""
    make = GraphMaker()
    q, k, v, p = make.inputs("q", "k", "v", "p")
    module = make.finish(make.call(F.scaled_dot_product_attention, q, k, v, None, p))
    ours = decomposed(module)
    inputs = heads()
    for probability in (0.0, 0.5):
        found = []
        for graph in (ours, module):
            torch.manual_seed(0)
            found.append(graph(*inputs, probability))
        assert_close(*([one] for one in found))  # type: ignore[arg-type]


def test_a_symbolic_graph_is_opened() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).transpose(1, 3).unbind(2)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Model()
    module = fx.symbolic_trace(copy.deepcopy(model))
    reports = Pipeline.standard(recipe=paper(), schedule=Static(Bits(4, 4, 8))).run(module)
    assert reports[1].notes == (
        "(root): scaled_dot_product_attention decomposed into 2 products: equal to float rounding",
    )
    assert [item for report in reports for item in report.uncovered] == []
    quantizers = {node.name for node in module.graph.nodes if QUANTIZER in node.meta}
    assert {"scores_input_q", "scores_other_q", "scores_gradient_q", "context_input_q", "context_other_q",
            "context_gradient_q"} <= quantizers  # fmt: skip
    for length in (3, 9):
        assert module(torch.randn(2, length, 8)).shape == (2, 2, length, 4)


# Multi-head attention.

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "bias_k, bias_v": {"add_bias_kv": True},
    "add_zero_attn": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "dropout": {"dropout": 0.3},
    "other widths": {"kdim": 5, "vdim": 7},
    "other widths, no bias": {"kdim": 5, "vdim": 7, "bias": False},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "no weights": {"need_weights": False},
    "average weights": {},
    "weights per head": {"average_attn_weights": False},
}


def layer_of(name: str) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(8, 2, **LAYERS[name])
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def sources(layer: nn.MultiheadAttention, batch: tuple[int, ...] = (3,)) -> list[Tensor]:
    return [torch.randn(4, *batch, 8), torch.randn(6, *batch, layer.kdim), torch.randn(6, *batch, layer.vdim)]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", LAYERS)
def test_multi_head_attention(name: str, weights: str) -> None:
    layer = layer_of(name)
    compare(multi_head(layer, same=False, **WEIGHTS[weights]), *sources(layer))
    compare(multi_head(layer, same=False, **WEIGHTS[weights]), *sources(layer, ()))
    if layer._qkv_same_embed_dim:
        compare(multi_head(layer, **WEIGHTS[weights]), torch.randn(4, 3, 8))
        compare(multi_head(layer.eval(), **WEIGHTS[weights]), torch.randn(4, 3, 8))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("name", ["plain", "both", "dropout"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_its_masks(name: str, weights: str, dtype: torch.dtype) -> None:
    layer = layer_of(name)

    def mask(*shape: int) -> Tensor:
        made = torch.randn(shape)
        if dtype is torch.float32:
            return made
        return (made > 0.3).index_fill(-1, torch.tensor([0]), False)

    for shape in ((4, 6), (6, 4, 6)):
        compare(multi_head(layer, same=False, masks=("attn_mask",), **WEIGHTS[weights]), *sources(layer), mask(*shape))
    both = ("attn_mask", "key_padding_mask")
    compare(multi_head(layer, same=False, masks=both[1:], **WEIGHTS[weights]), *sources(layer), mask(3, 6))
    compare(multi_head(layer, same=False, masks=both, **WEIGHTS[weights]), *sources(layer), mask(4, 6), mask(3, 6))
    # Without a batch.
    compare(multi_head(layer, same=False, masks=both, **WEIGHTS[weights]), *sources(layer, ()), mask(4, 6), mask(6))
    compare(multi_head(layer, same=False, masks=both[:1], **WEIGHTS[weights]), *sources(layer, ()), mask(2, 4, 6))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("padded", [False, True])
def test_the_causal_hint(weights: str, padded: bool) -> None:
    layer = layer_of("plain")
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    masks = ("attn_mask", "key_padding_mask") if padded else ("attn_mask",)
    inputs = [torch.randn(4, 3, 8), causal] + ([torch.zeros(3, 4, dtype=torch.bool)] if padded else [])
    compare(multi_head(layer, masks=masks, is_causal=True, **WEIGHTS[weights]), *inputs)


def test_static_keys_stay_fused() -> None:
    make = GraphMaker(attn=nn.MultiheadAttention(8, 2))
    (x, k) = make.inputs("x", "k")
    weights = [make.read(f"attn.{name}") for name in ("in_proj_weight", "in_proj_bias")]
    out = [make.read(f"attn.out_proj.{name}") for name in ("weight", "bias")]
    call = make.call(F.multi_head_attention_forward, x, x, x, 8, 2, *weights, None, None, False, 0.0, *out, static_k=k)
    module = make.finish(call)
    reports = Pipeline.standard().run(module)
    ((item,),) = [report.uncovered for report in reports if report.uncovered]
    assert "static_k" in item.reason


# The kernels that torch.nn uses without gradients.


def fast(layer: nn.MultiheadAttention, mask_type: int | None, *, same: bool = True, **options: Any) -> Any:
    make = GraphMaker(attn=layer)
    query = make.inputs("query")[0]
    key, value = (query, query) if same else make.inputs("key", "value")
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    read = [make.read(f"attn.{name}") for name in names]
    mask = None if mask_type is None else make.inputs("mask")[0]
    call = make.call(torch._native_multi_head_attention, query, key, value, 8, 2, *read, mask,
                     mask_type=mask_type, at="attn", **options)  # fmt: skip
    return make.finish(call)


MASKS = {None: (), 0: (5, 5), 1: (3, 5), 2: (3, 2, 5, 5)}


@pytest.mark.parametrize("mask_type", MASKS)
@pytest.mark.parametrize("options", WEIGHTS.values(), ids=WEIGHTS)
def test_inference_kernel(mask_type: int | None, options: dict[str, Any]) -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 5, 8)
    mask = [] if mask_type is None else [(torch.rand(MASKS[mask_type]) > 0.6).index_fill(-1, torch.tensor([0]), False)]
    plain = fast(layer, mask_type, **options)
    with torch.no_grad():
        ours, theirs = decomposed(plain)(x, *mask), plain(x, *mask)
    assert (ours[1] is None) == (theirs[1] is None)
    assert_close([y for y in ours if y is not None], [y for y in theirs if y is not None])


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask_type", [None, 0, 1])
def test_encoder_layer_kernel(gelu: bool, norm_first: bool, mask_type: int | None) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    make = GraphMaker(layer=layer)
    x = make.inputs("x")[0]
    mask_node = None if mask_type is None else make.inputs("mask")[0]

    def read(*names: str) -> list[fx.Node]:
        return [make.read(f"layer.{name}") for name in names]

    call = make.call(
        torch._transformer_encoder_layer_fwd, x, 8, 2,
        *read("self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight",
              "self_attn.out_proj.bias"),
        gelu, norm_first, 1e-5, *read("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "linear1.weight",
                                      "linear1.bias", "linear2.weight", "linear2.bias"),
        mask_node, mask_type, at="layer",
    )  # fmt: skip
    plain = make.finish(call)
    x_value = torch.randn(3, 5, 8)
    mask = [] if mask_type is None else [(torch.rand(MASKS[mask_type]) > 0.6).index_fill(-1, torch.tensor([0]), False)]
    with torch.no_grad():
        assert_close([decomposed(plain)(x_value, *mask)], [plain(x_value, *mask)])
        with torch.autocast("cpu", torch.bfloat16):  # torch.nn takes this kernel under autocast of a CPU, too
            ours, theirs = decomposed(plain)(x_value, *mask), plain(x_value, *mask)
        assert ours.dtype is theirs.dtype is torch.bfloat16
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=0.05 * float(theirs.abs().max()))
        Pipeline.standard(recipe=paper(), schedule=Static(4)).run(plain)
        assert plain(x_value, *mask).isfinite().all()
    layers = {node.meta[QUANTIZER].layers[0] for node in plain.graph.nodes if QUANTIZER in node.meta}
    assert layers == {"layer.self_attn.in_proj", "layer.self_attn.scores", "layer.self_attn.context",
                      "layer.self_attn.out_proj", "layer.linear1", "layer.linear2"}  # fmt: skip


def test_slices_of_a_packed_projection_are_weights() -> None:
    layer = nn.MultiheadAttention(8, 2)
    module = multi_head(layer, same=False)
    Pipeline.standard(recipe=paper(), schedule=Static(4)).run(module)
    found = {(node.meta[QUANTIZER].layers[0], node.meta[QUANTIZER].operand): node.meta[QUANTIZER].role
             for node in module.graph.nodes if QUANTIZER in node.meta}  # fmt: skip
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        assert found[f"attn.{name}", "weight"] == "weight"
        assert found[f"attn.{name}", "bias"] == "bias"
        assert found[f"attn.{name}", "input"] == "activation"
