"""`benchmarks/README.md` is made from results: nothing measured is left out, nothing missed is hidden."""

import json
from pathlib import Path

from harness.catalog import CONTENDERS, Settings, chosen
from harness.machine import here
from harness.results import Executed, Facts, Result, Row
from readme import SCRIPTS, page

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def result() -> Result:
    executed = Executed(integer=0, floating=1)
    facts = Facts(peak_bytes=100, build_seconds=0.1, executed=executed)
    rows = (
        Row(contender=CONTENDERS["fp32"], seconds=(1.0, 1.0), facts=facts),
        Row(contender=CONTENDERS["simulated"], seconds=(2.0, 2.0), facts=facts),
        Row(contender=CONTENDERS["integer"], reason="ValueError: no"),
    )
    settings = Settings(steps=2, contenders=chosen(["simulated", "integer"]))
    return Result(model="resnet74", about="a net", settings=settings, machine=here(2, "the command"), rows=rows)


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    text = page(tmp_path)
    assert text.count("| not measured |") >= 12
    assert "12 targets: 0 met, 0 missed, 12 not measured." in text
    assert text.count("not measured yet |") == len(SCRIPTS)


def test_results_are_shown_with_what_is_missed(tmp_path: Path) -> None:
    (tmp_path / "bench_resnet74.json").write_text(json.dumps(result().to_dict()))
    (tmp_path / "capture_cost.md").write_text("# x")
    text = page(tmp_path)
    assert "| resnet74 | simulated: step time at most 1.2 x FP32 | measured 2.00 | **missed** |" in text
    assert "| resnet74 | simulated: peak memory at most 1.05 x FP32 | measured 1.00 | met |" in text
    assert " 1 missed, " in text
    assert "not available: ValueError: no" in text
    for part in ("a net. ", "2 threads", "`the command`", "FP32 eager: 1000.0 ms a step"):
        assert part in text
    assert "[results/capture_cost.md](results/capture_cost.md)" in text


def test_the_page_is_the_one_that_the_results_give() -> None:
    assert (BENCHMARKS / "README.md").read_text(encoding="utf-8") == page(BENCHMARKS / "results")
