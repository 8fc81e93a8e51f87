"""Sums at indices: equal to torch's, and none of them lost between the threads of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxscript")

import onnx_ir as ir

import cpt_fx
from cpt_fx.export.operators import EVERYWHERE
from cpt_fx.export.refusals import UnsupportedError, check_nodes
from cpt_fx.schedules import Static

aten = torch.ops.aten


def at(size: int, *shape: int) -> Tensor:
    return torch.randint(-size, size, shape)


INDICES: dict[str, Any] = {
    "rows": lambda: (at(4, 7),),
    "two, adjacent": lambda: (at(4, 7), at(5, 7)),
    "two, broadcast": lambda: (at(4, 2, 1), at(5, 1, 3)),
    "in the middle": lambda: (None, at(5, 7), at(6, 7)),
    "apart": lambda: (at(4, 7), None, at(6, 7)),
    "apart, two dims": lambda: (None, at(5, 2, 3), None, at(3, 2, 3)),
    "all": lambda: (at(4, 7), at(5, 7), at(6, 7), at(3, 7)),
    "the last": lambda: (None, None, None, at(3, 9)),
    "none": lambda: (at(4, 0),),
    "mask": lambda: (torch.rand(4, 5) > 0.5,),
    "mask in the middle": lambda: (None, torch.rand(5, 6) > 0.4),
    "int32": lambda: (at(4, 7).int(),),
}


@pytest.mark.parametrize("name", INDICES)
def test_sums_at_indices(name: str) -> None:
    torch.manual_seed(0)
    x, indices = torch.randn(4, 5, 6, 3), list(INDICES[name]())
    shape = aten.index.Tensor(x, indices).shape
    for values in (torch.randn(shape), torch.tensor(2.0), torch.randn(shape[-1:])):
        expected = aten.index_put.default(x, indices, values, True)
        torch.testing.assert_close(EVERYWHERE[aten.index_put.default](x, indices, values, True), expected)


class Words(nn.Module):
    """Few words, each of them often in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(10, 64), nn.Linear(64, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.out(self.table(words).tanh())
        return scores.mean(1)


def test_gradients_of_a_table_in_several_threads(tmp_path: Path) -> None:
    """The export compares three steps with PyTorch's, with as many threads as there are cores."""
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = cpt_fx.transform(Words(), Static(8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    cpt_fx.export.ort_training(model, (torch.randint(0, 10, (64, 300)),), tmp_path, loss="mse", optimizer=optimizer)


class Places(nn.Module):
    """Sums at indices, and indices with masks, of which the exporter's own translations are wrong or refused."""

    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("rows", torch.tensor([0, 2, 2, 1]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h = h.index_put((self.rows,), h[self.rows], accumulate=True).index_add(0, self.rows, h[:4])
        picked = (h > 0).max(1).indices
        made: Tensor = (
            h + picked.unsqueeze(1) + h[:, torch.tensor([True, False, True, True])][:, self.rows.clamp_max(1)][:, :1]
        )
        return made


def test_sums_and_masks_in_evaluation(tmp_path: Path) -> None:
    """The export compares its outputs with PyTorch's."""
    pytest.importorskip("onnxruntime")
    model = cpt_fx.transform(Places(), Static(8)).eval()
    cpt_fx.export.onnx(model, (torch.randn(5, 4),), tmp_path / "model.onnx")


def test_what_would_lose_sums_is_refused() -> None:
    values = [ir.Value(name=name) for name in "xiu"]
    node = ir.node("ScatterND", values, attributes={"reduction": "add"})
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 18})
    with pytest.raises(UnsupportedError, match="loses some sums"):
        check_nodes(ir.Model(graph, ir_version=9))
