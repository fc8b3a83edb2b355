"""Samples of a case, where the device oracle is held to the NumPy one: what keeps the judge honest at full width."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ..parity.compare import Finding, judge
from ..parity.interface import Judged
from ..parity.problem import Params, Problem, Router, Routing
from ..parity.tolerances import unit_roundoff
from . import oracle, oracle_device

_SHRINK = np.finfo(np.float64).eps / 2 / unit_roundoff("float32")
"""float64 is one more honest way to compute a layer; its gauge is smaller by the ratio of the roundoffs."""


def spot_check(
    problem: Problem,
    params: Params,
    x: Any,
    routing: Routing,
    cotangent: Any,
    *,
    tokens: int = 64,
    columns: int = 8,
    seed: int = 0,
    pieces: Iterable[oracle_device.Piece] | None = None,
) -> list[Finding]:
    """`oracle` recomputes y, dx and dweight of some tokens, and kernel gradients of the busiest, an idle and a random expert.

    A hidden unit's gradients do not depend on the other units, so `columns` of the F say what all would. `pieces` are
    those of `oracle_device.stream_experts` on the same case, by default computed here.
    """
    if pieces is None:
        pieces = oracle_device.stream_experts(problem, params, x, routing, cotangent)
    rng = np.random.default_rng(seed)
    ids = np.asarray(routing.topk_idx)
    chosen = _experts(problem, ids, rng)
    units = np.sort(rng.choice(problem.F, min(columns, problem.F), replace=False))
    rows = np.sort(rng.choice(problem.T, min(tokens, problem.T), replace=False))
    want = {e: _expert(problem, params, x, routing, cotangent, e, units) for e in chosen}
    few = problem.replace(T=len(rows), mesh=None)
    part = Routing(ids[rows], np.asarray(routing.topk_weights)[rows])  # type: ignore[arg-type]
    some = oracle.judge_experts(few, params, np.asarray(x)[rows], part, np.asarray(cotangent)[rows], kernels=False)
    found = []
    for name, e, judged in pieces:
        value = np.asarray(judged.value)
        if e is None:
            found.append(_compare(name, value[rows], some[name]))
        elif e in want:
            finding = _compare(name, _sample(problem, name, value, units), want[e][name])
            found.append(finding.replace(expert=e))
    return found


def _experts(problem: Problem, ids: np.ndarray, rng: np.random.Generator) -> list[int]:
    counts = np.bincount(ids[ids >= 0], minlength=problem.E)
    idle, busy = np.flatnonzero(counts == 0), np.flatnonzero(counts)
    picked = [int(counts.argmax()), *idle[:1].tolist()]
    return sorted({*picked, *([int(rng.choice(busy))] if len(busy) else [])})


def _expert(
    problem: Problem, params: Params, x: Any, routing: Routing, cotangent: Any, e: int, units: np.ndarray
) -> dict[str, Judged]:
    """One expert alone, cut down to some hidden units: its kernels' gradients there."""
    t, k = np.nonzero(np.asarray(routing.topk_idx) == e)
    alone = problem.replace(
        T=len(t), K=1, E=1, F=len(units), router=Router(), mesh=None, capacity_factor=None, experts_shared_F=0
    )
    leaves = {
        name: _sample(problem, name, np.asarray(leaf[e]), units)[None]
        for name in oracle_device.PER_EXPERT
        if (leaf := getattr(params, name)) is not None
    }
    own = Params(gate_kernel=np.zeros((problem.D, 1)), **leaves)  # type: ignore[arg-type]
    weights = np.asarray(routing.topk_weights)[t, k][:, None]
    only = Routing(np.zeros((len(t), 1), np.int32), weights)  # type: ignore[arg-type]
    judged = oracle.judge_experts(alone, own, np.asarray(x)[t], only, np.asarray(cotangent)[t])
    return {name: Judged(judged[name].value[0], judged[name].gauge[0]) for name in leaves}


def _sample(problem: Problem, name: str, leaf: np.ndarray, units: np.ndarray) -> np.ndarray:
    if name == "wo":
        return leaf[units]
    if name == "wo_bias":
        return leaf
    return leaf[..., np.concatenate([units, units + problem.F]) if problem.experts.gated else units]


def _compare(name: str, got: np.ndarray, want: Judged) -> Finding:
    return judge(name, got, Judged(want.value, _SHRINK * want.gauge), dtype=np.float64, empty_ok=True)
