"""A comparison on a tiny model, two rounds: what it holds, and that nothing goes missing. Times are not looked at."""

import copy
import gc
import importlib.util
import json
import logging
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import contenders, measuring, peers, preparing
from harness.catalog import CONTENDERS, KINDS, OURS, PEERS, PRESETS, Settings, chosen
from harness.measuring import run
from harness.models import Workload, given, mean_square, preset
from harness.page import html
from harness.results import Result
from harness.table import HEADINGS, cells, markdown, missing
from torch import Tensor, nn

NAMES = (
    "fp32",
    "fp32-compiled",
    "bf16",
    "simulated",
    "simulated-compiled",
    "integer",
    "torch-ao-fx",
    "torchao",
    "brevitas",
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tiny() -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return given("tiny", (model, torch.randn(4, 6)))


def settings(*names: str, **more: Any) -> Settings:
    return Settings(steps=2, contenders=chosen(names), backend="aot_eager", **more)


@pytest.fixture(scope="module")
def result() -> Result:
    return run(tiny(), settings(*NAMES), command="the command")


@pytest.mark.slow
def test_every_contender_has_a_row(result: Result) -> None:
    assert [row.contender.name for row in result.rows] == list(NAMES)
    for row in result.rows:
        assert row.available == (row.reason is None) == (row.facts is not None)
        assert len(row.seconds) == (2 if row.available else 0)
    ran = {row.contender.name for row in result.rows if row.available}
    assert {"fp32", "fp32-compiled", "bf16", "simulated", "simulated-compiled", "torch-ao-fx"} <= ran
    for peer in ("torchao", "brevitas"):
        if importlib.util.find_spec(peer) is None:
            assert result.by_name[peer].reason == 'not installed: pip install "cpt_fx[bench]"'


@pytest.mark.slow
def test_widths_change_and_nothing_is_compiled_again(result: Result) -> None:
    facts = result.by_name["simulated-compiled"].facts
    assert facts is not None
    assert facts.widths == (3, 4, 5, 6, 7, 8)
    assert (facts.graphs, facts.recompilations) == (1, 0)
    assert facts.compile_seconds is not None
    plain = result.by_name["fp32"].facts
    assert plain is not None
    assert (plain.widths, plain.graphs, plain.recompilations, plain.compile_seconds) == ((), None, None, None)


@pytest.mark.slow
def test_products_that_ran(result: Result) -> None:
    def executed(name: str) -> tuple[int, int, int | None, int | None]:
        facts = result.by_name[name].facts
        assert facts is not None
        done = facts.executed
        return done.integer, done.floating, done.forward, done.backward

    # Two forward, two for weights, one for the input of the second layer.
    assert executed("fp32") == executed("fp32-compiled") == (0, 5, None, None)
    assert executed("simulated") == executed("simulated-compiled") == (0, 5, 2, 2)
    # Whether so small products pay on integers is up to this machine; each is made in one way or the other.
    integer, floating, forward, backward = executed("integer")
    assert forward is not None and backward is not None
    assert integer == forward + backward
    assert integer + floating == 5


@pytest.mark.slow
def test_memory(result: Result) -> None:
    facts = result.by_name["fp32"].facts
    assert facts is not None
    weights = 4 * (6 * 8 + 8 + 8 * 4 + 4)
    # Weights, their gradients and the batch at the least.
    assert 2 * weights + 4 * 24 <= facts.peak_bytes < 4 * weights
    # What goes into each layer, and the result for the loss.
    assert facts.saved_bytes == 4 * 4 * (6 + 8)
    half = result.by_name["bf16"].facts
    assert half is not None and half.saved_bytes == facts.saved_bytes / 2
    assert result.memory_ratio(result.by_name["fp32"]) == 1


@pytest.mark.slow
def test_the_reference_is_one(result: Result) -> None:
    ratio = result.ratio(result.by_name["fp32"])
    assert ratio is not None
    assert (ratio.median, ratio.low, ratio.high) == (1, 1, 1)
    assert result.compiled_ratio(result.by_name["simulated"]) is None
    assert result.compiled_ratio(result.by_name["simulated-compiled"]) is not None


@pytest.mark.slow
def test_data_is_plain_and_complete(result: Result) -> None:
    data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert set(data) == {"model", "about", "settings", "machine", "contenders", "targets"}
    assert set(data["machine"]) == {"processor", "cores", "threads", "versions", "date", "command"}
    assert data["machine"]["command"] == "the command"
    assert data["machine"]["versions"]["torch"] == torch.__version__
    full = next(row for row in data["contenders"] if row["name"] == "simulated-compiled")
    for key in ("step_ratio", "step_ratio_to_compiled"):
        assert set(full[key]) == {"median", "low", "high"}
    assert set(full["executed"]) == {"integer", "floating", "forward", "backward"}
    again = Result.from_dict(data)
    assert again.rows == result.rows
    assert json.loads(json.dumps(again.to_dict())) == data


@pytest.mark.slow
def test_the_table_shows_reasons(result: Result) -> None:
    absent = [row for row in result.rows if not row.available]
    assert missing(result) == [f"{row.contender.label}: not available: {row.reason}" for row in absent]
    lines = markdown(result).splitlines()
    assert len(lines) == 2 + len(result.rows)
    assert {line.count("|") for line in lines} == {len(HEADINGS) + 1}
    assert all(row.reason is not None and row.reason in markdown(result) for row in absent)
    assert all(len(cells(result, row)) == (len(HEADINGS) if row.available else 2) for row in result.rows)


@pytest.mark.slow
def test_the_page_needs_nothing_else(result: Result) -> None:
    page = html(result)
    assert not re.search(r"""<script|<link|@import|url\(|(src|href)=["']?https?:""", page)
    assert "prefers-color-scheme: dark" in page
    for row in result.rows:
        assert page.count(f">{row.contender.label}<") >= 3
    ran = sum(row.available for row in result.rows)
    assert page.count('<rect class="bar') == 2 * ran
    assert page.count('class="whisker"') == ran
    assert page.count('class="absent"') == 2 * (len(result.rows) - ran)


def test_whatever_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> nn.Module:
        raise NotImplementedError("no such thing\nsecond line")

    monkeypatch.setattr(contenders, "transform", fails)
    found = run(tiny(), settings("simulated", "integer", "bf16")).by_name
    assert found["integer"].reason == found["simulated"].reason == "NotImplementedError: no such thing"
    assert found["bf16"].available


def test_a_contender_that_fails_later_drops_out(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    real = contenders.Trainee.step

    def step(self: contenders.Trainee) -> None:
        taken.append(self.contender.name)
        if self.contender.name == "bf16" and taken.count("bf16") > 20:
            raise RuntimeError("worn out")
        real(self)

    monkeypatch.setattr(contenders.Trainee, "step", step)
    many = Settings(steps=30, contenders=chosen(["bf16"]))
    found = run(tiny(), many).by_name
    assert found["bf16"].reason == "RuntimeError: worn out"
    assert found["bf16"].seconds == ()
    assert len(found["fp32"].seconds) == 30


def test_without_the_reference_there_are_no_ratios() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("never")

    made = Workload(name="m", about="m", model=Broken(2, 2), inputs=(torch.ones(2),), loss=mean_square)
    found = run(made, settings("bf16"))
    assert [row.reason for row in found.rows] == ["ValueError: never"] * 2
    assert "there are no ratios" in html(found)
    assert "ValueError: never" in markdown(found)


def test_contenders_take_turns_from_another_start_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def note(step: Any, depth: int) -> float:
        assert not gc.isenabled()
        order.append((step.__self__.contender.name, depth))
        return 1.0

    monkeypatch.setattr(measuring, "seconds_of", note)
    run(tiny(), Settings(steps=3, contenders=chosen(["bf16", "simulated"])))
    assert gc.isenabled()
    names = ["fp32", "bf16", "simulated"]
    assert order == [(names[(turn + place) % 3], turn) for turn in range(3) for place in range(3)]


def test_all_is_as_before() -> None:
    made, threads = tiny(), torch.get_num_threads()
    before, drawn = copy.deepcopy(made.model.state_dict()), torch.get_rng_state()
    filters, level = list(warnings.filters), logging.root.manager.disable
    run(made, settings("simulated", threads=threads + 1))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), drawn)
    assert (warnings.filters, logging.root.manager.disable) == (filters, level)
    assert all(torch.equal(value, before[name]) for name, value in made.model.state_dict().items())
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_the_steps_train(monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny()
    with preparing.bench(settings("simulated")):
        trainee, _ = preparing.prepare("simulated", made, settings("simulated"))
    assert trainee is not None and trainee.schedule is not None
    before = [value.detach().clone() for value in trainee.model.parameters()]
    position = trainee.schedule.position
    trainee.step()
    assert trainee.schedule.position == position + 1
    assert any(not torch.equal(*pair) for pair in zip(before, trainee.model.parameters(), strict=True))
    assert all(value.grad is None for value in trainee.model.parameters())


def test_static_widths() -> None:
    facts = run(tiny(), settings("simulated", schedule="static", q_max=5)).by_name["simulated"].facts
    assert facts is not None and facts.widths == (5,)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "bert-small"])
