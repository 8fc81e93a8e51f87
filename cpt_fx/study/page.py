"""A study as one HTML page: figures, sentences, tables, and what was run. Nothing to load, light and dark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from cpt_fx import report
from cpt_fx.study.conclusions import Conclusion
from cpt_fx.study.figure_style import COLOURS, INK, RULE, SOFT
from cpt_fx.study.tables import Table

FIGURE_TITLES = {
    "cost": "Quality against cost",
    "deficit": "Low precision at the start of training",
    "window": "A window of low precision, moved along training",
    "first-cycle": "Equal cost, different beginnings",
    "delayed": "Schedules that begin later",
}
# The same hues on a dark page, light enough to read.
_DARK = {"small": "#56b4e9", "medium": "#3fc79a", "large": "#ff9a57", "other": "#dd8fc0"}

_VARIABLES = {COLOURS[name]: f"--{name}" for name in _DARK}
_VARIABLES |= {INK: "--ink", SOFT: "--soft", RULE: "--rule", "#ffffff": "--page"}
_LIGHT_RULES = "".join(f"--{name}: {COLOURS[name]}; " for name in _DARK)
_DARK_RULES = "".join(f"--{name}: {colour}; " for name, colour in _DARK.items())

STYLE = f"""
:root {{ {_LIGHT_RULES}}}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK_RULES}}} }}
main {{ max-width: 1040px; }}
figure svg {{ max-width: 780px; }}
.wide {{ overflow-x: auto; margin: 10px 0 0; }}
.wide th, .wide td {{ padding: 7px 0 7px 14px; font-size: 13.5px; }}
.wide th:first-child {{ padding-left: 0; }}
.wide thead th {{ white-space: normal; vertical-align: bottom; }}
.wide td.text {{ text-align: left; white-space: normal; color: var(--soft); min-width: 20ch; }}
.wide td.better {{ color: var(--c1); }} .wide td.worse {{ color: var(--c2); }}
.wide td.apart {{ color: var(--soft); }}
section ul {{ margin: 4px 0 0; padding-left: 20px; max-width: 86ch; }} section li {{ margin: 3px 0; }}
section p {{ margin: 8px 0 0; max-width: 82ch; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: 5px 20px; margin: 10px 0 0; font-size: 13.5px; }}
dt {{ color: var(--soft); }} dd {{ margin: 0; overflow-wrap: anywhere; }}
.notes {{ white-space: pre-line; }}
"""


def html(
    title: str,
    lead: str,
    *,
    figures: Mapping[str, str],
    said: Sequence[Conclusion],
    tables: Sequence[Table],
    facts: Sequence[tuple[str, str]],
    notes: str = "",
    missing_figures: str = "",
) -> str:
    """Return the page. `figures` are SVG by name; without them `missing_figures` says why there are none."""
    sections = [f"<style>{STYLE}</style>"]
    if missing_figures:
        sections.append(f'<p class="note">{escape(missing_figures)}</p>')
    sections.extend(_figure(name, svg) for name, svg in figures.items())
    sections.append("<section><h2>What comes out</h2>" + "".join(map(_conclusion, said)) + "</section>")
    if notes:
        sections.append(f'<section><h2>Notes</h2><p class="notes">{escape(notes)}</p></section>')
    sections.extend(_table(table) for table in tables)
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    sections.append(f"<section><h2>What was run</h2><dl>{items}</dl></section>")
    return report.page(title, lead, sections, "Written by cpt_fx.study from the records of the runs.")


def inlined(svg: str, name: str) -> str:
    """Return a drawing for a page that holds several: its ids are its own, its colours are the page's."""
    svg = svg[svg.index("<svg") :]
    # Inside a page the drawing's style element would be everyone's; what it sets are the lines' joins.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    prefix = f"{name}-"
    svg = re.sub(r'\bid="', f'id="{prefix}', svg)
    svg = re.sub(r'href="#', f'href="#{prefix}', svg)
    svg = svg.replace("url(#", f"url(#{prefix}")
    svg = re.sub(
        r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{_title(name)}">', svg
    )
    svg = svg.replace("<svg ", '<svg style="stroke-linejoin: round; stroke-linecap: butt" ', 1)
    for colour, variable in _VARIABLES.items():
        svg = re.sub(re.escape(colour), f"var({variable})", svg, flags=re.IGNORECASE)
    return svg


def _title(name: str) -> str:
    return escape(FIGURE_TITLES.get(name, name.capitalize()))


def _figure(name: str, svg: str) -> str:
    return f"<figure><figcaption><h2>{_title(name)}</h2></figcaption>\n{inlined(svg, name)}</figure>"


def _conclusion(conclusion: Conclusion) -> str:
    findings = "".join(f"<li>{escape(finding)}</li>" for finding in conclusion.findings)
    return f"<p><b>{escape(conclusion.where)}</b></p><ul>{findings}</ul>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    body = "".join(
        f"<tr><th>{escape(row[0])}</th>"
        + "".join(_cell(heading, cell) for heading, cell in zip(table.headings[1:], row[1:], strict=True))
        + "</tr>"
        for row in table.rows
    )
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}</section>"
    )


def _cell(heading: str, cell: str) -> str:
    kind = {"reason": "text", "schedules": "text"}.get(heading, "")
    if heading == "verdict":
        kind = {"better": "better", "worse": "worse", "not told apart": "apart"}.get(cell, "")
    return f'<td class="{kind}">{escape(cell)}</td>' if kind else f"<td>{escape(cell)}</td>"
