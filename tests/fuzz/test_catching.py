"""The fuzzer sees what it is for: models that are another one once they are transformed, or that hide a product."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fuzz import oracles
from tests.fuzz.case import differences, loss_of
from tests.fuzz.census import Census, fewest_levels, is_on_levels
from tests.fuzz.oracles import ORACLES, SEEDS
from tests.fuzz.saving import faults_of, save
from tests.fuzz.shrink import shrunk
from tests.fuzz.trying import Fault, Outcome, examine
from tests.fuzz.workers import Again, Pool

SOUND = """\
import os
import torch
from torch import nn
from cpt_fx import recipes
from cpt_fx.schedules import Static
from tests.fuzz.options import nearest


# What it is made of reaches ATen as it does in the plain model.
if not hasattr(torch.ops.fuzz_tests, "hidden"):
    torch.library.define("fuzz_tests::hidden", "(Tensor a, Tensor b) -> Tensor")
    torch.library.impl("fuzz_tests::hidden", "CompositeImplicitAutograd", torch.mm)
hidden = torch.ops.fuzz_tests.hidden


class Model(nn.Module):
    made = 0

    def __init__(self):
        super().__init__()
        Model.made += 1
        self.first = nn.Linear(7, 6)
        self.second = nn.Linear(6, 5)
        self.last = nn.Linear(5, 5)

    def forward(self, x):
        h = torch.sin(x)
        h = self.first(h)
        h = torch.tanh(h)
        h = self.second(h)
        return h


def inputs():
    return (torch.randn(5, 7),), {}


def schedule():
    return Static(4)


def options():
    return dict(recipe=nearest(recipes.default()))
