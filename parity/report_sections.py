"""What a report says, section by section: each a table, and where a picture helps, the plot of that table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from . import plots
from .costs import imbalance
from .device import describe
from .problem import Problem
from .records import CaseRecord, Record, ResultRecord
from .registry import BASELINE
from .tables import label, problem_line
from .terminal import percent, rate, seconds, size
from .tolerances import ELEMENT_BAR


@dataclass
class Section:
    """A titled table, with a sentence on how to read it and perhaps a plot."""

    title: str
    text: str
    headers: list[str]
    rows: list[list[str]]
    plot: Callable[[], str] | None = None
    """Draws the SVG; called only for HTML, since it needs matplotlib."""
    notes: list[str] = field(default_factory=list)


def sections(records: Sequence[Record]) -> list[Section]:
    """Every section that these records can fill."""
    cases = [(r, c) for r in records for c in r.cases]
    found = [runs(records)]
    judged = [(r, c) for r, c in cases if any(x.findings or x.reason for x in c.results)]
    found += [matrix(r, c) for r, c in judged]
    timed = [(r, c) for r, c in cases if any(x.timings for x in c.results)]
    if timed:
        over = speedup(timed)
        found += [*([over] if over.rows else []), *(times(r, c) for r, c in timed)]
        found += [s for r, c in timed if (s := time_split(r, c))]
        found += [section for r, c in timed if (section := roofline(r, c)) is not None]
    found += [ladder_section(r) for r in records if r.kind == "ladder"]
    found += [errors(r, c) for r, c in judged if any(f.histogram for x in c.results for f in x.findings)]
    return found


def runs(records: Sequence[Record]) -> Section:
    """What was run, where."""
    rows = [
        [r.kind, r.created, describe(r.environment), str(r.seed), r.source_hash[:12], str(len(r.cases))]
        for r in records
    ]
    return Section(
        "Runs", "One line for each record.", ["kind", "created (UTC)", "on", "seed", "source", "cases"], rows
    )


def matrix(record: Record, case: CaseRecord) -> Section:
    """Stage x implementation: the largest error as % of its bar, or why not."""
    results = case.results
    keys = list(dict.fromkeys((f.stage, f.tensor) for r in results for f in r.findings))
    rows = [[label(s, t), *(cell(r, s, t) for r in results)] for s, t in keys]
    rows.append(["**verdict**", *(r.verdict for r in results)])
    notes = [f"{r.implementation}: {r.verdict}: {r.reason}" for r in results if r.reason]
    return Section(
        f"Agreement: {case.label}",
        f"{problem_line(Problem.from_json(case.problem))}. Largest error as a percentage of its bar, before and after timing; "
        "100 % would fail. `exact` was compared bit for bit.",
        ["stage: tensor", *(r.implementation for r in results)],
        rows,
        notes=notes,
    )


def cell(result: ResultRecord, stage: str, tensor: str) -> str:
    """One tensor's worst finding; `-` where nothing was judged."""
    found = [
        f
        for f in (*result.findings, *result.after)
        if (f.stage, f.tensor) == (stage, tensor) and f.verdict != "cannot run"
    ]
    if not found:
        return "-"
    if any(f.verdict == "known" for f in found):
        return "known"
    measured = [f.percent for f in found if f.percent is not None]
    text = percent(max(measured)) if measured else "exact"
    return text if all(f.ok for f in found) else f"FAILS ({text if measured else found[0].check})"


def speedup(timed: Sequence[tuple[Record, CaseRecord]]) -> Section:
    """Speedup over loop_and_pad of each case that times it, beside how uneven its loads are."""
    what = _best_what([c for _, c in timed])
    timed = [(r, c) for r, c in timed if (base := c.result(BASELINE)) is not None and base.timing(what) is not None]
    names = _names(timed)
    rows, series = [], {n: [] for n in names}
    for _, case in timed:
        sizes = np.asarray(case.group_sizes)
        values = [ratio(case, n, what) for n in names]
        for n, v in zip(names, values, strict=True):
            series[n].append(v)
        rows.append([case.label, f"{imbalance(sizes):.1f}", *("-" if v is None else f"{v:.2f}" for v in values)])
    groups = [f"{c.label}\nbusiest {imbalance(np.asarray(c.group_sizes)):.1f} x mean" for _, c in timed]
    return Section(
        f"Speedup over {BASELINE} against skew",
        f"{what}: {BASELINE}'s median time divided by each implementation's, from interleaved rounds of one run.",
        ["case", "busiest expert / mean", *names],
        rows,
        plot=lambda: plots.grouped_bars(groups, series, xlabel=f"speedup over {BASELINE}, {what}", unit="x", line=1.0),
    )


