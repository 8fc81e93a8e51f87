"""Write the tables and the picture of docs/architecture.md: python docs/make_architecture.py

The rooms and their imports are read from the source, the two walks from running it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import networkx as nx
import torch
from matplotlib.figure import Figure
from torch import nn

import cpt_fx
from tests.test_rooms import DOORS, imported, modules, room_of

DOCS = Path(__file__).parent
PICTURE = DOCS / "images" / "rooms.svg"
PAGE = DOCS / "architecture.md"
FRONT = ("cpt_fx", "__main__")
"""What only hands on to the rooms."""


def rooms() -> nx.DiGraph:
    """Return the rooms, each with its lines and what its first line says, and an edge for each import."""
    graph = nx.DiGraph()
    known = modules()
    for module, path in known.items():
        room, text = room_of(module), path.read_text(encoding="utf-8")
        if room in FRONT:
            continue
        graph.add_node(room)
        graph.nodes[room]["lines"] = graph.nodes[room].get("lines", 0) + len(text.splitlines())
        if module.count(".") == 1:
            graph.nodes[room]["says"] = (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]
        for target, _ in imported(module, text, set(known)):
            if room_of(target) != room and (module, target) not in DOORS:
                graph.add_edge(room, room_of(target))
    return graph


def draw(graph: nx.DiGraph) -> None:
    """Draw the rooms in rows, each below all that import from it. A line that follows from others is left out."""
    plain = nx.transitive_reduction(graph)
    across: dict[str, float] = {}
    down: dict[str, int] = {}
    rows = [list(row) for row in nx.topological_generations(plain)]
    depth_of = {room: depth for depth, row in enumerate(rows) for room in row}
    for room in list(rows[0]):
        # What nothing imports stands right above what it imports.
        rows[0].remove(room)
        rows[min(depth_of[used] for used in plain.successors(room)) - 1].append(room)
    for depth, row in enumerate(rows):
        wanted = {room: [across[user] for user in plain.predecessors(room)] for room in row}
        ordered = sorted(row, key=lambda room: (sum(wanted[room]) / max(len(wanted[room]), 1), room))
        for index, room in enumerate(ordered):
            across[room], down[room] = (index + 0.5) / len(row) + 0.05 * (depth % 2), depth
    height = 1 + max(down.values())
    figure = Figure(figsize=(9, 0.8 * height), layout="constrained")
    ax = figure.subplots()
    ax.set_axis_off()
    for user, used in sorted(plain.edges):
        ax.plot([across[user], across[used]], [-down[user], -down[used]], color="0.7", linewidth=1, zorder=1)
    for room, x in across.items():
        label = f"{room}\n{graph.nodes[room]['lines']:,}"
        box = {"boxstyle": "round,pad=0.45", "facecolor": "#eef3f8", "edgecolor": "#7a93ac"}
        ax.text(x, -down[room], label, ha="center", va="center", fontsize=9, color="#1c2733", bbox=box, zorder=2)
    ax.set(xlim=(0, 1.04), ylim=(0.5 - height, 0.5))
    mpl.rcParams["svg.hashsalt"] = "rooms"  # the same file for the same rooms
    figure.savefig(PICTURE, metadata={"Date": None}, facecolor="white")


@contextmanager
def visited(order: dict[str, int]) -> Iterator[None]:
    """Note the files of the package in the order in which calls reach them, each with the functions called there."""
    package = str(Path(str(cpt_fx.__file__)).parent)
    passes = str(Path(package).parent / "passes")
    seen: set[object] = set()

    def note(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_filename.startswith((package, passes)) and code not in seen:
            seen.add(code)
            name = code.co_filename.removeprefix(package).removeprefix(str(Path(passes).parent)).lstrip("/")
            order[name] = order.get(name, 0) + 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def walk(run: Callable[[], object]) -> dict[str, int]:
    """Return the files that a call passes through."""
    order: dict[str, int] = {}
    with visited(order):
        run()
    return order


def walks() -> dict[str, dict[str, int]]:
    """Return the files that a small model passes through."""
    schedule = cpt_fx.schedules.named("CR", q_min=3, q_max=8, total_steps=80)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(5, 8)
    for way in ("symbolic", "dynamo"):  # imports are no part of a walk
        cpt_fx.transform(model, schedule, capture=way)(x).sum().backward()
    made: list[nn.Module] = []
    found = {"`transform`, torch.fx": walk(lambda: made.append(cpt_fx.transform(model, schedule, capture="symbolic")))}
    for _ in range(2):
        made[0](x).sum().backward()

    def step() -> None:
        made[0](x).sum().backward()
        schedule.step()

    found["a step of training"] = walk(step)
    other = cpt_fx.transform(model, schedule, capture="dynamo")
    found["the first call of a model that Dynamo captures"] = walk(lambda: other(x))
    return found


def tables(graph: nx.DiGraph) -> str:
    """Return both tables in Markdown."""
    lines = ["| room | holds | lines | imports from |", "| --- | --- | ---: | --- |"]
    for room in reversed(list(nx.lexicographical_topological_sort(graph))):
        others = ", ".join(f"`{other}`" for other in sorted(graph.successors(room)))
        lines.append(f"| `{room}` | {graph.nodes[room]['says']} | {graph.nodes[room]['lines']:,} | {others} |")
    lines += [
        "",
        "| walk | files | functions | in the order in which they are reached |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, order in walks().items():
        lines.append(f"| {name} | {len(order)} | {sum(order.values())} | {', '.join(f'`{file}`' for file in order)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    house = rooms()
    draw(house)
    start, end = "<!-- generated: python docs/make_architecture.py -->\n", "<!-- end -->\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(start)
    PAGE.write_text(f"{before}{start}\n{tables(house)}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")
