"""Parity, then time, then parity again on the timed outputs: the one path to a timing.

`run_case` takes one problem with several input variants (other tokens, routings and cotangents; the same parameters),
judges every implementation on the first variant, times those that passed, interleaved, and judges the outputs of
the last timed repetition against the oracle's answer for the variant that it ran on.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from .bounds import COPY_BYTES, dense_flops, dense_gemm, grouped_gemms, memory_copy
from .costs import cost, flops, padded_rows
from .findings import to_record
from .inputs import Case
from .interface import Implementation, Unsupported
from .judge import layer_findings
from .law_tools import use_oracle
from .problem import InvalidInput, Problem
from .records import TIMED_VERDICTS, CaseRecord, FindingRecord, ResultRecord, new_case
from .registry import BASELINE
from .stages import stage_call, stage_findings
from .streamed import is_large
from .timing import Call, measure


@dataclass
class Options:
    """What `run_case` is asked to do."""

    whats: tuple[str, ...] = ("experts forward", "experts forward+backward")
    """Calls to time, from stages.WHATS."""
    layer: bool = True
    """Judge the live layer and its gradients too."""
    grad: bool = True
    timing: bool = True
    budget_s: float = 8.0
    rounds: int | None = None
    most: int = 30
    """Repetitions of a quick call, whatever the budget."""
    oracle: str = ""
    """Empty: the NumPy oracle, or oracle_device for a GPU or a layer too large for it."""
    step_limit_s: float = 10.0
    """Without a GPU, an implementation whose forward + backward step is estimated above this is declined as too slow."""
    bounds: bool = False
    """Time each implementation's own grouped GEMMs alone too."""
    step: Callable[..., None] = field(default=lambda text, advance=1: None)


@dataclass
class _Subject:
    implementation: Implementation
    result: ResultRecord
    calls: dict[str, Call] = field(default_factory=dict)
    judged_as: list[Case] = field(default_factory=list)
    """The cases whose oracle's answer it must give: the given ones, or what is left of them after its drops."""


def run_case(cases: Sequence[Case], implementations: Sequence[Implementation], options: Options) -> CaseRecord:
    """One CaseRecord: every implementation's verdict on the first variant, and its times on all of them."""
    first, problem = cases[0], cases[0].problem
    options = _resolved(options, problem)
    use_oracle(options.oracle)
    sizes = group_sizes(first)
    record = new_case(first.label, problem, source=first.label)
    record.rows, record.group_sizes = int(sizes.sum()), sizes.tolist()
    dense = dense_gemm(problem, record.rows)
    measure([dense], rounds=5)
    record.bounds.append(dense.record(useful_flops=dense_flops(problem, dense)))
    subjects = [
        _Subject(i, _admit(i, problem, sizes, record.bounds[0].flops_per_s, options.step_limit_s))
        for i in implementations
    ]
    record.results = [s.result for s in subjects]
    for s in subjects:
        options.step(f"{s.implementation.name}: parity")
        if not s.result.reason:
            _judge_first(s, cases, options)
    if options.timing:
        passed = [s for s in subjects if s.result.verdict in TIMED_VERDICTS]
        if options.bounds:
            _time_bounds(passed, cases, record, options)
        _time(passed, cases, record, options)
    return record


def _resolved(options: Options, problem: Problem) -> Options:
    oracle = options.oracle
    if not oracle:
        oracle = "oracle_device" if jax.default_backend() == "gpu" or is_large(problem) else "oracle"
    whats = tuple(w for w in options.whats if options.grad or "backward" not in w)
    return dataclasses.replace(options, oracle=oracle, whats=whats)


def group_sizes(case: Case) -> np.ndarray:
    """Real rows of each expert."""
    ids = np.asarray(case.routing.topk_idx)
    return np.bincount(ids[ids >= 0], minlength=case.problem.E).astype(np.int64)


def _admit(
    implementation: Implementation, problem: Problem, sizes: np.ndarray, rate: float, limit_s: float
) -> ResultRecord:
    """A result that cannot run, with its reason, or with none when it may be tried."""
    result = ResultRecord(implementation=implementation.name, verdict="cannot run")
    result.own_stages = sorted(set(implementation.stages) - set(implementation.composed))
    support = implementation.can_run(problem)
    rows = padded_rows(problem, implementation.name, sizes)
    result.notes["computed_rows"] = rows
    work = flops(problem, rows, backward=True)
    if not support:
        result.reason = support.reason
    elif jax.default_backend() == "cpu" and rate and work / rate > limit_s and implementation.name != BASELINE:
        result.reason = (
            f"too slow here: it computes {rows:,} rows for {int(sizes.sum()):,} routed ones, {work / 1e9:,.0f} GFLOP a "
            f"step, {work / rate:.0f} s at a dense GEMM's {rate / 1e9:.0f} GFLOP/s; limit {limit_s:.0f} s"
        )
    return result


