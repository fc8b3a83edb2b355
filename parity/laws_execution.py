"""Laws of how a layer runs: compiled once for every routing, under any transformation, and without shared state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import running
from .compare import Finding, same_bits
from .inputs import Case
from .interface import Implementation
from .law import Law, law
from .law_tools import by_bits, by_gauge, expect, moved, oracle_view, real_rows, with_routing
from .laws_structure import sign_experts
from .patterns import PATTERNS, routing_ids
from .problem import InvalidInput, Problem, Routing

ROUTINGS = 50
"""How many routings one executable must serve."""


@law(
    "one-executable",
    stage="experts",
    judged_by="bits",
    faults="K",
    needs={"jit", "device sizes", "gated", "no clamp", "no biases", "unquantised", "dropless"},
    scope="once",
)
def one_executable(implementation: Implementation, case: Case) -> list[Finding]:
    """Fifty routings of one shape are served by one trace, and each result follows its own routing."""
    traces: list[int] = []
    fn, problem = implementation.stage("experts"), case.problem

    @jax.jit
    def step(params: Any, x: jax.Array, routing: Routing) -> jax.Array:
        traces.append(1)
        return fn(problem, params, x, routing)

    findings: list[Finding] = []
    for i in range(ROUTINGS):
        made, want = sign_experts(_rerouted(case, i))
        with running.blaming_target():
            got = np.asarray(step(made.params, made.x, made.routing))
        found = same_bits("y", got + np.zeros_like(got), want + np.zeros_like(want))
        if not found.ok or i == 0:
            findings.append(found)
    findings.append(expect("y", len(traces) == 1, f"{ROUTINGS} routings of one shape were traced {len(traces)} times"))
    return findings


@law("jit", stage="experts", judged_by="gauge", faults="K", needs={"jit", "unquantised", "no mesh"}, scope="once")
def jit(implementation: Implementation, case: Case) -> list[Finding]:
    """Without `jit` the layer computes what it computes under it."""
    compiled = running.experts(implementation, case)
    fn = implementation.stage("experts")
    y = fn(case.problem, case.params, case.x, case.routing)
    running.check_kind("experts", "y", y, compiled["y"].shape, case.problem.dtype)
    return by_gauge(case.problem, oracle_view(case), {"y": np.asarray(y)}, {"y": compiled["y"]})


@law("checkpoint", stage="experts", judged_by="gauge", faults="EGJ", needs={"jit", "gradients"}, scope="once")
def checkpoint(implementation: Implementation, case: Case) -> list[Finding]:
    """Rematerialised under `jax.checkpoint` the layer has the same y and gradients."""
    base = running.experts(implementation, case)
    y, grads = running.call(
        implementation,
        "experts",
        _checkpointed,
        case.params,
        case.x,
        case.routing.topk_weights,
        case.routing.topk_idx,
        case.cotangent,
        case.problem,
    )
    got = {"y": np.asarray(y), **running.check_gradients(case, grads)}
    return by_gauge(case.problem, oracle_view(case), got, base)


@law("scan", stage="experts", judged_by="gauge", faults="JK", needs={"jit", "gradients"}, scope="once")
def scan(implementation: Implementation, case: Case) -> list[Finding]:
    """Three layers of a `scan`, each with its own routing, give the y and gradients that each gives alone."""
    cases = [case, *(_rerouted(case, i) for i in (1, 2))]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(c.routing for c in cases))
    args = (case.params, case.x, stacked.topk_weights, stacked.topk_idx, case.cotangent, case.problem)
    ys, grads = running.to_host(running.call(implementation, "experts", _scanned, *args))
    findings: list[Finding] = []
    views, sums = [oracle_view(c) for c in cases], {}
    for i, one in enumerate(cases):
        alone = running.experts(implementation, one)
        got = {"y": ys[i], "topk_weights": grads["topk_weights"][i]}
        findings += by_gauge(case.problem, views[i], got, {name: alone[name] for name in got})
        for name in ("x", *running.EXPERT_LEAVES):
            if name in alone:
                sums[name] = sums.get(name, 0.0) + alone[name].astype(np.float64)

    # The scan adds the layers' gradients in storage dtype; each addition rounds as one more output does.
    def spread(name: str, _: np.ndarray) -> np.ndarray:
        return np.sqrt(sum(v[name].gauge ** 2 for v in views)) + _rounding(case.problem, sums[name])

    total = moved({name: views[0][name] for name in sums}, gauge=spread)
    return findings + by_gauge(case.problem, total, {name: grads[name] for name in sums}, sums)


@law("layers-apart", stage="experts", judged_by="gauge", faults="JK", needs={"jit", "gradients"}, scope="once")
def layers_apart(implementation: Implementation, case: Case) -> list[Finding]:
    """Two layers with opposite routings, whose forwards and backwards interleave, do not share state."""
    problem = case.problem
    near = np.tile(np.arange(problem.K), (problem.T, 1))
    weights = np.asarray(case.routing.topk_weights)
    first, second = (with_routing(case, ids, weights) for ids in (near, problem.E - 1 - near))
    args = (case.params, case.x, first.routing, second.routing, case.cotangent, problem)
    pairs = running.to_host(running.call(implementation, "experts", _interleaved, *args))
    findings: list[Finding] = []
    for one, (y, grads) in zip((first, second), pairs, strict=True):
        alone = running.experts(implementation, one)
        findings += by_gauge(problem, oracle_view(one), {"y": y, **grads}, alone)
    return findings


@law("no-tokens", stage="experts", judged_by="bits", faults="AJ", needs={"empty", "no mesh"}, scope="once")
def no_tokens(implementation: Implementation, case: Case) -> list[Finding]:
    """A batch without tokens gives an empty y and gradients of exact zeros in their full shapes."""
    problem = case.problem.replace(T=0)
    none = Routing(case.routing.topk_idx[:0], case.routing.topk_weights[:0])
    empty = case.replace(problem=problem, x=case.x[:0], routing=none, cotangent=case.cotangent[:0])
    got = running.experts(implementation, empty)
    return by_bits(got, {name: np.zeros_like(value) for name, value in got.items() if value.size})


def _rerouted(case: Case, i: int) -> Case:
    """The case with the i-th of an endless list of routings, extreme ones among them."""
    p, names = case.problem, list(PATTERNS)
    for offset in range(len(names)):
        try:
            ids = routing_ids(names[(i + offset) % len(names)], p.T, p.K, p.E, seed=case.seed + i)
        except InvalidInput:  # not every pattern fits every shape
            continue
        return with_routing(case, ids, np.roll(np.asarray(case.routing.topk_weights), i, axis=0))
    return with_routing(case, real_rows(case), np.asarray(case.routing.topk_weights))


def _rounding(problem: Problem, values: np.ndarray) -> np.ndarray:
    return float(jnp.finfo(problem.dtype).eps) * np.abs(values)


def _leaves(params: Any) -> dict[str, jax.Array]:
    return {name: leaf for name in running.EXPERT_LEAVES if (leaf := getattr(params, name)) is not None}


def _checkpointed(fn, params, x, topk_weights, topk_idx, cotangent, problem):
    @jax.checkpoint
    def forward(leaves, x, topk_weights):
        return fn(problem, params.replace(**leaves), x, Routing(topk_idx, topk_weights))

    y, pull = jax.vjp(forward, _leaves(params), x, topk_weights)
    grads, dx, dw = pull(cotangent)
    return y, {"x": dx, "topk_weights": dw, **grads}


def _scanned(fn, params, x, topk_weights, topk_idx, cotangent, problem):
    def forward(leaves, x, topk_weights):
        def layer(_, routing):
            return None, fn(problem, params.replace(**leaves), x, Routing(*routing))

        return jax.lax.scan(layer, None, (topk_idx, topk_weights))[1]

    ys, pull = jax.vjp(forward, _leaves(params), x, topk_weights)
    grads, dx, dw = pull(jnp.stack([cotangent] * len(ys)))
    return ys, {"x": dx, "topk_weights": dw, **grads}


def _interleaved(fn, params, x, first, second, cotangent, problem):
    def forward(leaves, x, topk_weights, ids):
        return fn(problem, params.replace(**leaves), x, Routing(ids, topk_weights))

    def named(pulled):
        return {"x": pulled[1], "topk_weights": pulled[2], **pulled[0]}

    leaves = _leaves(params)
    y_a, pull_a = jax.vjp(lambda p, a, w: forward(p, a, w, first.topk_idx), leaves, x, first.topk_weights)
    y_b, pull_b = jax.vjp(lambda p, a, w: forward(p, a, w, second.topk_idx), leaves, x, second.topk_weights)
    grads_a = pull_a(cotangent)
    return (y_a, named(grads_a)), (y_b, named(pull_b(cotangent)))


LAWS: tuple[Law, ...] = (one_executable, jit, checkpoint, scan, layers_apart, no_tokens)
