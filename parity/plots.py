"""Plots as inline SVG: colour-blind safe, told apart by hatch or marker too, with units on every axis."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
"""Okabe and Ito's palette."""
HATCHES = ("", "//", "..", "xx", "\\\\", "oo", "--", "++")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def grouped_bars(
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    xlabel: str,
    unit: str,
    line: float | None = None,
) -> str:
    """Horizontal bars: one group for each name, one bar for each series; None leaves a gap marked "-"."""
    height = 0.9 + 0.34 * len(groups) * max(len(series), 1)
    figure, axes = _figure(height)
    width = 0.8 / max(len(series), 1)
    for i, (name, values) in enumerate(series.items()):
        at = np.arange(len(groups)) + (i - (len(series) - 1) / 2) * width
        shown = [v or 0.0 for v in values]
        axes.barh(at, shown, width * 0.92, label=name, color=COLOURS[i % 8], hatch=HATCHES[i % 8], edgecolor="white")
        for y, value in zip(at, values, strict=True):
            axes.text(value or 0.0, y, f" {_number(value)}", va="center", fontsize=8)
    if line is not None:
        axes.axvline(line, color="#444444", linewidth=1, linestyle="--")
    axes.set_yticks(np.arange(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xlabel(f"{xlabel} ({unit})")
    axes.margins(x=0.12)
    _legend(axes, len(series))
    return _svg(figure)


def stacked_bars(groups: Sequence[str], parts: Mapping[str, Sequence[float]], *, xlabel: str, unit: str) -> str:
    """Horizontal bars, each the sum of its parts from left to right."""
    figure, axes = _figure(1.2 + 0.5 * len(groups))
    left = np.zeros(len(groups))
    for i, (name, values) in enumerate(parts.items()):
        axes.barh(
            np.arange(len(groups)),
            values,
            0.7,
            left=left,
            label=name,
            color=COLOURS[i % 8],
            hatch=HATCHES[i % 8],
            edgecolor="white",
        )
        left = left + np.asarray(values)
    axes.set_yticks(np.arange(len(groups)), groups)
    axes.invert_yaxis()
    axes.set_xlabel(f"{xlabel} ({unit})")
    _legend(axes, len(parts))
    return _svg(figure)


def waterfall(names: Sequence[str], values: Sequence[float | None], *, xlabel: str, unit: str) -> str:
    """One bar a rung from the previous rung's value to its own: what each change took away or added. Log scale."""
    figure, axes = _figure(1.0 + 0.42 * len(names))
    previous: float | None = None
    for i, value in enumerate(values):
        if value is None:
            axes.text(0.02, i, "not measured here", va="center", fontsize=8, transform=axes.get_yaxis_transform())
            continue
        start = value if previous is None else previous
        better = value <= start
        low, high = min(start, value), max(start, value)
        if previous is None or high == low:
            axes.plot([value], [i], "o", color=COLOURS[0])
        else:
            axes.barh(
                i,
                high - low,
                0.6,
                left=low,
                color=COLOURS[0] if better else COLOURS[5],
                hatch="" if better else "//",
                edgecolor="white",
            )
        axes.plot([value, value], [i - 0.42, i + 0.42], color="black", linewidth=2)
        axes.text(high * 1.04, i, f"{_number(value)}", va="center", fontsize=8)
        previous = value
    axes.set_xscale("log")
    axes.set_yticks(np.arange(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"{xlabel} ({unit}, log scale)")
    axes.margins(x=0.15)
    return _svg(figure)


def roofline(
    points: Mapping[str, Sequence[tuple[str, float, float]]],
    flops_per_s: float,
    bytes_per_s: float | None,
    *,
    unit: str,
    scale: float,
) -> str:
    """Rate against arithmetic intensity, log-log; points are (stage, FLOP per byte, FLOP/s) by implementation."""
    figure, axes = _figure(4.2)
    intensities = [p[1] for series in points.values() for p in series if p[1] > 0]
    low, high = min(intensities, default=0.1) / 2, max(intensities, default=100.0) * 2
    x = np.geomspace(low, high, 100)
    roof = np.full_like(x, flops_per_s) if bytes_per_s is None else np.minimum(flops_per_s, x * bytes_per_s)
    axes.plot(x, roof / scale, color="#444444", linewidth=1.5, label="attainable")
    stages = list(dict.fromkeys(p[0] for series in points.values() for p in series))
    for i, (name, series) in enumerate(points.items()):
        for stage, intensity, value in series:
            axes.plot(
                [intensity],
                [value / scale],
                MARKERS[stages.index(stage) % 8],
                color=COLOURS[i % 8],
                markersize=7,
                markeredgecolor="black",
                markeredgewidth=0.5,
            )
        axes.plot([], [], "s", color=COLOURS[i % 8], label=name)
    for j, stage in enumerate(stages):
        axes.plot([], [], MARKERS[j % 8], color="white", markeredgecolor="black", label=stage)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("useful FLOP per byte that must move")
    axes.set_ylabel(f"useful {unit}")
    _legend(axes, len(points) + len(stages) + 1)
    return _svg(figure)


def error_steps(histograms: Mapping[str, Sequence[int]], bar: float) -> str:
    """Share of elements at or above each |error| / gauge, log scale: honest layers fall away well before the bar."""
    figure, axes = _figure(3.6)
    for i, (name, counts) in enumerate(histograms.items()):
        total = max(sum(counts), 1)
        above = np.cumsum(np.asarray(counts)[::-1])[::-1] / total
        live = above > 0
        axes.step(
            np.arange(len(counts))[live] / 4,
            above[live],
            where="post",
            label=name,
            color=COLOURS[i % 8],
            linestyle=("-", "--", ":", "-.")[i % 4],
        )
    axes.axvline(bar, color="#444444", linewidth=1, linestyle="--")
    axes.text(bar, 1.0, " bar", fontsize=8, va="top")
    axes.set_yscale("log")
    axes.set_xlabel("|error| / gauge (1)")
    axes.set_ylabel("share of elements beyond (1)")
    _legend(axes, len(histograms))
    return _svg(figure)


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: Any, entries: int) -> None:
    if entries > 1:
        axes.figure.legend(fontsize=8, frameon=False, loc="outside lower left", ncols=min(entries, 3))


def _svg(figure: Any) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dropless", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    body = text.getvalue()
    body = re.sub(r"<metadata>.*?</metadata>", "", body[body.index("<svg") :], flags=re.S)
    # Several plots share a page: ids that nothing refers to would only collide.
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda m: m.group(0) if m.group(1) in used else "", body)
    # The page sets the size: fixed points would overflow a narrow window.
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        r'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1" role="img">',
        body,
        count=1,
        flags=re.S,
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
