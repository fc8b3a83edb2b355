"""How often the guard cries wolf, and how often it catches a slower stage: real processes, then many pairings of them.

    python tests/benchmarks/guard_trials.py collect FOLDER RUNS [STREAMS]   adds runs, STREAMS (2) at a time
    python tests/benchmarks/guard_trials.py judge FOLDER RECORD.json        plays the guard on them and writes the rates

A run is what one process of `dropless guard` does with one case: it times the guard's calls with the guard's budget a call, and
beside them `blocked` with one stage made slower. How much extra work costs nearest to a quarter of the stage is measured
before the first run, by STREAMS processes side by side as the runs will be. `judge` then takes every run as a baseline, and every other one as the guard's first
measurement with the two after it as the others: for n runs that is n (n - 3) guards, of which n / 4 share no measurement.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from dropless.parity import complete, get, guard, records
from dropless.parity.cli_guard import CASE_BUDGET_S
from dropless.parity.inputs import Case
from dropless.parity.interface import Implementation
from dropless.parity.remeasure import ROUNDS, keep_compiled
from dropless.parity.stages import WHATS as EVERY
from dropless.parity.stages import stage_call
from dropless.parity.timing import measure
from dropless.parity.workload import Request, build

sys.path.insert(0, str(Path(__file__).parent))
from slower import slower

WHATS = tuple(w for w in EVERY if not w.startswith("layer"))
"""What the guard times."""
INJECTED = {"grouped_gemm": ("grouped_gemm forward",), "experts": ("experts forward", "experts forward+backward")}
"""Stage to slow down -> its calls."""
SHARES = (3 / 32, 1 / 8, 5 / 32, 3 / 16, 7 / 32, 1 / 4)
GOAL = 1.25
BASELINE_BUDGET_S = 2 * CASE_BUDGET_S
"""What `bench` spends on the guard's calls is 13 s and more of its 20: the rest goes to whole layers."""
LEAST = 5
"""Rounds that `measure` makes however slow a call is."""
PRESET = "mixtral-8x7b"
NAMES = ("loop_and_pad", "blocked", "ragged_dot")

Samples = dict[str, dict[str, dict[str, list[float]]]]
"""Call -> implementation, or stage of `blocked` that is slower -> clock -> seconds."""


def collect(folder: Path, runs: int, streams: int) -> None:
    """Adds `runs` runs to the folder, each in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    done = len(_runs(folder))
    with ThreadPoolExecutor(streams) as pool:
        if not (folder / "shares.json").exists():
            list(pool.map(lambda i: _child("calibrate", folder / f"factors-{i}.json"), range(streams)))
            found = [json.loads((folder / f"factors-{i}.json").read_text()) for i in range(streams)]
            (folder / "shares.json").write_text(json.dumps({s: _nearest([f[s] for f in found]) for s in INJECTED}))
        list(pool.map(lambda i: _child("run", folder / f"run-{i:03d}.json"), range(done, done + runs)))
    print(f"{done + runs} runs")


def _child(command: str, target: Path) -> None:
    subprocess.run([sys.executable, __file__, command, str(target)], check=True)


def _runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("run-*.json"))


def run(target: Path) -> None:
    """Times what the guard times, and the slower stages, in this process."""
    keep_compiled(target.parent / "compiled")
    shares = json.loads((target.parent / "shares.json").read_text())
    cases = build(Request(preset=PRESET)).cases
    layers = {name: complete(get(name)) for name in NAMES}
    plan = [(w, name, layers[name]) for w in WHATS for name in NAMES]
    guarded = len(plan)
    for stage, whats in INJECTED.items():
        slow = slower(layers["blocked"], stage, shares[stage])
        plan += [(w, stage, slow) for w in whats]
    calls = {(w, n): stage_call(i, w, cases) for w, n, i in sorted(plan, key=lambda p: WHATS.index(p[0]))}
    load = os.getloadavg()[0]
    measure(list(calls.values()), budget_s=BASELINE_BUDGET_S * len(calls) / guarded, most=ROUNDS)
    times: Samples = {w: {} for w in WHATS}
    for (what, name), call in calls.items():
        times[what][name] = {"wall": call.wall_s, "cpu": call.cpu_s}
    target.write_text(json.dumps({"times": times, "load": load}))


def calibrate(target: Path) -> None:
    """Writes, for each stage and share of extra work, its cost as a factor of processor time, over the stage's calls."""
    cases = build(Request(preset=PRESET)).cases
    layer = complete(get("blocked"))
    target.write_text(json.dumps({stage: _factors(layer, stage, whats, cases) for stage, whats in INJECTED.items()}))


