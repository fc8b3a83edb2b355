"""An exact router: which experts float64 arithmetic chooses, and routings that a router can and must choose."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float, Int

from .draws import NUMPY_DTYPES, stream
from .problem import Params, Problem


def choose(problem: Problem, params: Params, x: Float[Array | np.ndarray, "T D"]) -> Int[np.ndarray, "T K"]:
    """The experts that an exact router chooses, best first: float64, lower index wins ties, NaN ranks last."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf in x are the caller's to give
        logits = exact_logits(np.asarray(x), np.asarray(params.gate_kernel), params.gate_bias)
        if problem.router.logits_dtype == "activation":
            logits = logits.astype(NUMPY_DTYPES[problem.dtype]).astype(np.float64)
        ranked = biased_scores(problem, logits, params.expert_bias)
        ranked = np.where(eligible(problem, ranked), ranked, -np.inf)
    return np.argsort(-ranked, axis=1, kind="stable")[:, : problem.K].astype(np.int32)


def within_groups(problem: Problem, topk_idx: Int[np.ndarray, "T K"], seed: int = 0) -> Int[np.ndarray, "T K"]:
    """Ids that a group-limited router can choose: each token keeps its experts in the `group_topk` groups it hits most.

    Experts of other groups are replaced by further ones of the kept groups, in proportion to the batch's loads, so
    that the skew stays. Without groups the ids come back as they are.
    """
    r, (T, K) = problem.router, topk_idx.shape
    if r.groups == 1 or T == 0:
        return topk_idx
    size = problem.E // r.groups
    chosen = np.zeros((T, problem.E), bool)
    np.put_along_axis(chosen, topk_idx, True, axis=1)
    hits = chosen.reshape(T, r.groups, size).sum(axis=2)
    # Of groups that are hit equally often the busier ones stay: the lower index would add a skew of its own.
    kept = np.argsort(-hits - hits.sum(axis=0) / (hits.sum() + 1), axis=1, kind="stable")[:, : r.group_topk]
    stays = np.zeros((T, r.groups), bool)
    np.put_along_axis(stays, kept, True, axis=1)
    stays = np.repeat(stays, size, axis=1)
    # The K largest keys: the token's own experts first, then draws without replacement.
    keys = np.log(chosen.sum(axis=0) + 1e-3) + stream(seed, "within groups").gumbel(size=chosen.shape)
    keys = np.where(stays, np.where(chosen, np.inf, keys), -np.inf)
    return np.argsort(-keys, axis=1, kind="stable")[:, :K].astype(np.int32)


def tie_pairs(params: Params) -> Params:
    """Parameters in which experts 2j and 2j+1 have the same gate column and router biases, so that they always tie."""
    first = np.arange(params.wi.shape[0]) // 2 * 2

    def paired(leaf: Array | None) -> Array | None:
        return None if leaf is None else leaf[..., first]

    return params.replace(
        gate_kernel=params.gate_kernel[:, first],
        gate_bias=paired(params.gate_bias),
        expert_bias=paired(params.expert_bias),
    )


def exact_logits(x: np.ndarray, kernel: np.ndarray, gate_bias: Array | np.ndarray | None) -> np.ndarray:
    """Logits in float64, gate bias included, before any rounding to the activation dtype."""
    logits = x.astype(np.float64) @ kernel.astype(np.float64)
    return logits if gate_bias is None else logits + np.asarray(gate_bias).astype(np.float64)


def exact_scores(problem: Problem, logits: np.ndarray) -> np.ndarray:
    """Scores in float64; the logits themselves where softmax comes after the choice."""
    r = problem.router
    if r.softmax_order == "after":
        return logits
    if r.score == "softmax":
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        return shifted / shifted.sum(axis=1, keepdims=True)
    if r.score == "sigmoid":
        return 0.5 * (1 + np.tanh(logits / 2))
    return np.sqrt(np.logaddexp(0, logits))


def biased_scores(problem: Problem, logits: np.ndarray, expert_bias: Array | np.ndarray | None) -> np.ndarray:
    """Scores with the selection bias: what is ranked, in groups too."""
    scores = exact_scores(problem, logits)
    return scores if expert_bias is None else scores + np.asarray(expert_bias).astype(np.float64)


def eligible(problem: Problem, biased: np.ndarray) -> np.ndarray:
    """Which experts stay: those of the `group_topk` best groups, lower index first in a tie."""
    r = problem.router
    if r.groups == 1:
        return np.ones(biased.shape, bool)
    size = problem.E // r.groups
    grouped = np.sort(biased.reshape(-1, r.groups, size), axis=2)
    group_scores = grouped[:, :, size - r.group_score_topk :].sum(axis=2)
    kept = np.argsort(-group_scores, axis=1, kind="stable")[:, : r.group_topk]
    stays = np.zeros(group_scores.shape, bool)
    np.put_along_axis(stays, kept, True, axis=1)
    return np.repeat(stays, size, axis=1)
