"""An HTML page of tables and drawings: one file without scripts or external resources, light and dark."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, place: str = "scroll", coloured: bool = True,
    kind: Callable[[str, str], str] = lambda heading, cell: "",
) -> str:  # fmt: skip
    """Return an HTML table; its first column names the rows, with their colours; `kind` gives the class of a cell."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = ""
    for index, (name, *cells) in enumerate(rows, start=1):
        body += "<tr><th>" + f'<i class="c{index}"></i>' * coloured + f"{escape(name)}</th>"
        for heading, cell in zip(headings[1:], cells, strict=True):
            own = kind(heading, cell)
            body += "<td" + f' class="{own}"' * bool(own) + f">{escape(cell)}</td>"
        body += "</tr>"
    return f'<div class="{place}"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def inlined(svg: str, name: str, title: str, colours: Mapping[str, str]) -> str:
    """Return a drawing to inline in a page: `name` makes its ids unique, `colours` become CSS variables of the page."""
    svg = svg[svg.index("<svg") :]
    # Inside a page the drawing's style element would apply to everything; it only sets how lines join.
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    head = rf'<svg style="stroke-linejoin: round; stroke-linecap: butt" viewBox="\1" role="img" aria-label="{title}">'
    svg = re.sub(r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>', head, svg)
    for colour, variable in colours.items():
        svg = re.sub(re.escape(colour), f"var({variable})", svg, flags=re.IGNORECASE)
    return svg


def page(title: str, lead: str, sections: Sequence[str], foot: str) -> str:
    """Return a complete page. `sections` is HTML; the other arguments are text."""
    return PAGE.format(
        title=escape(title), lead=escape(lead), style=STYLE, sections="\n".join(sections), foot=escape(foot)
    )


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
<main>
<header><h1>{title}</h1><p>{lead}</p></header>
{sections}
<footer>{foot}</footer>
</main>
</html>
"""

STYLE = """
:root { --page: #fff; --ink: #16191d; --soft: #5b636e; --rule: #e4e7eb; --mark: #b4bcc8; --c1: #1f5fd0; --c2: #c8500a; }
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e8eaed; --soft: #9aa3ae; --rule: #2c3138; --mark: #566070; --c1: #7fb0ff; --c2: #ffa35c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
main { max-width: 944px; margin: 0 auto; padding: 40px 32px 56px; }
h1 { font-size: 26px; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 8px; }
h2 { font-size: 16px; margin: 0; }
header p { color: var(--soft); margin: 0 0 28px; max-width: 68ch; }
figure, section { margin: 36px 0 0; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; align-items: baseline; gap: 4px 24px; }
figcaption { margin-bottom: 8px; }
i { display: inline-block; width: 18px; height: 0; border-top: 2.5px solid; vertical-align: middle; }
th i { margin-right: 10px; }
i.c1 { border-color: var(--c1); } i.c2 { border-color: var(--c2); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.note { margin: 6px 0 0; font-size: 13px; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 9px 0 9px 20px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { font-size: 13px; font-weight: 500; color: var(--soft); padding-top: 0; }
tbody th { font-weight: 600; }
/* Wider than the text: a drawing of a graph needs the room. */
.graph { width: min(1560px, 100vw - 64px); margin: 10px 0 0 50%; transform: translateX(-50%); }
.graph { border: 1px solid var(--rule); border-radius: 6px; }
.graph img { display: block; width: 100%; min-width: 1000px; height: auto; }
a { color: var(--c1); }
footer { margin-top: 44px; padding-top: 14px; border-top: 1px solid var(--rule); font-size: 13px; color: var(--soft); }
@media (max-width: 640px) { main { padding: 28px 20px; } }
@media print { main { max-width: none; padding: 0; } figure { break-inside: avoid; } }
"""
