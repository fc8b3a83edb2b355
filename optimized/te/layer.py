"""The whole layer wired for speed: one set of logits, one routing, six grouped products, losses beside them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...parity.problem import Losses, Output, Params, Problem, Routing
from . import rows as move
from .experts import backward, forward
from .hidden import hidden
from .quantised import quantised_experts
from .routing import SCORES, gate_gradients, gate_logits, select_and_place, weights_at

SEGMENTS = 1024
"""Segments that are summed at a time: a matrix of SEGMENTS x T numbers."""


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
    given = (params.gate_kernel, params.gate_bias, params.expert_bias)
    kernels = (params.wi, params.wo, params.wi_bias, params.wo_bias)
    if problem.T:
        if problem.recipe == "none":
            found: Any = _routed(problem, given, kernels, x, mask)
        else:
            found = _routed_quantised(problem, params, x, mask)
        y, z, weights, topk_idx, sizes = found
    else:
        y, z = x, gate_logits(problem, x, params.gate_kernel, params.gate_bias)
        topk_idx, sizes = jnp.zeros((0, problem.K), jnp.int32), jnp.zeros(problem.E, jnp.int32)
        weights = jnp.zeros((0, problem.K), jnp.float32)
    if problem.experts.shared_F:
        shared = _shared(problem, params, x)
        shared = shared if mask is None else jnp.where(mask[:, None], shared, 0)
        y = (y.astype(jnp.float32) + shared.astype(jnp.float32)).astype(x.dtype)
    routing = Routing(topk_idx, weights)
    return Output(y, _losses(problem, z, topk_idx, sizes, mask, segment_ids), routing, sizes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(problem: Problem, given: tuple, kernels: tuple, x: Array, mask: Array | None) -> tuple:
    """(y, logits, weights, topk_idx, group_sizes) in one differentiable step, so that x's two gradients meet in one pass."""
    return _forward(problem, given, kernels, x, mask)[0]


def _forward(problem: Problem, given: tuple, kernels: tuple, x: Array, mask: Array | None) -> tuple[tuple, tuple]:
    gate_kernel, gate_bias, expert_bias = given
    z = gate_logits(problem, x, gate_kernel, gate_bias)
    topk_idx, found = select_and_place(problem, expert_bias, z)
    weights = weights_at(problem, z, topk_idx)
    if mask is not None:
        topk_idx, weights = jnp.where(mask[:, None], topk_idx, -1), jnp.where(mask[:, None], weights, 0.0)
        found = move.plan(topk_idx, problem.E)
    y, saved = forward(problem, kernels, x, weights, topk_idx, found)
    return (y, z, weights, topk_idx, found.group_sizes), (given, saved, z, mask)


def _backward(problem: Problem, kept: tuple, d: tuple) -> tuple:
    (gate_kernel, gate_bias, expert_bias), saved, z, mask = kept
    dy, dz, d_weights = d[:3]
    d_kernels, d_rows, through_experts = backward(problem, saved, dy)
    d_weights = d_weights + through_experts
    if mask is not None:
        d_weights = jnp.where(mask[:, None], d_weights, 0.0)
    _, pull = jax.vjp(lambda z: weights_at(problem, z, jnp.maximum(saved.topk_idx, 0)), z)
    dz = dz + pull(d_weights)[0]
    through_gate, d_gate = gate_gradients(saved.x, gate_kernel, dz)
    dx = move.sum_rows(d_rows, saved.found.row_of_slot, bias=through_gate)
    d_bias = None if gate_bias is None else dz.sum(axis=0).astype(gate_bias.dtype)
    steered = None if expert_bias is None else jnp.zeros_like(expert_bias)
    return (d_gate, d_bias, steered), d_kernels, dx, None


_routed.defvjp(_forward, _backward)


def _routed_quantised(problem: Problem, params: Params, x: Array, mask: Array | None) -> tuple:
    """The same five, differentiable piece by piece: what quantising costs hides what one step would save."""
    z = gate_logits(problem, x, params.gate_kernel, params.gate_bias)
    topk_idx, found = select_and_place(problem, params.expert_bias, z)
    weights, sizes = weights_at(problem, z, topk_idx), found.group_sizes
    if mask is not None:
        topk_idx, weights = jnp.where(mask[:, None], topk_idx, -1), jnp.where(mask[:, None], weights, 0.0)
        sizes = move.plan(topk_idx, problem.E).group_sizes
    return quantised_experts(problem, params, x, Routing(topk_idx, weights)), z, weights, topk_idx, sizes


def _shared(problem: Problem, params: Params, x: Array) -> Array:
    assert params.shared_wi is not None and params.shared_wo is not None
    pre = jnp.matmul(x, params.shared_wi, preferred_element_type=jnp.float32).astype(x.dtype)
    return jnp.matmul(hidden(problem.experts, pre), params.shared_wo, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


def _losses(
    problem: Problem, z: Array, topk_idx: Array, sizes: Array, mask: Array | None, segment_ids: Array | None
) -> Losses:
    """balance = E / (K n^2) * sum_e c_e * sum_t P_te over n real tokens; sequence: its mean over segments; z: logsumexp^2."""
    real = jnp.ones(problem.T, bool) if mask is None else mask
    score = SCORES[problem.router.score](z)
    prob = score if problem.router.score == "softmax" else score / score.sum(axis=1, keepdims=True)
    prob = jnp.where(real[:, None], prob, 0.0)
    n = jnp.maximum(real.sum(dtype=jnp.int32), 1).astype(jnp.float32)

    def balance(counts: Array, probs: Array, n: Array) -> Array:
        return problem.E / problem.K * jnp.sum(counts * probs, axis=-1) / jnp.square(jnp.maximum(n, 1.0))

    whole = balance(sizes.astype(jnp.float32), prob.sum(axis=0), n)
    sequence = whole
    if segment_ids is not None:
        chosen = move.dense(jnp.ones(topk_idx.shape, jnp.float32), topk_idx, problem.E)
        segment = jnp.unique(segment_ids, return_inverse=True, size=problem.T)[1]
        sums = [_segment_sum(a, segment) for a in (chosen, prob, real[:, None].astype(jnp.float32))]
        size = sums[2][:, 0]
        sequence = balance(sums[0], sums[1], size).sum() / jnp.maximum((size > 0).astype(jnp.float32).sum(), 1.0)
    squares = jnp.square(jax.nn.logsumexp(z, axis=1))
    return Losses(balance=whole, sequence=sequence, z=jnp.where(real, squares, 0.0).sum() / n)


def _segment_sum(values: Float[Array, "T N"], segment: Int[Array, " T"]) -> Float[Array, "T N"]:
    """values[t] added up at segment[t], as products with 0 and 1: jax.ops.segment_sum adds with atomics, whose bits vary."""
    T = len(segment)
    size = min(T, SEGMENTS)

    @jax.checkpoint
    def block(first: Array) -> Array:
        member = segment == (first + jnp.arange(size, dtype=segment.dtype))[:, None]
        return jnp.matmul(member.astype(jnp.float32), values, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.map(block, jnp.arange(0, T, size, dtype=segment.dtype)).reshape(-1, values.shape[1])[:T]
