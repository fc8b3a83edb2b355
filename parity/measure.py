"""Parity, then time, then parity again on the timed outputs: the one path to a timing.

`run_case` takes one problem with several input variants (other tokens, routings and cotangents; the same parameters),
judges every implementation on the first variant, times those that passed, interleaved, and judges the outputs of
the last timed repetition against the oracle's answer for the variant that it ran on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from .bounds import dense_flops, dense_gemm
from .compare import Finding, judge
from .costs import cost, flops, padded_rows
from .inputs import NUMPY_DTYPES, Case
from .interface import Implementation, Judged, Unsupported
from .law_tools import oracle_view, use_oracle
from .problem import Params, Problem, Routing
from .records import CaseRecord, FindingRecord, ResultRecord, TimingRecord, new_case
from .running import EXPERT_LEAVES
from .timing import Call, measure, prepare

STEP_LIMIT_S = 20.0
"""An implementation whose forward + backward step is estimated above this is declined as too slow."""

BINS = 32
"""Bins of the error histogram; each is a quarter of a gauge wide."""


@dataclass
class Options:
    """What `run_case` is asked to do."""

    grad: bool = True
    layer: bool = True
    """Judge the live layer too."""
    timing: bool = True
    budget_s: float = 8.0
    rounds: int | None = None
    oracle: str = "oracle_device"
    step: Callable[..., None] = field(default=lambda text, advance=1: None)
    tick: Callable[[], None] = field(default=lambda: None)


@dataclass
class _Subject:
    implementation: Implementation
    result: ResultRecord
    calls: dict[str, Call] = field(default_factory=dict)


def run_case(cases: Sequence[Case], implementations: Sequence[Implementation], options: Options) -> CaseRecord:
    """One CaseRecord: every implementation's verdict on the first variant, and its times on all of them."""
    first = cases[0]
    problem = first.problem
    use_oracle(options.oracle)
    sizes = group_sizes(first)
    record = new_case(first.label, problem, pattern=first.label)
    record.rows, record.group_sizes = int(sizes.sum()), sizes.tolist()
    dense = dense_gemm(problem, record.rows)
    measure([dense], rounds=5)
    record.bounds.append(dense.record(useful_flops=dense_flops(problem, dense)))
    rate = record.bounds[0].flops_per_s
    subjects = [_Subject(i, _admit(i, problem, sizes, rate)) for i in implementations]
    record.results = [s.result for s in subjects]
    for s in subjects:
        if not s.result.reason:
            options.step(f"{s.implementation.name}: parity")
            _judge_first(s, list(cases), options)
    if options.timing:
        _time(
            [s for s in subjects if s.result.verdict in ("agree", "expected-different")], list(cases), record, options
        )
    return record


def group_sizes(case: Case) -> np.ndarray:
    """Real rows of each expert."""
    ids = np.asarray(case.routing.topk_idx)
    return np.bincount(ids[ids >= 0], minlength=case.problem.E).astype(np.int64)


def forward_call(implementation: Implementation, problem: Problem) -> Callable[..., dict[str, Any]]:
    """(params, x, topk_idx, topk_weights, cotangent) -> {"y"}: the experts, forward."""
    experts = implementation.stage("experts")

    def forward(params: Params, x, topk_idx, topk_weights, cotangent):
        return {"y": experts(problem, params, x, Routing(topk_idx, topk_weights))}

    return forward


def gradient_call(implementation: Implementation, problem: Problem) -> Callable[..., dict[str, Any]]:
    """(params, x, topk_idx, topk_weights, cotangent) -> y and every gradient by the name of what it is of."""
    experts = implementation.stage("experts")
    own = implementation.stages.get("experts_vjp")

    def both(params: Params, x, topk_idx, topk_weights, cotangent):
        if own is not None:
            routing = Routing(topk_idx, topk_weights)
            return {"y": experts(problem, params, x, routing), **own(problem, params, x, routing, cotangent)}
        leaves = {name: leaf for name in EXPERT_LEAVES if (leaf := getattr(params, name)) is not None}

        def forward(leaves, x, weights):
            return experts(problem, params.replace(**leaves), x, Routing(topk_idx, weights))

        y, pull = jax.vjp(forward, leaves, x, topk_weights)
        of_leaves, of_x, of_weights = pull(cotangent)
        return {"y": y, "x": of_x, "topk_weights": of_weights, **of_leaves}

    return both


def findings_of(case: Case, got: dict[str, Any], stage: str = "experts") -> list[FindingRecord]:
    """Every tensor of `got` against the oracle's answer on the case; a NaN row of x must be NaN in y and is left out."""
    view = oracle_view(case)
    return [_finding(name, np.asarray(value), view[name], case, stage) for name, value in got.items() if name in view]


def _finding(name: str, got: np.ndarray, judged: Judged, case: Case, stage: str) -> FindingRecord:
    dtype = np.dtype(np.float32) if name == "topk_weights" else NUMPY_DTYPES[case.problem.dtype]
    f = to_record(judge(name, got, judged, dtype=dtype), stage)
    f.histogram = histogram(got, judged) if f.check == "values" and got.shape == judged.value.shape else []
    return f


