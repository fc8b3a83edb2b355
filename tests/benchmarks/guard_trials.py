"""How often the guard cries wolf, and how often it catches a slower stage: real runs, then every pairing of them.

    python tests/benchmarks/guard_trials.py collect RAW.json [RUNS]     adds runs in a fresh process (repeat for more processes)
    python tests/benchmarks/guard_trials.py judge RAW.json RECORD.json  plays the guard on them and writes the rates

A run times what `dropless guard` times of one case, with its budget a call, and beside it `blocked` with one stage made slower
by about a quarter: each process first measures what several amounts of extra work cost, and takes the one nearest to 1.25.
`judge` then takes every run as a baseline, and every other one as the fresh measurement with the two after it as its
confirmations: for n runs that is n (n - 3) guards, of which at least n / 4 share no measurement.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from dropless.parity import complete, get, guard, records
from dropless.parity.cli_guard import CASE_BUDGET_S
from dropless.parity.inputs import Case
from dropless.parity.interface import Implementation
from dropless.parity.measure import GUARD_ROUNDS, group_sizes
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
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4)
GOAL = 1.25
PRESET = "mixtral-8x7b"
NAMES = ("loop_and_pad", "blocked", "ragged_dot")


def collect(path: Path, runs: int) -> None:
    """Appends `runs` measurements to the raw file."""
    workload = build(Request(preset=PRESET))
    layers = {name: complete(get(name)) for name in NAMES}
    plan = [(w, name, layers[name]) for w in WHATS for name in NAMES]
    guarded = len(plan)
    for stage, whats in INJECTED.items():
        slow = injected(layers["blocked"], stage, whats, workload.cases)
        plan += [(w, stage, slow) for w in whats]
    calls = {(w, n): stage_call(i, w, workload.cases) for w, n, i in sorted(plan, key=lambda p: WHATS.index(p[0]))}
    whole = json.loads(path.read_text()) if path.exists() else {"runs": []}
    for _ in range(runs):
        for call in calls.values():
            call.wall_s, call.cpu_s = [], []
        measure(list(calls.values()), budget_s=CASE_BUDGET_S * len(calls) / guarded, most=GUARD_ROUNDS)
        times: dict[str, dict[str, dict[str, list[float]]]] = {w: {} for w in WHATS}
        for (what, name), call in calls.items():
            times[what][name] = {"wall": list(call.wall_s), "cpu": list(call.cpu_s)}
        whole["runs"].append(times)
        whole.setdefault("load", []).append(os.getloadavg()[0])
        path.write_text(json.dumps(whole))
    print(f"{len(whole['runs'])} runs, {group_sizes(workload.cases[0]).sum()} rows")


def injected(layer: Implementation, stage: str, whats: tuple[str, ...], cases: Sequence[Case]) -> Implementation:
    """The layer with the share of extra work that comes nearest to GOAL in processor time, over the stage's calls."""
    found = {}
    for share in SHARES:
        slow = slower(layer, stage, share)
        factors = []
        for what in whats:
            pair = [stage_call(i, what, cases) for i in (layer, slow)]
            measure(pair, rounds=15)
            factors.append(np.median(np.divide(pair[1].cpu_s, pair[0].cpu_s)))
        found[share] = float(np.exp(np.mean(np.log(factors))))
    best = min(found, key=lambda share: abs(np.log(found[share] / GOAL)))
    print(f"{stage}: " + ", ".join(f"{s:.3f} of the work again {f:.2f} x" for s, f in found.items()), flush=True)
    return slower(layer, stage, best)


def as_case(times: dict[str, dict[str, dict[str, list[float]]]], injected: str = "") -> records.CaseRecord:
    """A measured run as the guard sees it; with `injected`, that stage is the slower one."""
    case = records.CaseRecord(label=PRESET, problem={})
    for name in NAMES:
        result = records.ResultRecord(implementation=name, verdict="agree")
        for what, by_name in times.items():
            slow = name == "blocked" and what in INJECTED.get(injected, ())
            samples = by_name[injected if slow else name]
            result.timings.append(
                records.TimingRecord(what=what, compile_s=0.0, wall_s=samples["wall"], cpu_s=samples["cpu"])
            )
        case.results.append(result)
    return case


def play(runs: list, injected: str = "") -> tuple[int, int]:
    """(guards, guards with an alarm) over all pairings; a slower stage must be named by one of its own calls."""
    plain = [as_case(r) for r in runs]
    fresh = [as_case(r, injected) for r in runs]
    played = alarmed = 0
    shifts = {}

    def shift(i: int, j: int) -> list[guard.Shift]:
        if (i, j) not in shifts:
            shifts[i, j] = guard.shifts(plain[i], fresh[j])
        return shifts[i, j]

    n = len(runs)
    for i in range(n):
        for j in range(n):
            again = [(j + 1 + k) % n for k in range(guard.CONFIRMATIONS)]
            if i in (j, *again):
                continue
            later = [s for k in again for s in shift(i, k)]
            alarms = [s for s in shift(i, j) if guard.confirmed(s, later)]
            if injected:
                alarms = [s for s in alarms if s.what in INJECTED[injected] and s.implementation == "blocked"]
            played += 1
            alarmed += bool(alarms)
    return played, alarmed


def judge(raw: Path, target: Path) -> None:
    """Writes the rates as a record."""
    whole = json.loads(raw.read_text())
    runs = whole["runs"]
    trials = []
    for what, injected in (("nothing changed", ""), *((f"{s} slower", s) for s in INJECTED)):
        played, alarmed = play(runs, injected)
        trials.append({"what": what, "runs": played, "count": alarmed})
    slow = {}
    for stage, whats in INJECTED.items():
        ratios = [np.median(r[w][stage]["cpu"]) / np.median(r[w]["blocked"]["cpu"]) for r in runs for w in whats]
        slow[stage] = float(np.median(ratios))
    record = records.new_record("guard", command={"preset": PRESET, "runs": len(runs)})
    record.extra = {"trials": trials, "measured slowdown": slow, "real runs": len(runs)}
    if whole.get("load"):
        record.extra["load"] = float(np.median(whole["load"]))
    records.write(target, record)
    print(json.dumps(record.extra, indent=1))


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("collect", "judge"):
        sys.exit(__doc__)
    if sys.argv[1] == "collect":
        collect(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 5)
    else:
        judge(Path(sys.argv[2]), Path(sys.argv[3]))
