"""Renders sections as Markdown, and as one self-contained HTML file that prints, narrows and needs no network."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from .report_sections import Section

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }
h1, h2, p, li { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.25rem 0.6rem; border-bottom: 1px solid #ddd; white-space: nowrap; }
thead th { border-bottom: 2px solid #888; }
td.number, th.number { text-align: right; } td.bad { font-weight: bold; color: #a00; }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; max-width: 45rem; }
code { background: #f2f2f2; padding: 0 0.2em; }
nav ul { columns: 18rem; column-gap: 2.5rem; padding-left: 1.2rem; }
@media (max-width: 30rem) { body { padding: 0.5rem; } th, td { padding: 0.2rem 0.35rem; } figure { overflow-x: auto; } figure svg { min-width: 34rem; } }
@media print {
  body { max-width: none; font-size: 10pt; } nav { display: none; } .scroll { overflow: visible; }
  table { font-size: 7pt; } th, td { white-space: normal; padding: 0.1rem 0.3rem; }
  section { break-inside: avoid-page; } figure svg { max-height: 16cm; }
}
"""


def markdown(sections: Sequence[Section], title: str = "dropless report") -> str:
    """The sections as Markdown tables."""
    lines = [f"# {title}", ""]
    for s in sections:
        lines += [f"## {s.title}", "", s.text, "", *table(s.headers, s.rows), ""]
        lines += [f"* {n}" for n in s.notes] + ([""] if s.notes else [])
    return "\n".join(lines).rstrip() + "\n"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table's lines; bars in cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return [line(headers), "|" + "---|" * len(headers), *(line(r) for r in rows)]


def page(sections: Sequence[Section], title: str = "dropless report") -> str:
    """The sections as one HTML file: styles and plots inline, no script, no request."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        # An empty icon, or a browser asks the server for one and logs the miss.
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{STYLE}</style></head><body>',
        f"<h1>{html.escape(title)}</h1><nav><ul>",
        *(f'<li><a href="#s{i}">{html.escape(s.title)}</a></li>' for i, s in enumerate(sections)),
        "</ul></nav>",
    ]
    for i, s in enumerate(sections):
        parts.append(f'<section id="s{i}"><h2>{html.escape(s.title)}</h2><p>{_inline(s.text)}</p>')
        if s.plot is not None:
            parts.append(f'<figure role="img" aria-label="{html.escape(s.title)}: the table below">{s.plot()}</figure>')
        parts.append(_html_table(s))
        if s.notes:
            parts.append("<ul>" + "".join(f"<li>{_inline(n)}</li>" for n in s.notes) + "</ul>")
        parts.append("</section>")
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _html_table(s: Section) -> str:
    # A column with a number in it is one of numbers: its words ("exact", "-") stand where the numbers do.
    right = {i for row in s.rows for i, c in enumerate(row) if i and re.match(r"[<>]?\d", c)}
    head = "".join(
        f'<th scope="col"{" class=number" if i in right else ""}>{_inline(h)}</th>' for i, h in enumerate(s.headers)
    )
    body = "".join("<tr>" + "".join(_html_cell(c, i in right) for i, c in enumerate(row)) + "</tr>" for row in s.rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _html_cell(text: str, right: bool) -> str:
    kinds = [k for k, holds in (("number", right), ("bad", text.startswith("FAILS") or text == "disagree")) if holds]
    return f'<td class="{" ".join(kinds)}">{_inline(text)}</td>' if kinds else f"<td>{_inline(text)}</td>"


def _inline(text: str) -> str:
    """Escaped text, with `code` and **bold** as Markdown has them."""
    escaped = html.escape(text)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
