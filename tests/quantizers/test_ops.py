"""The ops of rewritten graphs: schema, tracing, compilers, export, autograd transforms, observers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from cpt_fx.quantizers.counters import new_counters
from cpt_fx.quantizers.numerics import Grid, quantize_or_pass
from cpt_fx.quantizers.ops import FAKE_QUANTIZE, FAKE_QUANTIZE_OBSERVED, QUANTIZE_GRADIENT, QUANTIZERS
from cpt_fx.quantizers.straight_through import grid_of
from cpt_fx.quantizers.widths import host_value

FORMATS: list[dict[str, Any]] = [
    {},
    {"keep": [0]},
    {"over": [0, -1]},
    {"scheme": "affine_integer", "keep": [1]},
    {"scheme": "symmetric", "keep": [-1]},
    {"scheme": "float", "exponent": 2},
    {"scheme": "float", "exponent": 4, "specials": "fn", "keep": [0]},
    {"scheme": "float", "exponent": 8, "specials": "ieee"},
    {"scheme": "float", "exponent": 2, "over": [-1], "block": 4},
    {"scheme": "affine", "keep": [0], "block": 4},
]
WIDTHS = (0, 2, 3, 8, 16, 32)


def name(options: dict[str, Any]) -> str:
    return "-".join(str(value) for value in options.values()) or "default"


def grid(options: dict[str, Any]) -> Grid:
    return grid_of(options, "nearest")


def bits(width: int = 4) -> Tensor:
    return torch.tensor(width)


def state() -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(()), torch.zeros(()), torch.zeros(())


class Layer(nn.Module):
    """What a rewritten linear layer looks like."""

    def __init__(self, **observer: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.observer = observer
        for key, value in {
            "bits": bits(),
            "zero_point": state()[0],
            "range": state()[0],
            "gathered": state()[0],
        }.items():
            self.register_buffer(key, value)

    def forward(self, x: Tensor) -> Tensor:
        running = (self.zero_point, self.range, self.gathered)
        x = FAKE_QUANTIZE_OBSERVED(x, self.bits, *running, self.training, **self.observer)
        weight = FAKE_QUANTIZE(self.weight, self.bits, keep=[0], scheme="symmetric")
        result: Tensor = QUANTIZE_GRADIENT(x @ weight.t(), self.bits, rounding="nearest")
        return result


@pytest.mark.parametrize("options", FORMATS, ids=name)
def test_the_traced_path_is_the_eager_path(options: dict[str, Any]) -> None:
    x = torch.randn(3, 4, 6)
    traced = make_fx(lambda x, width: FAKE_QUANTIZE(x, width, **options), tracing_mode="fake")(x, bits())
    for width in WIDTHS:
        expected = FAKE_QUANTIZE(x, bits(width), **options)
        assert torch.equal(quantize_or_pass(x, bits(width), grid(options)), expected)
        assert torch.equal(traced(x, bits(width)), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_compiled_path_is_the_eager_path(backend: str) -> None:
    """Outputs and gradients, bit for bit; and a change of bits compiles nothing anew."""

    def net(x: Tensor, width: Tensor) -> list[Tensor]:
        quantized = [FAKE_QUANTIZE(x, width, **options) for options in FORMATS]
        return [QUANTIZE_GRADIENT(y * 2, width, rounding="nearest") for y in quantized]

    torch._dynamo.reset()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    x = torch.randn(3, 4, 6)
    upstream = [torch.randn(3, 4, 6) for _ in FORMATS]
    for width in WIDTHS:
        results = []
        for run in (net, compiled):
            leaf = x.clone().requires_grad_()
            # The first call compiles; afterwards nothing may.
            with torch.compiler.set_stance("default" if width == WIDTHS[0] else "fail_on_recompile"):
                outputs = run(leaf, bits(width))
            results.append([*outputs, *torch.autograd.grad(outputs, leaf, upstream)])
        for eager, other in zip(*results, strict=True):
            assert torch.equal(eager, other)


@pytest.mark.parametrize("training", [True, False])
def test_a_compiled_layer_is_the_eager_layer(training: bool) -> None:
    torch._dynamo.reset()
    layers = [Layer(), Layer()]
    layers[1].load_state_dict(layers[0].state_dict())
    runs: list[Any] = [layers[0].train(training), torch.compile(layers[1].train(training), backend="aot_eager")]
    for _ in range(3):
        x, upstream = torch.randn(2, 4, 5), torch.randn(2, 4, 3)
        outputs = [run(x) for run in runs]
        for output in outputs:
            output.backward(upstream)
        assert torch.equal(*outputs)
    for eager, other in zip(layers[0].state_dict().values(), layers[1].state_dict().values(), strict=True):
        assert torch.equal(eager, other)
    assert layers[0].weight.grad is not None and layers[1].weight.grad is not None
    assert torch.equal(layers[0].weight.grad, layers[1].weight.grad)


def observed(x: Tensor, training: bool, counters: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (x, bits(), *state(), training), {"counters": new_counters()} if counters else {}


def opcheck_cases() -> list[Any]:
    x, leaf = torch.randn(3, 4), torch.randn(3, 4).requires_grad_()
    given = {"zero_point": torch.zeros(3, 1), "range": torch.ones(3, 1)}
    cases = [(FAKE_QUANTIZE, (torch.randn(3, 4, 2).requires_grad_(), bits()), options) for options in FORMATS[:6]]
    cases += [(FAKE_QUANTIZE, (x, bits()), {"counters": new_counters()}), (FAKE_QUANTIZE, (leaf, bits()), given)]
    cases += [(QUANTIZE_GRADIENT, (tensor, bits()), {"rounding": "nearest"}) for tensor in (x, leaf)]
    cases += [
        (FAKE_QUANTIZE_OBSERVED, *observed(tensor, training, counters))
        for tensor, training, counters in ((x, True, True), (leaf, True, False), (leaf, False, False))
    ]
    return cases


@pytest.mark.parametrize("case", range(13))
def test_opcheck(case: int) -> None:
    """Schema (aliases and mutations), registration, fake tensors and AOT dispatch: all four tests apply."""
    cases = opcheck_cases()
    assert len(cases) == 13
    torch.library.opcheck(*cases[case])


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("options", FORMATS, ids=name)
def test_meta_tensors(options: dict[str, Any], device: str) -> None:
    """With the bits on the meta device as well, and with bits that stay on the CPU."""
    x = torch.empty(3, 4, 6, device="meta", dtype=torch.bfloat16)
    result = FAKE_QUANTIZE(x, bits().to(device), **options)
    assert (result.device.type, result.shape, result.dtype) == ("meta", x.shape, x.dtype)
    layer = Layer().to("meta")
    assert layer(torch.empty(2, 5, device="meta")).shape == (2, 3)


def test_host_value_reads_only_what_is_free() -> None:
    assert host_value(bits(7)) == 7
    assert host_value(bits(7).to("meta")) is None
    with torch._subclasses.FakeTensorMode() as mode:
        assert host_value(mode.from_tensor(bits(7))) is None


@pytest.mark.parametrize("training", [True, False])
def test_export_keeps_the_nodes(training: bool) -> None:
    layer = Layer().train(training)
    x = torch.randn(2, 5)
    program = torch.export.export(layer, (x,))
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if target in QUANTIZERS] == [
        FAKE_QUANTIZE_OBSERVED, FAKE_QUANTIZE, QUANTIZE_GRADIENT]  # fmt: skip
    assert torch.equal(program.module()(x), layer(x))
    decomposed = program.run_decompositions()
    assert not any(node.target in QUANTIZERS for node in decomposed.graph.nodes)
    again = decomposed.module()
    for width in (2, 8, 32):
        layer.get_buffer("bits").fill_(width)
        again.load_state_dict(layer.state_dict())
        assert torch.equal(again(x), layer(x))


def test_inplace_after_the_gradient_quantizer() -> None:
    """The hook stays on the value it was put on; relu_ and += are what follows a layer in real models."""
    gradient = torch.randn(4, 5)
    expected = FAKE_QUANTIZE(gradient, bits())
    leaf = torch.randn(4, 5, requires_grad=True)
    hidden = leaf * 1
    result = QUANTIZE_GRADIENT(hidden, bits(), rounding="nearest")
    assert result is hidden
    result += 1
    result.backward(gradient)
    assert leaf.grad is not None and torch.equal(leaf.grad, expected)
    result = QUANTIZE_GRADIENT(leaf * 1, bits(), rounding="nearest").relu_()
    (through_relu,) = torch.autograd.grad(result, leaf, gradient)
    # relu masks first, what is left is quantized
    assert torch.equal(through_relu, FAKE_QUANTIZE(gradient * (leaf > 0), bits()))


def test_inplace_after_a_layer_that_returns_a_view() -> None:
    """A linear layer over sequences does: an in-place op goes around hooks of views, to what they are views of."""
    x, gradient = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    layer = nn.Linear(4, 5)
    assert layer(x)._is_view()
    result = QUANTIZE_GRADIENT(layer(x), bits(), rounding="nearest").relu_()
    result.backward(gradient)
    expected = FAKE_QUANTIZE(gradient * (layer(x) > 0), bits()).sum((0, 1))
    assert layer.bias.grad is not None and torch.allclose(layer.bias.grad, expected, rtol=1e-6)


def test_one_quantized_gradient_serves_every_reader() -> None:
    leaf = torch.randn(4, requires_grad=True)
    result = QUANTIZE_GRADIENT(leaf * 1, bits(2), rounding="nearest")
    one, two = torch.randn(4), torch.randn(4)
    ((result * one).sum() + (result * two).sum()).backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, FAKE_QUANTIZE(one + two, bits(2)))


def test_the_same_range_for_a_module_called_many_times() -> None:
    """Running state follows the calls in their order."""
    running = state()
    for factor in (1.0, 3.0):
        FAKE_QUANTIZE_OBSERVED(torch.tensor([-1.0, 2.0]) * factor, bits(), *running, True, momentum=0.5)
    expected = torch.tensor([-1.0, 3.0]) * 0.5 * 0.5 + torch.tensor([-3.0, 9.0]) * 0.5
    assert [float(value) for value in running] == [*expected.tolist(), 0.75]


def test_corrected_averages_count_the_first_batches_fully() -> None:
    running = state()
    x = torch.randn(40)
    FAKE_QUANTIZE_OBSERVED(x, bits(), *running, True)
    assert float(running[2]) == pytest.approx(0.1)
    corrected = FAKE_QUANTIZE_OBSERVED(x, bits(), *running, False)
    # 0.1 r / 0.1 is r up to three roundings, 2e-7 of the largest magnitude
    torch.testing.assert_close(corrected, FAKE_QUANTIZE(x, bits()), rtol=0, atol=3e-7 * float(x.abs().max()))
    published = FAKE_QUANTIZE_OBSERVED(x, bits(), *running, False, corrected=False)
    assert float(published.max() - published.min()) == pytest.approx(0.1 * float(x.max() - x.min()))


def test_untrained_and_corrected_uses_the_tensor_at_hand() -> None:
    x = torch.randn(40)
    for given in (bits(), torch.tensor(4, dtype=torch.int32)):
        assert torch.equal(FAKE_QUANTIZE_OBSERVED(x, given, *state(), False), FAKE_QUANTIZE(x, bits()))


@pytest.mark.parametrize("when_off", [False, True])
def test_zero_bits_and_the_observer(when_off: bool) -> None:
    running = state()
    x = torch.randn(5)
    assert torch.equal(FAKE_QUANTIZE_OBSERVED(x, bits(0), *running, True, when_off=when_off), x)
    assert [bool(value) for value in running] == [when_off] * 3
    FAKE_QUANTIZE_OBSERVED(x, bits(32), *running, True, when_off=when_off)
    assert all(bool(value) for value in running)  # full precision watches: the range is there when bits come back


def test_observing_leaves_no_trace_in_autograd() -> None:
    running = state()
    x = torch.randn(5, requires_grad=True)
    FAKE_QUANTIZE_OBSERVED(x, bits(), *running, True).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(5))
    assert not any(value.requires_grad for value in running)


def test_empty_batches_are_not_observed() -> None:
    running = state()
    assert FAKE_QUANTIZE_OBSERVED(torch.empty(0, 3), bits(), *running, True).shape == (0, 3)
    assert not any(bool(value) for value in running)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_observer_and_input_of_different_dtypes(dtype: torch.dtype) -> None:
    running = state()
    x = torch.randn(6, dtype=dtype)
    for training in (True, False):
        assert FAKE_QUANTIZE_OBSERVED(x, bits(), *running, training).dtype == dtype
    assert running[0].dtype == torch.float32
    low = tuple(value.to(dtype) for value in running)
    assert FAKE_QUANTIZE_OBSERVED(x, bits(), *low, False).dtype == dtype


def test_observed_symmetric_uses_the_true_maximum() -> None:
    for _ in range(50):
        x = torch.randn(7)
        results = [FAKE_QUANTIZE_OBSERVED(v, bits(8), *state(), True, scheme="symmetric") for v in (x, -x)]
        assert torch.equal(results[0], -results[1])


@pytest.mark.parametrize("scheme", ["affine", "affine_integer", "symmetric"])
def test_a_trace_takes_the_same_range_before_one_has_learned(scheme: str) -> None:
    """The top of a range is the maximum: minimum plus width may be off in the last bit."""

    def quantized(x: Tensor, bits: Tensor, empty: Tensor) -> Tensor:
        made: Tensor = FAKE_QUANTIZE_OBSERVED(x, bits, empty, empty, empty, False, scheme=scheme, floored=False)
        return made

    bits, empty = torch.tensor(8), torch.zeros(())
    traced = make_fx(quantized)(torch.randn(50), bits, empty)
    for seed in range(20):
        x = torch.randn(50, generator=torch.Generator().manual_seed(seed)) + 0.3
        assert torch.equal(traced(x, bits, empty), quantized(x, bits, empty)), seed
