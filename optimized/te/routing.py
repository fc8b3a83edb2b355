"""How tokens choose experts: TE's fused kernel ranks and selects; weights are its own where they are the contract's.

Two ways into the kernel. Where `support.fused_weights` says that TE computes this router, logits go in and weights come
out, forward and backward in one kernel each. Elsewhere the scores that are to be ranked go in, only the choice comes
out, and the weights of the chosen K are computed here.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...parity.interface import Unsupported
from ...parity.problem import Params, Problem, Routing
from . import kernels
from . import rows as move
from .support import fused_weights, selection

FAR = 1e30
"""Stands for infinite and undefined logits inside TE's kernel, whose comparisons would pick one expert twice for NaN."""


def route(problem: Problem, params: Params, x: Float[Array, "T D"]) -> Routing:
    """Chooses each token's K best experts; a weight is the chosen one's own score, whatever steered the choice.

    s = score(logits), or the logits themselves for a softmax after the choice
    idx = top-K of s + expert_bias, over the experts of the eligible groups; ascending ids
    w = s[idx] (after: softmax over s[idx]), then w / (sum w + norm_eps) if normalised, then w * scaling always

    Exact ties go to whichever expert TE's kernel meets first, the same on every call. A NaN row still gets K distinct
    ids in range; its weights are NaN. All in float32; expert_bias has gradient 0. Raises Unsupported for groups that TE
    does not rank as the contract does.
    """
    return choose_fused(problem, params, gate_logits(problem, x, params.gate_kernel, params.gate_bias))


def gate_logits(
    problem: Problem, x: Float[Array, "T D"], gate_kernel: Float[Array, "D E"], gate_bias: Float[Array, " E"] | None
) -> Float[Array, "T E"]:
    """x @ gate_kernel + gate_bias in float32, on tensor cores: products of two bfloat16 numbers are exact in float32.

    So widening the operands first would change no product. activation: rounded once to x's dtype, bias included.
    """
    z = _gate(x, gate_kernel)
    if gate_bias is not None:
        z = z + gate_bias.astype(jnp.float32)
    if problem.router.logits_dtype == "activation":
        z = jax.lax.reduce_precision(z, exponent_bits=8, mantissa_bits=7)
    return z


def choose_fused(problem: Problem, params: Params, z: Float[Array, "T E"]) -> Routing:
    """The routing at given logits, by TE's kernel."""
    router, K = problem.router, problem.K
    if not (able := selection(router, K, problem.E)):
        raise Unsupported(able.reason)
    if problem.T == 0:
        return Routing(jnp.zeros((0, K), jnp.int32), jnp.zeros((0, K), jnp.float32))
    safe = _finite(z)
    if fused_weights(router, K):
        pre = router.score != "softmax" or router.softmax_order == "before"
        probs, chosen = _fused(problem, safe, score=router.score, pre_softmax=pre, scaling=router.scaling)
        topk_idx = move.chosen_ids(chosen, K)
        return Routing(topk_idx, _undefined_stays(z, move.take(probs, topk_idx)))
    score, ranked = _scores(problem, params.expert_bias, safe)
    _, chosen = _fused(problem, ranked, score="softmax", pre_softmax=False, scaling=1.0)
    topk_idx = move.chosen_ids(chosen, K)
    return Routing(topk_idx, _undefined_stays(z, _weights(problem, score, topk_idx)))


def select_and_place(
    problem: Problem, expert_bias: Float[Array, " E"] | None, z: Float[Array, "T E"]
) -> tuple[Int[Array, "T K"], move.Plan]:
    """Each token's experts, and the rows of its slots: in one kernel where there are no groups, else by TE's.

    The kernel gives exact ties to the lower index; TE's to whichever expert it meets first.
    """
    _, ranked = _scores(problem, expert_bias, _finite(z))
    if kernels.usable() and problem.router.groups == 1 and kernels.can_select(*z.shape):
        topk_idx, rank, totals = kernels.select(ranked, problem.K)
        return topk_idx, move.place(topk_idx, rank, totals, kernels.block_of(*z.shape))
    if not (able := selection(problem.router, problem.K, problem.E)):
        raise Unsupported(able.reason)
    _, chosen = _fused(problem, ranked, score="softmax", pre_softmax=False, scaling=1.0)
    topk_idx = move.chosen_ids(chosen, problem.K)
    return topk_idx, move.plan(topk_idx, problem.E)


