"""The tables that a record prints: what agreed, as a percentage of its bar, and what it cost."""

from __future__ import annotations

import numpy as np
from rich.markup import escape

from .costs import imbalance
from .device import describe
from .problem import Problem
from .records import CaseRecord, FindingRecord, Record, ResultRecord
from .registry import BASELINE
from .terminal import out, percent, rate, seconds, size, table
from .traffic_table import print_traffic


def print_record(record: Record) -> None:
    """Everything that `compare` and `bench` show."""
    for case in record.cases:
        console = out()
        console.print(
            f"[bold]{escape(case.label)}[/] · {escape(problem_line(Problem.from_json(case.problem)))}", highlight=False
        )
        console.print(escape(load_line(case)), highlight=False)
        console.print(escape(describe(record.environment)), style="dim", highlight=False)
        print_parity(case)
        print_timing(case)
        if case.traffic:
            print_traffic(case.traffic)
        print_reasons(case)


def problem_line(p: Problem) -> str:
    """Sizes and dtype in one line."""
    r = p.router
    groups = f", {r.group_topk} of {r.groups} groups" if r.groups > 1 else ""
    return f"T {p.T}, K {p.K} of E {p.E}, D {p.D}, F {p.F}, {p.dtype}; {r.score} router{groups}"


def load_line(case: CaseRecord) -> str:
    """How uneven the loads are."""
    sizes = np.asarray(case.group_sizes)
    if not sizes.size or not case.rows:
        return f"{case.source or case.pattern}: no routed rows"
    idle = int((sizes == 0).sum())
    return (
        f"{case.source or case.pattern}: {case.rows:,} routed rows; busiest expert {sizes.max():,} rows, "
        f"{imbalance(sizes):.1f} x the mean; {idle} idle"
    )


def print_parity(case: CaseRecord) -> None:
    """Rows: tensors by stage; columns: implementations; cells: % of bar."""
    shown = [r for r in case.results if r.findings]
    if not shown:
        return
    t = table(
        "largest error, % of its bar",
        *(r.implementation for r in shown),
        numbers=tuple(r.implementation for r in shown),
    )
    for stage, tensor in _keys(shown):
        t.add_row(label(stage, tensor), *(_cell(_find(r, stage, tensor)) for r in shown))
    t.add_row("verdict", *(_verdict(r) for r in shown))
    out().print(t)


def print_timing(case: CaseRecord) -> None:
    """One table for each call. Columns: median, spread, speedup over the baseline, useful rate, memory."""
    timed = [r for r in case.results if r.timings]
    base = case.result(BASELINE)
    dense = next((b for b in case.bounds if b.what == "dense GEMM"), None)
    for what in dict.fromkeys(x.what for r in timed for x in r.timings):
        numbers = ["median", "p10-p90", "speedup", "useful", "of dense", "memory"]
        if out().width < 90:
            numbers.remove("p10-p90")
        t = table("implementation", *numbers, title=what, numbers=tuple(numbers))
        for r in timed:
            x = r.timing(what)
            if x is None:
                continue
            reference = base.timing(what) if base else None
            cells = {
                "median": seconds(x.median),
                "p10-p90": _short(x.p10, x.p90),
                "speedup": f"{reference.median / x.median:.2f} x" if reference else "-",
                "useful": rate(x.flops_per_s) if x.useful_flops else "-",
                "of dense": f"{100 * x.flops_per_s / dense.flops_per_s:.0f} %" if dense and x.useful_flops else "-",
                "memory": size(x.peak_bytes),
            }
            t.add_row(r.implementation, *(cells[n] for n in numbers))
        out().print(t)
    if timed and dense:
        out().print(
            f"Speedup is over {BASELINE}; useful counts real rows only; a dense GEMM here runs at {rate(dense.flops_per_s)}.",
            style="dim",
            highlight=False,
        )


def print_reasons(case: CaseRecord) -> None:
    """One line for each implementation that did not run or did not agree."""
    for r in case.results:
        if r.reason:
            style = "bold red" if r.verdict in ("disagree", "not repeatable") else "yellow"
            out().print(f"[{style}]{r.implementation}: {r.verdict}[/]: {escape(r.reason)}", highlight=False)


def _keys(results: list[ResultRecord]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((f.stage, f.tensor) for r in results for f in r.findings))


def _find(r: ResultRecord, stage: str, tensor: str) -> list[FindingRecord]:
    """A tensor's findings before and after timing."""
    found = [f for f in r.findings if (f.stage, f.tensor) == (stage, tensor)]
    return found + [f for f in r.after if f.tensor == tensor and f.stage.startswith(stage)]


VALUES = ("y", "rows", "row_of_slot", "group_sizes", "topk_idx", "weights", "balance", "sequence", "z")
"""Tensors that are judged themselves; any other name is of what the gradient is."""


def label(stage: str, tensor: str) -> str:
    """A row's name: the stage, then the tensor, with d for a gradient."""
    return f"{stage}: {tensor}" if tensor in VALUES else f"{stage}: d {tensor}"


def _cell(found: list[FindingRecord]) -> str:
    if not found:
        return "-"
    failed = [f for f in found if not f.ok]
    measured = [f.percent for f in found if f.percent is not None]
    if failed:
        return f"[bold red]{percent(max(measured)) if measured else failed[0].check}[/]"
    return percent(max(measured)) if measured else "exact"


def _verdict(r: ResultRecord) -> str:
    style = {"agree": "green", "disagree": "bold red", "not repeatable": "bold red"}.get(r.verdict, "yellow")
    return f"[{style}]{r.verdict}[/]"


def _short(low: float, high: float) -> str:
    unit, scale = ("s", 1.0) if high >= 1 else ("ms", 1e-3) if high >= 1e-3 else ("µs", 1e-6)
    return f"{low / scale:.3g}-{high / scale:.3g} {unit}"
