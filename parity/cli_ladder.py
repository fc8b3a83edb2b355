"""`ladder`: from the naive loop to the fastest layer here, one change at a time."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.markup import escape

from . import options as o
from .interface import Implementation
from .ladder import RUNGS, SPREAD, WHAT, rows
from .records import new_record, write, write_text
from .tables import load_line, problem_line
from .terminal import out, progress, rate, seconds, size, table

PRESET = "mixtral-8x7b"
"""Few experts: the host loop compiles for every new count of each."""


def ladder(
    preset: Annotated[str | None, typer.Option(help=f"Routing shape of a real model. [default: {PRESET}]")] = None,
    full: o.FULL = False,
    tokens: o.TOKENS = None,
    skew: o.SKEW = None,
    exponent: o.EXPONENT = 1.0,
    dtype: o.DTYPE = None,
    html: Annotated[Path | None, typer.Option(help="Write the walk with its waterfall plot as one HTML file.")] = None,
    seed: o.SEED = 0,
    out_: o.OUT = None,
) -> int:
    """Walks from the host loop to the fastest layer: what each change is, where it is, what it costs and buys."""
    from .measure import Options, run_case
    from .workload import Request, build

    asked = {k: v for k, v in locals().items() if k in o.RECORDED and v not in (None, [], ())}
    target = o.record_path(out_, "dropless-ladder")
    o.check_writable(html)
    name = preset or PRESET
    request = Request(preset=name, full=full, tokens=tokens, skew=skew, exponent=exponent, dtype=dtype, seed=seed)
    workload = build(request)
    implementations = runnable()
    alone = [i for i in implementations if i.name not in SPREAD]
    ranks = ranks_for(workload.problem.E, workload.problem.T)
    record = new_record("ladder", seed=seed, command=asked)
    chosen = Options(whats=("experts forward", WHAT), layer=False)
    with progress(len(implementations) + 1, "ladder") as step:
        case = run_case(workload.cases, alone, dataclasses.replace(chosen, step=step))
        if ranks > 1 and len(alone) < len(implementations):
            spread = build(dataclasses.replace(request, ep=ranks))
            there = [i for i in implementations if i.name in SPREAD]
            for result in run_case(spread.cases, there, dataclasses.replace(chosen, step=step)).results:
                result.notes["devices"] = ranks
                case.results.append(result)
    case.label, case.source, case.exponent = workload.label, workload.source, exponent
    case.pattern = skew or "zipf"
    record.cases.append(case)
    walk = rows(record, case)
    record.extra["rungs"] = walk
    console = out()
    console.print(f"[bold]{escape(case.label)}[/] · {escape(problem_line(workload.problem))}", highlight=False)
    console.print(escape(load_line(case)), highlight=False)
    print_walk(walk, str(record.environment.get("device_kind")))
    if html is not None:
        from .report import page
        from .report_sections import ladder_section, runs

        write_text(html, page([runs([record]), ladder_section(record)], "dropless ladder"))
    console.print(f"Record: {write(target, record)}", highlight=False, soft_wrap=True)
    return 1 if record.disagreements else 0


def ranks_for(E: int, T: int) -> int:
    """The most of this process's devices, up to the 8 of one host, among which E experts and T tokens divide evenly."""
    return max(n for n in range(1, min(jax.device_count(), 8) + 1) if E % n == 0 and T % n == 0)


def runnable() -> list[Implementation]:
    """The rungs that this machine can run, in order."""
    found = []
    for rung in RUNGS:
        try:
            implementation = rung.build()
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("dropless"):
                raise
            continue
        if implementation.available():
            found.append(implementation)
    return found


def print_walk(walk: list[dict[str, Any]], here: str) -> None:
    """Each rung with its text and code, then the table, its last column a waterfall in characters of what ran `here`."""
    console = out()
    for i, (rung, row) in enumerate(zip(RUNGS, walk, strict=True), 1):
        console.print(f"[bold]{i}. {rung.title}[/] [dim]{rung.name} · {rung.code_at()}[/]", highlight=False)
        console.print(f"   {rung.changed}", highlight=False)
        if row.get("reason"):
            console.print(f"   [yellow]{escape(row['reason'])}[/]", highlight=False)
    numbers = ("time", "useful", "padding", "memory", "executables")
    t = table("rung", *numbers, "", title=f"{WHAT}: time, and the change from the rung above", numbers=numbers)
    measured = [r["seconds"] for r in walk if r.get("seconds") and r["device"] == here]
    previous: float | None = None
    for i, row in enumerate(walk, 1):
        if not row.get("seconds"):
            t.add_row(f"{i} {row['implementation']}", "-", "-", "-", "-", "-", "not measured here")
            continue
        elsewhere, devices = row["device"] != here, row.get("devices", 1)
        t.add_row(
            f"{i} {row['implementation']}" + (f" on {devices}" if devices > 1 else ""),
            seconds(row["seconds"]),
            rate(row["flops_per_s"]),
            "-" if row["padding"] is None else f"{100 * row['padding']:.0f} %",
            size(row["memory"]),
            str(row["compiles"]),
            f"recorded on {row['device']}: {row['case']}"
            if elsewhere
            else _bar(previous, row["seconds"], min(measured), max(measured)),
        )
        previous = previous if elsewhere else row["seconds"]
    console.print(t)


def _bar(previous: float | None, value: float, low: float, high: float, width: int = 20) -> str:
    """A stretch from the previous time to this one on a log axis: = is time saved, > is time added."""

    def at(v: float) -> int:
        return round((width - 1) * math.log(v / low) / math.log(high / low)) if high > low else 0

    start, end = at(value if previous is None else previous), at(value)
    line = [" "] * width
    for i in range(min(start, end), max(start, end) + 1):
        line[i] = "=" if end <= start else ">"
    line[end] = "|"
    return "".join(line).rstrip()