def _factors(layer: Implementation, stage: str, whats: Sequence[str], cases: Sequence[Case]) -> list[float]:
    logs: list[list[float]] = [[] for _ in SHARES]
    for what in whats:
        plain = stage_call(layer, what, cases)
        slow = [stage_call(slower(layer, stage, share), what, cases) for share in SHARES]
        measure([plain, *slow], rounds=30)
        for found, call in zip(logs, slow, strict=True):
            found.append(guard.middle(np.log(call.cpu_s) - np.log(plain.cpu_s)))
    factors = [math.exp(sum(found) / len(found)) for found in logs]
    print(f"{stage}: " + ", ".join(f"{s:.3f}: {f:.2f} x" for s, f in zip(SHARES, factors, strict=True)), flush=True)
    return factors


def _nearest(found: Sequence[Sequence[float]]) -> float:
    """The share whose factor, in the middle of the processes, comes nearest to GOAL."""
    factors = np.exp(np.log(found).mean(axis=0))
    return SHARES[int(np.argmin(np.abs(np.log(factors / GOAL))))]


def as_case(times: Samples, injected: str = "", part: float = 1.0) -> records.CaseRecord:
    """A measured run as the guard sees it; with `injected`, that stage is the slower one.

    `part`: of the rounds, the first, but never fewer than `measure` makes.
    """
    case = records.CaseRecord(label=PRESET, problem={})
    for name in NAMES:
        result = records.ResultRecord(implementation=name, verdict="agree")
        for what, by_name in times.items():
            slow = name == "blocked" and what in INJECTED.get(injected, ())
            samples = by_name[injected if slow else name]
            kept = max(math.ceil(part * len(samples["wall"])), LEAST)
            result.timings.append(
                records.TimingRecord(
                    what=what, compile_s=0.0, wall_s=samples["wall"][:kept], cpu_s=samples["cpu"][:kept]
                )
            )
        case.results.append(result)
    return case


def play(runs: Sequence[Samples], injected: str = "") -> tuple[int, int]:
    """(guards, guards with an alarm) over all pairings; a slower stage must be named by one of its own calls."""
    plain = [guard.ratios(as_case(r)) for r in runs]
    fresh = [guard.ratios(as_case(r, injected, CASE_BUDGET_S / BASELINE_BUDGET_S)) for r in runs]
    played = alarmed = 0
    n = len(runs)
    for i in range(n):
        for j in range(n):
            measured = [(j + k) % n for k in range(guard.MEASUREMENTS)]
            if i in measured:
                continue
            first = guard.compare(PRESET, plain[i], fresh[j])
            alarms = []
            if any(s.suspicious for s in first):
                together = guard.compare(PRESET, plain[i], *(fresh[k] for k in measured))
                alarms = [s for s in guard.settled(first, together) if s.alarm]
            if injected:
                alarms = [s for s in alarms if s.what in INJECTED[injected] and s.implementation == "blocked"]
            played += 1
            alarmed += bool(alarms)
    return played, alarmed


def judge(folder: Path, target: Path) -> None:
    """Writes the rates as a record."""
    whole = [json.loads(path.read_text()) for path in _runs(folder)]
    runs = [r["times"] for r in whole]
    trials = []
    for what, injected in (("nothing changed", ""), *((f"{s} slower", s) for s in INJECTED)):
        played, alarmed = play(runs, injected)
        trials.append({"what": what, "runs": played, "count": alarmed})
    slow = {}
    for stage, whats in INJECTED.items():
        logs = [np.log(r[w][stage]["cpu"]) - np.log(r[w]["blocked"]["cpu"]) for r in runs for w in whats]
        slow[stage] = math.exp(float(np.mean([guard.middle(rounds) for rounds in logs])))
    record = records.new_record("guard", command={"preset": PRESET, "runs": len(runs)})
    record.extra = {"trials": trials, "measured slowdown": slow, "real runs": len(runs)}
    record.extra["load"] = float(np.median([r["load"] for r in whole]))
    records.write(target, record)
    print(json.dumps(record.extra, indent=1))


def main(arguments: Sequence[str]) -> None:
    """One of the commands above, or `calibrate` and `run`, which `collect` starts."""
    if len(arguments) < 2:
        sys.exit(__doc__)
    command, first, *rest = arguments
    path = Path(first)
    if command == "collect" and rest:
        collect(path, int(rest[0]), int(rest[1]) if len(rest) > 1 else 2)
    elif command == "judge" and rest:
        judge(path, Path(rest[0]))
    elif command in ("run", "calibrate"):
        {"run": run, "calibrate": calibrate}[command](path)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