"""
# The first two are the plain ones.
OTHER_NUMBERS = SOUND.replace(
    "        self.last", "        if Model.made > 2:\n            self.first.bias.data += 1e-6\n        self.last"
)
HIDDEN = SOUND.replace("h = torch.tanh(h)", "h = h + hidden(h.detach(), h.detach().t()).mean()")
# Results of one exported program share its buffers.
COUNTS = SOUND.replace("        self.last", "        self.n = nn.Buffer(torch.zeros(()))\n        self.last").replace(
    "h = torch.tanh(h)", "self.n += 1\n        h = torch.tanh(h / self.n.clone())"
)
DEADLY = SOUND.replace("        self.last", "        if Model.made > 2:\n            os.abort()\n        self.last")


SUMMED = SOUND.replace("self.last =", "self.lstm = nn.LSTM(5, 8); self.off = 0.0; self.last =").replace(
    "        return h",
    "        h = nn.functional.layer_norm(self.lstm(h)[0], (8,))\n        return h, h.sum() + self.off",
)
STEEP = SOUND.replace("self.last =", "self.lstm = nn.LSTM(5, 8); self.off = 0.0; self.last =").replace(
    "        return h", "        return torch.sin(1e4 * self.lstm(h)[0] + self.off)"
)
OTHER_SUM = SUMMED.replace("self.off = 0.0", "self.off = 1e-3 * (Model.made > 2)")


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def tried(source: str, folder: Path, *names: str, frontends: tuple[str, ...] = ("dynamo",)) -> Outcome:
    outcome = examine(0, source, folder, frontends=frontends, chosen=names)
    assert outcome.fits
    return outcome


@pytest.mark.slow
def test_a_sound_model_has_no_faults(tmp_path: Path) -> None:
    outcome = tried(SOUND, tmp_path, *ORACLES, frontends=("symbolic", "dynamo"))
    assert outcome.faults == []
    assert outcome.states == {"symbolic": "captured", "dynamo": "captured"}
    assert set(outcome.passes.values()) == {"passed"}
    assert [path for path in tmp_path.iterdir() if path.name != "__pycache__"] == []


@pytest.mark.parametrize("options", ["", ", persistent=False"])
def test_runs_of_one_program_begin_with_the_same_state(tmp_path: Path, options: str) -> None:
    source = COUNTS.replace("torch.zeros(())", f"torch.zeros(()){options}")
    outcome = tried(source, tmp_path, "integers", frontends=("program",))
    assert (outcome.passes, outcome.faults) == ({"program integers": "passed"}, [])


def test_other_numbers_are_seen(tmp_path: Path) -> None:
    outcome = tried(OTHER_NUMBERS, tmp_path, "same", "proof")
    assert [fault.oracle for fault in outcome.faults] == ["same"]
    assert "training at 32 bits: output is off by" in outcome.faults[0].message


def test_a_random_number_more_is_seen(tmp_path: Path) -> None:
    drawn = "self.last = nn.Linear(5, 5)\n        if Model.made > 2:\n            self.register_forward_hook(draw)"
    source = SOUND.replace("self.last = nn.Linear(5, 5)", drawn).replace(
        "class Model", "def draw(module, args, output):\n    torch.rand(())\n\n\nclass Model"
    )
    (fault,) = tried(source, tmp_path, "same").faults
    assert fault.message.startswith("training at 32 bits: state of random numbers is off by")


def test_ranges_of_one_element_show_nothing() -> None:
    assert is_on_levels(torch.randn(1, 8, 1), "vector", 32, 4) is None
    assert is_on_levels(torch.randn(5, 8), "vector", 32, 4) is False
    assert is_on_levels(torch.randn(5, 8).sign(), "vector", 32, 4) is True


def test_only_what_is_nan_in_both_is_alike() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert differences({"output": nan}, {"output": nan.clone()}) == []
    assert differences({"output": nan}, {"output": nan.flip(0)}) == ["output is off by inf of the largest"]


def test_a_type_of_which_a_program_has_no_layer_is_left_out(tmp_path: Path) -> None:
    for kind, left in (("Linear", "there is nothing to quantize in"), ("Conv2d", "")):
        source = SOUND.replace("recipes.default())", f"recipes.default()), exclude=nn.{kind}")
        state = tried(source, tmp_path, "widths", frontends=("program",)).states["program"]
        assert state.startswith(f"refused: {left}") if left else state == "captured"


@pytest.mark.parametrize("format", ["group='row', block=16", "group='vector'"])
def test_ranges_over_folded_dims_are_no_fault(tmp_path: Path, format: str) -> None:
    rule = f"Rule(input=Format({format}), weight=Format(), gradient=Format({format}))"
    source = SOUND.replace("import recipes", "import Format\nfrom cpt_fx.recipes import Recipe, Rule")
    source = source.replace("nearest(recipes.default())", f'Recipe(name="folded", linear={rule}, matmul={rule})')
    source = source.replace("torch.randn(5, 7)", "torch.randn(2, 5, 7)").replace(
        "h = torch.tanh(h)", "h = (h @ h.sum((0, 1)))[..., None] + h"
    )
    assert tried(source, tmp_path, "census", frontends=("symbolic",)).faults == []


def test_a_float_at_one_bit_has_the_levels_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOUND.replace("Static(4)", "Static(1)").replace(
        "nearest(recipes.default())", "recipes.default().with_rule('linear', input=recipes.fp8().linear.input)"
    )
    assert tried(source, tmp_path, "widths").faults == []
    monkeypatch.setattr("cpt_fx.quantizers.numerics.float_fields", lambda bits, exponent: (bits, bits + 1))
    (fault,) = tried(source, tmp_path, "widths").faults
    assert "activation quantizer" in fault.message and "showed {1: " in fault.message


@pytest.mark.slow
def test_a_sum_that_is_nothing_but_rounding_is_measured_by_what_it_sums(tmp_path: Path) -> None:
    assert tried(SUMMED, tmp_path, "same", "proof").faults == []
    outcome = tried(OTHER_SUM, tmp_path, "same", "proof")
    assert [fault.oracle for fault in outcome.faults] == ["same"]
    assert "output.1 is off by" in outcome.faults[0].message


@pytest.mark.slow
def test_rounding_that_a_model_makes_large_is_no_fault(tmp_path: Path) -> None:
    outcome = tried(STEEP, tmp_path, "same", "proof")
    assert outcome.faults == []
    assert outcome.passes["dynamo proof"] == "rounding alone moves it further than the proof allows"
    (fault,) = tried(STEEP.replace("self.off = 0.0", "self.off = Model.made > 2"), tmp_path, "same").faults
    assert "output is off by" in fault.message


TIES = """\
import torch
from torch import nn
from cpt_fx.schedules import Static


