"""Laws of a router: which experts, with which weights, and what each switch may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import running
from .compare import Finding, same_bits
from .draws import stream
from .inputs import Case
from .interface import Implementation
from .law import Law, law
from .law_tools import expect, live_case, route_findings
from .problem import Params, Problem, Routing

OWN = {"no mesh"}


@law("routes", stage="route", judged_by="gauge", faults="CEF", needs=OWN)
def routes(implementation: Implementation, case: Case) -> list[Finding]:
    """Each token gets K distinct experts none of which is clearly beaten by one left out, with those experts' weights."""
    return route_findings(case, running.route(implementation, case))


@law("ties", stage="route", judged_by="bits", faults="E", needs=OWN, scope="shape")
def ties(implementation: Implementation, case: Case) -> list[Finding]:
    """Exact ties give distinct experts in range, the same ones in every one of twenty calls."""
    tied = case.replace(params=case.params.replace(**_zeros(case.params)))
    first = running.route(implementation, tied)
    findings = [distinct(case.problem, first.topk_idx)]
    for _ in range(19):
        again = running.route(implementation, tied)
        found = [same_bits("topk_idx", again.topk_idx, first.topk_idx)]
        found.append(same_bits("topk_weights", again.topk_weights, first.topk_weights))
        findings += [f for f in found if not f.ok]
    return findings


@law("nan-route", stage="route", judged_by="bits", faults="E", needs=OWN | {"T >= 2"})
def nan_route(implementation: Implementation, case: Case) -> list[Finding]:
    """A token that holds NaN still gets distinct experts in range, and changes no bit of another token's routing."""
    spoilt = stream(case.seed, "nan route").random(case.problem.T) < 0.3
    spoilt[case.seed % case.problem.T] = True
    x = np.asarray(case.x).copy()
    x[spoilt] = np.nan
    clean = running.route(implementation, case)
    got = running.route(implementation, case.replace(x=jnp.asarray(x)))
    return [
        distinct(case.problem, got.topk_idx),
        same_bits("topk_idx", got.topk_idx[~spoilt], clean.topk_idx[~spoilt]),
        same_bits("topk_weights", got.topk_weights[~spoilt], clean.topk_weights[~spoilt]),
    ]


@law("selection-bias", stage="route", judged_by="gauge", faults="F", needs=OWN | {"selection bias"})
def selection_bias(implementation: Implementation, case: Case) -> list[Finding]:
    """A selection bias decides who is chosen, and enters no weight: a favourite is chosen by every token at its own score."""
    favourite = int(stream(case.seed, "favourite").integers(case.problem.E))
    bias = np.asarray(case.params.expert_bias).copy()
    bias[favourite] += 64.0  # far above any score or logit
    pushed = case.replace(params=case.params.replace(expert_bias=jnp.asarray(bias)))
    got = running.route(implementation, pushed)
    chosen = (got.topk_idx == favourite).any(1)
    message = f"expert {favourite}, which a bias of 64 favours, is not chosen by token {int(np.argmin(chosen))}"
    return [expect("topk_idx", chosen.all(), message), *route_findings(pushed, got)]


@law("negative-bias", stage="route", judged_by="gauge", faults="F", needs=OWN | {"selection bias"})
def negative_bias(implementation: Implementation, case: Case) -> list[Finding]:
    """Lowering every selection bias by one changes nothing: experts of excluded groups rank at -inf, not at 0."""
    lowered = case.replace(params=case.params.replace(expert_bias=case.params.need("expert_bias") - 1.0))
    return route_findings(lowered, running.route(implementation, lowered))


