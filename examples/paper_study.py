"""Compare the ten schedules with static precision on real data, in three domains; this writes docs/results/.

    python examples/paper_study.py --workers 2                 # hours on two cores; continues if it was killed
    python examples/paper_study.py --only king-james --seeds 2
    python examples/paper_study.py --fast                      # a quick check on data that need no fetching

Each study trains a script of this folder under the ten schedules, static precision and full precision, each with
several seeds. Then follow the experiments on critical learning periods and a range test. Finished runs are kept in
--store, one file for each study, and are not trained again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.ranges import range_of

from cpt_fx import study
from cpt_fx.study import measured
from cpt_fx.study.analysis import Panel, against, cost_correlation, groups, panels, verdict
from cpt_fx.study.comparison import compare

HERE = Path(__file__).resolve().parent
SCHEDULES = ("CR", "LR", "ER", "RR", "CT", "LT", "ETV", "ETH", "RTV", "RTH")
BASELINES = ("static q_max", "static 6", "static q_min", "full precision")
HELD = {"hold_rate": True}
"""The published deficit runs hold the learning rate until the deficit is over."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One task, and how it is studied."""

    name: str
    title: str
    dataset: str
    model: str
    size: str
    published: str
    """The setup of the paper in this domain."""
    limits: str
    """The limits of this study."""
    script: str
    """The script of this folder that trains it."""
    options: Mapping[str, Any]
    """Options of the script."""
    family: str
    """The kind of model, as `schedules.recommend` names it."""
    steps: int
    bits: tuple[tuple[int, int], ...]
    metric: str
    better: str
    seeds: int
    range_steps: int
    published_q_min: int
    schedules: tuple[str, ...] = SCHEDULES
    critical: Sequence[Mapping[str, Any]] = ()
    """Arguments of `study.critical`, one mapping for each call; its `options` are added to those of the script."""

    @property
    def notes(self) -> str:
        """What was trained, what the paper trains, and the limits of the study."""
        return (
            f"Data: {self.dataset}. Model: {self.model}. Training: {self.size}. The paper: {self.published}. What this "
            f"cannot show: {self.limits}"
        )


CORA = {
    "data": "cora", "split": "full", "model": "paper-gcn", "hidden": 64, "layers": 3, "dropout": 0.2, "lr": 0.01,
    "weight_decay": 0.0,
}  # fmt: skip
NODES: dict[str, Any] = {
    "dataset": "Cora (2,708 papers, 5,278 links, 1,433 words, 7 subjects; 1,208 nodes to train on, 1,000 to test)",
    "model": "the GCN of the published experiments (three convolutions, normalised over nodes and features at once, 64 "
    "wide)",
    "size": "300 epochs on the whole graph with Adam, its rate falling along a cosine from 0.01 to 0.001",
    "published": "the same GCN 512 wide, 500 epochs on ogbn-arxiv, which has 60 times as many nodes, q_min 3",
    "limits": "what large graphs do; one test node is 0.1 points of accuracy, and all seeds share the test nodes. Runs "
    "are judged at their end, where the net overfits: stopped at the best validation epoch, the order of the schedules "
    "turned round in trials outside these records.",
    "script": "node_classification.py", "family": "gnn", "steps": 300, "bits": ((3, 8), (2, 8)),
    "metric": "accuracy", "better": "higher", "seeds": 5, "range_steps": 60, "published_q_min": 3,
}  # fmt: skip
PLANS = (
    Plan(
        name="cora-fp", title="Node classification: GCN on Cora, aggregation in full precision", **NODES,
        options={**CORA, "aggregation": "fp"},
        critical=(
            {"experiments": ["deficit"], "q_min": 2, "options": HELD},
            {"experiments": ["window", "first-cycle", "delayed"], "q_min": 2},
        ),
    ),
    Plan(
        name="cora-q", title="Node classification: GCN on Cora, quantized aggregation", **NODES,
        options={**CORA, "aggregation": "q"},
    ),
    Plan(
        name="king-james", title="Language model: LSTM on the King James Bible",
        dataset="the King James Bible in words (the 2,000 most frequent ones, all others count as one, 8 % of the test "
        "part, which is the end of the text from Colossians 4 on)",
        model="one LSTM layer 128 wide, with an embedding and a decoder of that width",
        size="1,500 steps of 32 x 20 words (1.1 epochs), plain SGD with gradients clipped, its rate falling from 20 "
        "along a cosine",
        published="an LSTM 800 wide, 40 epochs on the Penn Treebank, q_min 5",
        limits="what happens when a text is seen many times; and the rate was chosen by the perplexity of the test "
        "part after 800 steps, mostly in full precision, so that its level flatters.",
        script="language_model.py", options={"data": "kjv", "model": "lstm"}, family="rnn", steps=1500,
        bits=((3, 8),), metric="perplexity", better="lower", seeds=3, range_steps=150, published_q_min=5,
        critical=(
            {"experiments": ["deficit"], "deficits": [0, 375, 750], "options": HELD},
            {"experiments": ["window"], "window": 375, "starts": [0, 562, 1125]},
            {"experiments": ["first-cycle", "delayed"], "delayed": ["RR"], "delays": [375]},
        ),
    ),
    Plan(
        name="cifar10", title="Image classification: ResNet-8 on CIFAR-10",
        dataset="CIFAR-10 (50,000 training and 10,000 test images, cropped and flipped in training)",
        model="the published CIFAR ResNet with 8 layers and 8, 16 and 32 channels",
        size="1,200 steps of 64 images (1.5 epochs), SGD with momentum, its rate falling from 0.1 to a tenth after a "
        "half and after three quarters",
        published="ResNet-152 and MobileNetV2, 64,000 steps of 128 images (164 epochs), q_min 3 and 4",
        limits="where long training of large nets ends: this net is far from it. Batch norm's statistics were not "
        "estimated anew for the width of the evaluation, so that static 3 bits, and windows at the end, measure their "
        "lag too.",
        script="image_classification.py",
        options={"data": "cifar10", "model": "resnet8", "width": 8, "batch": 64, "lr": 0.1}, family="cnn", steps=1200,
        bits=((3, 8),), metric="accuracy", better="higher", seeds=3, range_steps=150, published_q_min=3,
        critical=(
            {"experiments": ["deficit"], "deficits": [0, 300, 600], "options": HELD},
            {"experiments": ["window"], "window": 300, "starts": [0, 450, 900]},
            {"experiments": ["first-cycle", "delayed"], "delayed": ["RR"], "delays": [300]},
        ),
    ),
)  # fmt: skip
FAST = (
    Plan(
        name="karate", title="Node classification: GCN on the karate club", dataset="the karate club, 34 nodes",
        model="a GCN", size="16 epochs", published="nothing so small", limits="anything: it is a trial.",
        script="node_classification.py", options={"fast": True}, family="gnn", steps=16, bits=((3, 8),),
        metric="accuracy", better="higher", seeds=2, range_steps=8, published_q_min=3, schedules=("CR", "RTH"),
        critical=({"experiments": ["deficit"], "deficits": [0, 4], "options": HELD},),
    ),
)  # fmt: skip