def times(record: Record, case: CaseRecord) -> Section:
    """Medians, spreads, rates and memory."""
    dense = next((b for b in case.bounds if b.what == "dense GEMM"), None)
    scale, unit = rate_unit(record)
    rows = []
    for r in case.results:
        for t in r.timings:
            speed = ratio(case, r.implementation, t.what)
            rows.append(
                [
                    t.what,
                    r.implementation,
                    seconds(t.median),
                    f"{seconds(t.p10)} - {seconds(t.p90)}",
                    "-" if speed is None else f"{speed:.2f}",
                    f"{t.flops_per_s / scale:.3g}" if t.useful_flops else "-",
                    f"{100 * t.flops_per_s / dense.flops_per_s:.0f} %" if dense and t.useful_flops else "-",
                    size(t.temp_bytes),
                    f"{t.compile_s:.2f} s",
                    str(len(t.samples)),
                ]
            )
    rows.sort(key=lambda row: _order(row[0]))
    for b in case.bounds:
        if b.useful_flops:
            rows.append(
                [
                    "upper bound",
                    b.what,
                    seconds(b.median),
                    f"{seconds(b.p10)} - {seconds(b.p90)}",
                    "-",
                    f"{b.flops_per_s / scale:.3g}",
                    f"{100 * b.flops_per_s / dense.flops_per_s:.0f} %" if dense else "-",
                    size(b.temp_bytes),
                    f"{b.compile_s:.2f} s",
                    str(len(b.samples)),
                ]
            )
    timer = next((t.device_timer for r in case.results for t in r.timings if t.device_timer), "")
    return Section(
        f"Times: {case.label}",
        f"{describe(record.environment)}. {'Device time, ' + timer if timer else 'Wall time'}; useful work counts real rows only.",
        [
            "call",
            "implementation",
            "median",
            "p10 - p90",
            f"x {BASELINE}",
            f"useful {unit}",
            "of dense",
            "temporaries",
            "compile",
            "repetitions",
        ],
        rows,
    )


def time_split(record: Record, case: CaseRecord) -> Section | None:
    """Where the layer's forward time goes, by its own stages timed alone."""
    parts = ("route", "permute", "grouped GEMMs", "unpermute", "the rest")
    rows, series, groups = [], {p: [] for p in parts}, []
    base = case.result(BASELINE)
    for r in case.results:
        layer = r.timing("layer forward")
        gemms = next((b for b in case.bounds if b.what == f"grouped GEMMs alone: {r.implementation}"), None)
        # A stage that is not timed is the baseline's own.
        whats = [f"{s} forward" for s in ("route", "permute", "unpermute")]
        stages = [r.timing(w) or (base.timing(w) if base else None) for w in whats]
        if layer is None or gemms is None or None in stages:
            continue
        route, permute, unpermute = (s.median for s in stages if s)
        values = [route, permute, gemms.median, unpermute]
        values.append(max(layer.median - sum(values), 0.0))
        groups.append(r.implementation)
        for p, v in zip(parts, values, strict=True):
            series[p].append(v * 1e3)
        rows.append([r.implementation, *(seconds(v) for v in values), seconds(layer.median)])
    if not rows:
        return None
    return Section(
        f"Time split of the layer: {case.label}",
        "Stages timed alone, forward. The rest is the layer's time less those: activation, shared expert, losses. A layer "
        "that fuses stages can take less than their sum; then the rest is 0.",
        ["implementation", *parts, "layer forward"],
        rows,
        plot=lambda: plots.stacked_bars(groups, series, xlabel="time, forward", unit="ms"),
    )


def roofline(record: Record, case: CaseRecord) -> Section | None:
    """Each call's useful rate against what its arithmetic intensity allows; None where no dense GEMM was timed."""
    scale, unit = rate_unit(record)
    dense = next((b.flops_per_s for b in case.bounds if b.what == "dense GEMM"), 0.0)
    if not dense:
        return None
    copy = next((b.bytes_moved / b.median for b in case.bounds if b.what == "memory copy"), None)
    points: dict[str, list[tuple[str, float, float]]] = {}
    rows = []
    for r in case.results:
        for t in r.timings:
            if not t.useful_flops or not t.bytes_moved:
                continue
            intensity = t.useful_flops / t.bytes_moved
            roof = min(dense, intensity * copy) if copy else dense
            points.setdefault(r.implementation, []).append((t.what, intensity, t.flops_per_s))
            share = f"{100 * t.flops_per_s / roof:.0f} %" if roof else "-"
            rows.append(
                [
                    t.what,
                    r.implementation,
                    f"{intensity:.3g}",
                    f"{t.flops_per_s / scale:.3g}",
                    f"{roof / scale:.3g}",
                    share,
                ]
            )
    memory = f", memory at {copy / 1e9:.3g} GB/s (a copy)" if copy else ""
    return Section(
        f"Roofline: {case.label}",
        f"The roof is measured here: one dense GEMM at {dense / scale:.3g} {unit}{memory}. Bytes count every operand and result once.",
        ["call", "implementation", "FLOP per byte", f"useful {unit}", f"attainable {unit}", "of attainable"],
        rows,
        plot=lambda: plots.roofline(points, dense, copy, unit=unit, scale=scale),
    )


