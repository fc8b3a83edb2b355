"""`dropless check` and `dropless mutants`: a target's verdict per law, and the proof that the laws can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .check import Report, check, describe, junit
from .interface import Unsupported
from .job import NotCallable
from .known import SHIPPED, read_known
from .problem import InvalidInput
from .suite import BAD
from .terminal import err, out, progress, table

TARGET = Annotated[str, typer.Argument(help="A registered name, or package.module:attribute.", metavar="TARGET")]
PROFILE = Annotated[str, typer.Option(help="quick, default, thorough or gpu.")]
ONLY = Annotated[list[str] | None, typer.Option(help="A law's name; repeatable. [default: all]")]
SEED = Annotated[int, typer.Option(help="Of the drawn routings, and of every case's numbers.", min=0)]
EXAMPLES = Annotated[int | None, typer.Option(help="Drawn routings for each law and shape.", min=1)]
KNOWN = Annotated[list[Path] | None, typer.Option(help="A file of known failures; repeatable, beside the shipped one.")]
WITH = Annotated[
    str,
    typer.Option(
        "--with",
        help="What a bare function computes beyond gated SiLU without bias, separated by commas: bias, clamp, ungated, "
        "gelu, gelu-erf, relu2, early, shared, no-expert (slots of -1), empty (no tokens).",
    ),
]
DTYPES = Annotated[str, typer.Option(help="Dtypes to judge, separated by commas. [default: the target's own]")]
ARRAYS = Annotated[str, typer.Option(help="What the target's functions take and return: jax, numpy or torch.")]
CASE = Annotated[str, typer.Option(help="One case, as a failure prints it; needs one --only.")]
TIMEOUT = Annotated[
    float | None, typer.Option(help="Seconds without an answer after which a call counts as hung.", min=1)
]
RECORD = Annotated[Path | None, typer.Option("--json", help="Write a record of the verdicts to this file.")]
JUNIT = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file.")]


def check_(
    target: TARGET,
    profile: PROFILE = "quick",
    only: ONLY = None,
    seed: SEED = 0,
    max_examples: EXAMPLES = None,
    known: KNOWN = None,
    wider: WITH = "",
    dtypes: DTYPES = "",
    arrays: ARRAYS = "jax",
    case: CASE = "",
    timeout: TIMEOUT = None,
    json_path: RECORD = None,
    junit_path: JUNIT = None,
) -> int:
    """The conformance suite on a layer: a verdict per law, and for a failure the smallest routing that shows it."""
    entries = [entry for path in (SHIPPED, *(known or [])) for entry in read_known(path)]
    try:
        with progress(total=1, first="starting") as step:
            report = check(
                target,
                profile=profile,
                only=only or (),
                seed=seed,
                max_examples=max_examples,
                known=entries,
                wider=_words(wider),
                dtypes=_words(dtypes),
                arrays=arrays,
                case=case,
                timeout_s=timeout,
                progress=lambda law, done, of: step(f"{done}/{of} {law}", 0),
            )
    except Unsupported as declined:
        raise InvalidInput(f"{target} cannot run here: {declined}") from None
    except NotCallable as wrong:
        err().print(f"dropless: {wrong}", highlight=False, markup=False, soft_wrap=True)
        return 1
    _show(report)
    if json_path is not None:
        _record(report, json_path)
    if junit_path is not None:
        from .records import write_text

        write_text(junit_path, junit(report))
    return report.exit_code


def _show(report: Report) -> None:
    t = table(
        "law",
        "stage",
        "verdict",
        "% of bar",
        "cases",
        "why",
        title=f"{report.target}: {report.job.profile} profile",
        numbers=("% of bar", "cases"),
    )
    for v in report.verdicts:
        style = "red" if v.status in BAD else "" if v.status == "agree" else "dim"
        worst = f"{v.percent:.0f}" if v.percent is not None and v.status == "agree" else ""
        t.add_row(v.law, v.stage, v.status, worst, str(v.examples or ""), v.reason, style=style)
    out().print(t)
    for note in report.notes:
        out().print(note, highlight=False, markup=False, soft_wrap=True)
    for v in report.verdicts:
        if v.status in BAD or v.status in ("known", "expected-different"):
            # Plain lines, never wrapped: the last one is there to be copied.
            out().print("\n".join(describe(report.job, v)), highlight=False, markup=False, soft_wrap=True)
    counts = [
        f"{report.count(s)} {s}"
        for s in ("agree", *BAD, "known", "expected-different", "cannot run")
        if report.count(s)
    ]
    if not any(v.status != "cannot run" for v in report.verdicts):
        counts.append("nothing was judged, which is no pass")
    out().print(f"{', '.join(counts)} in {report.seconds:.0f} s", highlight=False)


def _record(report: Report, path: Path) -> None:
    from .records import FindingRecord, ResultRecord, new_case, new_record, write
    from .spec import parse_case
    from .profiles import PLAIN
    from .check import reproduce

    record = new_record("check", seed=report.job.seed, command={"check": report.target, "profile": report.job.profile})
    bad = [v for v in report.verdicts if v.status in BAD]
    known = any(v.status == "known" for v in report.verdicts)
    different = any(v.status == "expected-different" for v in report.verdicts)
    verdict = "disagree" if bad else "expected-different" if different else "known" if known else "agree"
    if not bad and report.exit_code:
        verdict = "cannot run"
    findings = []
    for v in report.verdicts:
        f = v.finding
        findings.append(
            FindingRecord(
                tensor=f.tensor if f else "",
                stage=v.stage,
                ok=v.status not in BAD,
                check=f.check if f else "values",
                percent=None
                if v.percent is None and (f is None or f.measured is None)
                else (100 * f.measured if f and f.measured is not None else v.percent),
                message=(f.message if f else "") or v.reason,
                law=v.law,
                verdict="disagree" if v.status == "alarm" else v.status,
                reproduce=reproduce(report.job, v) if v.case else "",
                routing=v.case,
            )
        )
    problem = parse_case(report.job.case).problem if report.job.case else PLAIN[0]
    case = new_case(f"laws, {report.job.profile} profile", problem, source="drawn routings")
    reason = bad[0].law if bad else ""
    case.results.append(
        ResultRecord(
            implementation=report.target,
            verdict=verdict,
            reason=reason,
            own_stages=list(report.own),
            findings=findings,
            notes={"notes": list(report.notes), "seconds": report.seconds},
        )
    )
    record.cases.append(case)
    write(path, record)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
