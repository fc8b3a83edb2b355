"""A suite's results as tables, and as the project's one record."""

from __future__ import annotations

from pathlib import Path

from .check import Report, describe, reproduce
from .kill import Matrix
from .profiles import profile
from .records import FindingRecord, ResultRecord, new_case, new_record, write
from .spec import parse_case
from .terminal import out, table
from .verdict import BAD, Verdict

SHOWN = ("known", "expected-different", *BAD)
"""Statuses that are described in full."""


def show_report(report: Report) -> None:
    """A line for each law that was judged, what was not and why, and every failure in full."""
    numbers = ("% of bar", "cases", "s")
    t = table(
        "law", "stage", "verdict", *numbers, title=f"{report.target}: {report.job.profile} profile", numbers=numbers
    )
    left_out: dict[str, list[str]] = {}
    for v in report.verdicts:
        if v.status == "cannot run":
            left_out.setdefault(v.reason, []).append(v.law)
            continue
        style = "red" if v.status in BAD else "" if v.status == "agree" else "dim"
        worst = f"{v.percent:.0f}" if v.percent is not None and v.status == "agree" else ""
        t.add_row(v.law, v.stage, v.status, worst, str(v.examples or ""), f"{v.seconds:.1f}", style=style)
    out().print(t)
    for reason, laws in left_out.items():
        _plain(f"not judged, {reason}: {', '.join(laws)}")
    for note in report.notes:
        _plain(note)
    for v in report.verdicts:
        if v.status in SHOWN:
            _plain("\n".join(describe(report.job, v)))
    counts = [f"{report.count(s)} {s}" for s in ("agree", *SHOWN, "cannot run") if report.count(s)]
    if len(left_out) and all(v.status == "cannot run" for v in report.verdicts):
        counts.append("nothing was judged, which is no pass")
    _plain(f"{', '.join(counts)} in {report.seconds:.0f} s")


def show_matrix(matrix: Matrix) -> None:
    """Mutants down, laws across by number: X killed, ! raised, . passed, blank where the stage is not the mutant's."""
    laws = [
        law
        for law in (matrix.rows[0].cells if matrix.rows else {})
        if any(r.cells[law] != "not run" for r in matrix.rows)
    ]
    signs = {"killed": "X", "raised": "!", "passed": ".", "not run": " "}
    t = table("class", "mutant", "its law", "dead", "by law, in the order below", title="Kill matrix")
    for r in matrix.rows:
        t.add_row(
            r.fault,
            r.mutant,
            r.law,
            "yes" if r.killed else "NO",
            "".join(signs[r.cells[law]] for law in laws),
            style="" if r.killed else "red",
        )
    out().print(t)
    _plain("laws, from the left: " + ", ".join(f"{i + 1} {law}" for i, law in enumerate(laws)))
    _plain(
        "X killed, ! raised, . passed, blank: not run, as a law of another stage or shape, or with programs of its own"
    )
    for r in matrix.rows:
        if not r.killed:
            _plain(f"{r.mutant} survives {r.law}: {r.said or 'it passed'}")
    for name, failed in matrix.honest.items():
        _plain(f"{name}: {'fails ' + '; '.join(failed) if failed else 'honest, and fails no law'}")
    dead = sum(r.killed for r in matrix.rows)
    _plain(
        f"{dead} of {len(matrix.rows)} killed by the law they name, at {len(matrix.seeds)} seeds, in {matrix.seconds:.0f} s"
    )


def record_report(report: Report, path: Path) -> None:
    """Writes the verdicts as a record of kind `check`."""
    record = new_record("check", seed=report.job.seed, command={"check": report.target, "profile": report.job.profile})
    bad = [v for v in report.verdicts if v.status in BAD]
    judged = [v for v in report.verdicts if v.status != "cannot run"]
    worst = next((s for s in (*BAD, "expected-different", "known") if report.count(s)), "agree")
    result = ResultRecord(
        implementation=report.target,
        verdict=worst if judged else "cannot run",  # type: ignore[arg-type]
        reason=f"{bad[0].law}: {_said(bad[0])}" if bad else "" if judged else "no law applies",
        own_stages=list(report.own),
        findings=[_finding(report, v) for v in report.verdicts] if judged else [],
        notes={"notes": list(report.notes), "seconds": report.seconds},
    )
    problem = parse_case(report.job.case).problem if report.job.case else profile(report.job.profile).problems()[0]
    case = new_case(f"laws, {report.job.profile} profile", problem, source="drawn routings")
    case.results.append(result)
    record.cases.append(case)
    write(path, record)


def record_matrix(matrix: Matrix, path: Path) -> None:
    """Writes the matrix as a record of kind `mutants`."""
    record = new_record("mutants", command={"mutants": len(matrix.rows), "seeds": list(matrix.seeds)})
    record.extra = {
        "kill_rate": matrix.kill_rate,
        "honest": matrix.honest,
        "seconds": matrix.seconds,
        "mutants": [
            {"name": r.mutant, "fault": r.fault, "law": r.law, "killed": r.killed, "cells": r.cells}
            for r in matrix.rows
        ],
    }
    write(path, record)


def _finding(report: Report, v: Verdict) -> FindingRecord:
    f = v.finding
    measured = None if f is None or f.measured is None else 100 * f.measured
    return FindingRecord(
        tensor=f.tensor if f else "",
        stage=v.stage,
        ok=v.status not in BAD,
        check=f.check if f else "values",
        percent=v.percent if measured is None else measured,
        message=_said(v),
        law=v.law,
        verdict=v.status,
        reproduce=reproduce(report.job, v) if v.case else "",
        routing=v.case,
    )


def _said(v: Verdict) -> str:
    return v.reason or (v.finding.message if v.finding else "")


def _plain(text: str) -> None:
    # Never wrapped and never marked up: a line that reproduces a failure is there to be copied.
    out().print(text, highlight=False, markup=False, soft_wrap=True)
