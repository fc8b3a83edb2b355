"""Records `te` on a GPU: every law, three shapes against their own grouped GEMMs, and the presets at full width.

    python tests/benchmarks/record_gpu.py FOLDER --part laws [--examples N] [--workers N] [--seconds N]
    python tests/benchmarks/record_gpu.py FOLDER --part shapes [--shape A]... [--seconds N]
    python tests/benchmarks/record_gpu.py FOLDER --part presets [--preset NAME]... [--seconds N]
    python tests/benchmarks/record_gpu.py FOLDER --part fp8-laws [--examples N] [--workers N] [--seconds N]
    python tests/benchmarks/record_gpu.py FOLDER --part fp8 [--shape A]... [--seconds N]

Each part is a process of its own and writes FOLDER/te-PART.json after every step, so that a run that is cut short leaves what it
has; past --seconds no further step begins. Parameters are drawn on the device: a large layer would take minutes on the host. All
calls of a shape, its grouped GEMMs alone included, are timed in turn, so that their ratios share one moment.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dropless.parity import complete, get
from dropless.parity.bounds import dense_flops
from dropless.parity.costs import cost, flops
from dropless.parity.inputs import Case, make_cotangent, make_weights, make_x
from dropless.parity.interface import Implementation, Unsupported
from dropless.parity.job import Job
from dropless.parity.patterns import routing_ids
from dropless.parity.presets import PRESETS
from dropless.parity.problem import Params, Problem, Router, Routing
from dropless.parity.records import CaseRecord, ResultRecord, new_case, new_record, write
from dropless.parity.stages import stage_call
from dropless.parity.timing import Call, measure
from gpu_beside import ALONE, EXPERT_CALLS, Makers, own_gemms, unquantised
from gpu_judge import judged
from gpu_laws import record_laws
from gpu_quantisers import record_quantisers

NAME = "te"
TOKENS = 8192
SHAPES = {
    "4096 x 3584, 8 experts, top-2": Problem(
        T=TOKENS, K=2, E=8, D=4096, F=3584, dtype="bfloat16", router=Router(normalize=True)
    ),
    "7168 x 2048, 32 experts, top-8": Problem(
        T=TOKENS, K=8, E=32, D=7168, F=2048, dtype="bfloat16", router=Router(normalize=True)
    ),
    "qwen3-30b-a3b, 2048 x 768, 128 experts, top-8": PRESETS["qwen3-30b-a3b"].problem(T=TOKENS, dtype="bfloat16"),
}
ORDER = (
    "mixtral-8x7b",
    "gpt-oss-20b",
    "deepseek-v3",
    "olmoe-1b-7b",
    "gpt-oss-120b",
    "qwen3-235b-a22b",
    "mixtral-8x22b",
)
"""Presets by what they add to the shapes; qwen3-30b-a3b is one of those."""
SHAPE_CALLS = ("experts forward", "experts forward+backward", "layer forward", "layer forward+backward")
RECIPE = "fp8-current"
PRESET_CALLS = ("experts forward+backward", "layer forward")
BLOCKS, ROUNDS = 4, 4
"""Every call is timed ROUNDS times in each of BLOCKS turns."""


def timed(
    folder: Path, kind: str, problems: dict[str, Problem], whats: tuple[str, ...], spare: Callable[[], bool]
) -> None:
    """Parity, time, and parity of the timed outputs, for each problem that is begun in time."""
    record = new_record("bench", command={"part": kind, "tokens": TOKENS})
    implementation = complete(get(NAME))
    for label, problem in problems.items():
        if not spare():
            print(f"{label}: not begun in the time given", flush=True)
            continue
        began = time.perf_counter()
        case = record_case(
            implementation, label, problem, whats, beside={"shapes": own_gemms, "fp8": unquantised}.get(kind)
        )
        record.cases.append(case)
        write(folder / f"te-{kind}.json", record)
        show(case, time.perf_counter() - began)


def record_case(
    implementation: Implementation,
    label: str,
    problem: Problem,
    whats: tuple[str, ...],
    *,
    beside: Callable[[Implementation, list[Case]], Makers] | None = None,
    place: Callable[[Case], Case] = lambda case: case,
) -> CaseRecord:
    """One problem on one implementation; `beside` makes the calls that are timed in turn with it, and not judged.

    `place` moves what runs and is judged to where it is used, when that is several devices.
    """
    result = ResultRecord(implementation=implementation.name, verdict="agree")
    result.own_stages = sorted(set(implementation.stages) - set(implementation.composed))
    cases = [place(drawn(problem, seed)) for seed in range(2)]
    cases[1] = cases[1].replace(params=cases[0].params)
    record = new_case(label, problem, source="zipf at a fixed routing; the layer routes tokens itself")
    sizes = np.bincount(np.asarray(cases[0].routing.topk_idx).ravel(), minlength=problem.E)
    record.pattern, record.exponent = "zipf", 1.0
    record.rows, record.group_sizes = int(sizes.sum()), sizes.tolist()
    record.results.append(result)
    if not (support := implementation.can_run(problem)):
        result.verdict, result.reason = "cannot run", support.reason
        return record
    makers = {what: lambda what=what: stage_call(implementation, what, cases) for what in whats}
    makers |= beside(implementation, cases) if beside else {}
    clock = [time.perf_counter()]
    try:
        with ThreadPoolExecutor(len(makers)) as pool:
            calls = dict(zip(makers, pool.map(lambda make: make(), makers.values()), strict=True))
        clock.append(time.perf_counter())
        before = [(what, calls[what](1)) for what in whats]
        # Products of several streams overlap: their kernels' times add up to more than has passed.
        in_turn(list(calls.values()), overlapping=bool(implementation.host_sync(problem)))
        clock.append(time.perf_counter())
        # The last repetition ran variant 1 too, so one pass of the oracle judges what came before and after the timing.
        result.findings, result.after = judged(cases[1], before, [(what, _last(calls[what], 1)) for what in whats])
        clock.append(time.perf_counter())
        spent = (round(b - a, 1) for a, b in itertools.pairwise(clock))
        result.notes["seconds"] = dict(zip(("compile", "time", "judge"), spent, strict=True))
    except Unsupported as declined:
        result.verdict, result.reason = "cannot run", str(declined)
        return record
    failed = [f for f in (*result.findings, *result.after) if not f.ok]
    if failed:
        result.verdict, result.reason = "disagree", f"{failed[0].stage} {failed[0].tensor}: {failed[0].message}"
        return record
    for name, call in calls.items():
        if name in whats:
            work = cost(problem, name, record.rows, int(np.count_nonzero(sizes)))
            result.timings.append(call.record(useful_flops=work.flops, bytes_moved=work.bytes))
        else:
            dense = name == "dense GEMM"
            work = dense_flops(problem, call) if dense else flops(problem, record.rows, backward="+" in name)
            record.bounds.append(call.record(useful_flops=work))
            record.bounds[-1].what = name
    return record


def _last(call: Call, variant: int) -> Any:
    assert call.last is not None and call.last[0] == variant
    return call.last[1]


def drawn(problem: Problem, seed: int) -> Case:
    """A case whose large tensors are drawn on the device; tokens, routing, weights and cotangent as everywhere else."""
    ids = routing_ids("zipf", problem.T, problem.K, problem.E, seed, 1.0)
    return Case(
        problem=problem,
        params=params(problem),
        x=jnp.asarray(make_x(problem, seed)),
        routing=Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(make_weights(problem, ids, seed), jnp.float32)),
        cotangent=jnp.asarray(make_cotangent(problem, seed)),
        seed=seed,
        label="zipf",
    )


def params(problem: Problem) -> Params:
    """Kernels scaled by fan-in, biases of order one and never zero."""
    p, x = problem, problem.experts
    S = (2 if x.gated else 1) * x.shared_F
    shapes: dict[str, tuple[tuple[int, ...], float, str]] = {
        "gate_kernel": ((p.D, p.E), p.D**-0.5, p.dtype),
        "wi": ((p.E, p.D, p.wi_columns), p.D**-0.5, p.dtype),
        "wo": ((p.E, p.F, p.D), 2 * p.F**-0.5, p.dtype),
    }
    if p.router.gate_bias:
        shapes["gate_bias"] = ((p.E,), 0.1, p.dtype)
    if p.router.selection_bias:
        shapes["expert_bias"] = ((p.E,), 0.1, "float32")
    if x.wi_bias:
        shapes["wi_bias"] = ((p.E, p.wi_columns), 1.0, p.dtype)
    if x.wo_bias:
        shapes["wo_bias"] = ((p.E, p.D), 1.0, p.dtype)
    if S:
        shapes |= {
            "shared_wi": ((p.D, S), p.D**-0.5, p.dtype),
            "shared_wo": ((x.shared_F, p.D), 2 * x.shared_F**-0.5, p.dtype),
        }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    normal = jax.jit(
        lambda key, shape, scale, dtype: (jax.random.normal(key, shape, jnp.dtype(dtype)) * scale).astype(dtype),
        static_argnums=(1, 2, 3),
    )
    return Params(**{name: normal(k, *shapes[name]) for k, name in zip(keys, shapes, strict=True)})


def in_turn(calls: list[Call], *, overlapping: bool = False) -> None:
    """Times all calls in BLOCKS turns and keeps every repetition; wall time alone where kernels overlap."""
    wall: list[list[float]] = [[] for _ in calls]
    device: list[list[float]] = [[] for _ in calls]
    for _ in range(BLOCKS):
        for call in calls:
            call.wall_s, call.device_s = [], []
        measure(calls, rounds=ROUNDS)
        for i, call in enumerate(calls):
            wall[i] += call.wall_s
            device[i] += call.device_s
    for i, call in enumerate(calls):
        call.wall_s, call.device_s = wall[i], [] if overlapping else device[i]
        call.device_timer = "" if overlapping else call.device_timer


def show(case: CaseRecord, seconds: float) -> None:
    """The lines that matter at the end of a log."""
    result = case.results[0]
    worst_percent = max((f.percent or 0.0 for f in (*result.findings, *result.after)), default=0.0)
    print(
        f"{case.label}: {result.verdict} {result.reason} worst {worst_percent:.0f} % of bar, {seconds:.0f} s, "
        f"of it {result.notes.get('seconds')}",
        flush=True,
    )
    median = {t.what: t.median for t in (*result.timings, *case.bounds)}
    for t in (*result.timings, *case.bounds):
        print(
            f"  {t.what:44s} {1e3 * t.median:8.3f} ms  {t.flops_per_s / 1e12:5.0f} TFLOP/s  {t.device_timer}",
            flush=True,
        )
    for stage in ("experts", "layer"):
        alone = ALONE[stage]
        if alone in median and f"{stage} forward" in median:
            gemm_f, gemm_fb = median[alone], median[f"{alone}, forward+backward"]
            f, fb = median[f"{stage} forward"], median[f"{stage} forward+backward"]
            backward = (fb - f) / (gemm_fb - gemm_f)
            print(f"  {stage} / own GEMMs: forward {f / gemm_f:.3f}, backward {backward:.3f}", flush=True)


def main() -> None:
    """Runs one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part", choices=("laws", "shapes", "presets", "fp8", "fp8-laws"), required=True)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--examples", type=int, default=3)
    parser.add_argument("--workers", type=int, default=6, help="processes that run laws side by side")
    parser.add_argument("--shape", action="append", choices=tuple("ABC"), help="one of the three shapes, by letter")
    parser.add_argument("--preset", action="append", choices=tuple(PRESETS))
    given = parser.parse_args()
    deadline = time.time() + given.seconds

    def spare() -> bool:
        return time.time() < deadline

    given.folder.mkdir(parents=True, exist_ok=True)
    job = Job(NAME, "gpu", max_examples=given.examples)
    shapes = {
        label: p for letter, (label, p) in zip("ABC", SHAPES.items(), strict=True) if letter in (given.shape or "ABC")
    }
    if given.part == "laws":
        record_laws(given.folder / "te-laws.json", job, deadline=deadline, workers=given.workers)
    elif given.part == "shapes":
        timed(given.folder, "shapes", shapes, SHAPE_CALLS, spare)
    elif given.part == "presets":
        chosen = {n: PRESETS[n].problem(T=TOKENS, dtype="bfloat16") for n in given.preset or ORDER}
        timed(given.folder, "presets", chosen, PRESET_CALLS, spare)
    elif given.part == "fp8-laws":
        record_quantisers(given.folder / "te-fp8-quantiser.json", NAME)
        record_laws(given.folder / "te-fp8-laws.json", job, recipe=RECIPE, deadline=deadline, workers=given.workers)
    else:
        quantised = {f"{n}, {RECIPE}": p.replace(recipe=RECIPE) for n, p in shapes.items()}
        timed(given.folder, "fp8", quantised, EXPERT_CALLS, spare)


if __name__ == "__main__":
    main()
