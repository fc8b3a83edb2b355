"""Records the ladder's rungs that need GPUs at Mixtral-8x7B's full width, beside `loop_and_pad`: parity, then time, then parity.

    python tests/benchmarks/record_ladder.py FOLDER [--tiny NAME,...]

A rung runs alone, on one GPU or (`te_ep`) on all that are here, so that the largest fits. FOLDER/ladder.json is written after
every rung. With --tiny the rungs named run at small sizes on whatever devices are here.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np
from dropless.parity import ladder
from dropless.parity.cli_ladder import ranks_for
from dropless.parity.costs import padded_rows
from dropless.parity.placement import expert_mesh
from dropless.parity.presets import PRESETS
from dropless.parity.problem import Problem
from dropless.parity.records import CaseRecord, ResultRecord, new_record, write
from ep_measure import placed
from record_gpu import TOKENS, record_case

PRESET = "mixtral-8x7b"
ON_GPUS = ("loop_and_pad", "te_gemm", "te_dispatch", "te", "te_ep")


def main() -> None:
    """Every rung in the ladder's order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", default="")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    problem = PRESETS[PRESET].problem(T=TOKENS, dtype="bfloat16")
    if given.tiny:
        problem = problem.replace(T=64, D=64, F=32)
    record = new_record("ladder", command={"preset": PRESET, "tokens": problem.T})
    for rung in ladder.RUNGS:
        if rung.name not in (given.tiny.split(",") if given.tiny else ON_GPUS):
            continue
        began = time.perf_counter()
        case = record_rung(rung, problem)
        if record.cases:
            record.cases[0].results += case.results
        else:
            record.cases.append(case)
        record.extra["rungs"] = ladder.rows(record, record.cases[0])
        write(given.folder / "ladder.json", record)
        show(case.results[0], time.perf_counter() - began)


def record_rung(rung: ladder.Rung, problem: Problem) -> CaseRecord:
    """One rung's verdict and time, on all devices when it spreads."""
    ranks = ranks_for(problem.E, problem.T) if rung.name in ladder.SPREAD else 1
    whats = (ladder.WHAT,)
    if ranks == 1:
        case = record_case(rung.build(), PRESET, problem, whats)
    else:
        case = record_case(rung.build(), PRESET, problem.replace(mesh=expert_mesh(ranks)), whats, place=placed)
    (result,) = case.results
    result.notes["devices"] = ranks
    result.notes["computed_rows"] = padded_rows(problem, rung.name, np.asarray(case.group_sizes))
    return case


def show(result: ResultRecord, seconds: float) -> None:
    """The line that matters at the end of a log."""
    worst = max((f.percent or 0.0 for f in (*result.findings, *result.after)), default=0.0)
    timing = result.timing(ladder.WHAT)
    took = f"{1e3 * timing.median:.2f} ms, {timing.flops_per_s / 1e12:.0f} TFLOP/s" if timing else "no time"
    print(
        f"{result.implementation}: {result.verdict} {result.reason} worst {worst:.0f} % of bar, {took}, {seconds:.0f} s"
    )


if __name__ == "__main__":
    if "--tiny" in sys.argv:
        jax.config.update("jax_num_cpu_devices", 2)
    main()