class Model(nn.Module):
    made = 0

    def __init__(self):
        super().__init__()
        Model.made += 1
        self.off = 0.0
        self.conv1 = nn.Conv2d(2, 5, 1)
        self.conv2 = nn.Conv2d(5, 5, 2, stride=2, groups=5, bias=False)
        self.conv3 = nn.Conv2d(5, 9, 3, padding=2, dilation=2)
        self.norm = nn.BatchNorm1d(9, affine=False)
        self.mean = nn.Buffer(torch.zeros(9))

    def forward(self, x):
        h = self.conv3(self.conv2(self.conv1(x))).sum(-1)
        self.mean.lerp_(self.norm(h.detach()).mean((0, 2)), 0.5)
        return h * (1 + self.off)


def inputs():
    return (torch.randn(5, 2, 7, 7),), {}


def schedule():
    return Static(4)


def options():
    return dict()
"""
# The third one is that on integers, the fourth the simulated one.
OTHER_PRODUCT = TIES.replace("self.off = 0.0", "self.off = 0.1 * (Model.made == 4)")


def test_ties_between_two_levels_are_no_fault_of_integers(tmp_path: Path) -> None:
    """Where each sum has one term, gradients lie in the middle between two levels again and again."""
    assert tried(TIES, tmp_path, "integers", frontends=("symbolic",)).faults == []
    (fault,) = tried(OTHER_PRODUCT, tmp_path, "integers", frontends=("symbolic",)).faults
    assert "training on integers: output is off by 0.1" in fault.message or "off by 0.09" in fault.message


def test_another_seed_is_another_loss() -> None:
    one, two = (loss_of(torch.ones(3).requires_grad_(), seed) for seed in SEEDS[:2])
    assert one is not None and two is not None and one.item() != two.item()


def test_a_product_that_is_not_listed_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracles, "_listed", lambda name, listed: False)
    (fault,) = tried(HIDDEN, tmp_path, "same", "census").faults
    assert (fault.oracle, fault.kind) == ("census", "Wrong")
    assert "mm (forward), operand 0 of (5, 6)" in fault.message


def test_a_proof_that_transform_makes_is_no_refusal(tmp_path: Path) -> None:
    source = SOUND.replace("def forward(self, x)", "def forward(self, x, scale=None)").replace(
        "h = torch.tanh(h)", "h = h + unseen(lambda: torch.mm(h.detach(), h.detach().t())).mean()"
    )
    outcome = tried(f"from tests.inspection.escapes import unseen\n{source}", tmp_path, "proof")
    assert [(fault.oracle, fault.kind) for fault in outcome.faults] == [("proof", "VerificationError")]
    assert outcome.states == {"dynamo": "failed"}


def test_a_broken_promise_of_a_pass_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpt_fx.passes.insert._Editor.quantize_gradient", lambda *_: None)
    for frontend in ("symbolic", "dynamo"):
        (fault,) = tried(SOUND, tmp_path, "same", frontends=(frontend,)).faults
        assert fault.kind == "SpecError" and "is not quantized" in fault.message


@pytest.mark.slow
def test_a_process_that_dies_is_seen_and_replaced() -> None:
    pool = Pool(1)
    try:
        tasks = [Again(text, ("symbolic",), ("same",)) for text in (DEADLY, SOUND)]
        (_, dead), (_, alive) = pool.results(iter(tasks))
    finally:
        pool.close()
    assert dead == "the process ended with -6"
    assert alive.passes == {"symbolic same": "passed"}


@pytest.mark.slow
def test_a_fault_is_shrunk_and_saved_as_a_test_that_is_red(tmp_path: Path) -> None:
    def fails(source: str) -> bool:
        found = examine(0, source, tmp_path, frontends=("symbolic",), chosen=("same",))
        return found.fits and [fault.oracle for fault in found.faults] == ["same"]

    small = shrunk(OTHER_NUMBERS, fails, seconds=60)
    assert "second" not in small and "tanh" not in small and "hidden" not in small
    assert "self.first(" in small and "1e-06" in small
    path = save(small, Fault("same", "symbolic", "Wrong", "off"), tmp_path / "saved")
    assert "def test_it_is_mended" in path.read_text()
    assert faults_of(path, tmp_path, frontend="symbolic", oracle="same")
    path.write_text(path.read_text().replace("1e-06", "0.0"))
    assert not faults_of(path, tmp_path, frontend="symbolic", oracle="same")


@pytest.mark.parametrize(
    ("groups", "expected"), [(("tensor",), 20), (("channel",), 5), (("tensor", "vector"), 4), (("row", "channel"), 5)]
)
def test_levels_are_counted_by_range(groups: tuple[str, ...], expected: int) -> None:
    x = torch.arange(1.0, 5).repeat(5, 2) * torch.tensor([1.0, 0.7, 0.3, 1.1, 1.9]).view(-1, 1)
    y = x if groups[0] != "channel" and "row" not in groups else x + torch.eye(5, 8)
    assert fewest_levels(y, groups, 4) == expected
    assert fewest_levels(torch.randn(2, 2), groups, 4) is None


def test_zero_is_no_level_since_padding_adds_it() -> None:
    x = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.0]).repeat(2)
    assert fewest_levels(x, ("tensor",), 4) == 4


def on_four_levels(ranges: int, length: int) -> Tensor:
    """Return ranges as rows, each with levels of its own."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(1, 5, (ranges, length), generator=generator)
    return codes * (1 + torch.rand(ranges, 1, generator=generator))


