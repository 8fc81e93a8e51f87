"""ONNX Runtime computes what PyTorch computes: losses, gradients, running state, updates; with stochastic rounding too.

Roundings of float32 differ between both by some 1e-7. Where a value lies that close to the middle between two levels,
one of them may round up and the other down, and from there on they differ by a step: in PyTorch, float32 and float64
differ as often. So single steps are compared at seeds where none does, many steps either at widths where a step is no
more than rounding, or from the same state each time, by their median.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

import cpt_fx
from cpt_fx import recipes
from cpt_fx.export.verify import _differences
from cpt_fx.formats import Rounding
from cpt_fx.native import disabled
from cpt_fx.ort import Trainer
from cpt_fx.quantizers import numerics
from cpt_fx.schedules import Schedule, Static, named

pytestmark = pytest.mark.filterwarnings(
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:.*:DeprecationWarning",
)
BATCH = 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.again = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.last = nn.Linear(8 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(x + self.again(self.second(x)))
        out: Tensor = self.last(F.avg_pool2d(x, 2).flatten(1))
        return out


class Attention(nn.Module):
    """A block with an embedding that is also the head, and attention whose products are quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(30, 16), nn.LayerNorm(16)
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.wide = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        parts = self.mix(self.norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        out: Tensor = self.head((x + self.wide(x)).mean(1))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.LSTM(6, 12, batch_first=True), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(x)[0][:, -1])
        return out


Case = tuple[Callable[[], nn.Module], Callable[[], Tensor], int]
CASES: dict[str, Case] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10)), lambda: torch.randn(BATCH, 20), 10
    ),
    "residual": (Residual, lambda: torch.randn(BATCH, 3, 8, 8), 10),
    "attention": (Attention, lambda: torch.randint(0, 30, (BATCH, 7)), 30),
    "lstm": (Recurrent, lambda: torch.randn(BATCH, 5, 6), 5),
}  # fmt: skip


def nearest() -> recipes.Recipe:
    """The default recipe, rounding gradients to nearest."""
    found = recipes.default()
    changed = {}
    for field in dataclasses.fields(found):
        rule = getattr(found, field.name)
        if getattr(rule, "gradient", None) is not None:
            format = dataclasses.replace(rule.gradient, rounding=Rounding.NEAREST)
            changed[field.name] = dataclasses.replace(rule, gradient=format)
    return dataclasses.replace(found, **changed)


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.02, momentum=0.9, weight_decay=1e-3),
    # Adam divides by the root of the mean square: where the true gradient is zero, it would show rounding only.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-3, eps=1e-4),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, bool], Path]:
    """Exports that several tests use: widths are inputs, so one serves every schedule."""
    return defaultdict(lambda: tmp_path_factory.mktemp("exported") / "made")


