"""Colours, for light and dark, and the style sheet that uses them."""

from __future__ import annotations

import re
from importlib.resources import files

LIGHT = {
    "bg": "#ffffff", "ink": "#1b2230", "muted": "#5f6b7c", "card": "#ffffff", "under": "#f1f4f8", "rim": "#c9d1dc",
    "rim-strong": "#93a0b2", "value": "#f1f4f8", "end": "#2b3442", "end-ink": "#ffffff", "frame": "#f8fafc",
    "edge": "#8a97a8", "on-role": "#ffffff",
    "weight": "#2563c9", "weight-soft": "#eaf1fd", "activation": "#a35203", "activation-soft": "#fdf1e2",
    "bias": "#0f766e", "bias-soft": "#e3f5f2", "gradient": "#a6338f", "gradient-soft": "#fbeaf7",
}  # fmt: skip
DARK = {
    "bg": "#12161d", "ink": "#e6eaf0", "muted": "#96a3b5", "card": "#1c222c", "under": "#171c24", "rim": "#3a4454",
    "rim-strong": "#5b6a80", "value": "#222a35", "end": "#d5dce6", "end-ink": "#12161d", "frame": "#161b23",
    "edge": "#6d7b8f", "on-role": "#12161d",
    "weight": "#7fb0ff", "weight-soft": "#18263f", "activation": "#f2b366", "activation-soft": "#33260f",
    "bias": "#5fd0c2", "bias-soft": "#11302d", "gradient": "#e59ad6", "gradient-soft": "#371a32",
}  # fmt: skip


def resource(name: str) -> str:
    """Return the text of a file of this package."""
    return files("cpt_fx.inspection").joinpath(name).read_text(encoding="utf-8")


def variables(palette: dict[str, str]) -> str:
    """Return a palette as CSS custom properties."""
    return " ".join(f"--{name}: {value};" for name, value in palette.items())


def standalone_style() -> str:
    """Return the style of a drawing on its own: literal colours, since many viewers know no custom properties."""
    sheet = resource("graph.css")
    return f"{_filled(sheet, LIGHT)}@media (prefers-color-scheme: dark) {{\n{_filled(sheet, DARK)}}}\n"


def _filled(sheet: str, palette: dict[str, str]) -> str:
    return re.sub(r"var\(--([a-z-]+)\)", lambda match: palette[match[1]], sheet)
