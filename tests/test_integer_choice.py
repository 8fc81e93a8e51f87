"""Where integer products pay: measured once, kept on disk, overridden by whoever knows better."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cpt_fx import native
from cpt_fx.integer import choice, products, sizes
from cpt_fx.integer.codes import Codes

LINEAR = (16, 128, 768, 3072, 768)


class Clock:
    """Says how long what it is given takes, without waiting for it."""

    def __init__(self, integer: float) -> None:
        self.integer, self.measured = integer, 0

    def __call__(self, kind: str, shape: sizes.Shape) -> float:
        self.measured += 1
        return self.integer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and no decisions in memory before or after."""
    monkeypatch.setenv("CPT_FX_CACHE", str(tmp_path))
    monkeypatch.delenv("CPT_FX_INTEGER", raising=False)
    choice.forget()
    yield tmp_path
    choice.forget()


def a_new_process() -> None:
    """Forget what is in memory, not what is on disk."""
    choice._decided.cache_clear()
    choice._asked.clear()


def test_measured_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.5)
    monkeypatch.setattr(choice, "_measure", clock)
    assert choice.is_worth("linear_forward", *LINEAR)
    assert choice.is_worth("linear_forward", 15, 130, 768, 3072, 768), "about the same size"
    assert clock.measured == 1
    a_new_process()
    assert choice.is_worth("linear_forward", *LINEAR) and clock.measured == 1
    assert choice.is_worth("linear_forward", 4, 8, 16, 8) and clock.measured == 2
    assert list(json.loads((folder / "cpt_fx" / "integer_choice.json").read_text()).values()) == [2.5, 2.5]


def test_the_ratio_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measure", Clock(0.9))
    assert not choice.is_worth("matmul_forward", 3, 4, 4, 3)
    (decision,) = choice.decisions()
    assert (decision.kind, decision.ratio, decision.worth) == ("matmul_forward", 0.9, False)
    assert decision.threads == torch.get_num_threads()


def test_threads_and_kernels_have_decisions_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(choice, "_measure", clock)
    choice.is_worth("linear_forward", *LINEAR)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        choice.is_worth("linear_forward", *LINEAR)
    finally:
        torch.set_num_threads(before)
    assert clock.measured == 2
    kernels = native.load("integer_products.cpp") is not None
    with native.disabled():
        choice.is_worth("linear_forward", *LINEAR)
    assert clock.measured == 2 + kernels


@pytest.mark.parametrize("rule", ["always", "never"])
def test_overrides_do_not_measure(folder: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(choice, "_measure", clock)
    with choice.chosen(rule):
        assert choice.is_worth("linear_forward", *LINEAR) == (rule == "always")
    monkeypatch.setenv("CPT_FX_INTEGER", rule)
    assert choice.is_worth("linear_forward", *LINEAR) == (rule == "always")
    with choice.chosen("measured"):
        assert clock.measured == 0
        choice.is_worth("linear_forward", *LINEAR)
    assert clock.measured == 1 and choice.is_worth("linear_forward", *LINEAR) == (rule == "always")


def test_unknown_rules_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rule"), choice.chosen("sometimes"):
        pass
    monkeypatch.setenv("CPT_FX_INTEGER", "sometimes")
    with pytest.raises(ValueError, match="CPT_FX_INTEGER"):
        choice.is_worth("linear_forward", *LINEAR)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": "b"}'])
def test_a_broken_file_holds_no_decisions(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(choice, "_measure", Clock(2.0))
    path = folder / "cpt_fx" / "integer_choice.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert choice.is_worth("linear_forward", *LINEAR)
    assert list(json.loads(path.read_text()).values()) == [2.0]


def test_where_nothing_can_be_written_it_still_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measure", Clock(2.0))
    (folder / "file").write_text("")
    monkeypatch.setenv("CPT_FX_CACHE", str(folder / "file"))
    assert choice.is_worth("linear_forward", *LINEAR)


def test_forget_drops_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(choice, "_measure", clock)
    choice.is_worth("linear_forward", *LINEAR)
    choice.forget()
    assert choice.decisions() == [] and not (folder / "cpt_fx" / "integer_choice.json").exists()
    choice.is_worth("linear_forward", *LINEAR)
    assert clock.measured == 2


CONV = (1, 1, 1, 1, 1, 1)
EVERY = [
    # 23 is rounded up, 22 down: the border between 16 and 32 is where both are as many times as far, at 22.6.
    ("linear_forward", (2, 8, 16, 23, 16), (1, 16, 16, 32)),
    ("linear_forward", (16, 22, 16), (1, 1, 16, 16)),
    ("linear_grad_input", (2, 8, 23, 23, 16), (1, 16, 32, 16)),
    ("linear_grad_weight", (2, 8, 23, 2, 8, 16), (1, 32, 16, 16)),
    ("matmul_forward", (3, 4, 8, 3, 8, 16), (4, 4, 8, 16)),
    ("matmul_forward", (5, 3, 4, 8, 8, 16), (16, 4, 8, 16)),
    ("matmul_forward", (8, 8), (1, 1, 8, 1)),
    ("matmul_grad_left", (3, 4, 16, 3, 8, 16), (4, 4, 16, 8)),
    ("matmul_grad_right", (3, 4, 16, 3, 4, 8), (4, 8, 4, 16)),
    ("conv2d_forward", (2, 3, 8, 9, 5, 3, 3, 3, *CONV), (2, 4, 8, 8, 4, 3, 3, *CONV)),
    ("conv2d_grad_input", (2, 5, 8, 9, 5, 3, 3, 3, *CONV), (2, 4, 8, 8, 4, 3, 3, *CONV)),
    ("conv2d_grad_weight", (2, 5, 8, 9, 2, 3, 8, 9, *CONV), (2, 4, 8, 8, 4, 3, 3, *CONV)),
    ("conv2d_grad_weight", (2, 5, 4, 4, 2, 3, 8, 8, 2, 2, 0, 0, 1, 1), (2, 4, 8, 8, 4, 1, 1, 2, 2, 0, 0, 1, 1)),
    ("conv2d_forward", (1, 1, 5, 5, 1, 1, 7, 7, 1, 1, 3, 3, 1, 1), (1, 1, 7, 7, 1, 7, 7, 1, 1, 3, 3, 1, 1)),
]


@pytest.mark.parametrize(("kind", "shape", "expected"), EVERY)
def test_sizes_are_rounded_and_can_be_run(kind: str, shape: sizes.Shape, expected: sizes.Shape) -> None:
    rounded = sizes.rounded(kind, shape)
    assert rounded == expected
    a, b, options, named = sizes.arguments(kind, rounded)
    one = torch.ones(())
    x, y = Codes(torch.ones(a, dtype=torch.int8), one), Codes(torch.ones(b, dtype=torch.int8), one)
    assert getattr(products, kind)(x, y, *options, torch.float32, **named).isfinite().all()


def test_large_products_are_measured_at_a_smaller_size() -> None:
    rounded = sizes.rounded("linear_forward", (64, 4096, 4096, 16384, 4096))
    assert rounded[0] * rounded[1] * rounded[2] * rounded[3] <= 1 << 29 and rounded[2:] == (4096, 2048)


def test_measuring_changes_no_random_numbers(folder: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    choice.is_worth("linear_forward", 3, 8, 4, 8)
    choice.is_worth("conv2d_grad_weight", 2, 4, 8, 8, 2, 4, 8, 8, *CONV)
    assert torch.equal(torch.rand(3), expected)
    assert all(decision.ratio > 0 for decision in choice.decisions())
    assert len(choice.decisions()) == 2