def weights_at(problem: Problem, z: Float[Array, "T E"], topk_idx: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """The weights of a choice, as a differentiable function of the logits; NaN in a row of logits stays in its weights."""
    score, _ = _scores(problem, None, _finite(z))
    return _undefined_stays(z, _weights(problem, score, topk_idx))


def _finite(z: Array) -> Array:
    return jnp.where(jnp.isnan(z), -FAR, jnp.clip(z, -FAR, FAR))


def _undefined_stays(z: Array, weights: Array) -> Array:
    return jnp.where(jnp.isnan(z).any(axis=1, keepdims=True), math.nan, weights)


def _scores(problem: Problem, expert_bias: Array | None, z: Array) -> tuple[Array, Array]:
    """(scores, what is ranked)."""
    score = z if problem.router.softmax_order == "after" else SCORES[problem.router.score](z)
    ranked = score if expert_bias is None else score + expert_bias
    return score, jax.lax.stop_gradient(ranked)


def _weights(problem: Problem, score: Array, topk_idx: Array) -> Array:
    router = problem.router
    weights = move.take(score, topk_idx)
    if router.softmax_order == "after":
        weights = jax.nn.softmax(weights, axis=1)
    if router.normalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + router.norm_eps)
    return weights * router.scaling


def _fused(
    problem: Problem, ranked: Float[Array, "T E"], *, score: str, pre_softmax: bool, scaling: float
) -> tuple[Float[Array, "T E"], Bool[Array, "T E"]]:
    """TE's kernel: (weights, choice), both laid out by expert. Without pre_softmax a softmax ranks what it is given."""
    from transformer_engine.jax.router import fused_topk_with_score_function

    grouped = problem.router.groups > 1
    return fused_topk_with_score_function(
        ranked,
        topk=problem.K,
        use_pre_softmax=pre_softmax,
        num_groups=problem.router.groups if grouped else -1,
        group_topk=problem.router.group_topk if grouped else -1,
        scaling_factor=float(scaling),
        score_function=score,
    )


@jax.custom_vjp
def _gate(x: Array, gate_kernel: Array) -> Array:
    return jnp.matmul(x, gate_kernel, preferred_element_type=jnp.float32)


def _gate_forward(x: Array, gate_kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return _gate(x, gate_kernel), (x, gate_kernel)


def _gate_backward(saved: tuple[Array, Array], dz: Array) -> tuple[Array, Array]:
    return gate_gradients(*saved, dz)


_gate.defvjp(_gate_forward, _gate_backward)


def gate_gradients(
    x: Float[Array, "T D"], gate_kernel: Float[Array, "D E"], dz: Float[Array, "T E"]
) -> tuple[Float[Array, "T D"], Float[Array, "D E"]]:
    """(gradient of x, gradient of gate_kernel) of x @ gate_kernel: dz as three bfloat16 pieces, so on tensor cores."""
    parts = move.pieces(dz, axis=1)
    dx = jnp.matmul(parts, jnp.tile(gate_kernel, (1, move.PIECES)).T, preferred_element_type=x.dtype)
    d_kernel = jnp.matmul(x.T, parts, preferred_element_type=jnp.float32)
    d_kernel = d_kernel.reshape(*gate_kernel.shape[:1], move.PIECES, -1).sum(axis=1)
    return dx, d_kernel.astype(gate_kernel.dtype)


def _sqrtsoftplus(z: Array) -> Array:
    # Far below 0 softplus(z) = exp(z) underflows, and sqrt's slope at 0 is infinite: take exp(z/2) there instead.
    low = z < -30.0
    return jnp.where(low, jnp.exp(jnp.where(low, z, 0.0) / 2), jnp.sqrt(jax.nn.softplus(jnp.where(low, 0.0, z))))


SCORES = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "sqrtsoftplus": _sqrtsoftplus}
"""Logits [T, E] to scores [T, E], by name; softmax is over the last axis."""
