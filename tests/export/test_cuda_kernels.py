"""Whatever a training step computes has a CUDA kernel in ONNX Runtime: by its lists, since no GPU is at hand."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch.nn import functional as F

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnx_ir as ir  # noqa: E402
from onnx import parser  # noqa: E402

import cpt_fx  # noqa: E402
from cpt_fx.export import functions, program  # noqa: E402
from cpt_fx.export.functions import QuantizerKind, add_functions, kind_of  # noqa: E402
from cpt_fx.export.recording import OPSET  # noqa: E402
from cpt_fx.export.updates import trace_updates  # noqa: E402
from cpt_fx.formats import Rounding, Scheme, Specials  # noqa: E402
from cpt_fx.quantizers.numerics import Grid  # noqa: E402
from cpt_fx.schedules import Static  # noqa: E402
from tests.export.cuda_kernels import RELEASES, kernels, missing  # noqa: E402
from tests.export.test_functions import calling  # noqa: E402
from tests.export.test_parity import CASES  # noqa: E402

FLOAT = Grid(scheme=Scheme.FLOAT, exponent=4, specials=Specials.FN)
KINDS: tuple[QuantizerKind | str, ...] = (
    *(kind_of(Grid(scheme=scheme, rounding=rounding)) for scheme in list(Scheme)[:3] for rounding in Rounding),
    kind_of(FLOAT),
    kind_of(FLOAT._replace(specials=Specials.IEEE, block=32)),
    *(kind_of(Grid(), source, percentile=99.0) for source in ("Observed", "Recalled")),
    kind_of(Grid(), "Observed"),
    kind_of(Grid(), "Learned"),
    functions.LEARNED,
    functions.UNIFORM,
)
OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")


@cache
def graph_of(name: str) -> Any:
    """The gradients of a model, with the functions that they call."""
    make, inputs, _ = CASES[name]
    torch.manual_seed(0)
    x = inputs()
    model = cpt_fx.transform(make(), Static(8), example_inputs=(x,)).train()
    call = program.Call((x,), {}, (torch.zeros(len(x), dtype=torch.long),), F.cross_entropy)
    graph = program.trace(cpt_fx.single_graph(model, (x,)), call, gradients=True)
    add_functions(graph)
    return ir.to_proto(graph.model)


@cache
def updates_of(name: str) -> tuple[Any, ...]:
    """The first update and the later ones of an optimizer."""
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    made = trace_updates(getattr(torch.optim, name)([parameter], lr=0.1), {"p": parameter}, {"p": 0})
    return ir.to_proto(made.first), ir.to_proto(made.later)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind if isinstance(kind, str) else kind.name)
def test_functions(kind: QuantizerKind | str, release: str) -> None:
    assert not missing(calling(functions.function(kind)), kernels(release, OPSET))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, release: str) -> None:
    assert not missing(graph_of(name), kernels(release, OPSET))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates(name: str, release: str) -> None:
    for graph in updates_of(name):
        assert not missing(graph, kernels(release, OPSET))


@pytest.mark.parametrize("release", RELEASES)
def test_what_has_no_kernel_is_found(release: str) -> None:
    model = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : {OPSET}, "cpt_fx" : 1]>
        graph (uint64[3] x, int32[3] y, int64[1] place) => (uint64[3] a, int32 b, int32[3] c) {{
            a = cpt_fx.Shift (x)
            b = GatherND (y, place)
            c = Add (y, y)
        }}
        <domain: "cpt_fx", opset_import: ["" : {OPSET}]>
        Shift (x) => (y) {{ y = BitShift <direction = "LEFT"> (x, x) }}"""
    )
    assert missing(model, kernels(release, OPSET)) == {"BitShift", "GatherND of int32"}
