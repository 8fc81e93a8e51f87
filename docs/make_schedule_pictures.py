"""Draw the pictures of docs/schedules.md: python docs/make_schedule_pictures.py"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpt_fx.schedules import (
    NAMES,
    Cyclic,
    Deficit,
    Delayed,
    Schedule,
    Sequence,
    Static,
    named,
    relative_cost,
    savings_group,
)

IMAGES = Path(__file__).parent / "images"
TITLES = {
    "CR": "cosine, repeated",
    "LR": "linear, repeated",
    "ER": "exponential, repeated",
    "RR": "REX, repeated",
    "CT": "cosine, triangular",
    "LT": "linear, triangular",
    "ETV": "exponential, vertical",
    "ETH": "exponential, horizontal",
    "RTV": "REX, vertical",
    "RTH": "REX, horizontal",
}


def panel(ax: Axes, schedule: Schedule, title: str, note: str = "") -> None:
    schedule.plot(ax=ax)
    ax.set_title(title, fontsize=10, loc="left")
    ax.text(1, 1.02, note, transform=ax.transAxes, ha="right", va="bottom", fontsize=8.5, color="0.35")
    ax.grid(axis="y", color="0.92")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(xlabel="", ylabel="", ylim=(2.6, 8.5), yticks=range(3, 9))


def legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    names = {"forward": "weights and activations", "gradient": "gradients"}
    shown = [names.get(label, label) for label in labels]
    figure.get_layout_engine().set(wspace=0.06, hspace=0.04)
    figure.legend(handles, shown, loc="outside lower center", ncols=3, frameon=False, fontsize=9)


def the_ten() -> None:
    figure = Figure(figsize=(10, 11), dpi=130, layout="constrained")
    axes = figure.subplots(5, 2, sharex=True, sharey=True)
    left = ("CR", "LR", "ER", "RR", "CT")
    order = [*left, *(name for name in NAMES if name not in left)]
    for name, ax in zip(order, axes.T.flat, strict=True):
        schedule = named(name, q_min=3, q_max=8, total_steps=640, cycles=4)
        note = f"{savings_group(name)} saving, cost {relative_cost(schedule):.2f}"
        panel(ax, schedule, f"{name}   {TITLES[name]}", note)
    for ax in axes[-1]:
        ax.set(xlabel="step", xticks=range(0, 641, 160))
    for ax in axes[:, 0]:
        ax.set_ylabel("bits")
    legend(figure, axes[0, 0])
    figure.savefig(IMAGES / "schedules-ten.png")


def the_others() -> None:
    cycling: Cyclic = named("CR", q_min=3, q_max=8, total_steps=480, cycles=4)
    shown: dict[str, Schedule] = {
        "Static(5, 8)": Static(5, 8, total_steps=640),
        "Deficit(q_min=3, q_max=8, start=160, end=320)": Deficit(q_min=3, q_max=8, start=160, end=320, total_steps=640),
        "Delayed(CR, 160)": Delayed(cycling, 160),
        "Sequence([CR, Static(8)])": Sequence([cycling, Static(8, total_steps=160)]),
    }
    figure = Figure(figsize=(10, 5), dpi=130, layout="constrained")
    axes = figure.subplots(2, 2, sharex=True, sharey=True)
    for (title, schedule), ax in zip(shown.items(), axes.flat, strict=True):
        panel(ax, schedule, title)
    for ax in axes[-1]:
        ax.set(xlabel="step", xticks=range(0, 641, 160))
    for ax in axes[:, 0]:
        ax.set_ylabel("bits")
    legend(figure, axes[1, 0])
    figure.savefig(IMAGES / "schedules-others.png")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    the_ten()
    the_others()