def exported(
    name: str, schedule: Schedule, directories: dict[tuple[str, str, bool], Path], optimizer: str = "sgd",
    *, stochastic: bool = False,
) -> tuple[nn.Module, Trainer, Callable[[], tuple[Tensor, Tensor]]]:  # fmt: skip
    """A transformed model, its trainer in ONNX Runtime, and batches."""
    torch.manual_seed(0)
    make, inputs, classes = CASES[name]
    x = inputs()
    recipe = recipes.default() if stochastic else nearest()
    model = cpt_fx.transform(make(), schedule, recipe=recipe, example_inputs=(x,)).train()
    folder = directories[name, optimizer, stochastic]
    if not folder.exists():
        # Another batch size than the one trained with.
        cpt_fx.export.ort_training(
            model, (x[:3],), folder, loss="cross_entropy", optimizer=OPTIMIZERS[optimizer](model.parameters())
        )
    torch.manual_seed(1)
    return model, Trainer(folder, schedule, seed=1, threads=1), lambda: (inputs(), torch.randint(0, classes, (BATCH,)))


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    return float(loss.detach()), {name: gradient.clone() for name, gradient in found.items()}


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest element of each gradient; tied parameters go by either name."""
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    matched = {name: theirs.get(name, theirs.get("head.weight")) for name in ours}
    worst = 0.0
    for name, gradient in ours.items():
        other = matched[name]
        assert other is not None, name
        scale = max(float(gradient.abs().max()), 1e-3 * largest)
        worst = max(worst, float((other - gradient).abs().max()) / scale)
    return worst


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bits", [8, 5])
def test_one_step(name: str, bits: int, directories: dict[tuple[str, str, bool], Path]) -> None:
    model, trainer, batch = exported(name, Static(bits), directories)
    x, y = batch()
    loss, ours = gradients(model, x, y)
    theirs = trainer.backward(x, y)
    assert abs(theirs - loss) <= 1e-6
    assert difference(ours, trainer.gradients()) <= 1e-5
    learned = trainer.state_dict()
    for key, buffer in model.named_buffers():
        if key in learned and buffer.is_floating_point():
            torch.testing.assert_close(learned[key], buffer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_twenty_steps_without_visible_rounding(
    name: str, optimizer: str, directories: dict[tuple[str, str, bool], Path]
) -> None:
    model, trainer, batch = exported(name, Static(23), directories, optimizer)
    torch_optimizer = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(20):
        x, y = batch()
        loss, _found = gradients(model, x, y)
        torch_optimizer.step()
        assert abs(trainer.step(x, y) - loss) <= 1e-5
    learned = trainer.state_dict()
    for key, parameter in model.named_parameters():
        if key in learned:
            torch.testing.assert_close(learned[key], parameter.detach(), rtol=0, atol=1e-5)
    with torch.no_grad():
        model.eval()
        x, y = batch()
        loss, outputs = trainer.evaluate(x, y)
        torch.testing.assert_close(torch.as_tensor(outputs), model(x), rtol=0, atol=2e-4)
        assert loss == pytest.approx(float(F.cross_entropy(model(x), y)), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_a_hundred_steps_of_a_cycle(name: str, optimizer: str, directories: dict[tuple[str, str, bool], Path]) -> None:
    """From the same state each step, 3 to 8 bits; ONNX Runtime's own updates carry the training on."""
    schedule = named("CR", q_min=3, q_max=8, total_steps=100)
    model, trainer, batch = exported(name, schedule, directories, optimizer)
    found, seen = [], set()
    for _ in range(100):
        trainer.to_torch(model)
        x, y = batch()
        seen.add(schedule.bits(schedule.position).weight)
        _loss, ours = gradients(model, x, y)
        trainer.step(x, y)
        found.append(difference(ours, trainer.gradients()))
    assert seen == {3, 4, 5, 6, 7, 8}
    assert sorted(found)[50] < 1e-5


