"""What is passed wrongly, or is broken on disk: an error that names it, and a trainer that is as it was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnxruntime

import cpt_fx
from cpt_fx.common.files import digest
from cpt_fx.errors import ExportError
from cpt_fx.ort import Trainer
from cpt_fx.ort.feeding import arrays_of
from cpt_fx.ort.manifest import DATA, FILES, VALUES, Manifest, Optimizer, read
from cpt_fx.ort.manifest import Tensor as Described
from tests import ort


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return Trainer(ort.net_directory(), ort.schedule(), seed=5, threads=1)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A directory to break."""
    return Path(shutil.copytree(ort.net_directory(), tmp_path / "exported"))


# Directories.


def test_a_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"nowhere is not a directory"):
        Trainer(tmp_path / "nowhere", ort.schedule())
    with pytest.raises(ExportError, match=r"holds no manifest\.json"):
        Trainer(tmp_path, ort.schedule())


def test_a_part_with_a_schedule_of_its_own(tmp_path: Path) -> None:
    schedule = cpt_fx.schedules.Static(6)
    model = cpt_fx.transform(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), ort.schedule(), overrides={"1": schedule})
    with pytest.raises(ExportError, match=r"follows a schedule of its own \(Static\(bits=6\)\).*: leave it out"):
        cpt_fx.export.ort_training(model, (torch.randn(4, 4),), tmp_path / "made", loss="mse", optimizer="sgd")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_missing_cut_or_changed(copied: Path, name: str) -> None:
    path = copied / name
    data = path.read_bytes()
    for broken in (data[: len(data) // 2], b"", data[:-1] + bytes([data[-1] ^ 1])):
        path.write_bytes(broken)
        with pytest.raises(ExportError, match=rf"{name} is not as it was written"):
            Trainer(copied, ort.schedule())
    path.unlink()
    with pytest.raises(ExportError, match=rf"{name} is missing"):
        Trainer(copied, ort.schedule())


@pytest.mark.parametrize("name", [name for name in FILES if name not in (VALUES, DATA)])
def test_graphs_that_onnx_runtime_does_not_load(copied: Path, name: str) -> None:
    """As an older release may not load what a newer one does: here also where the checksum was made to fit."""
    (copied / name).write_bytes(b"nonsense")
    made = read(copied)
    replace(made, digests={name: digest(copied / name) for name in FILES}).write(copied)
    with pytest.raises(ExportError, match=rf"does not load .*{name}"):
        Trainer(copied, ort.schedule(), clip_norm=1.0)


# Arguments.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"schedule": 8}, TypeError, r"schedule must be one of cpt_fx\.schedules, got int.*Static\(8\)"),
        ({"accumulation": 0}, ValueError, "accumulation must be an integer of at least 1"),
        ({"accumulation": 2.0}, TypeError, "accumulation must be an integer"),
        ({"threads": 0}, ValueError, "threads must be an integer of at least 1"),
        ({"seed": -1}, ValueError, "seed must be an integer of at least 0"),
        ({"device": "tpu"}, ValueError, "device must be"),
        ({"learning_rate": -1.0}, ValueError, "a learning rate must be"),
        ({"learning_rate": [0.1, 0.2]}, ValueError, "2 learning rates were given for 1 parameter groups"),
    ],
)
def test_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"schedule": ort.schedule()} | options
    with pytest.raises(error, match=message):
        Trainer(ort.net_directory(), **options)


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="there is a GPU build")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there(device: str) -> None:
    with pytest.raises(ExportError, match=r"CUDA 11\.8"):
        Trainer(ort.net_directory(), ort.schedule(), device)


# Batches.