@law("groups", stage="route", judged_by="bits", faults="F", needs=OWN | {"groups"})
def groups(implementation: Implementation, case: Case) -> list[Finding]:
    """A token's experts lie in at most group_topk groups."""
    got = running.route(implementation, case)
    size = case.problem.E // case.problem.router.groups
    spans = [len(set(row // size)) for row in got.topk_idx]
    limit, worst = case.problem.router.group_topk, int(np.argmax(spans))
    return [expect("topk_idx", max(spans) <= limit, f"token {worst} visits {max(spans)} groups of at most {limit}")]


@law("scaling", stage="route", judged_by="gauge", faults="F", needs=OWN)
def scaling(implementation: Implementation, case: Case) -> list[Finding]:
    """The scaling factor multiplies every weight, normalised or not, and moves no choice."""
    findings: list[Finding] = []
    for normalize in (False, True):
        for factor in (1.0, 2.5):
            findings += _switched(implementation, case, router_scaling=factor, router_normalize=normalize)
    return findings


@law("normalisation", stage="route", judged_by="gauge", faults="F", needs=OWN)
def normalisation(implementation: Implementation, case: Case) -> list[Finding]:
    """Normalising divides a token's weights by their sum; switched off, each weight is the score itself."""
    findings: list[Finding] = []
    for normalize in (False, True):
        findings += _switched(implementation, case, router_normalize=normalize)
    return findings


@law("narrow-margin", stage="route", judged_by="bits", faults="E", needs=OWN | {"float32 logits", "one group", "K < E"})
def narrow_margin(implementation: Implementation, case: Case) -> list[Finding]:
    """Logits 1 + 2^-9 and 1, which bfloat16 cannot tell apart, are told apart when logits are float32."""
    problem = case.problem
    if problem.D < 2:
        return []
    loser = int(stream(case.seed, "narrow").integers(problem.E - 1))  # ranks first in a tie: the lower index
    winner = int(stream(case.seed, "wide").integers(loser + 1, problem.E))
    kernel, x = np.zeros((problem.D, problem.E)), np.zeros((problem.T, problem.D))
    x[:, 0], x[:, 1] = 1.0, 2.0**-9
    kernel[0], kernel[0, [loser, winner]], kernel[1, winner] = -1.0, 1.0, 1.0
    others = [e for e in range(problem.E) if e not in (loser, winner)]
    kernel[0, others[: problem.K - 1]] = 2.0
    leaves = _zeros(case.params)
    leaves["gate_kernel"] = jnp.asarray(kernel.astype(case.params.gate_kernel.dtype))
    made = case.replace(params=case.params.replace(**leaves), x=jnp.asarray(x.astype(case.x.dtype)))
    got = np.sort(running.route(implementation, made).topk_idx, axis=1)
    want = np.sort([winner, *others[: problem.K - 1]]).astype(np.int32)
    return [same_bits("topk_idx", got, np.tile(want, (problem.T, 1)))]


@law(
    "top-1-gradient", stage="route", judged_by="bits", faults="F", needs=OWN | {"K = 1", "E >= 2", "jit"}, scope="shape"
)
def top_1_gradient(implementation: Implementation, case: Case) -> list[Finding]:
    """With one expert per token a softmax before the choice trains the gate, and one after the choice does not."""
    findings = []
    for order in ("before", "after"):
        changes = {"router_softmax_order": order, "router_normalize": False, "router_score": "softmax"}
        problem = case.problem.replace(**changes)
        if not implementation.supports(problem):
            continue
        grad = np.asarray(running.call(implementation, "route", _gate_gradient, case.params, case.x, problem))
        if order == "before":
            findings.append(
                expect("gate_kernel", np.any(grad != 0), "softmax before the choice gives the gate no gradient")
            )
        else:
            findings.append(same_bits("gate_kernel", grad + 0, np.zeros_like(grad)))
    return findings


@law("update-bias", stage="update_bias", judged_by="bits", faults="F", needs={"no mesh"})
def update_bias(implementation: Implementation, case: Case) -> list[Finding]:
    """The bias of an expert above the mean load falls by the rate, one below rises by it, one at the mean stays."""
    ids = np.asarray(case.routing.topk_idx)
    sizes = np.bincount(ids[ids >= 0], minlength=case.problem.E).astype(np.int32)
    bias = (np.arange(case.problem.E) % 7 - 3).astype(np.float32) / 4
    fn = implementation.stage("update_bias")
    got = np.asarray(fn(jnp.asarray(bias), jnp.asarray(sizes), jnp.float32(0.125)))
    want = bias + np.float32(0.125) * np.sign(sizes.sum() - case.problem.E * sizes.astype(np.int64)).astype(np.float32)
    return [same_bits("expert_bias", got, want)]


def distinct(problem: Problem, topk_idx: Any) -> Finding:
    """Every token's ids lie in [0, E) and differ."""
    ids = np.sort(topk_idx, axis=1)
    bad = (ids < 0).any(1) | (ids >= problem.E).any(1) | (ids[:, 1:] == ids[:, :-1]).any(1)
    token = int(np.argmax(bad)) if len(bad) else 0
    message = f"token {token} got experts {topk_idx[token].tolist() if len(bad) else []}; accepted: distinct, 0 to {problem.E - 1}"
    return expect("topk_idx", not bad.any(), message)


def _switched(implementation: Implementation, case: Case, **changes: Any) -> list[Finding]:
    """The router under other switches, on inputs whose experts are not in doubt: the same experts, the right weights."""
    problem = case.problem.replace(**changes)
    if not implementation.supports(problem):
        return []
    made = live_case(case)
    if made is None:
        return []
    made = made.replace(problem=problem)
    got = running.route(implementation, made)
    wanted = np.sort(np.asarray(made.routing.topk_idx), axis=1)
    return [same_bits("topk_idx", np.sort(got.topk_idx, axis=1), wanted), *route_findings(made, got)]


def _zeros(params: Params) -> dict[str, jax.Array]:
    """The router's leaves as zeros."""
    leaves = {n: getattr(params, n) for n in ("gate_kernel", "gate_bias", "expert_bias")}
    return {n: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) for n, leaf in leaves.items() if leaf is not None}


def _gate_gradient(fn: Callable[..., Routing], params: Params, x: jax.Array, problem: Problem) -> jax.Array:
    cotangent = jnp.linspace(1.0, 2.0, problem.T, dtype=jnp.float32)[:, None]
    return jax.grad(lambda kernel: (fn(problem, params.replace(gate_kernel=kernel), x).topk_weights * cotangent).sum())(
        params.gate_kernel
    )


LAWS: tuple[Law, ...] = (
    routes,
    ties,
    nan_route,
    selection_bias,
    negative_bias,
    groups,
    scaling,
    normalisation,
    narrow_margin,
    top_1_gradient,
    update_bias,
)
