"""Recurrent layers of torch against loops written out by hand from the published rules, quantizers and all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.profiler import ProfilerActivity, profile

import cpt_fx
from cpt_fx.recipes import paper
from cpt_fx.schedules import Bits, Static
from tests.selecting import mostly_slow

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

FORWARD, BACKWARD = 5, 7


def grid(x: Tensor, bits: int, low: Tensor, high: Tensor) -> Tensor:
    """The published quantizer."""
    levels = 2**bits - 1
    scale = ((high - low) / levels).clamp(min=1e-8)
    result: Tensor = ((x - low) / scale).clamp(0, levels).round() * scale + low
    return result


class Straight(torch.autograd.Function):
    """Quantized on the way forward, the identity on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return grid(x, FORWARD, low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None, None


class Gradient(torch.autograd.Function):
    """The identity on the way forward; back, one range per index of dim 1 of three, or of the whole tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        dims = (0, 2) if gradients[0].dim() == 3 else (0, 1)
        low, high = (f(gradients[0], dims, keepdim=True) for f in (torch.amin, torch.amax))
        return grid(gradients[0], BACKWARD, low, high)


straight: Callable[..., Tensor] = Straight.apply
gradient: Callable[..., Tensor] = Gradient.apply


@dataclass
class Oracle:
    """A recurrent layer as a loop. `seen` are the running ranges of activations, which start at nothing."""

    layer: nn.RNNBase
    training: bool = True
    seen: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def product(self, x: Tensor, which: str, name: str) -> Tensor:
        weight = getattr(self.layer, f"weight_{which}_{name}")
        bias = getattr(self.layer, f"bias_{which}_{name}") if self.layer.bias and which != "hr" else None
        quantized = straight(weight, weight.amin(1, keepdim=True), weight.amax(1, keepdim=True))
        if bias is not None:
            bias = straight(bias, bias.min(), bias.max())
        return gradient(F.linear(self.activation(x, f"{which}_{name}"), quantized, bias))

    def activation(self, x: Tensor, key: str) -> Tensor:
        low, width = self.seen.get(key, (torch.zeros(()), torch.zeros(())))
        if self.training:
            now = x.detach().min(), x.detach().max()
            self.seen[key] = 0.9 * low + 0.1 * now[0], 0.9 * width + 0.1 * (now[1] - now[0])
            return straight(x, *now)
        return straight(x, low, low + width)

    def step(self, z: Tensor, state: list[Tensor], name: str) -> list[Tensor]:
        y = self.product(state[0], "hh", name)
        if self.layer.mode == "LSTM":
            i, f, g, o = (z + y).chunk(4, -1)
            cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
            return [self.product(hidden, "hr", name) if self.layer.proj_size else hidden, cell]
        if self.layer.mode == "GRU":
            (zr, zz, zn), (yr, yz, yn) = z.chunk(3, -1), y.chunk(3, -1)
            reset, update = (zr + yr).sigmoid(), (zz + yz).sigmoid()
            new = (zn + reset * yn).tanh()
            return [(1 - update) * new + update * state[0]]
        return [torch.tanh(z + y) if self.layer.mode == "RNN_TANH" else torch.relu(z + y)]

    def direction(
        self, x: Tensor, sizes: list[int] | None, state: list[Tensor], name: str
    ) -> tuple[Tensor, list[Tensor]]:
        """All steps of one direction, and the last state of every sequence."""
        z = self.product(x, "ih", name)
        pieces = list(z.unbind(0) if sizes is None else z.split(sizes))
        back = name.endswith("reverse")
        running = [part.clone() for part in state]
        outputs = []
        for piece in reversed(pieces) if back else pieces:
            rows = len(piece)
            new = self.step(piece, [part[:rows] for part in running], name)
            running = [torch.cat([part, old[rows:]]) for part, old in zip(new, running, strict=True)]
            outputs.append(new[0])
        outputs = outputs[::-1] if back else outputs
        return torch.stack(outputs) if sizes is None else torch.cat(outputs), running

    def __call__(self, x: Tensor, sizes: list[int] | None, state: list[Tensor]) -> list[Tensor]:
        ways = ["", "_reverse"] if self.layer.bidirectional else [""]
        last: list[list[Tensor]] = []
        for depth in range(self.layer.num_layers):
            found = []
            for way in ways:
                start = [part[len(last)] for part in state]
                output, end = self.direction(x, sizes, start, f"l{depth}{way}")
                found.append(output)
                last.append(end)
            x = torch.cat(found, -1)
            if depth < self.layer.num_layers - 1:
                x = F.dropout(x, self.layer.dropout, self.training)
        return [x, *(torch.stack(parts) for parts in zip(*last, strict=True))]


class Net(nn.Module):
    """A recurrent layer as people write it: no word of its insides."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        y, last = self.rnn(x, state if len(state) > 1 else state[0])
        return (y, *last) if len(state) > 1 else (y, last)


class PackedNet(nn.Module):
    """The same on sequences of different lengths."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, x: Tensor, sizes: Tensor, *state: Tensor) -> Any:
        y, last = self.rnn(PackedSequence(x, sizes), state if len(state) > 1 else state[0])
        return (y.data, *last) if len(state) > 1 else (y.data, last)


def states(layer: nn.RNNBase, batch: int) -> list[Tensor]:
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    hidden = torch.randn(count, batch, layer.proj_size or layer.hidden_size)
    return [hidden, torch.randn(count, batch, layer.hidden_size)] if layer.mode == "LSTM" else [hidden]


def gradients(outputs: list[Tensor], layer: nn.RNNBase, inputs: list[Tensor]) -> list[Tensor]:
    layer.zero_grad()
    for x in inputs:
        x.grad = None
    torch.autograd.backward(outputs, [torch.linspace(-1, 2, y.numel()).view_as(y) for y in outputs])
    return [x.grad.clone() for x in (*inputs, *layer.parameters()) if x.grad is not None]


def quantized(model: nn.Module, **options: Any) -> nn.Module:
    recipe = options.pop("recipe", paper(gradient_rounding="nearest"))
    return cpt_fx.transform(model, Static(Bits(FORWARD, FORWARD, BACKWARD)), recipe=recipe, **options)


KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": lambda **options: nn.LSTM(6, 8, **options),
    "lstm, projected": lambda **options: nn.LSTM(6, 8, proj_size=5, **options),
    "gru": lambda **options: nn.GRU(6, 8, **options),
    "tanh": lambda **options: nn.RNN(6, 8, **options),
    "relu": lambda **options: nn.RNN(6, 8, nonlinearity="relu", **options),
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers both ways": {"num_layers": 2, "bidirectional": True},
    "batch first, no bias": {"batch_first": True, "bias": False},
    "dropout": {"num_layers": 2, "dropout": 0.5},
}


def compare(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize("shape", mostly_slow([*SHAPES, "packed"], every=4))
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_published_loop(kind: str, shape: str) -> None:
    packed = shape == "packed"
    layer = KINDS[kind](**({"bidirectional": True} if packed else SHAPES[shape]))
    model = quantized((PackedNet if packed else Net)(layer))
    oracle = Oracle(layer)
    start = states(layer, 3)
    for turn, lengths in enumerate(([5, 3, 2], [4, 4, 1])):
        whole = torch.randn(5 - turn, 3, 6)
        sequence = pack_padded_sequence(whole, lengths)
        x = sequence.data if packed else whole.transpose(0, 1) if layer.batch_first else whole
        inputs = [part.clone().requires_grad_() for part in (x, *start)]
        between = [sequence.batch_sizes] if packed else []
        torch.manual_seed(turn)
        outputs = list(model(inputs[0], *between, *inputs[1:]))
        ours = [*outputs, *gradients(outputs, layer, inputs)]
        torch.manual_seed(turn)
        first = inputs[0].transpose(0, 1) if layer.batch_first else inputs[0]
        outputs = oracle(first, sequence.batch_sizes.tolist() if packed else None, inputs[1:])
        outputs[0] = outputs[0].transpose(0, 1) if layer.batch_first else outputs[0]
        compare(ours, [*outputs, *gradients(outputs, layer, inputs)])
    # Two training batches have moved the running ranges, step by step; evaluation uses them.
    model.eval()
    oracle.training = False
    outputs = oracle(first, sequence.batch_sizes.tolist() if packed else None, inputs[1:])
    outputs[0] = outputs[0].transpose(0, 1) if layer.batch_first else outputs[0]
    with torch.no_grad():
        compare(list(model(inputs[0], *between, *inputs[1:])), [part.detach() for part in outputs])


@pytest.mark.parametrize("kind", ["lstm", "gru", "tanh"])
def test_low_precision_matters(kind: str) -> None:
    """The oracle is no copy of full precision: else all of this would prove nothing."""
    layer = KINDS[kind]()
    x, start = torch.randn(5, 3, 6), states(layer, 3)
    plain = Net(layer)(x, *start)[0]
    assert (Oracle(layer)(x, None, start)[0] - plain).abs().max() > 1e-2


class Encoder(Net):
    """A recurrent layer and a linear one."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__(layer)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, *state: Tensor) -> Any:
        return self.head(super().forward(x, *state)[0])


@pytest.mark.slow
@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("way", ["excluded", "no rule"])
def test_the_fused_kernel_stays_where_nothing_is_quantized(build: Callable[[int, int], nn.RNNBase], way: str) -> None:
    """Left out by name or by recipe, the layer is the very kernel of torch, to the bit."""
    net = Encoder(build(6, 8))
    recipe = paper(gradient_rounding="nearest")
    options = {"exclude": "rnn"} if way == "excluded" else {"recipe": replace(recipe, recurrent=None)}
    model = cpt_fx.transform(net, Static(32), **({"recipe": recipe} | options))
    x, start = torch.randn(5, 3, 6), states(net.rnn, 3)
    assert torch.equal(model(x, *start), net(x, *start))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        model(x, *start)
    assert f"aten::{net.rnn.mode.lower()}" in {event.key for event in found.key_averages()}
    (left,) = cpt_fx.inspect(model).uncovered
    assert (left.layer, left.by_choice) == ("rnn", way == "excluded")
    assert {quantizer.layer for quantizer in cpt_fx.inspect(model).quantizers} == {"head"}


@pytest.mark.slow
def test_models_of_the_same_code_may_have_other_numbers_of_layers() -> None:
    """Dynamo makes a symbol of a number that it has seen to differ: the layer must be decomposed all the same."""
    for layers in (1, 2, 3, 1):
        layer = nn.GRU(6, 8, num_layers=layers)
        model = quantized(Net(layer))
        x, start = torch.randn(4, 3, 6), states(layer, 3)
        compare(list(model(x, *start)), Oracle(layer)(x, None, start))
        assert not cpt_fx.inspect(model).uncovered
        assert len(cpt_fx.inspect(model).quantizers) == 8 * layers
