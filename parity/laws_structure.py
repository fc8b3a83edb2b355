"""Laws of where rows go: exact payloads, closed forms, no rounding and so no tolerance."""

from __future__ import annotations

import functools
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
from .law import law
from .law_tools import dyadic_weights, expect, real_rows, storage, with_routing
from .problem import Problem, Routing

ALIGNMENTS = (1, 8, 128)
"""No alignment, the smallest row tile in use, and Transformer Engine's."""


@law("rows-once", stage="permute", judged_by="bits", faults="ACDJ", needs={"no mesh"}, large=True)
def rows_once(implementation: Implementation, case: Case) -> list[Finding]:
    """Permutation puts each routed row exactly once into its expert's aligned group, in token order, and counts it."""
    findings: list[Finding] = []
    x = _signature(case.problem, case.seed)
    for align in ALIGNMENTS:
        rows, sizes, places = permuted(implementation, case.replace(x=x), align)
        findings += _rows_once(case, np.asarray(x), rows, sizes, places, align)
    return findings


@law("round-trip", stage="unpermute", judged_by="bits", faults="BCDEF", needs={"no mesh"}, large=True)
def round_trip(implementation: Implementation, case: Case) -> list[Finding]:
    """Identity experts give back every token times the sum of its weights (late) or its number of experts (early)."""
    problem, ids = case.problem, real_rows(case)
    weights = _payload_weights(ids)
    if problem.experts.weight_placement == "early":
        factor = np.minimum((ids >= 0).sum(1), 255).astype(np.float64)
        if problem.K > 255:
            return []  # a sum of more than 255 equal rows is not exact in bfloat16
    else:
        factor = weights.astype(np.float64).sum(1)
    x = np.asarray(_signature(problem, case.seed))
    made = with_routing(case, ids, weights)
    rows, _, places = permuted(implementation, made.replace(x=jnp.asarray(x)), 1)
    y = running.call(
        implementation, "unpermute", _unpermute, jnp.asarray(rows), made.routing, jnp.asarray(places), problem
    )
    running.check_kind("unpermute", "y", y, (problem.T, problem.D), problem.dtype)
    want = storage(problem, x.astype(np.float64) * factor[:, None])
    return [_token_bits("y", np.asarray(y), np.asarray(want))]


@law(
    "exact-experts",
    stage="experts",
    judged_by="bits",
    faults="BCDEFJ",
    needs={"gated", "no clamp", "no biases", "unquantised", "dropless"},
    large=True,
)
def exact_experts(implementation: Implementation, case: Case) -> list[Finding]:
    """Experts that only flip signs give, exactly, each token's signs weighted by the powers of two of its own slots."""
    made, want = sign_experts(case)
    got = running.experts(implementation, made, grad=False)
    return [_token_bits("y", got["y"], want)]


@law(
    "exact-weight-gradient",
    stage="experts",
    judged_by="bits",
    faults="EH",
    needs={"gated", "no clamp", "no biases", "unquantised", "dropless", "gradients"},
)
def exact_weight_gradient(implementation: Implementation, case: Case) -> list[Finding]:
    """With sign-flipping experts the gradient of each slot's weight is exactly <dy, that expert's output>."""
    made, _ = sign_experts(case)
    got = running.experts(implementation, made)
    ids = real_rows(case)
    outputs = _flipped(case, ids)
    dy = np.asarray(made.cotangent, np.float64)
    want = np.einsum("td,tkd->tk", dy, outputs).astype(np.float32)
    want = np.where(ids < 0, np.float32(0), want)
    return [same_bits("topk_weights", got["topk_weights"], want)]


@law("nowhere", stage="experts", judged_by="bits", faults="BDJ", needs={"no-expert", "no biases"})
def nowhere(implementation: Implementation, case: Case) -> list[Finding]:
    """A token whose slots are all -1 gives a row of exact zeros, whatever its weights say."""
    ids, weights = real_rows(case).copy(), np.asarray(case.routing.topk_weights).copy()
    lost = np.arange(case.problem.T) % 3 == 0
    ids[lost] = -1
    weights[lost] = 3.0
    got = running.experts(implementation, with_routing(case, ids, weights), grad=False)["y"]
    return [same_bits("y", got[lost], np.zeros_like(got[lost]))]