def errors(record: Record, case: CaseRecord) -> Section:
    """How errors spread against the gauge."""
    rows, merged = [], {}
    for r in case.results:
        counts = [f.histogram for f in r.findings if f.histogram and f.stage == "experts"]
        if not counts:
            continue
        total = np.sum(np.asarray(counts), axis=0)
        merged[r.implementation] = total.tolist()
        n = max(int(total.sum()), 1)
        beyond = [int(total[int(4 * g) :].sum()) for g in (1, 2, 3, 4, ELEMENT_BAR)]
        rows.append([r.implementation, f"{n:,}", *(f"{b / n:.2g}" if b else "0" for b in beyond)])
    return Section(
        f"Errors against the gauge: {case.label}",
        f"Share of elements of y and of every gradient whose error exceeds so many gauges; the bar is {ELEMENT_BAR:g}.",
        ["implementation", "elements", "> 1", "> 2", "> 3", "> 4", f"> {ELEMENT_BAR:g}"],
        rows,
        plot=lambda: plots.error_steps(merged, ELEMENT_BAR),
    )


def ladder_section(record: Record) -> Section:
    """The walk, with its waterfall."""
    walk = record.extra.get("rungs", [])
    here = str(record.environment.get("device_kind"))
    rows = []
    for i, r in enumerate(walk, 1):
        timed = bool(r.get("seconds"))
        rows.append(
            [
                f"{i}. {r['title']} (`{r['implementation']}`)",
                seconds(r["seconds"]) if timed else "-",
                rate(r["flops_per_s"]) if timed else "-",
                f"{100 * r['padding']:.0f} %" if timed and r.get("padding") is not None else "-",
                size(r["memory"]) if timed else "-",
                str(r["compiles"]) if timed else "-",
                _measured_on(r) if timed else "not measured",
            ]
        )
    names = [f"{i}. {r['title']}" for i, r in enumerate(walk, 1)]
    values = [1e3 * r["seconds"] if r.get("seconds") and r["device"] == here else None for r in walk]
    case = record.cases[0]
    return Section(
        f"Ladder: {case.label}",
        f"{problem_line(Problem.from_json(case.problem))}. Each rung changes one thing; the bar reaches from the time of the rung "
        f"above to its own. Measured on {here}; rungs from other devices are in the table only.",
        ["rung", "time", "useful", "padding", "memory", "executables", "measured on"],
        rows,
        plot=lambda: plots.waterfall(names, values, xlabel="time, experts forward+backward", unit="ms"),
        notes=[f"**{i}. {r['title']}**: {r['changed']} {r.get('reason') or ''}".strip() for i, r in enumerate(walk, 1)],
    )


def _measured_on(row: dict) -> str:
    devices = row.get("devices") or 1
    return f"{devices} x {row['device']}" if devices > 1 else row["device"]


def ratio(case: CaseRecord, implementation: str, what: str) -> float | None:
    """loop_and_pad's median over the implementation's; None when either was not timed."""
    base, own = case.result(BASELINE), case.result(implementation)
    a = base.timing(what) if base else None
    b = own.timing(what) if own and not apart(own) else None
    return a.median / b.median if a and b and b.median else None


def rate_unit(record: Record) -> tuple[float, str]:
    """TFLOP/s on a GPU, GFLOP/s elsewhere."""
    return (1e12, "TFLOP/s") if record.environment.get("platform") == "gpu" else (1e9, "GFLOP/s")


def _names(timed: Sequence[tuple[Record, CaseRecord]]) -> list[str]:
    return list(dict.fromkeys(r.implementation for _, c in timed for r in c.results if r.timings and not apart(r)))


def apart(result: ResultRecord) -> bool:
    """Whether it was timed on more devices than the case's others, in a run of its own: its time is no ratio's."""
    return "devices" in result.notes


def _best_what(cases: Sequence[CaseRecord]) -> str:
    """The most complete call that the cases timed."""
    timed: set[str] = {t.what for c in cases for r in c.results for t in r.timings}
    for what in ("experts forward+backward", "experts forward", "layer forward+backward", "layer forward"):
        if what in timed:
            return what
    return sorted(timed)[0]


def _order(what: str) -> int:
    from .stages import WHATS

    return WHATS.index(what) if what in WHATS else len(WHATS)
