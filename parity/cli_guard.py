"""`guard BASELINE`: does everything still agree, and is nothing slower than it was?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .device import device_class
from .guard import MEASUREMENTS, Shift, environment_changes, parity_changes, settled, shifts
from .problem import InvalidInput, Problem
from .records import CaseRecord, Record, new_record, read, write, write_text
from .registry import BASELINE
from .remeasure import Ask, measure_fresh
from .terminal import out, progress, table

CASE_BUDGET_S = 6.5
"""Of timing, for one measurement of one case; a suspicion triples it, and stays below 20 s."""


def guard(
    baseline: Annotated[Path, typer.Argument(help="A record of `bench` or `compare`.")],
    cross_device: Annotated[bool, typer.Option(help="Accept a baseline from another class of device.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write a summary for a pull request here.")] = None,
    out_: o.OUT = None,
) -> int:
    """Times what the baseline timed and compares ratios to loop_and_pad. Exit 1: an answer changed, or something is slower."""
    before = read(baseline)
    ranks = [mesh.devices for c in before.cases if (mesh := Problem.from_json(c.problem).mesh) is not None]
    o.start_devices(max(ranks, default=None))
    target = o.record_path(out_, "dropless-guard")
    o.check_writable(markdown)
    record = new_record("guard", seed=before.seed, command={"baseline": baseline.name})
    check_comparable(before, record, cross_device)
    alarms, rows, changed = run_guard(before, record)
    changes = environment_changes(before, record)
    record.extra = {
        "baseline": {"created": before.created, "source_hash": before.source_hash, "version": before.version},
        "alarms": [_shift_json(a) for a in alarms],
        "shifts": [_shift_json(s) for s in rows],
        "parity_changes": changed,
        "environment_changes": changes,
    }
    _print(rows, alarms, changed, changes)
    if markdown is not None:
        write_text(markdown, summary(rows, alarms, changed, changes))
    out().print(f"Record: {write(target, record)}", highlight=False, soft_wrap=True)
    return 1 if alarms or changed else 0


def check_comparable(before: Record, now: Record, cross_device: bool) -> None:
    """Raises InvalidInput when the baseline cannot be compared with a run on this machine."""
    old, new = device_class(before.environment), device_class(now.environment)
    if old != new and not cross_device:
        raise InvalidInput(f"the baseline is from {old} and this is {new}; accepted: the same class, or --cross-device")
    timed = [c for c in before.cases if any(r.timings for r in c.results)]
    if not timed:
        raise InvalidInput("the baseline holds no timings; accepted: a record of dropless bench or compare")
    for case in timed:
        names = {r.implementation for r in case.results if r.timings}
        if BASELINE not in names or len(names) < 2:
            raise InvalidInput(
                f"the baseline's case {case.label!r} times {', '.join(sorted(names))}; accepted: {BASELINE} and one more, "
                "since ratios are what is compared"
            )
    if not any(c.pattern for c in timed):
        raise InvalidInput(
            "the baseline's inputs came from a file; accepted: cases drawn from a named pattern (--skew)"
        )


def run_guard(before: Record, record: Record) -> tuple[list[Shift], list[Shift], list[str]]:
    """(alarms, every shift, parity changes); appends the fresh cases to `record`."""
    alarms: list[Shift] = []
    rows: list[Shift] = []
    changed: list[str] = []
    cases = [c for c in before.cases if c.pattern and any(r.timings for r in c.results)]
    with progress(len(cases), "guard") as step, tempfile.TemporaryDirectory(prefix="dropless-guard-") as folder:
        for case in cases:
            step(case.label)
            measured, found = guard_case(case, before.seed, Path(folder), lambda text: step(text, 0))
            record.cases.append(measured[0])
            changed += dict.fromkeys(line for fresh in measured for line in parity_changes(case, fresh))
            rows += found
            alarms += [s for s in found if s.alarm]
    return alarms, rows, changed


def guard_case(
    case: CaseRecord, seed: int, folder: Path, say: Callable[[str], None] = lambda text: None
) -> tuple[list[CaseRecord], list[Shift]]:
    """The case as measured, first whole, then its suspected calls alone; and its shifts by all that measured the call."""
    fresh = measure_fresh(case, Ask(seed, CASE_BUDGET_S), folder)
    found = shifts(case, fresh)
    suspects = dict.fromkeys((s.implementation, s.what) for s in found if s.suspicious)
    if not suspects:
        return [fresh], found
    measured = [fresh]
    while len(measured) < MEASUREMENTS:
        say(f"{case.label}: measuring {len(suspects)} suspicion{'s' if len(suspects) > 1 else ''} again")
        measured.append(measure_fresh(case, Ask(seed, CASE_BUDGET_S, tuple(suspects)), folder))
    return measured, settled(found, shifts(case, *measured))


def summary(rows: list[Shift], alarms: list[Shift], changed: list[str], changes: list[str]) -> str:
    """Markdown for a pull request."""
    verdict = "slower or different" if alarms or changed else "no alarm"
    lines = [f"### dropless guard: {verdict}", ""]
    lines += [f"* **parity**: {line}" for line in changed]
    lines += [
        f"* **slower**: {a.case}: {a.implementation} {a.what} ({a.clock}), {a.factor:.2f} x (bar {a.bar:.2f} x)"
        for a in alarms
    ]
    lines += [
        "",
        "| case | implementation | call | clock | before | now | now / before | bar | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for s in rows:
        mark = "**alarm**" if s.alarm else _mark(s)
        lines.append(
            f"| {s.case} | {s.implementation} | {s.what} | {s.clock} | {s.before:.3f} | {s.after:.3f} | {s.factor:.2f} | {s.bar:.2f} | {mark} |"
        )
    lines += [
        "",
        "Before and now are times over loop_and_pad's, middles of interleaved rounds; small calls are not judged.",
        "",
    ]
    lines += ["Environment: " + ("unchanged." if not changes else "")] + [f"* {line}" for line in changes]
    return "\n".join(lines) + "\n"


def _mark(s: Shift) -> str:
    if s.alarm:
        return "alarm"
    if not s.judged:
        return "small"
    return "not confirmed" if s.measurements > 1 else ""


def _print(rows: list[Shift], alarms: list[Shift], changed: list[str], changes: list[str]) -> None:
    numbers = ("before", "now", "now / before", "bar")
    t = table(
        "case", "implementation", "call", "clock", *numbers, "", title="Times over loop_and_pad's", numbers=numbers
    )
    for s in rows:
        style = "bold red" if s.alarm else "yellow" if s.measurements > 1 else "dim"
        t.add_row(
            s.case,
            s.implementation,
            s.what,
            s.clock,
            f"{s.before:.3f}",
            f"{s.after:.3f}",
            f"{s.factor:.2f}",
            f"{s.bar:.2f}",
            f"[{style}]{_mark(s)}[/]",
        )
    out().print(t)
    for line in changed:
        out().print(f"[bold red]parity[/]: {line}", highlight=False)
    out().print("Environment: " + ("; ".join(changes) if changes else "unchanged"), highlight=False)
    out().print("Alarm." if alarms or changed else "No alarm.")


def _shift_json(s: Shift) -> dict[str, object]:
    return {
        "case": s.case,
        "implementation": s.implementation,
        "what": s.what,
        "clock": s.clock,
        "before": s.before,
        "after": s.after,
        "noise": s.noise,
        "allowance": s.allowance,
        "share": s.share,
        "measurements": s.measurements,
        "bar": s.bar,
    }