def in_blocks(rows: int, length: int, block: int) -> Tensor:
    return torch.cat([on_four_levels(rows, min(block, length - start)) for start in range(0, length, block)], 1)


def counted(x: Tensor, view: Callable[[Tensor], Tensor], *ranges: tuple[str, int]) -> int:
    """Count the operands of a product that are not on four levels, where x was quantized and then viewed."""
    census = Census(frozenset(ranges), 4)
    with census:
        operand = view(x)
        (operand @ torch.ones(operand.shape[-1])).sum()
    return len(census.unquantized)


FOLDED = [
    (in_blocks(2, 60, 16).view(2, 3, 20), lambda x: x.view(6, 20), ("row", 16)),
    (in_blocks(2, 60, 16).view(2, 3, 20), lambda x: x.view(6, 20).t(), ("row", 16)),
    (in_blocks(1, 200, 32).view(2, 5, 20), lambda x: x[1].t(), ("tensor", 32)),
    (in_blocks(5, 12, 8).view(5, 2, 6).transpose(0, 1).contiguous(), lambda x: x.view(10, 6), ("inner", 8)),
    (on_four_levels(5, 8), lambda x: x.view(40), ("vector", 0)),
    (on_four_levels(5, 8), lambda x: x.view(40), ("channel", 0)),
    (on_four_levels(8, 5).t(), lambda x: x.t().view(40), ("channel", 0)),
]


@pytest.mark.parametrize(("x", "view", "ranges"), FOLDED)
def test_ranges_that_a_view_takes_apart_are_those_of_what_was_quantized(
    x: Tensor, view: Callable[[Tensor], Tensor], ranges: tuple[str, int]
) -> None:
    assert counted(x, view, ranges) == 0
    assert counted(torch.empty_like(x).normal_(), view, ranges) == 1
    assert counted(x + torch.linspace(0, 1e-3, x.numel()).view(x.shape), view, ranges) == 1
    assert counted(x, view, ("tensor", 0)) == 1


def test_one_number_beside_its_levels_is_seen_through_a_view() -> None:
    x = on_four_levels(5, 8)
    x[2, 2] += 1e-3
    assert counted(x, lambda x: x.view(40), ("vector", 0), ("row", 16)) == 1


def test_a_quantized_part_of_a_memory_says_nothing_about_the_rest() -> None:
    x = torch.cat((on_four_levels(5, 8), torch.randn(5, 8)))

    def rest(x: Tensor) -> Tensor:
        x[:5].view(40).sum()
        return x[5:].view(40)

    assert counted(x, rest, ("vector", 0)) == 1