def run(plan: Plan, arguments: argparse.Namespace) -> None:
    """Train everything in a plan that is not in the store yet, and write the results."""
    common: dict[str, Any] = {
        "store": arguments.store / f"{plan.name}.sqlite", "name": plan.name, "total_steps": plan.steps,
        "seeds": arguments.seeds or plan.seeds, "better": plan.better, "metric": plan.metric,
        "workers": arguments.workers, "threads": 1, "ray": arguments.ray,
    }  # fmt: skip
    train = f"{HERE / plan.script}:train"
    options = dict(plan.options)
    # The most important runs come first, in case the study is stopped early.
    study.run(train, schedules=(*plan.schedules, *BASELINES), bits=plan.bits[:1], options=options, **common)
    for part in plan.critical:
        more = {**part, "options": {**options, **part.get("options", {})}}
        study.critical(train, **more, **common)
    for pair in plan.bits[1:]:
        study.run(train, schedules=(*plan.schedules, *BASELINES), bits=[pair], options=options, **common)
    report(plan, study.load(common["store"], plan.name), arguments.out)


def report(plan: Plan, found: study.Study, out: Path) -> None:
    """Write the tables and figures of a study, with its range test beside them."""
    found.write(out, title=plan.title, notes=plan.notes, command=f"python examples/paper_study.py --only {plan.name}")
    script = importlib.import_module(Path(plan.script).stem).SCRIPT
    ranges = range_of(script.task(script.options(**plan.options)), steps=plan.range_steps)
    ranges.plot(out / f"{plan.name}-range.png")
    kept = {"study": plan.name, "published_q_min": plan.published_q_min, **ranges.to_dict()}
    (out / f"{plan.name}-range.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(f"{plan.title}\n{ranges}\nthe paper's q_min: {plan.published_q_min}; report: {out / plan.name}.html\n")


def recommendations(plan: Plan, found: study.Study, path: Path) -> None:
    """Write the measurements to the file that `cpt_fx.schedules.recommend` reads."""
    figure = f"docs/results/{plan.name}-cost.png"
    task = measured.Task(dataset=plan.dataset, model=plan.model, size=plan.size, figure=figure, limits=plan.limits)
    measured.update(path, plan.family, task, found.records)


def overview(plans: Sequence[Plan], store: Path, out: Path) -> None:
    """Write one line for each study and (q_min, q_max) with records."""
    lines = [
        "# Overview",
        "| study | bits | metric | rank correlation of cost and quality | small, medium, large saving | static q_max "
        "| static q_min | full precision | RTV less ETV | range test: q_min | the paper's q_min |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for plan in plans:
        path, ranges = store / f"{plan.name}.sqlite", out / f"{plan.name}-range.json"
        if not path.exists():
            continue
        found = json.loads(ranges.read_text(encoding="utf-8"))["q_min"] if ranges.exists() else "–"
        for panel in panels(study.load(path, plan.name).records):
            if panel.experiment == "schedules":
                ends = f"{found} | {plan.published_q_min} |"
                lines.append(f"| [{plan.name}]({plan.name}.md) | {panel.bits} | {_overview_cells(panel)} | {ends}")
    notes = (
        "Means over seeds, with their standard deviation for static runs; intervals are of 95 %. A positive "
        "correlation says: more compute, better quality. Made by `python examples/paper_study.py --report`."
    )
    (out / "overview.md").write_text("\n".join([*lines[:1], "", *lines[1:], "", notes]) + "\n", encoding="utf-8")


def _overview_cells(panel: Panel) -> str:
    """Return the cells of the overview for a panel."""
    digits = 4 if panel.better == "higher" else 2
    order = cost_correlation(panel)
    rho = "–" if order.rho is None else f"{order.rho:+.2f}"
    if order.rho_interval is not None:
        rho += f" ({order.rho_interval.low:+.2f} to {order.rho_interval.high:+.2f})"
    by_group = ", ".join(f"{group.mean.value:.{digits}f}" for group in groups(panel) if group.mean is not None)
    singles = []
    for label in (f"static {panel.q_max}", f"static {panel.q_min}", "full precision"):
        row = panel.row(label)
        known = row is not None and row.mean is not None
        singles.append(f"{row.mean.value:.{digits}f} ± {row.deviation or 0:.{digits}f}" if known else "–")
    rtv, etv = panel.row("RTV"), panel.row("ETV")
    difference = against(rtv, etv) if rtv is not None and etv is not None else None
    early = "–"
    if difference is not None and difference.interval is not None:
        low, high = difference.interval.low, difference.interval.high
        early = f"{difference.value:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f}), "
        early += verdict(difference, panel.better)
    return " | ".join([f"{panel.metric}, {panel.better} is better", rho, by_group, *singles, early])


def compare_aggregation(store: Path, out: Path) -> None:
    """Write the effect of quantized messages, schedule by schedule."""
    both = [store / f"{name}.sqlite" for name in ("cora-fp", "cora-q")]
    if not all(path.exists() for path in both):
        return
    full, quantized = (study.load(path).records for path in both)
    parts = ["# Cora: aggregation in full precision against quantized aggregation"]
    for table in compare(full, quantized, names=("FP-Agg", "Q-Agg")):
        parts += [f"## {table.title}", table.markdown()]
    parts.append("Made by `python examples/paper_study.py --only cora-fp --only cora-q`.")
    (out / "cora-aggregation.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="a trial on the karate club, in a folder that is deleted")
    parser.add_argument("--only", choices=[plan.name for plan in PLANS], action="append", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="default: %(default)s")
    parser.add_argument("--store", type=Path, default=Path("studies"), help="folder of the stores (default: studies)")
    parser.add_argument("--seeds", type=int, help="instead of the number each study has")
    parser.add_argument("--workers", type=int, default=1, help="processes that train (default: %(default)s)")
    parser.add_argument("--ray", nargs="?", const="auto", help="train on a Ray cluster")
    parser.add_argument(
        "--report", action="store_true", help="train nothing: write the reports of what is in the store"
    )
    parser.add_argument("--measured", type=Path, help="also update this file, which schedules.recommend reads")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.fast:
        with tempfile.TemporaryDirectory() as folder:
            arguments.out = arguments.store = Path(folder)
            for plan in FAST:
                run(plan, arguments)
                recommendations(
                    plan, study.load(arguments.store / f"{plan.name}.sqlite"), Path(folder, "measured.json")
                )
            overview(FAST, arguments.store, arguments.out)
            print(Path(folder, "overview.md").read_text(encoding="utf-8"))
        return
    for plan in PLANS:
        if arguments.only is not None and plan.name not in arguments.only:
            continue
        if arguments.report:
            report(plan, study.load(arguments.store / f"{plan.name}.sqlite", plan.name), arguments.out)
        else:
            arguments.store.mkdir(parents=True, exist_ok=True)
            run(plan, arguments)
        if arguments.measured is not None:
            found = study.load(arguments.store / f"{plan.name}.sqlite", plan.name)
            recommendations(plan, found, arguments.measured)
    compare_aggregation(arguments.store, arguments.out)
    overview(PLANS, arguments.store, arguments.out)


if __name__ == "__main__":
    main()
