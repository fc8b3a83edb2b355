"""Every law on one GPU, in several processes side by side: what a law costs there is compiling, and that runs on the host.

Each process loads the target once and takes the next task when it is done with one. Laws that share a run of the layer and
of the oracle are one task, and those that need an oracle begin first. The record is written anew after each task.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from dropless.parity.check import Report
from dropless.parity.check_report import record_report
from dropless.parity.job import Bench, Job, load
from dropless.parity.laws import LAWS, Law, laws_named
from dropless.parity.profiles import ONCE
from dropless.parity.suite import run_law
from dropless.parity.verdict import Verdict

_BENCH: list[Bench] = []


def record_laws(path: Path, job: Job, *, recipe: str = "none", deadline: float, workers: int) -> None:
    """Runs every law at the job's shapes, under `recipe`, and records them; past `deadline` (Unix time) none begins."""
    start = time.time()
    found: dict[str, Verdict] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(job, recipe)) as pool:
        waiting = {pool.submit(_run, names, deadline): names for names in tasks()}
        for future in as_completed(waiting):
            error = future.exception()
            verdicts = future.result() if error is None else [_died(name, error) for name in waiting[future]]
            for v in verdicts:
                found[v.law] = v
                said = v.reason or (v.finding.message if v.finding else "")
                percent = "" if v.percent is None else f"{v.percent:.0f} %"
                print(f"{v.law:26s} {v.status:12s} {percent:>6s} {v.seconds:6.1f} s  {said[:110]}", flush=True)
            whole = tuple(found.get(law.name) or _unreached(law) for law in LAWS)
            own = ("route", "permute", "unpermute", "grouped_gemm", "experts", "layer")
            notes = () if recipe == "none" else (f"under {recipe}",)
            record_report(Report(job, job.target, whole, notes, own, time.time() - start), path)
    counts = {s: sum(v.status == s for v in found.values()) for s in dict.fromkeys(v.status for v in found.values())}
    print(f"laws{'' if recipe == 'none' else ', ' + recipe}: {counts} in {time.time() - start:.0f} s", flush=True)


def tasks() -> list[tuple[str, ...]]:
    """The names of every law, in the order in which they are handed out."""
    alone = sorted((law for law in LAWS if law.name not in ONCE), key=lambda law: law.judged_by != "gauge")
    return [ONCE, *((law.name,) for law in alone)]


def _begin(job: Job, recipe: str) -> None:
    bench = load(job)
    if recipe != "none":
        shapes = tuple(p.replace(recipe=recipe) for p in bench.shapes)
        bench = dataclasses.replace(bench, shapes=shapes)
    _BENCH[:] = [bench]


def _run(names: tuple[str, ...], deadline: float) -> list[Verdict]:
    bench = _BENCH[0]
    return [
        run_law(law, bench.implementation, bench.shapes, bench.settings) if time.time() < deadline else _unreached(law)
        for law in laws_named(names)
    ]


def _unreached(law: Law) -> Verdict:
    return Verdict(law.name, law.stage, "cannot run", reason="not reached in the time given")


def _died(name: str, error: BaseException) -> Verdict:
    law = laws_named([name])[0]
    return Verdict(name, law.stage, "disagree", reason=f"its process ended: {type(error).__name__}: {error}")