def to_record(finding: Finding, stage: str) -> FindingRecord:
    """A Finding as it is stored."""
    measured = finding.measured
    return FindingRecord(
        tensor=finding.tensor,
        stage=stage,
        ok=bool(finding.ok),
        check=finding.check,
        percent=None if measured is None else 100.0 * float(measured),
        message=finding.message or "",
        kinks=int(finding.kinks or 0),
    )


def histogram(got: np.ndarray, judged: Judged) -> list[int]:
    """Elements by |error| / gauge in quarter steps; elements whose gauge is 0 are left out."""
    live = (judged.gauge > 0) & np.isfinite(judged.gauge)
    ratio = np.abs(got.astype(np.float64) - judged.value)[live] / judged.gauge[live]
    bins = np.minimum(np.nan_to_num(ratio, nan=BINS) * 4, BINS - 1).astype(np.int64)
    return np.bincount(bins, minlength=BINS).tolist()


def _admit(implementation: Implementation, problem: Problem, sizes: np.ndarray, rate: float) -> ResultRecord:
    result = ResultRecord(implementation=implementation.name, verdict="cannot run")
    result.own_stages = sorted(set(implementation.stages) - set(implementation.composed))
    support = implementation.can_run(problem)
    rows = padded_rows(problem, implementation.name, sizes)
    work = flops(problem, rows, backward=True)
    seconds = work / rate if rate else 0.0
    if not support:
        result.reason = support.reason
    elif jax.default_backend() == "cpu" and seconds > STEP_LIMIT_S:
        result.reason = (
            f"too slow here: it computes {rows:,} rows for {int(sizes.sum()):,} routed ones, {work / 1e9:,.0f} GFLOP a "
            f"step, about {seconds:.0f} s at the {rate / 1e9:.0f} GFLOP/s of a dense GEMM; limit {STEP_LIMIT_S:.0f} s"
        )
    result.notes["computed_rows"] = rows
    return result


def _judge_first(s: _Subject, cases: list[Case], options: Options) -> None:
    """Runs the first variant and sets the verdict; a target that raises disagrees, and its message is the reason."""
    implementation, case, result = s.implementation, cases[0], s.result
    try:
        s.calls = _calls(implementation, cases, options)
        for call in s.calls.values():
            got = jax.block_until_ready(call.run(*call.inputs[0]))
        result.findings = findings_of(case, got)
        if options.layer and implementation.offers("layer") and "numpy" not in implementation.traits:
            from .judge import layer_findings

            found = layer_findings(implementation, case, oracle=options.oracle, grad=options.grad)
            result.findings += [to_record(f, "layer") for f in found]
    except Unsupported as error:
        result.verdict, result.reason = "cannot run", str(error)
        result.findings = []
        return
    except Exception as error:  # the target's own fault, whatever it is: a verdict, not a crash of the comparison
        result.verdict, result.reason = "disagree", f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        result.findings = [FindingRecord(tensor="y", stage="experts", ok=False, check="ran", message=result.reason)]
        return
    _settle(result, implementation)


def _settle(result: ResultRecord, implementation: Implementation) -> None:
    failed = [f for f in (*result.findings, *result.after) if not f.ok]
    if not failed:
        result.verdict, result.reason = "agree", ""
    elif "drops" in implementation.traits:
        result.verdict, result.reason = "expected-different", f"drops on purpose: {failed[0].message}"
    else:
        result.verdict = "disagree"
        result.reason = f"{failed[0].stage} {failed[0].tensor}: {failed[0].message}"


def _calls(implementation: Implementation, cases: list[Case], options: Options) -> dict[str, Call]:
    problem = cases[0].problem
    eager = bool(implementation.traits & {"eager", "host-sync", "numpy"})
    inputs = [(c.params, c.x, c.routing.topk_idx, c.routing.topk_weights, c.cotangent) for c in cases]
    names = []
    if options.timing or not options.grad:
        names.append(("experts forward", forward_call))
    if options.grad:
        names.append(("experts forward+backward", gradient_call))
    return {what: prepare(what, make(implementation, problem), inputs, eager=eager) for what, make in names}


def _time(subjects: list[_Subject], cases: list[Case], record: CaseRecord, options: Options) -> None:
    calls = [c for s in subjects for c in s.calls.values()]
    options.step("timing")
    measure(calls, budget_s=options.budget_s, rounds=options.rounds, tick=options.tick)
    for s in subjects:
        timings: list[TimingRecord] = []
        for what, call in s.calls.items():
            sizes = [group_sizes(c) for c in cases]
            rows = float(np.mean([n.sum() for n in sizes]))
            work = cost(cases[0].problem, what, int(rows), busy=int((sizes[0] > 0).sum()))
            timings.append(call.record(useful_flops=work.flops, bytes_moved=work.bytes))
            assert call.last is not None
            variant, out = call.last
            options.step(f"{s.implementation.name}: parity of the timed outputs", advance=0)
            s.result.after += findings_of(cases[variant], out, what)
            call.last = None
        _settle(s.result, s.implementation)
        if s.result.verdict in ("agree", "expected-different"):
            s.result.timings = timings
