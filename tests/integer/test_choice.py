"""Where integer products pay: measured once, kept on disk, overridden by whoever knows better."""

import json
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cpt_fx import native
from cpt_fx.integer import choice, products
from cpt_fx.integer.codes import Codes
from cpt_fx.integer.kernels import Geometry
from cpt_fx.integer.products import Options
from tests.native.kernel_kinds import KINDS, kernels_of

Shape = tuple[int, ...]

LINEAR = ((16, 128, 768), (3072, 768))
PADDED = Geometry(padding=(1, 1))


def is_worth(kind: str, a: tuple[int, ...], b: tuple[int, ...], call: Options | None = None) -> bool:
    """Whether a product of factors of two shapes runs on integers."""
    return choice.decide(kind, a, b, call or Options()).worth


class Clock:
    """Says how long what it is given takes, without waiting for it."""

    def __init__(self, integer: float) -> None:
        self.integer, self.measured = integer, 0

    def __call__(self, kind: str, shape: Shape) -> float:
        self.measured += 1
        return self.integer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, and no decisions in memory before or after."""
    monkeypatch.setenv("CPT_FX_CACHE", str(tmp_path))
    monkeypatch.delenv("CPT_FX_INTEGER", raising=False)
    choice._decided.cache_clear()
    yield tmp_path
    choice._decided.cache_clear()


def a_new_process() -> None:
    """Forget what is in memory, not what is on disk."""
    choice._decided.cache_clear()


def ratios(folder: Path) -> list[float]:
    """What is kept on disk."""
    found = json.loads((folder / "cpt_fx" / "integer_choice.json").read_text())
    return [ratio for ratio, day in found.values()]


def test_measured_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.5)
    monkeypatch.setattr(choice, "_measure", clock)
    assert is_worth("linear_forward", *LINEAR)
    assert is_worth("linear_forward", (15, 130, 768), (3072, 768)), "about the same size"
    assert clock.measured == 1
    a_new_process()
    assert is_worth("linear_forward", *LINEAR) and clock.measured == 1
    assert is_worth("linear_forward", (4, 8), (16, 8)) and clock.measured == 2
    assert ratios(folder) == [2.5, 2.5]


def test_the_ratio_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measure", Clock(0.9))
    decision = choice.decide("matmul_forward", (3, 4), (4, 3), Options())
    assert (decision.ratio, decision.worth, decision.measured) == (0.9, False, True)


def test_threads_and_kernels_have_decisions_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(choice, "_measure", clock)
    is_worth("linear_forward", *LINEAR)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        is_worth("linear_forward", *LINEAR)
    finally:
        torch.set_num_threads(before)
    assert clock.measured == 2
    kernels = native.load("integer_products.cpp") is not None
    with native.disabled():
        is_worth("linear_forward", *LINEAR)
    assert clock.measured == 2 + kernels


@pytest.mark.parametrize("rule", ["always", "never"])
def test_overrides_do_not_measure(folder: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(choice, "_measure", clock)
    with choice.chosen(rule):
        assert is_worth("linear_forward", *LINEAR) == (rule == "always")
    monkeypatch.setenv("CPT_FX_INTEGER", rule)
    assert is_worth("linear_forward", *LINEAR) == (rule == "always")
    with choice.chosen("measured"):
        assert clock.measured == 0
        is_worth("linear_forward", *LINEAR)
    assert clock.measured == 1 and is_worth("linear_forward", *LINEAR) == (rule == "always")


def test_unknown_rules_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rule"), choice.chosen("sometimes"):
        pass
    monkeypatch.setenv("CPT_FX_INTEGER", "sometimes")
    with pytest.raises(ValueError, match="CPT_FX_INTEGER"):
        is_worth("linear_forward", *LINEAR)


@pytest.mark.parametrize("ratio", ["NaN", "Infinity", "-2", "0", "true", '"2"', "null"])
def test_a_ratio_that_nothing_measures_is_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ratio: str
) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(choice, "_measure", clock)
    assert is_worth("linear_forward", *LINEAR) and clock.measured == 1
    path = folder / "cpt_fx" / "integer_choice.json"
    path.write_text(path.read_text().replace("2.0", ratio))
    choice._decided.cache_clear()
    assert is_worth("linear_forward", *LINEAR) and clock.measured == 2


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": "b"}'])
def test_a_broken_file_holds_no_decisions(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    monkeypatch.setattr(choice, "_measure", Clock(2.0))
    path = folder / "cpt_fx" / "integer_choice.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert is_worth("linear_forward", *LINEAR)
    assert ratios(folder) == [2.0]


def test_where_nothing_can_be_written_it_still_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_measure", Clock(2.0))
    (folder / "file").write_text("")
    monkeypatch.setenv("CPT_FX_CACHE", str(folder / "file"))
    assert is_worth("linear_forward", *LINEAR)


IMAGES, FILTERS, GRADIENT = (2, 3, 8, 9), (5, 3, 3, 3), (2, 5, 8, 9)
ROUNDED = (2, 4, 8, 8, 4, 3, 3, 1, 1, 1, 1, 1, 1)
HALVED = Options(shape=(5, 3, 1, 1), geometry=Geometry(stride=(2, 2)))
EVERY = [
    # 23 is rounded up, 22 down: the border between 16 and 32 is where both are as many times as far, at 22.6.
    ("linear_forward", (2, 8, 16), (23, 16), Options(), (1, 16, 16, 32)),
    ("linear_forward", (16,), (22, 16), Options(), (1, 1, 16, 16)),
    ("linear_grad_input", (2, 8, 23), (23, 16), Options(), (1, 16, 32, 16)),
    ("linear_grad_weight", (2, 8, 23), (2, 8, 16), Options(), (1, 32, 16, 16)),
    ("matmul_forward", (3, 4, 8), (3, 8, 16), Options(), (4, 4, 8, 16)),
    ("matmul_forward", (5, 3, 4, 8), (8, 16), Options(), (16, 4, 8, 16)),
    ("matmul_forward", (8,), (8,), Options(), (1, 1, 8, 1)),
    ("matmul_grad_left", (3, 4, 16), (3, 8, 16), Options(), (4, 4, 16, 8)),
    ("matmul_grad_right", (3, 4, 16), (3, 4, 8), Options(), (4, 8, 4, 16)),
    ("conv2d_forward", IMAGES, FILTERS, Options(None, GRADIENT, PADDED), ROUNDED),
    ("conv2d_grad_input", GRADIENT, FILTERS, Options(None, IMAGES, PADDED), ROUNDED),
    ("conv2d_grad_weight", GRADIENT, IMAGES, Options(None, FILTERS, PADDED), ROUNDED),
    ("conv2d_grad_weight", (2, 5, 4, 4), (2, 3, 8, 8), HALVED, (2, 4, 8, 8, 4, 1, 1, 2, 2, 0, 0, 1, 1)),
    ("conv2d_forward", (1, 1, 5, 5), (1, 1, 7, 7), Options(geometry=Geometry(padding=(3, 3))),
     (1, 1, 7, 7, 1, 7, 7, 1, 1, 3, 3, 1, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "a", "b", "call", "expected"), EVERY)
def test_sizes_are_rounded_and_can_be_run(kind: str, a: Shape, b: Shape, call: Options, expected: Shape) -> None:
    rounded = choice.rounded(kind, a, b, call)
    assert rounded == expected
    first, second, more = choice.arguments(kind, rounded)
    one = torch.ones(())
    x, y = Codes(torch.ones(first, dtype=torch.int8), one), Codes(torch.ones(second, dtype=torch.int8), one)
    result = getattr(products, kind)(x, y, more)
    assert result.isfinite().all() and result.shape == more.shape


def test_large_products_are_measured_at_a_smaller_size() -> None:
    rounded = choice.rounded("linear_forward", (64, 4096, 4096), (16384, 4096), Options())
    assert rounded[0] * rounded[1] * rounded[2] * rounded[3] <= 1 << 29 and rounded[2:] == (4096, 2048)


def test_measuring_changes_no_random_numbers(folder: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    convolution = Options(shape=(4, 4, 3, 3), geometry=PADDED)
    decisions = [
        choice.decide("linear_forward", (3, 8), (4, 8), Options()),
        choice.decide("conv2d_grad_weight", (2, 4, 8, 8), (2, 4, 8, 8), convolution),
    ]
    assert torch.equal(torch.rand(3), expected)
    assert all(decision.ratio > 0 and decision.measured for decision in decisions)


class Watching(TorchDispatchMode):
    """What stands around a model, as selective checkpointing does, and goes by the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_who_watches_operators_sees_none_of_a_measurement(folder: Path) -> None:
    with Watching() as watching:
        found = choice.decide("matmul_forward", (3, 4), (4, 3), Options())
    assert found.measured and watching.seen == 0


