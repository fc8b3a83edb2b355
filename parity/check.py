"""The conformance suite on one target: every law that applies, one verdict each, in a worker process."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from .interface import Implementation
from .job import Bench, Job, load
from .known import Known, apply_known
from .laws import laws_named
from .problem import InvalidInput
from .profiles import profile as profile_named
from .spec import parse_case
from .verdict import BAD, Verdict, is_settled, merge_verdicts
from .worker import Ready, Worker


@dataclass(frozen=True)
class Report:
    """What a suite found."""

    job: Job
    target: str
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    """Stages that are the target's own; the others are the baseline's."""
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 without a disagreement, 1 otherwise; nothing judged at all is a failure."""
        judged = [v for v in self.verdicts if v.status != "cannot run"]
        return int(not judged or any(v.status in BAD for v in self.verdicts))

    def count(self, status: str) -> int:
        """How many laws have this verdict."""
        return sum(v.status == status for v in self.verdicts)


def check(
    target: str | Implementation,
    *,
    profile: str = "quick",
    only: Iterable[str] = (),
    seed: int = 0,
    max_examples: int | None = None,
    known: Iterable[Known] = (),
    wider: Iterable[str] = (),
    dtypes: Iterable[str] = (),
    arrays: str = "jax",
    case: str = "",
    timeout_s: float | None = None,
    shrink: bool = True,
    progress: Callable[[str, int, int], None] = lambda law, done, of: None,
) -> Report:
    """Judges a target by every law that applies to it, or by those of `only`.

    A name or `package.module:attribute` runs in a worker process, which is replaced when it hangs or dies; an
    Implementation object runs in this process. `case` is a failure's literal and needs one law in `only`. Raises
    InvalidInput, also for a target that does not import; NotCallable and Unsupported as `job.load` does.
    """
    names = [law.name for law in laws_named(only)]
    if case and len(names) != 1:
        raise InvalidInput(f"a case is given for {len(names)} laws; accepted: --only with one law")
    named = target if isinstance(target, str) else target.name
    job = Job(named, profile, seed, max_examples, tuple(wider), tuple(dtypes), arrays, case, shrink)
    start = time.perf_counter()
    if isinstance(target, Implementation):
        verdicts, notes, own = _here(job, target, names, progress)
    else:
        verdicts, notes, own = _apart(job, timeout_s or profile_named(profile).timeout_s, names, progress)
    marked = apply_known(verdicts, known, named)
    return Report(job, named, tuple(marked), tuple(notes), own, time.perf_counter() - start)


def reproduce(job: Job, verdict: Verdict) -> str:
    """The shell line that runs exactly the failing case again."""
    words = ["dropless", "check", job.target, "--only", verdict.law, "--case", verdict.case]
    for word in job.wider:
        words += ["--with", word]
    if job.arrays != "jax":
        words += ["--arrays", job.arrays]
    for dtype in job.dtypes:
        words += ["--dtypes", dtype]
    if job.profile == "gpu":
        words += ["--profile", "gpu"]
    return shlex.join(words)


def junit(report: Report) -> str:
    """The verdicts as JUnit XML: a failure for each disagreement or alarm, a skip for each law that did not run."""
    failed, skipped = sum(v.status in BAD for v in report.verdicts), report.count("cannot run")
    suite = ElementTree.Element(
        "testsuite",
        name=f"dropless {report.target}",
        tests=str(len(report.verdicts)),
        failures=str(failed),
        skipped=str(skipped),
        errors="0",
        time=f"{report.seconds:.3f}",
    )
    for v in report.verdicts:
        one = ElementTree.SubElement(suite, "testcase", classname=report.target, name=v.law, time=f"{v.seconds:.3f}")
        if v.status in BAD:
            message = v.finding.message if v.finding and v.status != "alarm" else v.reason
            ElementTree.SubElement(one, "failure", type=v.status, message=message).text = "\n".join(
                describe(report.job, v)
            )
        elif v.status != "agree":
            ElementTree.SubElement(one, "skipped", type=v.status, message=v.reason)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def describe(job: Job, verdict: Verdict) -> list[str]:
    """A verdict in lines: what failed and where, by how much, on which case, and how to see it again."""
    statement = laws_named([verdict.law])[0].statement
    lines = [f"{verdict.law}: {verdict.status}", f"  law      {statement}", f"  stage    {verdict.stage}"]
    f = verdict.finding
    if f is not None:
        lines.append(f"  check    {f.check}" + (f" of {f.tensor}" if f.tensor else ""))
        where = [f"{name} {value}" for name, value in (("token", f.token), ("expert", f.expert)) if value is not None]
        if f.index is not None:
            where.append(f"element {list(f.index)}")
        if where:
            lines.append(f"  worst    {', '.join(where)}")
        if f.measured is not None:
            lines.append(
                f"  measured {f.measured:.3g} of the bar" + ("" if f.gauge is None else f", gauge {f.gauge:.3g}")
            )
        if f.got is not None and f.want is not None:
            lines.append(f"  got      {f.got:.9g}, want {f.want:.9g}")
        lines.append(f"  says     {f.message}")
    if (second := verdict.second) is not None:
        worst = "" if second.measured is None else f", {second.measured:.3g} of the bar"
        lines.append(f"  then     got {second.got:.9g}{worst}" if second.got is not None else "  then     it passed")
    if verdict.reason:
        lines.append(f"  because  {verdict.reason}")
    if verdict.case:
        spec = parse_case(verdict.case)
        routing = spec.pattern or "[" + ", ".join(str(list(row)) for row in spec.topk_idx or ()) + "]"
        lines += [f"  seed     {spec.seed}", f"  routing  {routing}", f"  again    {reproduce(job, verdict)}"]
    return lines


def _here(job: Job, implementation: Implementation, names: Sequence[str], progress: Any) -> tuple[Any, Any, Any]:
    bench: Bench = load(job, implementation)
    if bench.undecided():
        bench.decide(bench.probe())
    verdicts = _shape_by_shape(names, bench.parts, lambda name, part: bench.run(name, part=part), progress)
    return (
        verdicts,
        bench.notes,
        tuple(s for s in bench.implementation.stages if s not in bench.implementation.composed),
    )


def _apart(job: Job, timeout_s: float, names: Sequence[str], progress: Any) -> tuple[Any, Any, Any]:
    worker = Worker(job, timeout_s)
    try:
        progress("starting", 0, len(names))
        ready: Ready = worker.start()
        notes = list(ready.notes)
        if ready.undecided:
            notes = worker.probe()
        return _shape_by_shape(names, worker.parts, worker.judge, progress), notes, ready.stages
    finally:
        worker.close()


def _shape_by_shape(
    names: Sequence[str], parts: int, judge: Callable[[str, int], Verdict], progress: Callable[[str, int, int], None]
) -> list[Verdict]:
    """All laws on the first shape, then on the next: they share its executables. A law that has failed is done."""
    verdicts: dict[str, Verdict] = {}
    for part in range(parts):
        for i, law in enumerate(laws_named(names)):
            if law.name in verdicts and is_settled(law, verdicts[law.name]):
                continue
            progress(law.name, part * len(names) + i, parts * len(names))
            found = [judge(law.name, part)]
            verdicts[law.name] = merge_verdicts([verdicts[law.name], *found] if law.name in verdicts else found)
    return [verdicts[name] for name in names]
