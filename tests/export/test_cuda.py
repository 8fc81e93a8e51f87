"""Whether a GPU can be used is said before ONNX Runtime falls back to the CPU, or ends the process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cpt_fx.errors import ExportError
from cpt_fx.ort import environment
from cpt_fx.ort.engine import check_session, session_providers
from cpt_fx.ort.environment import CPU, CUDA, Finding, PackageError, check_cuda


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two GPUs, and the build of ONNX Runtime for them."""
    monkeypatch.setattr(environment, "providers", lambda: [CUDA, CPU])
    monkeypatch.setattr(environment, "gpus", lambda: 2)
    return monkeypatch


def test_everything_is_there(gpu: pytest.MonkeyPatch) -> None:
    assert check_cuda() == Finding("GPUs: 2")
    assert session_providers("cuda") == [(CUDA, {"device_id": "0"}), CPU]
    assert session_providers("cuda:1") == [(CUDA, {"device_id": "1"}), CPU]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("providers", lambda: [CPU], "a GPU needs onnxruntime-gpu, or onnxruntime-training 1.19"),
        ("gpus", lambda: 0, "NVIDIA's driver is not there, or shows no GPU"),
    ],
)
def test_what_is_missing_is_said(name: str, value: object, expected: str, gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(environment, name, value)
    with pytest.raises(PackageError) as caught:
        session_providers("cuda")
    assert expected in str(caught.value)
    assert not check_cuda().works
    assert session_providers("cpu") == [CPU]


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", "cuda0", ""])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ExportError, match=r'device must be "cpu", "cuda" or "cuda:1"'):
        session_providers(device)


def test_a_gpu_that_is_not_there_is_refused(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExportError, match="'cuda:2' is not there: the driver knows 2, counted from 0"):
        session_providers("cuda:2")


class Session:
    def __init__(self, *providers: str) -> None:
        self.providers = providers

    def get_providers(self) -> Sequence[str]:
        return self.providers


def test_a_session_that_fell_back_is_refused() -> None:
    check_session(Session(CPU), "cpu")
    check_session(Session(CUDA, CPU), "cuda:0")
    with pytest.raises(ExportError, match="ONNX Runtime fell back to CPUExecutionProvider"):
        check_session(Session(CPU), "cuda")


def test_this_machine_can_be_looked_at() -> None:
    found = check_cuda()
    assert found.works == bool(found.found)
    assert found.message.startswith(found.problem)