X, TARGET = ort.batch(0)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((X,), {}, TypeError, "missing a required argument: 'target'; this model takes x, target"),
        ((X, TARGET, X), {}, TypeError, "too many positional arguments; this model takes x, target"),
        ((X,), {"target": TARGET, "y": X}, TypeError, "unexpected keyword argument 'y'; this model takes x, target"),
        ((X, TARGET), {"x": X}, TypeError, "multiple values for argument 'x'"),
        (([1.0], TARGET), {}, TypeError, "x must be a numpy array or a torch tensor, got list"),
        ((None, TARGET), {}, TypeError, "x must be a numpy array or a torch tensor, got NoneType"),
        ((X[0], TARGET), {}, ValueError, r"x must have the shape \(batch, 6\), got \(6,\)"),
        ((X[:, :5], TARGET), {}, ValueError, r"x must have the shape \(batch, 6\), got \(8, 5\)"),
        ((X, TARGET[:, None]), {}, ValueError, r"target must have the shape \(batch,\), got \(8, 1\)"),
        ((X[:0], TARGET[:0]), {}, ValueError, r"x is empty: its shape is \(0, 6\)"),
        ((X[:5], TARGET), {}, ValueError, "batch must be one size: x has 5, target has 8"),
        ((X.long(), TARGET), {}, TypeError, "x must be of float32, got int64"),
        ((X, TARGET.float()), {}, TypeError, "target must be of int64, got float32"),
        ((X, TARGET.bool()), {}, TypeError, "target must be of int64, got bool"),
        ((X.to(torch.complex64), TARGET), {}, TypeError, "x must be of float32, got complex64"),
        (
            (X, TARGET + 4),
            {},
            ValueError,
            r"target holds \d at \(\d,\): it must be from 0 to 3, or -100",
        ),
        ((X, TARGET - 5), {}, ValueError, r"target holds -\d at"),
    ],
)
def test_batches(
    trainer: Trainer, args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = trainer.state_dict()
    for call in (trainer.step, trainer.evaluate, trainer.backward):
        with pytest.raises(error, match=message):
            call(*args, **kwargs)
    assert trainer.updates == trainer.pending == 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())


def test_ignored_labels_are_no_class(trainer: Trainer) -> None:
    target = TARGET.clone()
    target[0] = -100
    loss, outputs = trainer.evaluate(X, target)
    expected = nn.functional.cross_entropy(torch.as_tensor(outputs), target)
    assert loss == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("word", [-1, ort.WORDS])
def test_words_that_are_not_in_the_vocabulary(word: int) -> None:
    trainer = Trainer(ort.tied_directory(), ort.schedule(), threads=1)
    words, target = ort.tokens(0)
    words[1, 2] = word
    with pytest.raises(ValueError, match=rf"tokens holds {word} at \(1, 2\): it must be from 0 to 11"):
        trainer.step(words, target)


def test_a_step_that_fails_is_not_half_done() -> None:
    """What was gathered before is dropped, and the training goes on."""
    trainer = Trainer(ort.tied_directory(), ort.schedule(), seed=5, threads=1, accumulation=3)
    words, target = ort.tokens(0)
    trainer.step(words, target)
    before, choices = trainer.state_dict(), dict(trainer.manifest.choices)
    trainer.manifest.choices.clear()
    with pytest.raises(Exception, match="indices element out of data bounds"):
        trainer.step(words + ort.WORDS, target)
    trainer.manifest.choices.update(choices)
    assert trainer.pending == 0
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())
    assert np.isfinite(trainer.step(words, target))


def test_one_example_has_no_variance(trainer: Trainer) -> None:
    before = trainer.state_dict()
    with pytest.raises(ValueError, match=r"x holds a batch of 1, and the model trains with 2 or more"):
        trainer.step(X[:1], TARGET[:1])
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())
    trainer.evaluate(X[:1], TARGET[:1])
    other = Trainer(ort.tied_directory(), ort.schedule(), threads=1)
    assert np.isfinite(other.step(*ort.tokens(0, 1)))


def test_integers_must_fit() -> None:
    manifest = _manifest(Described(name="ids", dtype="int32", shape=("n",)))
    assert arrays_of(manifest, (np.array([1, 2]),), {})["ids"].dtype == np.int32
    for value in (np.array([1 << 40]), np.array([(1 << 32) + 1]), np.array([(1 << 63) + 1], np.uint64)):
        with pytest.raises(ValueError, match="ids holds integers that do not fit into int32"):
            arrays_of(manifest, (value,), {})


