"""Every local function gives the numbers of `numerics`, bit for bit, noise included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx import helper  # noqa: E402

from cpt_fx.export import functions  # noqa: E402
from cpt_fx.export.functions import DOMAIN, QuantizerKind, kind_of  # noqa: E402
from cpt_fx.export.recording import OPSET  # noqa: E402
from cpt_fx.formats import Rounding, Scheme, Specials  # noqa: E402
from cpt_fx.quantizers import noise, numerics, ops  # noqa: E402
from cpt_fx.quantizers.numerics import Grid  # noqa: E402
from cpt_fx.quantizers.ops import LearnedRange  # noqa: E402

WIDTHS = (0, 1, 2, 3, 5, 8, 12, 24, 31, 32)
FLOATS = [(exponent, specials) for exponent in (2, 4, 5, 8) for specials in Specials]
GRIDS = (
    [Grid(scheme=scheme, rounding=rounding) for scheme in list(Scheme)[:3] for rounding in Rounding]
    + [Grid(rounding=rounding, floored=True) for rounding in Rounding]
    + [
        Grid(scheme=Scheme.FLOAT, rounding=rounding, exponent=exponent, specials=specials)
        for exponent, specials in FLOATS
        for rounding in Rounding
    ]
)
SPOILED = ((8, torch.nan), (2, torch.inf), (3, -torch.inf))
KEEPS: tuple[tuple[int, ...], ...] = ((), (0,), (0, 1), (0, 1, 2))
SEED = torch.tensor([123456789, -987654321], dtype=torch.int32)


def calling(function: Any) -> Any:
    """A model of one node, that calls a function."""
    inputs, outputs = list(function.input), list(function.output)
    node = helper.make_node(function.name, inputs, outputs, domain=DOMAIN)
    whole = {"bits": 7, "axes": 7, "seeds": 6, "draw": 7}
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(name, whole.get(name, 1), None) for name in inputs],
        [helper.make_tensor_value_info(name, 1, None) for name in outputs],
    )
    versions = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, functions=[function], opset_imports=versions, ir_version=10)


def session(function: Any) -> Any:
    model = calling(function)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(5, 7, 33),
        torch.rand(5, 7, 3) + 1,
        torch.zeros(5, 7, 3),
        -torch.rand(5, 7, 3) * 1e-7,
        torch.randn(5, 7, 3) * 1e-15,
        torch.randn(5, 7, 9).exp() ** 6,
        torch.randn(11),
        torch.randn(6, 4),
        torch.randn(2, 3, 4, 5),
    ]


def feed(kind: QuantizerKind, x: torch.Tensor, bits: int, axes: Sequence[int]) -> dict[str, Any]:
    made: dict[str, Any] = {"x": x.numpy(), "bits": np.array(bits), "axes": np.array(axes, np.int64)}
    if kind.draws:
        made |= {"seeds": np.stack([0 * SEED.numpy(), SEED.numpy()]), "draw": np.array([1])}
    return made


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: kind_of(grid).name)
def test_the_same_bits(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of(grid)
    run = session(functions.function(kind))
    monkeypatch.setattr(numerics, "new_seed", lambda device: SEED)
    for bits in WIDTHS:
        for keep in KEEPS:
            for x in tensors():
                axes = numerics.reduced_dims(x.ndim, keep, None)
                if not axes or max(keep, default=0) >= x.ndim:
                    continue
                expected = numerics.quantize_or_pass(x, torch.tensor(bits), grid._replace(keep=keep))
                (found,) = run.run(None, feed(kind, x, bits, axes))
                np.testing.assert_array_equal(found, expected.numpy(), err_msg=f"{bits} bits, keep {keep}")


@pytest.mark.parametrize("rounding", list(Rounding))
def test_blocks(rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid((0,), None, Scheme.FLOAT, rounding, 2, block=16)
    kind = kind_of(grid)
    run = session(functions.function(kind))
    monkeypatch.setattr(numerics, "new_seed", lambda device: SEED)
    x = torch.randn(3, 40).exp() ** 9
    x[1] = 0
    blocks, back = numerics.in_blocks(x, grid)
    assert blocks.shape == (3, 3, 16) and torch.equal(back(blocks), x)
    for bits in (2, 4, 6, 8, 32):
        expected = numerics.quantize_or_pass(x, torch.tensor(bits), grid)
        (found,) = run.run(None, feed(kind, blocks, bits, [2]))
        np.testing.assert_array_equal(back(torch.from_numpy(found)), expected.numpy())


@pytest.mark.parametrize("percentile", [100.0, 90.0])
@pytest.mark.parametrize("when_off", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("scheme", list(Scheme)[:3])
def test_running_ranges(scheme: Scheme, corrected: bool, when_off: bool, percentile: float) -> None:
    """They learn like those of the torch operator, from finite batches only, and are read like them."""
    kept = {"corrected": corrected, "percentile": percentile, "when_off": when_off}
    learns = session(functions.function(kind_of(Grid(scheme=scheme), "Observed", momentum=0.9, **kept)))
    recalls = session(functions.function(kind_of(Grid(scheme=scheme), "Recalled", **kept)))
    options = kept | {"scheme": scheme.value, "floored": False}
    state = [torch.zeros(()) for _ in range(3)]
    theirs = [part.numpy().copy() for part in state]
    names = ("zero_point", "range", "weight")
    for bits, bad in ((8, 0.0), (3, 0.0), (0, torch.nan), (0, 0.0), (32, 0.0), *SPOILED, (4, 0.0)):
        x = torch.randn(11, 23) + 0.3
        x[3, 9] += bad
        width = torch.tensor(bits)
        given = {"x": x.numpy(), "bits": np.array(bits)}
        recalled = ops.FAKE_QUANTIZE_OBSERVED(x, width, *state, False, **options)
        (found,) = recalls.run(None, given | dict(zip(names, theirs, strict=True)))
        np.testing.assert_array_equal(found, recalled.numpy())
        observed = ops.FAKE_QUANTIZE_OBSERVED(x, width, *state, True, **options, momentum=0.9)
        found, *theirs = learns.run(None, given | dict(zip(names, theirs, strict=True)))
        np.testing.assert_array_equal(found, observed.numpy())
        for part, value in zip(state, theirs, strict=True):
            np.testing.assert_array_equal(value, part.numpy())


@pytest.mark.parametrize("bits", [0, 2, 4, 8, 32])
def test_the_gradient_of_a_learned_range(bits: int) -> None:
    x = torch.randn(40, 6, requires_grad=True)
    low = torch.tensor(-0.9, requires_grad=True)
    span = torch.tensor(2.1, requires_grad=True)
    dy = torch.randn(40, 6)
    y = LearnedRange.apply(x, low, span, torch.tensor(bits), Grid())  # type: ignore[no-untyped-call]
    y.backward(dy)
    given = {name: part.detach().numpy() for name, part in (("x", x), ("low", low), ("span", span))}
    given["bits"] = np.array(bits)
    (found,) = session(functions.function(kind_of(Grid(), "Learned"))).run(None, given)
    np.testing.assert_array_equal(found, y.detach().numpy())
    vectors = {"x": x.detach().flatten().numpy(), "dy": dy.flatten().numpy()}
    gradients = session(functions.function(functions.LEARNED)).run(None, given | vectors)
    for ours, theirs in zip((x, low, span), gradients, strict=True):
        assert ours.grad is not None
        # Sums in another order.
        np.testing.assert_allclose(theirs.reshape(ours.shape), ours.grad.numpy(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("seed", [(123456789, -987654321), (0, 0), (-1, 2**31 - 1), (-(2**31), -(2**31)), (5, 77)])
def test_noise(seed: tuple[int, int]) -> None:
    """Uniform in [0, 1), and that of `noise.uniform`."""
    x, drawn = torch.empty(300, 100), torch.tensor(seed, dtype=torch.int32)
    given = {"x": x.numpy(), "seeds": drawn.numpy()[None], "draw": np.array([0])}
    (found,) = session(functions.function(functions.UNIFORM)).run(None, given)
    np.testing.assert_array_equal(found, noise.uniform(drawn, x).numpy())
    assert found.min() >= 0 and found.max() < 1 and abs(found.mean() - 0.5) < 0.01


def test_names_say_what_differs() -> None:
    assert QuantizerKind().name == "FakeQuantize"
    assert len({kind_of(grid).name for grid in GRIDS}) == len(GRIDS)
    recalled = kind_of(Grid(scheme=Scheme.AFFINE_INTEGER), "Recalled", momentum=0.5, percentile=99.9, corrected=False)
    assert recalled.name == "FakeQuantizeAffineIntegerRecalledNotCorrectedPercentile99_9"