def _judge_first(s: _Subject, cases: Sequence[Case], options: Options) -> None:
    """Runs the first variant and sets the verdict; a target that raises disagrees, and its message is the reason."""
    implementation, result = s.implementation, s.result
    try:
        s.judged_as = [kept(implementation, c) for c in cases]
        case = s.judged_as[0]
        for what in options.whats:
            if not _worth_timing(implementation, what.partition(" ")[0]):
                continue
            call = stage_call(implementation, what, cases)
            s.calls[what] = call
            got = call(0)
            result.findings += stage_findings(what, call, case, 0, got, options.oracle)
        judged_layer = any(w.startswith("layer") for w in s.calls)
        # A layer around experts that already disagree would only say so again, at the price of another compilation.
        worth = all(f.ok for f in result.findings) and "drops" not in implementation.traits
        if options.layer and not judged_layer and worth and implementation.offers("layer"):
            found = layer_findings(implementation, case, oracle=options.oracle, grad=options.grad)
            result.findings += [to_record(f, "layer") for f in found]
    except Unsupported as error:
        result.verdict, result.reason, result.findings = "cannot run", str(error), []
        return
    except InvalidInput:
        raise
    except Exception as error:  # the target's own fault, whatever it is: a verdict, not a crash of the comparison
        result.verdict, result.reason = "disagree", f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        result.findings = [FindingRecord(tensor="y", stage="experts", ok=False, check="ran", message=result.reason)]
        return
    _settle(s, cases)


def _worth_timing(implementation: Implementation, stage: str) -> bool:
    """Whether the stage is there and is not just the baseline's under another name."""
    if not implementation.offers(stage) or (stage == "layer" and "drops" in implementation.traits):
        return False
    return stage in ("experts", "layer") or stage not in implementation.composed


def kept(implementation: Implementation, case: Case) -> Case:
    """The case that a dropping implementation must match: its module's `keep(problem, routing)` says what is left."""
    if "drops" not in implementation.traits:
        return case
    module = sys.modules[implementation.stage("experts").__module__]
    return case.replace(routing=module.keep(case.problem, case.routing))


def _settle(s: _Subject, cases: Sequence[Case]) -> None:
    result = s.result
    failed = [f for f in (*result.findings, *result.after) if not f.ok]
    if failed:
        result.verdict = "disagree"
        result.reason = f"{failed[0].stage} {failed[0].tensor}: {failed[0].message}"
    elif "drops" in s.implementation.traits:
        routed, left = (int(group_sizes(c).sum()) for c in (cases[0], s.judged_as[0]))
        lost = np.asarray(cases[0].routing.topk_idx) != np.asarray(s.judged_as[0].routing.topk_idx)
        result.verdict = "expected-different"
        result.reason = (
            f"drops {routed - left:,} of {routed:,} rows, of {int(lost.any(1).sum()):,} tokens and "
            f"{int((group_sizes(cases[0]) > group_sizes(s.judged_as[0])).sum())} experts, exactly those that it reports"
        )
    else:
        result.verdict, result.reason = "agree", ""


def _time(subjects: Sequence[_Subject], cases: Sequence[Case], record: CaseRecord, options: Options) -> None:
    problem = cases[0].problem
    rows = int(np.mean([group_sizes(c).sum() for c in cases]))
    busy = int(np.count_nonzero(record.group_sizes))
    options.step("timing")
    calls = [s.calls[what] for what in options.whats for s in subjects if what in s.calls]
    measure(calls, budget_s=options.budget_s, rounds=options.rounds, most=options.most)
    for s in subjects:
        timings = []
        for what, call in s.calls.items():
            work = cost(problem, what, rows, busy)
            timings.append(call.record(useful_flops=work.flops, bytes_moved=work.bytes))
            if call.last is not None:
                variant, out = call.last
                s.result.after += stage_findings(what, call, s.judged_as[variant], variant, out, options.oracle)
                call.last = None
        _settle(s, cases)
        if s.result.verdict in TIMED_VERDICTS:
            s.result.timings = timings


def _time_bounds(subjects: Sequence[_Subject], cases: Sequence[Case], record: CaseRecord, options: Options) -> None:
    """Memory's rate, and each implementation's two grouped GEMMs alone."""
    problem = cases[0].problem
    copy = memory_copy()
    measure([copy], rounds=5)
    record.bounds.append(copy.record(bytes_moved=2.0 * COPY_BYTES))
    calls = {}
    for s in subjects:
        if "grouped_gemm" in s.result.own_stages:
            calls[s.implementation.name] = grouped_gemms(s.implementation, list(cases))
    measure(list(calls.values()), budget_s=options.budget_s / 4, rounds=options.rounds)
    for name, call in calls.items():
        timing = call.record(useful_flops=flops(problem, record.rows))
        timing.what = f"grouped GEMMs alone: {name}"
        record.bounds.append(timing)
