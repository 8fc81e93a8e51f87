"""Recurrent layers, decomposed: the numbers of the fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from cpt_fx.ir import recurrence as parts
from cpt_fx.ir.meta import DECISION, QUANTIZER
from cpt_fx.ir.subgraphs import nodes_of, state_of, subgraphs
from cpt_fx.pipeline import Pipeline
from cpt_fx.recipes import Recipe, paper
from cpt_fx.schedules import Bits, Static
from tests.decompose.fused_graphs import assert_close, cell, decomposed, recurrent, results
from tests.passes import set_bits

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

KINDS: dict[str, tuple[Callable[..., nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, projected": (nn.LSTM, {"proj_size": 2}),
    "gru": (nn.GRU, {}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu"}),
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "layers": {"num_layers": 3},
    "both ways": {"bidirectional": True},
    "batch first": {"batch_first": True},
    "all of it": {"num_layers": 2, "bidirectional": True, "batch_first": True, "bias": False},
}


def states(layer: nn.RNNBase, batch: int) -> list[Tensor]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    hidden = torch.randn(count, batch, layer.proj_size or layer.hidden_size)
    return [hidden, torch.randn(count, batch, layer.hidden_size)] if layer.mode == "LSTM" else [hidden]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_fused_kernel(kind: str, shape: str) -> None:
    build, options = KINDS[kind]
    layer = build(3, 4, **options, **SHAPES[shape])
    plain = recurrent(layer)
    ours = decomposed(plain)
    for time, batch in ((5, 2), (1, 3), (7, 1)):
        sizes = (batch, time) if layer.batch_first else (time, batch)
        inputs = (torch.randn(*sizes, 3), *states(layer, batch))
        assert_close(results(ours, *inputs), results(plain, *inputs))


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str, both: bool) -> None:
    build, options = KINDS[kind]
    layer = build(3, 4, **options, num_layers=2, bidirectional=both)
    plain = recurrent(layer, packed=True)
    ours = decomposed(plain)
    for lengths in ([5, 3, 3, 1], [2, 2], [4]):
        packed = pack_padded_sequence(torch.randn(max(lengths), len(lengths), 3), lengths)
        inputs = (packed.data, packed.batch_sizes, *states(layer, len(lengths)))
        assert_close(results(ours, *inputs), results(plain, *inputs))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers_draws_the_same_numbers(kind: str, packed: bool) -> None:
    build, options = KINDS[kind]
    layer = build(3, 4, **options, num_layers=3, dropout=0.4)
    plain = recurrent(layer, packed=packed)
    inputs = [torch.randn(5, 2, 3), *states(layer, 2)]
    if packed:
        sequence = pack_padded_sequence(inputs[0], [5, 2])
        inputs[:1] = [sequence.data, sequence.batch_sizes]
    assert_close(results(decomposed(plain), *inputs), results(plain, *inputs))
    plain = recurrent(layer.eval(), packed=packed)
    assert_close(results(decomposed(plain), *inputs), results(plain, *inputs))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_results_have_the_dtype_of_the_fused_kernel(kind: str, packed: bool) -> None:
    build, options = KINDS[kind]
    layer = build(3, 4, **options, num_layers=2)
    plain = recurrent(layer, packed=packed)
    inputs = [torch.randn(5, 2, 3), *states(layer, 2)]
    if packed:
        sequence = pack_padded_sequence(inputs[0], [5, 2])
        inputs[:1] = [sequence.data, sequence.batch_sizes]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = decomposed(plain)(*inputs), plain(*inputs)
    assert [y.dtype for y in ours] == [y.dtype for y in theirs]
    assert_close([y.detach().float() for y in ours], [y.detach().float() for y in theirs], 0.03)


CELLS = [nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4), nn.RNNCell(3, 4, nonlinearity="relu"),
         nn.LSTMCell(3, 4, bias=False)]  # fmt: skip


@pytest.mark.parametrize("layer", CELLS, ids=str)
def test_cells(layer: nn.RNNCellBase) -> None:
    plain = cell(layer)
    inputs = [torch.randn(2, 3), *(torch.randn(2, 4) for _ in range(2 if isinstance(layer, nn.LSTMCell) else 1))]
    assert_close(results(decomposed(plain), *inputs), results(plain, *inputs))


def quantized(layer: nn.RNNBase, bits: int, **options: Any) -> Any:
    module = recurrent(layer)
    recipe = options.pop("recipe", paper(gradient_rounding="nearest"))
    Pipeline.standard(recipe=recipe, schedule=Static(Bits(bits, bits, bits)), **options).run(module)
    return module


def test_at_32_bits_the_quantized_layer_is_the_fused_one() -> None:
    layer = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
    plain = recurrent(layer)
    inputs = (torch.randn(5, 2, 3), *states(layer, 2))
    expected = results(plain, *inputs)
    assert_close(results(quantized(layer, 32), *inputs), expected)


def test_layers_are_named_after_their_parameters() -> None:
    module = quantized(nn.LSTM(3, 4, num_layers=2, bidirectional=True), 4)
    layers = {node.meta[QUANTIZER].layers[0] for node in nodes_of(module) if QUANTIZER in node.meta}
    assert layers == {
        f"rnn.{which}_l{depth}{way}" for which in ("ih", "hh") for depth in (0, 1) for way in ("", "_reverse")
    }


def test_everything_runs_at_low_precision_and_weights_are_quantized_once_per_call() -> None:
    layer = nn.LSTM(3, 4)
    module = quantized(layer, 4)
    results(module, torch.randn(6, 2, 3), *states(layer, 2))
    runs = {name: int(value[0]) for name, value in module._cpt_fx.counters.named_buffers()}
    assert runs == {
        "rnn_ih_l0_input_q": 1, "rnn_ih_l0_weight_q": 1, "rnn_ih_l0_bias_q": 1, "rnn_ih_l0_gradient_q": 1,
        "rnn_hh_l0_input_q": 6, "rnn_hh_l0_weight_q": 1, "rnn_hh_l0_bias_q": 1, "rnn_hh_l0_gradient_q": 6,
    }  # fmt: skip


@pytest.mark.parametrize("build", [lambda: recurrent(nn.LSTM(3, 4, proj_size=2)), lambda: cell(nn.GRUCell(3, 4))])
def test_all_products_are_of_their_family(build: Callable[[], Any]) -> None:
    module = build()
    rule = paper().recurrent
    reports = Pipeline.standard(recipe=Recipe(name="only", recurrent=rule), schedule=Static(4)).run(module)
    assert [item for report in reports for item in report.uncovered] == []
    decisions = [node.meta[DECISION] for node in nodes_of(module) if DECISION in node.meta]
    assert {decision.family for decision in decisions} == {"recurrent"}
    assert [decision.layer.partition("_")[0] for decision in decisions][:2] == ["rnn.ih", "rnn.hh"]


def test_without_sharing_the_numbers_are_the_same() -> None:
    found = []
    inputs = (torch.randn(4, 2, 3), torch.randn(1, 2, 4), torch.randn(1, 2, 4))
    layer = nn.LSTM(3, 4)
    for pipeline in (Pipeline.standard(recipe=paper(gradient_rounding="nearest")),
                     Pipeline.standard(recipe=paper(gradient_rounding="nearest")).drop("share")):  # fmt: skip
        module = recurrent(layer)
        pipeline.run(module)
        set_bits(module, 4)
        found.append(results(module, *inputs))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_the_state_is_that_of_the_model_and_nothing_else() -> None:
    module = quantized(nn.LSTM(3, 4), 4)
    assert [name for name in module.state_dict() if "step" in name] == []
    assert {name.split(".")[0] for name in module.state_dict()} == {"rnn", "_cpt_fx"}
    ((_, subgraph),) = subgraphs(module)
    assert state_of(subgraph) is module._cpt_fx


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one time step"):
        decomposed(recurrent(nn.GRU(3, 4)))(torch.randn(0, 2, 3), torch.randn(1, 2, 4))


def test_a_step_sees_only_sequences_that_are_still_running() -> None:
    seen: list[int] = []

    def subgraph(x: Tensor, state: Tensor) -> tuple[Tensor]:
        assert x.shape[0] == state.shape[0]
        seen.append(x.shape[0])
        return (state + x,)

    data, sizes = torch.ones(6, 1), torch.tensor([3, 2, 1])
    _, last = parts.scan(subgraph, data, [torch.zeros(3, 1)], [], batch_sizes=sizes)
    assert (seen, last.flatten().tolist()) == ([3, 2, 1], [3, 2, 1])
    _, last = parts.scan(subgraph, data, [torch.zeros(3, 1)], [], batch_sizes=sizes, reverse=True)
    assert (seen[3:], last.flatten().tolist()) == ([1, 2, 3], [3, 2, 1])