@pytest.mark.parametrize("name", ["mlp", "residual", "lstm"])
def test_stochastic_rounding_equals_that_of_torch(
    name: str, directories: dict[tuple[str, str, bool], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same seed for each quantizer, gradients agree as if nothing were random."""
    model, trainer, batch = exported(name, Static(4), directories, stochastic=True)
    x, y = batch()
    before = trainer.generator.get_state()
    seeds = torch.randint(
        -(1 << 31), 1 << 31, (trainer.manifest.seeds, 2), generator=trainer.generator, dtype=torch.int32
    )
    trainer.generator.set_state(before)
    # Seeds are numbered in the order in which they are drawn, which is PyTorch's.
    left = list(seeds)
    monkeypatch.setattr(numerics, "new_seed", lambda device: left.pop(0))
    with disabled():
        _loss, ours = gradients(model, x, y)
    assert not left
    trainer.backward(x, y)
    assert difference(ours, trainer.gradients()) <= 1e-5


def test_gradients_lie_on_the_grid_and_are_unbiased(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = torch.randn(1, 12)
    model = cpt_fx.transform(nn.Linear(3, 12), Static(32, gradient=3), recipe=recipes.default()).train()
    cpt_fx.export.ort_training(
        model, (torch.randn(1, 3),), tmp_path / "made", optimizer="sgd", dynamic_batch=False,
        loss=lambda output, target: (output * target).sum(), example_targets=weights,
    )  # fmt: skip
    trainer = Trainer(tmp_path / "made", Static(32, gradient=3), seed=0)
    draws = []
    for _ in range(600):
        trainer.backward(torch.randn(1, 3), weights)
        trainer.advance()
        draws.append(trainer.gradients()["bias"])
    found = torch.stack(draws)
    step = (weights.max() - weights.min()) / 7
    codes = (found - weights.min()) / step
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
    assert len(found.unique(dim=0)) > 100
    # Five times the error of a mean of 600 draws, whose standard deviation is at most half a step.
    assert float((found.mean(0) - weights[0]).abs().max()) < 5 * 0.5 * float(step) / 600**0.5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("gradient", "another gradient '2.weight'"),
        ("loss", "another output 'loss'"),
        ("state", "another state '0.cpt_fx_input_range_size'"),
        ("parameter", "another parameter '2.bias'"),
        ("moment", "another optimizer state '2.weight.momentum_buffer'"),
    ],
)
def test_an_export_that_is_wrong_is_refused(
    wrong: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes out wrong: here by a hundredth, in one tensor."""
    backward, update = Trainer.backward, Trainer.update

    def spoilt(block: Any) -> None:
        block.write(1.01 * block.read())

    def broken(self: Trainer, *args: Any) -> float:
        loss = backward(self, *args)
        if wrong == "gradient":
            spoilt(self.memory.gradients["2.weight"])
        if wrong == "state":
            spoilt(self.memory.states["0.cpt_fx_input_range_size"])
        return 1.01 * loss if wrong == "loss" else loss

    def broken_update(self: Trainer) -> None:
        update(self)
        if wrong == "parameter":
            spoilt(self.memory.parameters["2.bias"])
        if wrong == "moment":
            spoilt(self.memory.moments["2.weight.momentum_buffer"])

    monkeypatch.setattr(Trainer, "backward", broken)
    monkeypatch.setattr(Trainer, "update", broken_update)
    model = cpt_fx.transform(CASES["mlp"][0](), Static(8)).train()
    with pytest.raises(cpt_fx.ExportError, match=said):
        cpt_fx.export.ort_training(
            model, (torch.randn(4, 20),), tmp_path / "made", loss="cross_entropy",
            optimizer=OPTIMIZERS["momentum"](model.parameters()),
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_what_is_no_number_has_to_be_so_in_both() -> None:
    ours = {"x": np.array([1.0, np.nan, np.inf], np.float32)}
    assert _differences(ours, {"x": ours["x"].copy()}, 0.0) == {"x": 0.0}
    for other in ([1.0, 0.0, np.inf], [1.0, np.nan, -np.inf], [np.nan, np.nan, np.inf]):
        (found,) = _differences(ours, {"x": np.array(other, np.float32)}, 0.0).values()
        assert not found <= 1.0


def test_what_torch_traces_wrongly_is_refused(tmp_path: Path) -> None:
    """Its decomposition of this loss counts labels that are not there."""
    model = cpt_fx.transform(nn.Linear(4, 3), Static(8)).train()
    labels = torch.tensor([[0, 2, -1], [1, 0, -1]])
    with pytest.raises(cpt_fx.ExportError, match="another output 'loss'"):
        cpt_fx.export.ort_training(
            model, (torch.randn(2, 4),), tmp_path / "made", loss=F.multilabel_margin_loss, optimizer="sgd",
            example_targets=labels,
        )  # fmt: skip


def test_what_runs_on_integers_is_refused(tmp_path: Path) -> None:
    model = cpt_fx.transform(nn.Linear(4, 3), Static(8), execution="integer")
    for export in (cpt_fx.export.onnx, cpt_fx.export.qdq):
        with pytest.raises(cpt_fx.ExportError, match='execution="simulated"'):
            export(model, (torch.randn(2, 4),), tmp_path / "made")


def test_wrapped_models_and_tensors_that_are_passed_twice(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
            scores = self.inner(x)
            return {"loss": F.mse_loss(scores, labels), "scores": scores, "kind": None, "size": 4}

    x = torch.randn(5, 4)
    model: Any = torch.compile(cpt_fx.transform(Own(), Static(8), example_inputs=(x, x.clone())))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = cpt_fx.export.ort_training(
        model, {"labels": x, "x": x}, tmp_path / "made", loss=None, optimizer=optimizer, dynamic_batch=False
    )
    assert [parameter.name for parameter in made.parameters] == ["inner.weight", "inner.bias"]
    assert {tensor.name for tensor in made.outputs} == {"output.loss", "output.scores"}
    assert Trainer(tmp_path / "made", Static(8)).step(x=x, labels=x) > 0


def test_signatures() -> None:
    """What users hold on to: the first ones are the contract, the rest may grow."""
    expected: dict[Callable[..., Any], str] = {
        cpt_fx.export.ort_training: "result, example_inputs, directory, *, loss, optimizer, dynamic_batch",
        cpt_fx.export.onnx: "result, example_inputs, path, bits",
        cpt_fx.export.qdq: "result, example_inputs, path, bits",
        cpt_fx.export.report: "result, example_inputs",
        Trainer: "directory, schedule, device",
    }
    for function, names in expected.items():
        found = str(inspect.signature(function).replace(return_annotation=inspect.Signature.empty))
        bare = [part.split(":")[0].split("=")[0].strip() for part in found.strip("()").split(", ")]
        wanted = names.split(", ")
        assert [name for name in bare if name in wanted] == wanted


def test_exports_are_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _model, trainer, batch = exported("residual", Static(8), {("residual", "sgd", False): tmp_path / "made"})
    trainer.step(*batch())
    out, err = capfd.readouterr()
    assert out == "" and err == ""
