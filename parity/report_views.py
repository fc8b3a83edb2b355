"""The tables and the picture of the project's own README files; every byte follows from the records."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from .costs import imbalance
from .device import describe
from .problem import Problem
from .records import Record
from .registry import BASELINE
from .report import table
from .report_sections import rate_unit, ratio
from .terminal import percent, rate, seconds

WHAT = "experts forward+backward"


def headline(records: Sequence[Record]) -> list[str]:
    """One row for each case: speedup of every implementation, its worst error, and the share of a dense GEMM."""
    rows = []
    for record in records:
        scale, unit = rate_unit(record)
        for case in record.cases:
            dense = next((b.flops_per_s for b in case.bounds if b.what == "dense GEMM"), 0.0)
            for r in case.results:
                t = r.timing(WHAT)
                if t is None:
                    continue
                measured = [f.percent for f in (*r.findings, *r.after) if f.percent is not None]
                speed = ratio(case, r.implementation, WHAT)
                rows.append(
                    [
                        case.label,
                        f"`{r.implementation}`",
                        percent(max(measured)) if measured else "exact",
                        seconds(t.median),
                        "-" if speed is None else f"{speed:.1f} x",
                        f"{t.flops_per_s / scale:.3g} {unit}",
                        f"{100 * t.flops_per_s / dense:.0f} %" if dense else "-",
                    ]
                )
    headers = [
        "layer",
        "implementation",
        "worst error, % of bar",
        WHAT,
        f"over {BASELINE}",
        "useful",
        "of a dense GEMM",
    ]
    machines = "; ".join(dict.fromkeys(describe(r.environment) for r in records))
    return [
        *table(headers, rows),
        "",
        f"Measured on {machines}; medians of interleaved rounds, zipf-skewed routing unless said.",
    ]


def picture(records: Sequence[Record]) -> str:
    """Horizontal bars of the speedup over loop_and_pad, as plain SVG."""
    bars: list[tuple[str, str, float]] = []
    for record in records:
        for case in record.cases:
            for r in case.results:
                speed = ratio(case, r.implementation, WHAT)
                if speed is not None and r.implementation != BASELINE:
                    busiest = imbalance(np.asarray(case.group_sizes))
                    bars.append((f"{case.label} (busiest expert {busiest:.1f} x mean)", r.implementation, speed))
    colours = {"blocked": "#0072B2", "ragged_dot": "#E69F00", "te": "#009E73", "te_ep": "#CC79A7"}
    top, step, left, width = 34, 24, 14, 430
    longest = max((v for _, _, v in bars), default=1.0)
    lines, y, last = [], top, ""
    for label, name, value in bars:
        if label != last:
            lines.append(f'<text x="{left}" y="{y + 12}" font-weight="bold">{html.escape(label)}</text>')
            y, last = y + 20, label
        length = max(2.0, width * value / longest)
        lines.append(f'<text x="{left + 8}" y="{y + 13}">{html.escape(name)}</text>')
        lines.append(
            f'<rect x="{left + 90}" y="{y + 2}" width="{length:.1f}" height="15" fill="{colours.get(name, "#666666")}"/>'
        )
        lines.append(f'<text x="{left + 96 + length:.1f}" y="{y + 13}">{value:.1f} x</text>')
        y += step
    one = left + 90 + width / longest
    lines.append(f'<line x1="{one:.1f}" x2="{one:.1f}" y1="{top}" y2="{y}" stroke="#444444" stroke-dasharray="4 3"/>')
    title = f"Speedup over {BASELINE}, {WHAT} (times; dashed line: {BASELINE})"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 {y + 10}" role="img" font-family="sans-serif" font-size="13">\n'
        f"<title>{html.escape(title)}</title>\n"
        f'<rect width="620" height="{y + 10}" fill="#ffffff"/>\n'
        f'<text x="{left}" y="20" font-size="14">{html.escape(title)}</text>\n' + "\n".join(lines) + "\n</svg>\n"
    )


def ladder_table(records: Sequence[Record]) -> list[str]:
    """The rungs of ladder records."""
    lines: list[str] = []
    for record in records:
        rungs = record.extra.get("rungs", [])
        rows = [
            [
                str(i + 1),
                r["title"],
                f"`{r['implementation']}`",
                seconds(r["seconds"]) if r.get("seconds") else r.get("reason", "-"),
                rate(r["flops_per_s"]) if r.get("seconds") else "-",
                "-" if r.get("padding") is None else f"{100 * r['padding']:.0f} %",
                "-" if r.get("compiles") is None else str(r["compiles"]),
                r.get("device", ""),
            ]
            for i, r in enumerate(rungs)
        ]
        headers = ["", "rung", "implementation", WHAT, "useful", "padding", "executables", "measured on"]
        lines += [*table(headers, rows), ""]
    return lines[:-1]


def gpu_matrix(records: Sequence[Record]) -> list[str]:
    """Stage x precision x implementation: largest error as % of its bar, over all cases of these records."""
    worst: dict[tuple[str, str, str], float | str] = {}
    reasons: dict[tuple[str, str], str] = {}
    columns: list[tuple[str, str]] = []
    for case in (c for r in records for c in r.cases):
        problem = Problem.from_json(case.problem)
        precision = str(problem.dtype) if problem.recipe == "none" else problem.recipe
        for r in case.results:
            column = (r.implementation, precision)
            if r.verdict == "cannot run":
                reasons.setdefault(column, r.reason)
                continue
            if column not in columns:
                columns.append(column)
            for f in (*r.findings, *r.after):
                if f.verdict == "cannot run":
                    continue
                key = (f.stage or "experts", *column)
                if f.verdict == "known":
                    worst[key] = "known"
                elif not f.ok:
                    worst[key] = "FAILS"
                elif f.percent is not None and worst.get(key) not in ("FAILS", "known"):
                    old = worst.get(key)
                    worst[key] = max(f.percent, old) if isinstance(old, float) else f.percent
                else:
                    worst.setdefault(key, "exact")
    stages = list(dict.fromkeys(k[0] for k in worst))

    def cell(value: float | str | None) -> str:
        return "-" if value is None else value if isinstance(value, str) else percent(value)

    rows = [[s, *(cell(worst.get((s, *c))) for c in columns)] for s in stages]
    lines = table(["stage", *(f"`{name}` {dtype}" for name, dtype in columns)], rows)
    lines += (
        [""] + [f"* `{name}` {dtype} cannot run: {why}" for (name, dtype), why in reasons.items()] if reasons else []
    )
    return lines


def laws(records: Sequence[Record]) -> list[str]:
    """How many laws each implementation kept, and every one that it did not or that was not judged, with its reason."""
    counts, other = [], []
    for r in (r for record in records for case in record.cases for r in case.results):
        judged = [f for f in r.findings if f.law]
        agreed = [f for f in judged if f.verdict == "agree"]
        worst = [f.percent for f in agreed if f.percent is not None]
        share = percent(max(worst)) if worst else "exact" if agreed else "-"
        counts.append([f"`{r.implementation}`", str(len(agreed)), share])
        if not judged:
            other.append([f"`{r.implementation}`", "all", r.verdict, r.reason])
        other += [
            [f"`{r.implementation}`", f"`{f.law}`", f.verdict or ("agree" if f.ok else "FAILS"), f.message]
            for f in judged
            if f.verdict != "agree"
        ]
    lines = table(["implementation", "laws that agree", "worst error, % of bar"], counts)
    return [*lines, "", *table(["implementation", "law", "verdict", "because"], other)] if other else lines


def guard_rates(records: Sequence[Record]) -> list[str]:
    """False alarms and detections of the guard's trials."""
    rows = []
    for record in records:
        for trial in record.extra.get("trials", []):
            rows.append(
                [
                    trial["what"],
                    f"{trial['runs']:,}",
                    f"{trial['count']:,}",
                    f"{100 * trial['count'] / trial['runs']:.2f} %",
                ]
            )
    lines = [*table(["", "guards played", "alarms", "share"], rows), ""]
    for r in records:
        load = f", load average {r.extra['load']:.0f}" if "load" in r.extra else ""
        slow = ", ".join(f"{stage} {factor:.2f} x" for stage, factor in r.extra.get("measured slowdown", {}).items())
        lines.append(
            f"{r.extra.get('real runs', 0)} real runs on {describe(r.environment)}{load}. Slowdown as measured: {slow}."
        )
    return lines
