"""Laws of what an expert computes: the value and every gradient at a fixed routing, against the oracle's gauge."""

from __future__ import annotations

import numpy as np

from . import running
from .compare import Finding, same_bits
from .draws import stream
from .inputs import Case
from .interface import Implementation
from .law import Law, law
from .law_tools import by_oracle, idle_experts, real_rows, with_routing

HUGE = 1e4
"""Values that memory holds before a case, so that stale rows cannot pass for rounding."""


@law("value", stage="experts", judged_by="gauge", faults="BCDEFM", needs={"dropless"})
def value(implementation: Implementation, case: Case) -> list[Finding]:
    """At a fixed routing y is the weighted sum of the chosen experts' outputs."""
    return by_oracle(case, running.experts(implementation, case), ["y"])


@law("gradient-x", stage="experts", judged_by="gauge", faults="BCEH", needs={"dropless", "gradients"})
def gradient_x(implementation: Implementation, case: Case) -> list[Finding]:
    """The gradient of x is the oracle's, for a random cotangent of order one."""
    return by_oracle(case, running.experts(implementation, case), ["x"])


@law("gradient-topk_weights", stage="experts", judged_by="gauge", faults="EFH", needs={"dropless", "gradients"})
def gradient_topk_weights(implementation: Implementation, case: Case) -> list[Finding]:
    """The gradient of each slot's weight is <dy, that expert's output>, and 0 where there is no expert."""
    return by_oracle(case, running.experts(implementation, case), ["topk_weights"])


@law("gradient-wi", stage="experts", judged_by="gauge", faults="ABCH", needs={"dropless", "gradients"})
def gradient_wi(implementation: Implementation, case: Case) -> list[Finding]:
    """The gradient of wi is the oracle's, expert by expert."""
    return by_oracle(case, running.experts(implementation, case), ["wi"])


@law("gradient-wo", stage="experts", judged_by="gauge", faults="ABCH", needs={"dropless", "gradients"})
def gradient_wo(implementation: Implementation, case: Case) -> list[Finding]:
    """The gradient of wo is the oracle's, expert by expert."""
    return by_oracle(case, running.experts(implementation, case), ["wo"])


@law("gradient-wi_bias", stage="experts", judged_by="gauge", faults="BH", needs={"dropless", "gradients", "wi bias"})
def gradient_wi_bias(implementation: Implementation, case: Case) -> list[Finding]:
    """The gradient of wi_bias sums the real rows of each expert, and no padding row."""
    return by_oracle(case, running.experts(implementation, case), ["wi_bias"])


@law("gradient-wo_bias", stage="experts", judged_by="gauge", faults="BH", needs={"dropless", "gradients", "wo bias"})
def gradient_wo_bias(implementation: Implementation, case: Case) -> list[Finding]:
    """The gradient of wo_bias sums weight times dy over the real rows of each expert."""
    return by_oracle(case, running.experts(implementation, case), ["wo_bias"])


@law("idle-gradients", stage="experts", judged_by="bits", faults="A", needs={"gradients", "K < E"})
def idle_gradients(implementation: Implementation, case: Case) -> list[Finding]:
    """An expert without tokens has a gradient of exactly 0 in every leaf, also after a step that left large values in memory."""
    idle_case = leave_idle(case)
    running.experts(implementation, loud(case))
    got = running.experts(implementation, idle_case)
    idle = idle_experts(idle_case)
    findings = []
    for name in running.EXPERT_LEAVES:
        if name in got:
            want = got[name].copy()
            want[idle] = 0
            findings.append(same_bits(name, got[name] + np.zeros_like(want), want + np.zeros_like(want)))
    return findings


@law("busy-gradients", stage="experts", judged_by="gauge", faults="AH", needs={"dropless", "gradients", "K < E"})
def busy_gradients(implementation: Implementation, case: Case) -> list[Finding]:
    """Beside an expert without tokens the gradients of the busy experts stay right."""
    idle_case = leave_idle(case)
    return by_oracle(idle_case, running.experts(implementation, idle_case), running.EXPERT_LEAVES)


@law("zero-weights", stage="experts", judged_by="gauge", faults="EH", needs={"dropless", "gradients"})
def zero_weights(implementation: Implementation, case: Case) -> list[Finding]:
    """A slot whose weight is exactly 0 is still a slot: its weight's gradient is <dy, that expert's output>, not 0."""
    ids = real_rows(case)
    weights = np.asarray(case.routing.topk_weights).copy()
    weights[np.arange(len(ids)) % 2 == 0, case.seed % case.problem.K] = 0
    zeroed = with_routing(case, ids, weights)
    return by_oracle(zeroed, running.experts(implementation, zeroed), ["y", "topk_weights"])


def leave_idle(case: Case) -> Case:
    """The case with at least one expert, picked by the seed, that no token visits; needs K < E."""
    problem, ids = case.problem, real_rows(case).copy()
    if len(idle_experts(case)):
        return case
    rng = stream(case.seed, "idle")
    idle = int(rng.integers(problem.E))
    for token, slot in np.argwhere(ids == idle):
        free = np.setdiff1d(np.arange(problem.E), [*ids[token], idle])
        ids[token, slot] = free[rng.integers(len(free))]
    return with_routing(case, ids, np.asarray(case.routing.topk_weights))


def loud(case: Case) -> Case:
    """A case of the same shape that keeps every expert busy, where the tokens suffice, with huge values everywhere."""
    problem = case.problem
    T, K, E = problem.T, problem.K, problem.E
    ids = (np.arange(T * K).reshape(T, K)) % E
    x, dy = np.asarray(case.x), np.asarray(case.cotangent)
    weights = np.full((T, K), 1 / K, np.float32)
    full = with_routing(case, ids, weights)
    return full.replace(x=(x * 0 + HUGE).astype(x.dtype), cotangent=(dy * 0 + HUGE).astype(dy.dtype))


LAWS: tuple[Law, ...] = (
    value,
    gradient_x,
    gradient_topk_weights,
    gradient_wi,
    gradient_wo,
    gradient_wi_bias,
    gradient_wo_bias,
    idle_gradients,
    busy_gradients,
    zero_weights,
)
