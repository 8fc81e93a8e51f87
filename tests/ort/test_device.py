"""The path of a GPU, without one: memory that can be read and written by copies only, and sessions on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

import onnxruntime

from cpt_fx.errors import ExportError
from cpt_fx.ort import Trainer, engine, trainer
from cpt_fx.ort.engine import Block
from tests import ort


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let "cuda" be other memory of this machine; return the devices that memory was asked for."""
    asked: list[str] = []
    original = onnxruntime.OrtValue.ortvalue_from_numpy

    def made(array: Any, device_type: str = "cpu", device_id: int = 0) -> Any:
        asked.append(f"{device_type}:{device_id}")
        return original(array.copy() if device_type == "cuda" else array)

    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_numpy", staticmethod(made))
    monkeypatch.setattr(engine, "session_providers", lambda device: ["CPUExecutionProvider"])
    monkeypatch.setattr(engine, "check_session", lambda session, device: None)
    monkeypatch.setattr(trainer, "session_providers", lambda device: [])
    return asked


def trainer_of(device: str) -> Trainer:
    return Trainer(ort.tied_directory(), ort.schedule(), device, seed=5, threads=1, accumulation=2)


def test_it_trains_as_on_the_cpu(pretended: list[str], tmp_path: Path) -> None:
    host, device = trainer_of("cpu"), trainer_of("cuda:1")
    assert "cuda:1" in pretended
    found = []
    expected = []
    for number in range(8):
        expected.append(host.step(*ort.tokens(number)))
        found.append(device.step(*ort.tokens(number)))
        assert device.evaluate(*ort.tokens(50))[0] == host.evaluate(*ort.tokens(50))[0]
    assert found == expected
    device.save(tmp_path / "state")
    other = trainer_of("cuda")
    other.load(tmp_path / "state")
    assert [other.step(*ort.tokens(number)) for number in range(4)] == [host.step(*ort.tokens(n)) for n in range(4)]
    trained = host.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in other.state_dict().items())
    other.to_torch(ort.tied())


def test_what_lies_on_the_device_is_bound_anew(pretended: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A width on the CPU is copied to a GPU when it is bound: bound once, it would stay the first one for good."""
    device = trainer_of("cuda")
    bound: list[str] = []
    original = onnxruntime.IOBinding.bind_cpu_input

    def noted(self: Any, name: str, value: Any) -> None:
        bound.append(name)
        original(self, name, value)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_cpu_input", noted)
    for _ in range(2):
        device.step(*ort.tokens(0))
    assert bound.count("bits.weight") == bound.count("seeds") == bound.count("tokens") == 2


def test_memory_of_a_device_is_not_shared(pretended: list[str]) -> None:
    with pytest.raises(ExportError, match='shared with torch on the CPU only, this Trainer is on "cuda"'):
        trainer_of("cuda").torch_parameters()


def test_blocks_keep_shape_and_values(pretended: list[str]) -> None:
    for device in ("cpu", "cuda"):
        for value in (torch.tensor(3), torch.ones(2, 3), torch.zeros(0, 2), torch.tensor([True])):
            block = Block(value.numpy(), device)
            assert block.shape == tuple(value.shape) and block.dtype == str(value.numpy().dtype)
            block.write(value.numpy())
            assert torch.equal(torch.from_numpy(block.read().copy()), value)
