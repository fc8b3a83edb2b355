"""Every law on one GPU, in several processes side by side: what a law costs there is compiling, and that runs on the host.

Each process loads the target once and takes the next law when it is done with one, so laws that come one after the
other, and share executables, mostly meet in one process. The record is written anew after each verdict.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import dropless.parity.suite
from dropless.parity.check import Report
from dropless.parity.check_report import record_report
from dropless.parity.job import Bench, Job, load
from dropless.parity.laws import LAWS, laws_named
from dropless.parity.suite import Verdict

_BENCH: list[Bench] = []


def record_laws(path: Path, job: Job, *, recipe: str = "none", deadline: float, workers: int) -> None:
    """Runs every law at the job's shapes, under `recipe`, and records them; past `deadline` (Unix time) none begins."""
    start = time.time()
    found: dict[str, Verdict] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(job, recipe)) as pool:
        waiting = {pool.submit(_run, law.name, deadline): law for law in LAWS}
        for future in as_completed(waiting):
            law = waiting[future]
            error = future.exception()
            verdict = future.result() if error is None else _died(law.name, law.stage, error)
            found[law.name] = verdict
            said = verdict.reason or (verdict.finding.message if verdict.finding else "")
            percent = "" if verdict.percent is None else f"{verdict.percent:.0f} %"
            print(
                f"{law.name:26s} {verdict.status:12s} {percent:>6s} {verdict.seconds:6.1f} s  {said[:110]}", flush=True
            )
            verdicts = tuple(found.get(v.name) or _unreached(v.name, v.stage) for v in LAWS)
            own = ("route", "permute", "unpermute", "grouped_gemm", "experts", "layer")
            notes = () if recipe == "none" else (f"under {recipe}",)
            record_report(Report(job, job.target, verdicts, notes, own, time.time() - start), path)
    counts = {s: sum(v.status == s for v in found.values()) for s in dict.fromkeys(v.status for v in found.values())}
    print(f"laws{'' if recipe == 'none' else ', ' + recipe}: {counts} in {time.time() - start:.0f} s", flush=True)


def _begin(job: Job, recipe: str) -> None:
    bench = load(job)
    if recipe != "none":
        shapes = tuple(p.replace(recipe=recipe) for p in bench.shapes)
        bench = dataclasses.replace(bench, shapes=shapes)
    _BENCH[:] = [bench]


def _run(name: str, deadline: float) -> Verdict:
    bench, law = _BENCH[0], laws_named([name])[0]
    if time.time() > deadline:
        return _unreached(law.name, law.stage)
    return dropless.parity.suite.run_law(law, bench.implementation, bench.shapes, bench.settings)


def _unreached(name: str, stage: str) -> Verdict:
    return Verdict(name, stage, "cannot run", reason="not reached in the time given")


def _died(name: str, stage: str, error: BaseException) -> Verdict:
    return Verdict(name, stage, "disagree", reason=f"its process ended: {type(error).__name__}: {error}")
