"""Arguments that ONNX takes as constants and models compute from the sizes of tensors; sizes that a graph relies on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("onnxruntime")

import cpt_fx
from cpt_fx.errors import ExportError
from cpt_fx.ort import Trainer
from cpt_fx.schedules import Static
from tests.export.zoo import differences


class Sized(nn.Module):
    """Halves, windows, shifts, factors and exponents that follow from the sizes of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 2, 3, stride=2)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.first(x)
        rows, columns = h.shape[-2:]
        left, right = h.chunk(2, -1)
        top, bottom, *_ = h.split(rows // 2, -2)
        return [
            left.cos(), right.sin(), top.cos(), bottom.sin(), h.roll(columns // 2, -1) * h,
            h.repeat_interleave(columns // 4, -1), (h.abs() + 0.1) ** (1 / columns), F.leaky_relu(h, 1 / rows),
            torch.addcmul(h, h, h, value=columns), F.softplus(h, beta=rows), F.avg_pool2d(h, (rows, columns)),
            h.unfold(-1, columns // 2, 1), self.up(h, output_size=[12, 12]),
        ]  # fmt: skip


class Bags(nn.Module):
    """Bags with weights of their own, some of them empty."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shares = nn.EmbeddingBag(9, 6, mode="sum", padding_idx=2), nn.Parameter(torch.rand(9))
        self.last = nn.Linear(6, 3)

    def forward(self, words: Tensor, offsets: Tensor) -> Tensor:
        made: Tensor = self.last(self.table(words, offsets, per_sample_weights=self.shares[words]))
        return made


class Near(nn.Module):
    """Bags that are rows of a table, how far they are from codes and from each other, and where rows of edges begin."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.codes = nn.EmbeddingBag(9, 6), nn.Linear(6, 6), nn.Parameter(torch.rand(5, 6))

    def forward(self, words: Tensor) -> list[Tensor]:
        bags = self.layer(self.table(words))
        begins = torch._convert_indices_from_coo_to_csr(words[:, 0].sort().values, 9)
        return [torch.cdist(bags, self.codes), torch.cdist(bags, bags, 1.0), bags[:, :1] * begins]


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Near, (torch.tensor([[1, 2, 8], [3, 2, 2], [3, 2, 2], [1, 8, 0]]),)),
        (Sized, (torch.rand(2, 3, 5, 5),)),
        (Bags, (torch.tensor([1, 2, 8, 3, 2, 2, 1, 8]), torch.tensor([0, 3, 3, 8]))),
        (lambda: nn.Sequential(nn.Conv3d(2, 3, 2, bias=False)), (torch.rand(2, 2, 3, 3, 3),)),
    ],
)
def test_it_is_right_in_every_form(model: type[nn.Module], inputs: tuple[Tensor, ...], tmp_path: Path) -> None:
    """Trained and in both graphs for inference."""
    torch.manual_seed(0)
    wrong = {what: off for what, off, most in differences(model(), inputs, {}, tmp_path) if not off <= most}
    assert not wrong


class Steps(nn.Module):
    """Three steps of what may be longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x[step : step + 1]).tanh() for step in range(3)])


def test_fewer_than_the_graph_is_made_for_are_refused(tmp_path: Path) -> None:
    result = cpt_fx.transform(Steps(), Static(8))
    loss = torch.nn.functional.mse_loss
    targets = torch.zeros(3, 2)
    manifest = cpt_fx.export.ort_training(
        result, (torch.rand(5, 4),), tmp_path / "t", loss=loss, optimizer="sgd", example_targets=targets
    )
    assert manifest.least["batch"] == 3
    trainer = Trainer(tmp_path / "t", Static(8))
    trainer.step(torch.rand(4, 4), targets)
    with pytest.raises(ValueError, match=r"x holds a batch of 2, and the model trains with 3 or more"):
        trainer.step(torch.rand(2, 4), targets)


class Taken(nn.Module):
    """A parameter called as an argument is, and a layer called as the inputs for widths are."""

    def __init__(self) -> None:
        super().__init__()
        self.bits, self.x = nn.Linear(4, 4), nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.bits(x) * self.x  # type: ignore[no-any-return]


def test_names_that_stand_for_two_things(tmp_path: Path) -> None:
    """The model's own come first, but for what no export can call otherwise."""
    result = cpt_fx.transform(Taken(), Static(8))
    manifest = cpt_fx.export.ort_training(result, (torch.rand(2, 4),), tmp_path / "t", loss="mse", optimizer="sgd")
    assert [tensor.name for tensor in manifest.inputs] == ["x_input"]
    assert set(manifest.width_sources) == {f"_cpt_fx.bits.{name}" for name in ("weight", "activation", "gradient")}
    net = nn.Linear(4, 4)
    net.register_parameter("seeds", nn.Parameter(torch.rand(4)))
    result = cpt_fx.transform(net, Static(8))
    with pytest.raises(ExportError, match=r"'seeds' would be the name of two inputs"):
        cpt_fx.export.ort_training(result, (torch.rand(2, 4),), tmp_path / "s", loss="mse", optimizer="sgd")


class Spans(nn.Module):
    """Where an answer begins in a text, as models of transformers ask; a place behind its end counts for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor, start: Tensor | None = None, scale: float = 1.0, **more: Tensor) -> Tensor:
        scores = self.layer(x).squeeze(-1) * scale
        return F.cross_entropy(scores, more["end"].clamp(0, scores.shape[1]), ignore_index=scores.shape[1])


def test_a_label_to_ignore_that_is_a_size(tmp_path: Path) -> None:
    inputs = {"x": torch.rand(3, 5, 4), "end": torch.tensor([2, 9, 4])}
    wrong = {what: off for what, off, most in differences(Spans(), (), inputs, tmp_path) if not off <= most}
    assert not wrong