def sign_experts(case: Case) -> tuple[Case, np.ndarray]:
    """The case with experts that flip signs, powers of two as weights, and the exact y.

    Column 0 of x is 1 and drives every gate to 32, where each activation is the identity to the last bit of float32
    (its square for relu2); up carries the other columns. So h holds x exactly, wo_e is a diagonal of signs, and every
    product and sum on the way is exact in each dtype.
    """
    problem, params = case.problem, case.params
    n = min(problem.F, problem.D - 1)
    open_gate = 32.0**2 if problem.experts.activation == "relu2" else 32.0
    wi = np.zeros((problem.E, problem.D, 2 * problem.F))
    wo = np.zeros((problem.E, problem.F, problem.D))
    feature = np.arange(n)
    wi[:, 0, : problem.F] = 32.0
    wi[:, 1 + feature, problem.F + feature] = 1 / open_gate
    wo[:, feature, 1 + feature] = _signs(case, "wo", (problem.E, n))
    x = _signs(case, "x", (problem.T, problem.D))
    x[:, 0] = 1.0
    ids = real_rows(case)
    weights = _payload_weights(ids)
    made = with_routing(case, ids, weights).replace(
        x=storage(problem, x),
        params=params.replace(wi=storage(problem, wi), wo=storage(problem, wo)),
        cotangent=storage(problem, _signs(case, "dy", (problem.T, problem.D))),
    )
    y = np.einsum("tk,tkd->td", weights.astype(np.float64), _flipped(case, ids))
    return made, np.asarray(storage(problem, y))


def permuted(implementation: Implementation, case: Case, align: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The implementation's own permutation of x, checked for kind: rows, group_sizes, row_of_slot."""
    problem = case.problem
    rows, sizes, places = running.call(implementation, "permute", _permute_at(align), case.x, case.routing, problem)
    running.check_kind("permute", "group_sizes", sizes, (problem.E,), np.int32)
    running.check_kind("permute", "row_of_slot", places, (problem.T, problem.K), np.int32)
    running.check_kind("permute", "rows", rows, (rows.shape[0], problem.D), problem.dtype)
    return np.asarray(rows), np.asarray(sizes), np.asarray(places)


def _rows_once(
    case: Case, x: np.ndarray, rows: np.ndarray, sizes: np.ndarray, places: np.ndarray, align: int
) -> list[Finding]:
    problem, ids = case.problem, real_rows(case)
    real = ids >= 0
    counts = np.bincount(ids[real], minlength=problem.E).astype(np.int32)
    findings = [same_bits("group_sizes", sizes, counts)]
    start = np.concatenate([[0], np.cumsum(-(-counts // align) * align)[:-1]])
    # The exact place follows from the law: token order inside an expert, groups at aligned starts.
    want = np.full(ids.shape, -1, np.int32)
    tokens, slots = np.nonzero(real)
    order = np.argsort(ids[tokens, slots] * max(problem.T, 1) + tokens, kind="stable")
    sorted_ids = ids[tokens, slots][order]
    first = np.concatenate([[0], np.cumsum(counts)[:-1]])
    want[tokens[order], slots[order]] = start[sorted_ids] + np.arange(len(order)) - first[sorted_ids]
    findings.append(same_bits("row_of_slot", places, want))
    in_range = want.max(initial=-1) < rows.shape[0]
    findings.append(
        expect("rows", in_range, f"permute gives {rows.shape[0]} rows; this routing needs {want.max(initial=-1) + 1}")
    )
    if in_range:
        findings.append(same_bits("rows", rows[want[real]], x[tokens]))
    return findings


def _token_bits(tensor: str, got: np.ndarray, want: np.ndarray) -> Finding:
    # Adding 0 turns -0 into +0: the sign of an exact zero says nothing about where a row went.
    return same_bits(tensor, got + np.zeros_like(got), want + np.zeros_like(want))


def _flipped(case: Case, ids: np.ndarray) -> np.ndarray:
    """[T, K, D]: each slot's expert applied to its token; 0 where there is no expert."""
    problem = case.problem
    n = min(problem.F, problem.D - 1)
    signs = np.zeros((problem.E, problem.D))
    signs[:, 1 : 1 + n] = _signs(case, "wo", (problem.E, n))
    x = _signs(case, "x", (problem.T, problem.D))
    return np.where((ids >= 0)[..., None], signs[ids] * x[:, None, :], 0.0)


def _payload_weights(ids: np.ndarray) -> np.ndarray:
    # Beyond 16 slots a sum of four binary levels may need more than bfloat16's 8 bits.
    return np.where(np.arange(ids.shape[1]) < 16, dyadic_weights(ids), np.float32(0))


def _signature(problem: Problem, seed: int) -> jax.Array:
    """Rows of signed powers of two: a token is told from every other one, and small multiples stay exact."""
    rng = stream(seed, "signature")
    shape = (problem.T, problem.D)
    return storage(problem, (rng.integers(0, 2, shape) * 2 - 1) * 2.0 ** rng.integers(0, 4, shape))


def _signs(case: Case, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return stream(case.seed, f"signs {name}").integers(0, 2, shape) * 2.0 - 1.0


@functools.cache
def _permute_at(align: int) -> Callable[..., Any]:
    def permute(fn: Callable[..., Any], x: jax.Array, routing: Routing, problem: Problem) -> Any:
        return fn(problem, x, routing, align=align)

    return permute


def _unpermute(fn, rows, routing, places, problem):
    return fn(problem, rows, routing, places)


LAWS = (rows_once, round_trip, exact_experts, exact_weight_gradient, nowhere)
__all__ = ["LAWS", "permuted", "sign_experts"]
