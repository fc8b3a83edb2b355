"""The whole layer wired for speed: one set of logits, one routing, six grouped products, losses beside them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...parity.problem import Losses, Output, Params, Problem, Routing
from . import rows as move
from .experts import planned_experts
from .hidden import hidden
from .routing import SCORES, choose, choose_and_place, logits


def layer(
    problem: Problem,
    params: Params,
    x: Float[Array, "T D"],
    *,
    mask: Bool[Array, " T"] | None = None,
    segment_ids: Int[Array, " T"] | None = None,
) -> Output:
    """y_t = sum_k w_tk * FFN_{idx_tk}(x_t) + FFN_shared(x_t), with the routing, its counts and the auxiliary losses.

    A masked token may hold anything, NaN included: it is routed nowhere, counts in no loss and no group size, its row of
    y is exactly 0, and so is its gradient.
    """
    if mask is not None:
        x = jnp.where(mask[:, None], x, 0)
    x, z = logits(problem, params, x)
    if mask is None:
        routing, found = choose_and_place(problem, params, z)
    else:
        routing, keep = choose(problem, params, z), mask[:, None]
        routing = Routing(jnp.where(keep, routing.topk_idx, -1), jnp.where(keep, routing.topk_weights, 0.0))
        found = move.plan(routing.topk_idx, problem.E)
    y = planned_experts(problem, params, x, routing, found) if problem.T else x
    if problem.experts.shared_F:
        shared = _shared(problem, params, x)
        shared = shared if mask is None else jnp.where(mask[:, None], shared, 0)
        y = (y.astype(jnp.float32) + shared.astype(jnp.float32)).astype(x.dtype)
    return Output(y, _losses(problem, z, routing, found, mask, segment_ids), routing, found.group_sizes)


def _shared(problem: Problem, params: Params, x: Array) -> Array:
    assert params.shared_wi is not None and params.shared_wo is not None
    pre = jnp.matmul(x, params.shared_wi, preferred_element_type=jnp.float32).astype(x.dtype)
    return jnp.matmul(hidden(problem.experts, pre), params.shared_wo, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


def _losses(
    problem: Problem, z: Array, routing: Routing, found: move.Plan, mask: Array | None, segment_ids: Array | None
) -> Losses:
    """balance = E / (K n^2) * sum_e c_e * sum_t P_te over n real tokens; sequence: its mean over segments; z: logsumexp^2."""
    real = jnp.ones(problem.T, bool) if mask is None else mask
    score = SCORES[problem.router.score](z)
    prob = score if problem.router.score == "softmax" else score / score.sum(axis=1, keepdims=True)
    prob = jnp.where(real[:, None], prob, 0.0)
    n = jnp.maximum(real.sum(dtype=jnp.int32), 1).astype(jnp.float32)

    def balance(counts: Array, probs: Array, n: Array) -> Array:
        return problem.E / problem.K * jnp.sum(counts * probs, axis=-1) / jnp.square(jnp.maximum(n, 1.0))

    whole = balance(found.group_sizes.astype(jnp.float32), prob.sum(axis=0), n)
    sequence = whole
    if segment_ids is not None:
        chosen = move.dense(jnp.ones(routing.topk_idx.shape, jnp.float32), routing.topk_idx, problem.E)
        segment = jnp.unique(segment_ids, return_inverse=True, size=problem.T)[1]
        sums = [jax.ops.segment_sum(a, segment, problem.T) for a in (chosen, prob, real[:, None].astype(jnp.float32))]
        size = sums[2][:, 0]
        sequence = balance(sums[0], sums[1], size).sum() / jnp.maximum((size > 0).astype(jnp.float32).sum(), 1.0)
    squares = jnp.square(jax.nn.logsumexp(z, axis=1))
    return Losses(balance=whole, sequence=sequence, z=jnp.where(real, squares, 0.0).sum() / n)
