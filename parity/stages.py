"""The calls that `bench` times one by one: how to run each stage alone, and how to judge what it returned.

A stage is judged on the very outputs that were timed. permute by bits; grouped_gemm and unpermute by gauge on a sample of
rows that holds each group's first and last; experts and layer by the oracle; route by admissible sets.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from . import launch
from .compare import Finding, judge, same_bits
from .findings import to_record
from .inputs import Case
from .interface import Implementation, Judged
from .judge import dtype_of, output_findings, route_findings
from .law_tools import oracle_view
from .problem import InvalidInput, Params, Problem, Routing
from .records import FindingRecord
from .running import EXPERT_LEAVES
from .streamed import is_large, streamed_experts
from .timing import Call, prepare

SAMPLE = 512
"""Rows of a stage's output that are recomputed in float64."""

WHATS = (
    "route forward",
    "permute forward",
    "grouped_gemm forward",
    "unpermute forward",
    "experts forward",
    "experts forward+backward",
    "layer forward",
    "layer forward+backward",
)
"""Every call that can be timed, in the order in which a token meets them."""


def check_whats(whats: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple; raises InvalidInput for one that is not in WHATS."""
    for what in whats:
        if what not in WHATS:
            raise InvalidInput(f"call is {what!r}; accepted: {', '.join(WHATS)}")
    return tuple(whats)


def stage_call(implementation: Implementation, what: str, cases: Sequence[Case]) -> Call:
    """The compiled call for one of WHATS, with one input variant for each case."""
    stage, _, direction = what.partition(" ")
    both = direction == "forward+backward"
    problem = cases[0].problem
    eager = bool(implementation.traits & {"eager", "host-sync", "numpy"})
    if stage == "experts":
        make = gradient_call if both else forward_call
        inputs = [(c.params, c.x, c.routing.topk_idx, c.routing.topk_weights, c.cotangent) for c in cases]
        return prepare(what, make(implementation, problem), inputs, eager=eager)
    fn = implementation.stage(stage)
    if stage == "layer":
        run = layer_gradient_call(implementation, problem) if both else _plain(fn, problem)
        inputs = [(c.params, c.x, *((c.cotangent,) if both else ())) for c in cases]
    elif stage == "route":
        run, inputs = _plain(fn, problem), [(c.params, c.x) for c in cases]
    elif stage == "permute":
        run = lambda x, routing: fn(problem, x, routing)  # noqa: E731
        inputs = [(c.x, c.routing) for c in cases]
    elif stage == "unpermute":
        run = lambda rows, routing, row_of_slot: fn(problem, rows, routing, row_of_slot)  # noqa: E731
        inputs = [(rows, c.routing, places) for c in cases for rows, _, places in (_permuted(implementation, c),)]
    elif stage == "grouped_gemm":
        run = fn
        inputs = [(rows, c.params.wi, sizes) for c in cases for rows, sizes, _ in (_permuted(implementation, c),)]
    else:
        raise ValueError(f"{what} is not one of {WHATS}")
    return prepare(what, run, inputs, eager=eager)


def stage_findings(what: str, call: Call, case: Case, variant: int, got: Any, oracle: str) -> list[FindingRecord]:
    """Judges one output of `stage_call`; `variant` says which inputs it came from."""
    stage = what.partition(" ")[0]
    host = launch.to_host(got)
    if stage == "experts":
        found = _experts_findings(case, host, both=what.endswith("forward+backward"))
    elif stage == "permute":
        found = _permute_findings(case, host)
    elif stage == "grouped_gemm":
        rows, kernels, sizes = map(np.asarray, call.inputs[variant])
        found = [_grouped_gemm_finding(case, rows, kernels, sizes, host)]
    elif stage == "unpermute":
        rows, _, places = call.inputs[variant]
        found = [_unpermute_finding(case, np.asarray(rows), np.asarray(places), host)]
    elif stage == "route":
        found = route_findings(case, host, oracle=oracle)
    else:
        out, grads = host if isinstance(host, tuple) else (host, {})
        found = output_findings(case, out, grads, oracle=oracle)
    return [to_record(f, stage) for f in found]


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


def layer_gradient_call(implementation: Implementation, problem: Problem) -> Callable[..., Any]:
    """(params, x, cotangent) -> Output and the gradients of every parameter and of x, for y's cotangent."""
    layer = implementation.stage("layer")

    def both(params: Params, x, cotangent):
        def forward(leaves, x):
            out = layer(problem, params.replace(**leaves), x)
            return out.y, out

        _, pull, out = jax.vjp(forward, params.named(), x, has_aux=True)
        of_leaves, of_x = pull(cotangent)
        return out, {"x": of_x, **of_leaves}

    return both


def _experts_findings(case: Case, got: dict[str, Any], *, both: bool) -> list[Finding]:
    wanted = ("x", "topk_weights", *(n for n in EXPERT_LEAVES if getattr(case.params, n) is not None)) if both else ()
    lacking = [
        Finding(tensor=name, check="ran", ok=False, message=f"experts_vjp returned no gradient of {name}")
        for name in wanted
        if name not in got
    ]
    if is_large(case.problem):
        return lacking + streamed_experts(case, got)
    view = oracle_view(case)
    empty = case.problem.T == 0
    return lacking + [
        judge(name, value, view[name], dtype=dtype_of(case.problem, name), empty_ok=empty)
        for name, value in got.items()
        if name in view
    ]


def _plain(fn: Callable[..., Any], problem: Problem) -> Callable[..., Any]:
    return lambda params, x: fn(problem, params, x)


def _permuted(implementation: Implementation, case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    permute = implementation.stage("permute")
    return jax.jit(lambda x, routing: permute(case.problem, x, routing))(case.x, case.routing)


def _permute_findings(case: Case, got: tuple[np.ndarray, np.ndarray, np.ndarray]) -> list[Finding]:
    """Counts, places and payloads, bit for bit, against a sort in NumPy."""
    rows, sizes, places = got
    ids = np.asarray(case.routing.topk_idx)
    flat = ids.reshape(-1)
    order = np.argsort(np.where(flat < 0, case.problem.E, flat), kind="stable")[: int((flat >= 0).sum())]
    want_places = np.full(flat.size, -1, np.int32)
    want_places[order] = np.arange(order.size, dtype=np.int32)
    x = np.asarray(case.x)
    want_rows = x[order // case.problem.K]
    want_sizes = np.bincount(flat[flat >= 0], minlength=case.problem.E).astype(np.int32)
    return [
        same_bits("group_sizes", sizes, want_sizes),
        same_bits("row_of_slot", places, want_places.reshape(ids.shape)),
        same_bits("rows", rows[: order.size], want_rows),
    ]


def _grouped_gemm_finding(
    case: Case, rows: np.ndarray, kernels: np.ndarray, sizes: np.ndarray, got: np.ndarray
) -> Finding:
    ends = np.cumsum(sizes)
    picked = _sample(ends, case.seed)
    expert = np.searchsorted(ends, picked, side="right")
    noise = importlib.import_module("dropless.reference.oracle_gauge").Noise(case.problem)
    a = rows[picked].astype(np.float64)
    value = np.empty((len(picked), kernels.shape[2]))
    squares = np.empty_like(value)
    for e in np.unique(expert):
        mine = expert == e
        kernel = kernels[e].astype(np.float64)
        value[mine], squares[mine] = a[mine] @ kernel, (a[mine] ** 2) @ (kernel**2)
    n = rows.shape[1]
    variance = noise.rounded("pre", value) + noise.per_square(n) * squares + noise.per_total(n) * value**2
    return judge("rows", got[picked], Judged(value, np.sqrt(variance)), dtype=case.problem.dtype)


def _unpermute_finding(case: Case, rows: np.ndarray, places: np.ndarray, got: np.ndarray) -> Finding:
    noise = importlib.import_module("dropless.reference.oracle_gauge").Noise(case.problem)
    tokens = _sample(np.asarray([case.problem.T]), case.seed)
    at = places[tokens]
    weights = np.asarray(case.routing.topk_weights)[tokens].astype(np.float64)
    if case.problem.experts.weight_placement == "early":
        weights = np.ones_like(weights)
    terms = np.where((at >= 0)[:, :, None], weights[:, :, None] * rows[np.maximum(at, 0)].astype(np.float64), 0.0)
    value, squares = terms.sum(1), (terms**2).sum(1)
    K = case.problem.K
    variance = noise.rounded("weight", np.sqrt(squares)) + noise.rounded("weighted_y", np.sqrt(squares))
    variance = variance + noise.partial_sums(K, value, squares) + noise.rounded("y", value)
    variance = variance + noise.per_square(K) * squares + noise.per_total(K) * value**2
    return judge("y", got[tokens], Judged(value, np.sqrt(variance)), dtype=case.problem.dtype, token=tokens)


def _sample(ends: np.ndarray, seed: int) -> np.ndarray:
    """Row numbers below ends[-1]: all when few, else each group's first and last and a random rest."""
    total = int(ends[-1]) if len(ends) else 0
    if total <= SAMPLE:
        return np.arange(total)
    starts = np.concatenate([[0], ends[:-1]])
    busy = ends > starts
    edges = np.concatenate([starts[busy], ends[busy] - 1])
    rest = np.random.default_rng(seed).choice(total, SAMPLE, replace=False)
    return np.unique(np.concatenate([edges, rest]))
