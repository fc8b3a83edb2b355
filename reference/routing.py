"""How tokens choose experts: logits, scores, a ranking that may be biased and limited to groups, and the weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..parity.problem import Params, Problem, Routing


def route(problem: Problem, params: Params, x: Float[Array, "T D"]) -> Routing:
    """Chooses each token's K best experts; a weight is the chosen one's own score, whatever steered the choice.

    s = score(logits), or the logits themselves for a softmax after the choice
    idx = top-K of s + expert_bias, over the experts of the eligible groups
    w = s[idx] (after: softmax over s[idx]), then w / (sum w + norm_eps) if normalised, then w * scaling always

    Ties go to the lower index, among groups too. A NaN row still gets K distinct ids in range; its NaN stays in its own
    weights. All in float32. The choice has no gradient: expert_bias's is exactly 0.
    """
    router = problem.router
    score = logits(problem, params, x)
    if router.softmax_order == "before":
        score = SCORES[router.score](score)
    topk_idx = choose(problem, params, score)
    weights = jnp.take_along_axis(score, topk_idx, axis=1)
    if router.softmax_order == "after":
        weights = jax.nn.softmax(weights, axis=1)
    if router.normalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + router.norm_eps)
    return Routing(topk_idx, weights * router.scaling)


def logits(problem: Problem, params: Params, x: Float[Array, "T D"]) -> Float[Array, "T E"]:
    """Scores tokens against experts: x @ gate_kernel + gate_bias, in float32.

    float32: the operands are widened first and the product runs at the highest precision. activation: the product
    of the operands as they are, accumulated in float32 and, bias included, rounded once to x's dtype.
    """
    narrow = problem.router.logits_dtype == "activation"
    a, b = (x, params.gate_kernel) if narrow else (x.astype(jnp.float32), params.gate_kernel.astype(jnp.float32))
    z = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    if problem.router.gate_bias:
        z = z + params.need("gate_bias").astype(jnp.float32)[None, :]
    if narrow:
        # The barrier keeps compilers from cancelling the two conversions: excess precision would change the choice.
        z = jax.lax.optimization_barrier(z.astype(x.dtype)).astype(jnp.float32)
    return z


def choose(problem: Problem, params: Params, score: Float[Array, "T E"]) -> Int[Array, "T K"]:
    """Ranks experts by score + expert_bias, those outside the eligible groups at -inf, and keeps the K best.

    Not 0 instead of -inf: a negative bias would rank the excluded above the eligible.
    """
    ranked = jax.lax.stop_gradient(score)
    if problem.router.selection_bias:
        ranked = ranked + jax.lax.stop_gradient(params.need("expert_bias")).astype(jnp.float32)[None, :]
    ranked = jnp.where(ranked == 0.0, 0.0, ranked)  # top_k orders -0.0 below 0.0, and they tie
    if problem.router.groups > 1:
        ranked = jnp.where(_eligible(problem, ranked), ranked, -jnp.inf)
    return jax.lax.top_k(ranked, problem.K)[1].astype(jnp.int32)


def update_bias(
    expert_bias: Float[Array, " E"], group_sizes: Int[Array, " E"], rate: float | Float[Array, ""]
) -> Float[Array, " E"]:
    """Moves busy experts down and idle ones up, without a loss: b_e + rate * sign(mean(c) - c_e).

    The sign is taken of sum(c) - E * c_e, in integers, so that an expert at the mean stays exactly where it is.
    """
    sizes = group_sizes.astype(jnp.int32)
    return expert_bias + rate * jnp.sign(sizes.sum(dtype=jnp.int32) - sizes.shape[0] * sizes).astype(expert_bias.dtype)


def _eligible(problem: Problem, ranked: Float[Array, "T E"]) -> Array:
    """Marks the experts of each token's best groups; a group's score is the sum of its group_score_topk best."""
    router, (tokens, experts) = problem.router, ranked.shape
    by_group = ranked.reshape(tokens, router.groups, experts // router.groups)
    best = jax.lax.top_k(by_group, router.group_score_topk)[0].sum(axis=2)
    kept = jax.lax.top_k(best, router.group_topk)[1]
    eligible = (kept[:, :, None] == jnp.arange(router.groups, dtype=kept.dtype)[None, None, :]).any(axis=1)
    return jnp.repeat(eligible, experts // router.groups, axis=1)


def _sqrtsoftplus(z: Array) -> Array:
    # Far below 0 softplus(z) = exp(z) underflows, and sqrt's slope at 0 is infinite: take exp(z/2) there instead.
    low = z < -30.0
    return jnp.where(low, jnp.exp(jnp.where(low, z, 0.0) / 2), jnp.sqrt(jax.nn.softplus(jnp.where(low, 0.0, z))))


SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "sqrtsoftplus": _sqrtsoftplus}
"""Logits [T, E] to scores [T, E], by name; softmax is over the last axis."""
