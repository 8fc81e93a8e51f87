"""`export.report`: what it promises is what exports do, what is refused is said, and nothing is left behind."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import cpt_fx
from cpt_fx.errors import TransformError

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

from cpt_fx.export import report
from cpt_fx.export.reporting import ExportReport

SCHEDULE = cpt_fx.schedules.Static(6)
X = torch.linspace(-1, 1, 12 * 6).reshape(12, 6)


def transformed(*layers: nn.Module, recipe: Any = None) -> nn.Module:
    torch.manual_seed(0)
    result = cpt_fx.transform(nn.Sequential(*layers), SCHEDULE, recipe=recipe)
    result(X)
    return result


def verdicts(found: ExportReport, target: str) -> dict[tuple[str, str], str]:
    return {
        (row.layer, row.what.partition(" ")[0]): row.verdicts[target] for row in found.rows if target in row.verdicts
    }


def notes(found: ExportReport, target: str) -> str:
    return "\n".join(found.targets[target].notes)


class Made(NamedTuple):
    """A report, the model it is on, that model's state and modes before, and the folder it was made in."""

    found: ExportReport
    model: nn.Module
    state: dict[str, Tensor]
    modes: dict[str, bool]
    folder: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model with a bit of everything, reported on once: that takes seconds."""
    folder = tmp_path_factory.mktemp("here")
    model = transformed(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3))
    state = copy.deepcopy(model.state_dict())
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return Made(report(model, (X,)), model, state, modes_of(model), folder)


def modes_of(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


@pytest.fixture
def model(made: Made) -> nn.Module:
    return made.model


@pytest.fixture
def found(made: Made) -> ExportReport:
    return made.found


def test_every_quantizer_has_a_verdict(model: nn.Module, found: ExportReport) -> None:
    views = cpt_fx.inspect(model).quantizers
    assert [row.layer for row in found.rows] == [view.layer for view in views]
    forward = {(view.layer, view.operand) for view in views if view.role != "gradient"}
    for target in ("onnx", "qdq"):
        assert verdicts(found, target) == dict.fromkeys(forward, "exact")
    gradients = {(view.layer, "gradient") for view in views if view.role == "gradient"}
    assert verdicts(found, "ort_training") == dict.fromkeys(forward | gradients, "exact")


def test_what_is_drawn_is_approximated(found: ExportReport) -> None:
    # In evaluation nothing is drawn.
    assert "random numbers" not in notes(found, "onnx")
    assert "random numbers are drawn from the seeds of a step" in notes(found, "ort_training")
    assert found.status("ort_training") == "approximated"
    assert found.status("onnx") == found.status("qdq") == "exact"


def test_running_state_is_named(found: ExportReport) -> None:
    # Ranges are part of their quantizer.
    assert "exact: 1.running_mean, 1.running_var, 1.num_batches_tracked: running" in notes(found, "ort_training")


def test_the_model_is_left_as_it_was(made: Made) -> None:
    after = made.model.state_dict()
    assert [name for name in made.state if not torch.equal(made.state[name], after[name])] == []
    assert modes_of(made.model) == made.modes
    assert list(made.folder.iterdir()) == []


def test_a_format_that_qdq_cannot_say_is_approximated() -> None:
    found = report(transformed(nn.Linear(6, 3), recipe="paper"), (X,), targets=("onnx", "qdq"))
    assert found.status("onnx") == "exact"
    assert found.status("qdq") == "approximated"
    row = next(row for row in found.rows if row.what.startswith("input"))
    status, error = row.verdicts["qdq"].split()
    assert status == "approximated" and 0 < float(error.rstrip("%")) < 20
    assert ": a zero point between two codes" in notes(found, "qdq")
    assert row.verdicts["qdq"] in str(found)


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6, max_norm=1.0), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(x))
        return out


def test_a_refusal_is_said_and_not_raised() -> None:
    result = cpt_fx.transform(Refused(), SCHEDULE)
    found = report(result, (torch.arange(8).reshape(4, 2),), targets=("ort_training", "onnx"))
    assert found.status("ort_training") == "refused"
    assert "max_norm" in found.targets["ort_training"].problem
    assert f"  {found.targets['ort_training'].problem[:40]}" in str(found)


def test_inputs_that_do_not_fit_are_said_and_not_raised() -> None:
    found = report(transformed(nn.Linear(6, 3)), (torch.randn(4, 5),))
    assert [found.status(target) for target in found.targets] == ["refused"] * 3
    assert all("mat1 and mat2" in outcome.problem for outcome in found.targets.values())


def test_any_state_is_kept() -> None:
    class Counting(nn.Module):
        counts: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 3)
            self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.counts += 1
            out: Tensor = self.fc(x)
            return out

    found = report(cpt_fx.transform(Counting(), SCHEDULE), (X,), targets="ort_training")
    assert "exact: counts: running state" in notes(found, "ort_training")
    assert found.status("ort_training") == "exact"


def test_one_target_is_enough() -> None:
    found = report(transformed(nn.Linear(6, 3)), (X,), targets="onnx")
    assert list(found.targets) == ["onnx"]
    assert repr(found) == "<ExportReport on Sequential: onnx exact>"


def test_it_is_data_too(found: ExportReport) -> None:
    data = json.loads(json.dumps(found.to_dict()))
    assert {name: one["status"] for name, one in data["targets"].items()} == {
        "ort_training": "approximated",
        "onnx": "exact",
        "qdq": "exact",
    }
    assert len(data["rows"]) == len(found.rows)


def test_exports_are_tried(found: ExportReport) -> None:
    assert any(note.startswith("tried") for note in found.targets["onnx"].notes)
    assert any("were compared with PyTorch" in note for note in found.targets["ort_training"].notes)


def test_bad_calls_are_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r'target must be one of "ort_training", "onnx", "qdq", got \'onxx\'. Did you'):
        report(model, (X,), targets=("onxx",))
    with pytest.raises(TransformError, match="is not transformed"):
        report(nn.Linear(6, 3), (X,))
    with pytest.raises(ValueError, match="example_inputs must be a tuple"):
        report(model, 3)