def test_presets_are_what_they_say(name: str) -> None:
    made = preset(name, batch=2)
    made_again = preset(name, batch=2)
    state, again = made.model.state_dict(), made_again.model.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in state.items())
    assert made.inputs[0].shape[0] == 2
    depth = {"resnet74": 74, "resnet20": 20}.get(name)
    layers = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in made.model.modules())
    assert depth is None or layers == depth
    made.loss(made.model(*made.inputs)).backward()
    assert all(value.grad is not None for value in made.model.parameters())


def test_bert_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    made = preset("bert-small", batch=2)
    assert made.about.endswith("in plain torch")
    made.loss(made.model(*made.inputs)).backward()
    assert all(value.grad is not None for value in made.model.parameters())


def test_bert_from_transformers() -> None:
    pytest.importorskip("transformers")
    made = preset("bert-small", batch=2)
    assert type(made.model).__name__ == "BertForSequenceClassification"
    made.loss(made.model(*made.inputs)).backward()


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (nn.Linear(2, 2), "must return \\(model, example_inputs\\)"),
        ((nn.Linear(2, 2), [torch.ones(2)]), "example_inputs as a tuple, got list"),
        ((nn.Linear(2, 2), torch.ones(2), 3), "a loss that can be called"),
    ],
)
def test_what_a_user_returns_is_checked(made: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        given("mine:make", made)


def test_a_loss_of_the_users_own() -> None:
    made = given("mine:make", (nn.Linear(2, 2), torch.ones(3, 2), lambda output: output.sum()))
    assert made.loss(torch.ones(2)) == 2
    assert made.shapes == "3x2"
    with pytest.raises(ValueError, match="no floating point tensor"):
        mean_square(torch.ones(2, dtype=torch.int64))


def test_names_are_those_of_the_catalog() -> None:
    assert tuple(peers.BUILDERS) == PEERS
    assert {*OURS, *PEERS, "fp32", "bf16"} == set(KINDS)
    assert [one.name for one in CONTENDERS.values()] == list(CONTENDERS)
