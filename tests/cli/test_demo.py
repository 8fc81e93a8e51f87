"""The demo: what it trains, what it compares, and the page it writes."""

import dataclasses
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from cpt_fx import demo
from cpt_fx.demo import DemoRun, DemoSettings
from cpt_fx.inspection import Verification, inspect
from cpt_fx.schedules import relative_cost
from cpt_fx.study import page as report

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
SETTINGS = DemoSettings(steps=24)
PROOF = Verification(quantizers=29, runs=90, widths=(3, 8), largest_ratio=0.5, notes=("2 < 3 & more",))


def run(settings: DemoSettings = SETTINGS) -> tuple[DemoRun, DemoRun]:
    return demo.run_demo(settings, lambda name, count: None)


@pytest.fixture(scope="module")
def runs() -> tuple[DemoRun, DemoRun]:
    return run()


@pytest.fixture(scope="module")
def written(runs: tuple[DemoRun, DemoRun], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return demo.write_report(runs, SETTINGS, inspect(runs[0].model), PROOF, folder)


@pytest.mark.slow
def test_it_learns_and_compares_like_with_like(runs: tuple[DemoRun, DemoRun]) -> None:
    cyclic, static = runs
    # The first batch is the same, so are the weights; only 3 and 8 bits make them differ.
    assert cyclic.losses[0] == pytest.approx(static.losses[0], rel=0.2)
    assert cyclic.losses[0] != static.losses[0]
    assert all(one.losses[-1] < 0.6 * one.losses[0] for one in runs)
    assert [len(one.losses) for one in runs] == [24, 24]
    assert list(cyclic.accuracies) == [*range(1, 25)]


@pytest.mark.slow
def test_both_runs_see_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def spy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        seen.append(labels.tolist())
        return cross_entropy(scores, labels)

    cross_entropy = functional.cross_entropy
    monkeypatch.setattr(functional, "cross_entropy", spy)
    run(DemoSettings(steps=8))
    assert seen[:8] == seen[8:]
    assert seen[0] != seen[1]


def test_costs_are_those_of_the_schedules(runs: tuple[DemoRun, DemoRun]) -> None:
    for one in runs:
        assert one.to_dict()["relative_cost"] == pytest.approx(relative_cost(one.schedule), rel=1e-12)
        assert one.schedule.position == 24
    told = [one.to_dict() for one in runs]
    assert told[0]["relative_cost"] < 0.8
    assert (told[1]["relative_cost"], told[1]["mean_bits"]) == (1, 8)


def test_the_quantizers_ran(runs: tuple[DemoRun, DemoRun]) -> None:
    proof = inspect(runs[0].model).verify()
    assert proof.proven
    assert proof.widths == (3, 4, 7, 8)  # three steps a cycle do not reach every width


@pytest.mark.slow
def test_a_seed_decides_everything(runs: tuple[DemoRun, DemoRun]) -> None:
    torch.rand(3)
    state = torch.get_rng_state()
    again = run()
    assert [one.losses for one in again] == [one.losses for one in runs]
    assert [one.accuracies for one in again] == [one.accuracies for one in runs]
    assert torch.equal(torch.get_rng_state(), state)
    assert run(DemoSettings(steps=8, seed=1))[0].losses[0] != runs[0].losses[0]


@pytest.mark.slow
def test_it_trains_on_one_thread_and_gives_the_others_back() -> None:
    before, seen = torch.get_num_threads(), set()
    torch.set_num_threads(2)
    try:
        demo.run_demo(DemoSettings(steps=8), lambda name, count: seen.add(torch.get_num_threads()))
        assert seen == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_training_and_test_images_are_apart() -> None:
    digits = demo.load_digits()
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    assert 0 <= digits.train_images.min() <= digits.train_images.max() <= 1
    again = demo.load_digits()
    assert torch.equal(again.test_images, digits.test_images)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r'pip install "cpt_fx\[demo\]"'):
        demo.load_digits()


def test_without_matplotlib_it_does_not_train_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'matplotlib.*pip install "cpt_fx\[demo\]"'):
        run()


@pytest.mark.parametrize(
    ("field", "message"), [({"steps": 7}, "at least 8"), ({"schedule": "XX"}, "one of"), ({"seed": -1}, "at least 0")]
)
def test_bad_settings_are_refused(field: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemoSettings(**field)  # type: ignore[arg-type]


class Page(HTMLParser):
    """Collects what a page loads and holds."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads.extend(value or "" for name, value in attrs if name == "src")
        self.links.extend(value or "" for name, value in attrs if name == "href")


@pytest.mark.slow
def test_the_page_stands_alone(written: Path) -> None:
    text = written.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 1
    assert "script" not in page.tags
    assert page.loads
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.loads)
    assert not re.search(r"url\((?!#)|@import", text)
    assert page.links == ["graph.html"]
    assert (written.parent / "graph.html").stat().st_size > 1000
    assert "evaluations among the runs: 29 quantizers ran, 90 times in total; levels counted at widths 3, 8" in text
    assert "at most 50 % of them; 2 &lt; 3 &amp; more." in text


def test_the_page_says_what_was_measured(written: Path, runs: tuple[DemoRun, DemoRun]) -> None:
    text = written.read_text(encoding="utf-8")
    for one in runs:
        name, *cells = demo.results(one)
        assert f"</i>{name}</th>" in text
        for cell in cells:
            assert f"<td>{cell}</td>" in text
    assert "<th>BitOps, of static 8 bits</th>" in text


def test_marks_can_be_seen_and_stay_behind() -> None:
    """At least as strong as the rules they cross, weaker than the text, light and dark."""
    pages, rules, marks, texts = (
        [sum(int(colour[at : at + 2], 16) for at in (0, 2, 4)) / 765 for colour in found]
        for found in (
            ["ffffff", "14171b"],
            *(re.findall(rf"--{name}: #([0-9a-f]{{6}});", report.STYLE) for name in ("rule", "mark", "soft")),
        )
    )
    for page, rule, mark, text in zip(pages, rules, marks, texts, strict=True):
        assert 2 * abs(rule - page) < abs(mark - page) < abs(text - page)


def test_the_drawing_shows_both_runs_in_the_colours_of_the_page(written: Path) -> None:
    (drawing,) = re.findall(r"<svg.*?</svg>", written.read_text(encoding="utf-8"), re.DOTALL)
    assert drawing.count(">CR<") == drawing.count(">static 8<") == 3
    for variable in ("--c1", "--c2", "--mark", "--ink", "--soft", "--rule", "--page"):
        assert f"var({variable})" in drawing
    assert not re.search("#(1f5fd0|c8500a|b4bcc8)", drawing)
    assert re.search(r">\$|mathdefault", drawing) is None


@pytest.mark.slow
def test_losses_that_are_not_finite_are_gaps(runs: tuple[DemoRun, DemoRun]) -> None:
    cyclic, static = runs
    losses = [math.nan, *static.losses[1:-1], math.inf]
    drawing = demo.curves((cyclic, dataclasses.replace(static, losses=losses)), SETTINGS)
    assert not re.search(r"\b(nan|inf)\b", drawing)


def test_smoothing_is_a_mean_of_the_last_few() -> None:
    assert demo.smooth([1, 3, math.nan, 5], 2) == [1, 2, 3, 5]
    assert math.isnan(demo.smooth([math.nan], 3)[0])