def test_a_stale_decision_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(choice, "_measure", clock)
    today = choice._today()
    for later, measured in ((0, 1), (choice._DAYS, 1), (choice._DAYS + 1, 2), (0, 3), (-1, 3)):
        monkeypatch.setattr(choice, "_today", lambda later=later: today + later)
        a_new_process()
        is_worth("linear_forward", *LINEAR)
        assert clock.measured == measured, later
    assert ratios(folder) == [2.0], "what is stale is gone"


def test_each_kind_of_machine_reads_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one home folder, by turns. The kernels are the same: those of products without any, say."""
    speed = {"avx2": 0.8, "avx512_vnni": 3.0}
    with native.disabled():
        for machine in (*speed, *speed):
            monkeypatch.setattr(choice, "_measure", Clock(speed[machine]))
            monkeypatch.setattr(choice, "processor", lambda machine=machine: {machine: True, "cpu_name": "a name"})
            choice._machine.cache_clear()
            a_new_process()
            assert choice.decide("linear_forward", *LINEAR, Options()).ratio == speed[machine]
    choice._machine.cache_clear()
    assert sorted(ratios(folder)) == [0.8, 3.0]


def test_every_kind_of_kernel_has_decisions_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(2.0)
    monkeypatch.setattr(choice, "_measure", clock)
    for kind in (*KINDS, *KINDS):
        with kernels_of(kind):
            is_worth("linear_forward", *LINEAR)
    assert clock.measured == len(KINDS)


def test_what_other_programs_take_is_not_counted() -> None:
    def run() -> None:
        sum(range(100_000))
        time.sleep(0.3)

    assert 0.0001 < choice._seconds(run) < 0.2


@pytest.mark.parametrize(
    ("first", "then", "runs", "expected"), [(1.1, 0.9, 25, 0.9), (0.9, 1.1, 25, 1.1), (2, 0, 5, 2)]
)
def test_measured_again_where_close(
    monkeypatch: pytest.MonkeyPatch, first: float, then: float, runs: int, expected: float
) -> None:
    counted = 0

    def seconds(run: Any) -> float:
        nonlocal counted
        if run.__name__ == "on_integers":
            return 1.0
        counted += 1
        return first if counted <= 6 else then  # the first of all is a warm-up

    monkeypatch.setattr(choice, "_seconds", seconds)
    assert choice._measure("linear_forward", (1, 8, 8, 8)) == expected
    assert counted == runs + 1


def keeps(name: int, ready: Any) -> None:
    ready.wait()
    for number in range(20):
        choice._keep(f"{name} {number}", (number + 1.0, choice._today()))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_no_measurement_is_lost_between_processes(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(4)
    processes = [context.Process(target=keeps, args=(name, ready)) for name in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(ratios(folder)) == 80