def test_inputs_without_dims_stay_so() -> None:
    manifest = _manifest(Described(name="t", dtype="float32", shape=()))
    for value in (np.float64(2.5), torch.tensor(2.5, dtype=torch.float64), np.array(2.5)):
        found = arrays_of(manifest, (value,), {})["t"]
        assert found.shape == () and found.dtype == np.float32 and found == 2.5


def test_bfloat16_is_a_float(trainer: Trainer) -> None:
    assert trainer.evaluate(X.bfloat16(), TARGET)[0] == trainer.evaluate(X.bfloat16().float(), TARGET)[0]


def _manifest(*inputs: Described) -> Manifest:
    return Manifest(
        inputs=inputs, targets=(), outputs=(), width_sources={}, seeds=0, parameters=(), states=(),
        optimizer=Optimizer(name="sgd", learning_rates=(0.1,)), loss="", schedule="",
    )  # fmt: skip


def test_labels_are_found_behind_what_moves_them() -> None:
    """A language model shifts and flattens its labels before the loss; indexing by a user's code is not looked at."""
    from cpt_fx.export.recording import _taken_apart, choices

    def run(scores: Tensor, table: Tensor, labels: Tensor, words: Tensor, both: Tensor, free: Tensor) -> Tensor:
        shifted = F.pad(labels, (0, 1), value=3)[..., 1:].reshape(-1)
        found = F.cross_entropy(scores, shifted, ignore_index=3) + F.embedding(words.long().flatten(), table).sum()
        found += F.cross_entropy(scores, both) + F.embedding(both, table).sum()
        # What is made of numbers may be anything.
        return found + F.nll_loss(scores, (free - 1).clamp_min(0)) + table[free].sum()

    labels, words = torch.ones(1, 4, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int32)
    both, free = torch.ones(2, 4, dtype=torch.int64)
    given = (torch.zeros(4, 7), torch.zeros(9, 2), labels, words, both.clone(), free.clone())
    record = make_fx(run, tracing_mode="fake", pre_dispatch=True, decomposition_table=_taken_apart())(*given)
    assert choices(record) == {2: (7, 3), 3: (9,), 4: (7, -100)}


# Out of order.


def test_updates_need_gradients(trainer: Trainer) -> None:
    for name in ("update", "advance"):
        with pytest.raises(RuntimeError, match=rf"{name}\(\) without gradients"):
            getattr(trainer, name)()
    assert trainer.schedule.position == 0


# Models that the weights do not belong to.


class Wider(ort.Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 5)


class Deeper(ort.Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first_layer = nn.Linear(ort.FEATURES, 16, bias=False)


class NoStatistics(ort.Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, track_running_stats=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Wider, r"last\.weight of Wider is float32 \(5, 16\), and was trained as float32 \(4, 16\)"),
        (Deeper, r"the training knows nothing of 'more\.weight', a parameter of Deeper"),
        (Renamed, r"Renamed has no parameter or buffer 'first\.weight'.*Did you mean \"first_layer\.weight\""),
        (NoStatistics, r"NoStatistics has no parameter or buffer 'norm\.running_mean'"),
        (lambda: ort.Net().double(), r"first\.weight of Net is float64"),
    ],
)
def test_other_models_are_refused(trainer: Trainer, make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    before: dict[str, Tensor] = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        trainer.to_torch(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_more_parameters_can_be_allowed(trainer: Trainer) -> None:
    model = Deeper()
    more = model.more.weight.clone()
    trainer.to_torch(model, strict=False)
    assert torch.equal(model.last.weight, trainer.state_dict()["last.weight"])
    assert torch.equal(model.more.weight, more)


def test_a_result_with_other_layers_quantized_is_refused(trainer: Trainer) -> None:
    result = cpt_fx.transform(ort.net(), ort.schedule(), exclude="last")
    with pytest.raises(ValueError, match=r"has no parameter or buffer 'last\.cpt_fx_input_range"):
        trainer.to_torch(result)
