"""Auxiliary losses: what keeps a router from collapsing onto few experts, without coefficients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..parity.problem import Losses, Problem
from .routing import SCORES

SEGMENTS = 128
"""Segments summed in one product: its operand of 0 and 1 has so many rows of T."""


def losses(
    problem: Problem,
    logits: Float[Array, "T E"],
    topk_idx: Int[Array, "T K"],
    *,
    mask: Bool[Array, " T"] | None = None,
    segment_ids: Int[Array, " T"] | None = None,
) -> Losses:
    """Measures balance over the batch, balance inside each segment, and the size of the logits.

    With c_e the real tokens' counts, P_te the probabilities and n the number of real tokens:
    balance = E / (K n^2) * sum_e c_e * sum_t P_te, 1 at perfect balance, tending to E/K at collapse onto K experts;
    sequence = the same inside each segment with a real token, averaged over those segments (no ids: one segment);
    z = mean_t logsumexp(logits_t)^2.

    P is over all E experts, never over the chosen ones: a never-chosen expert's logit has a gradient too. Counts have
    no gradient. No real token gives 0. Accumulates in float32.
    """
    real = jnp.ones(problem.T, bool) if mask is None else mask
    logits = jnp.where(real[:, None], logits, 0.0)
    prob = jnp.where(real[:, None], probabilities(problem, logits), 0.0)
    chosen = jnp.where(real[:, None] & (topk_idx >= 0), topk_idx, problem.E)

    def balance(segment: Array, segments: int) -> Array:
        counts = jnp.zeros((segments, problem.E), jnp.float32).at[segment[:, None], chosen].add(1.0, mode="drop")
        probs = _segment_sum(prob, segment, segments)
        n = _segment_sum(real.astype(jnp.float32)[:, None], segment, segments)[:, 0]
        each = problem.E / problem.K * jnp.sum(counts * probs, axis=1) / jnp.square(jnp.maximum(n, 1.0))
        return each.sum() / jnp.maximum(jnp.sum(n > 0, dtype=jnp.float32), 1.0)

    whole = balance(jnp.zeros(problem.T, jnp.int32), 1)
    z = jnp.square(jax.nn.logsumexp(logits, axis=1))
    return Losses(
        balance=whole,
        sequence=whole if segment_ids is None else balance(_number(segment_ids), problem.T),
        z=jnp.where(real, z, 0.0).sum() / jnp.maximum(real.sum(dtype=jnp.float32), 1.0),
    )


def probabilities(problem: Problem, logits: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Turns logits into P_te over all experts: softmax, or sigmoid and sqrtsoftplus scores divided by their sum."""
    score = SCORES[problem.router.score](logits)
    return score if problem.router.score == "softmax" else score / score.sum(axis=1, keepdims=True)


def _segment_sum(values: Float[Array, "T N"], segment: Int[Array, " T"], segments: int) -> Float[Array, "segments N"]:
    """values[t] added up at segment[t], one product with 0 and 1 for each SEGMENTS segments.

    jax.ops.segment_sum adds with atomics on a GPU: the loss, and what a rank makes of it, has other bits each time.
    """
    size, N = min(segments, SEGMENTS), values.shape[1]

    @jax.checkpoint
    def block(first: Array) -> Array:
        member = segment == (first + jnp.arange(size, dtype=segment.dtype))[:, None]
        return jnp.matmul(member.astype(jnp.float32), values, precision=jax.lax.Precision.HIGHEST)

    if segments <= SEGMENTS:
        return block(jnp.zeros((), segment.dtype))
    first = jnp.arange(0, segments, size, dtype=segment.dtype)
    return jax.lax.map(block, first).reshape(len(first) * size, N)[:segments]


def _number(segment_ids: Int[Array, " T"]) -> Int[Array, " T"]:
    """Renames arbitrary ids to 0..T-1, so that the number of segments needs no static bound but T."""
    return jnp.unique(segment_ids, return_inverse=True, size=segment_ids.shape[0])[1]
