"""Generated parts of Markdown files: each between a line that names its view and records, and an end line.

    <!-- generated: speedup tests/benchmarks/recorded/cpu-2/bench.json -->
    ...
    <!-- end -->

Paths are relative to the repository, which is the folder above the file that holds pyproject.toml. The same records give the
same bytes on every machine: no clock, no plot library, no environment enters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import report
from .problem import InvalidInput
from .records import Record, read, write_text
from .report_sections import matrix, speedup, times
from .report_views import gpu_matrix, guard_rates, headline, ladder_table, laws, picture

PART = re.compile(r"(<!-- generated: (?P<view>\S+)(?P<paths>(?: \S+)*) -->\n)(?P<body>.*?)(<!-- end -->)", re.S)


def _speedup(records: Sequence[Record]) -> list[str]:
    section = speedup([(r, c) for r in records for c in r.cases if any(x.timings for x in c.results)])
    return [section.text, "", *report.table(section.headers, section.rows)]


def _agreement(records: Sequence[Record]) -> list[str]:
    lines: list[str] = []
    for r in records:
        for c in r.cases:
            section = matrix(r, c)
            lines += [f"**{c.label}**: {section.text}", "", *report.table(section.headers, section.rows), ""]
            lines += [f"* {n}" for n in section.notes] + ([""] if section.notes else [])
    return lines[:-1]


def _times(records: Sequence[Record]) -> list[str]:
    lines: list[str] = []
    for r in records:
        for c in r.cases:
            section = times(r, c)
            lines += [f"**{c.label}**: {section.text}", "", *report.table(section.headers, section.rows), ""]
    return lines[:-1]


VIEWS: dict[str, Callable[[Sequence[Record]], list[str]]] = {
    "headline": headline,
    "speedup": _speedup,
    "agreement": _agreement,
    "times": _times,
    "ladder": ladder_table,
    "gpu-matrix": gpu_matrix,
    "laws": laws,
    "guard-rates": guard_rates,
}
"""View -> lines of Markdown from records. `picture` is one more: it writes an SVG beside the file that shows it."""


def refresh(path: Path, *, check: bool = False) -> bool:
    """Rewrites the generated parts of a file; returns whether it was up to date. With `check` nothing is written.

    Raises InvalidInput for an unknown view, a missing record, or a file without generated parts.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}; accepted: a Markdown file") from None
    if not PART.search(text):
        raise InvalidInput(f"{path} has no generated part; accepted: a file with <!-- generated: VIEW RECORD... -->")
    root = repository(path)
    pictures: dict[Path, str] = {}

    def fill(found: re.Match[str]) -> str:
        view, paths = found["view"], found["paths"].split()
        if len(paths) < (2 if view == "picture" else 1):
            raise InvalidInput(
                f"{path} asks for {view} without a record; accepted: VIEW RECORD..., picture FILE RECORD..."
            )
        if view == "picture":
            target, *paths = paths
            pictures[root / target] = picture([read(root / p) for p in paths])
            lines = [f"![Speed of each implementation]({target})"]
        elif view in VIEWS:
            lines = VIEWS[view]([read(root / p) for p in paths])
        else:
            raise InvalidInput(f"{path} asks for view {view!r}; accepted: {', '.join(VIEWS)}, picture")
        return found[1] + "\n".join(lines) + "\n" + found[5]

    new = PART.sub(fill, text)
    same = new == text and all(p.is_file() and p.read_text(encoding="utf-8") == svg for p, svg in pictures.items())
    if not check and not same:
        for target, svg in pictures.items():
            write_text(target, svg)
        write_text(path, new)
    return same


def repository(path: Path) -> Path:
    """The nearest folder at or above the file that holds pyproject.toml; else the file's own."""
    folder = path.resolve().parent
    return next((f for f in (folder, *folder.parents) if (f / "pyproject.toml").is_file()), folder)
