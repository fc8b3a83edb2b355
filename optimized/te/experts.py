"""The routed experts as one differentiable function around six grouped products.

forward:  x -gather-> rows -wi-> pre -act-> h -wo-> out -sum of a token's rows-> y
backward: dy -gather-> d -wo.T-> g -act-> (w h, d_pre, dw) -> d_wo = (w h).T d, d_wi = rows.T d_pre, d_pre -wi.T-> -sum-> dx

Saved between the two: the inputs, pre, and the index arrays. Nothing is scattered, nothing is padded, and rows beyond
the last expert's are never read: group sizes are exact.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...parity.problem import Params, Problem, Routing
from . import rows as move
from .grouped_gemm import kernel_gradient, product, transposed_product
from .hidden import hidden, hidden_gradient
from .quantised import quantised_experts


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts at a fixed routing: y_t = sum_k w_tk * (act(x_t @ wi_e + b_e) @ wo_e + c_e), e = idx_tk.

    Both placements are as the contract has them forward; backward the weight is applied between the products for
    both, which is the same in exact arithmetic. A bias is added outside the product, in float32, so that TE
    keeps group sizes on the device. Each product is rounded to x's dtype; everything between is float32. Under a recipe
    the products' operands are quantised (see quantised.py).
    """
    if problem.T == 0:
        return x
    if problem.recipe != "none":
        return quantised_experts(problem, params, x, routing)
    kernels = (params.wi, params.wo, params.wi_bias, params.wo_bias)
    return _experts(problem, kernels, x, routing.topk_weights, routing.topk_idx)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(problem: Problem, kernels: tuple, x: Array, weights: Array, topk_idx: Array) -> Array:
    return _forward(problem, kernels, x, weights, topk_idx)[0]


def _forward(problem: Problem, kernels: tuple, x: Array, weights: Array, topk_idx: Array) -> tuple[Array, Saved]:
    return forward(problem, kernels, x, weights, topk_idx, move.plan(topk_idx, problem.E))


def _backward(problem: Problem, saved: Saved, dy: Array) -> tuple:
    d_kernels, d_rows, d_weights = backward(problem, saved, dy)
    return d_kernels, move.sum_rows(d_rows, saved.found.row_of_slot), d_weights, None


_experts.defvjp(_forward, _backward)


class Saved(NamedTuple):
    """What lives from forward to backward."""

    kernels: tuple
    x: Array
    weights: Array
    topk_idx: Array
    found: move.Plan
    pre: Array
    expert: Array | None
    """Of each row; only a bias of wi needs it."""


def forward(
    problem: Problem, kernels: tuple, x: Array, weights: Array, topk_idx: Array, found: move.Plan
) -> tuple[Float[Array, "T D"], Saved]:
    """(y, what backward needs), for rows that have been found already; kernels are (wi, wo, wi_bias, wo_bias)."""
    wi, wo, wi_bias, wo_bias = kernels
    late = problem.experts.weight_placement == "late"
    rows, weight = move.spread(x, found.row_of_slot, problem.routed_rows, None if late else weights)
    pre = product(rows, wi, found.group_sizes)
    expert = None if wi_bias is None else _expert_of_row(problem, topk_idx, found)
    out = product(hidden(problem.experts, pre, weight, wi_bias, expert), wo, found.group_sizes)
    bias = None if wo_bias is None else _weighted_bias(weights, topk_idx, wo_bias)
    y = move.sum_rows(out, found.row_of_slot, weights if late else None, bias=bias)
    return y, Saved(kernels, x, weights, topk_idx, found, pre, expert)


def backward(
    problem: Problem, saved: Saved, dy: Float[Array, "T D"]
) -> tuple[tuple, Float[Array, "P D"], Float[Array, "T K"]]:
    """(gradients of the kernels, of the spread rows, of the weights); x's gradient is the sum of its rows'."""
    kernels, x, weights, topk_idx, found, pre, expert = saved
    wi, wo, wi_bias, wo_bias = kernels
    sizes, P = found.group_sizes, problem.routed_rows
    d, weight = move.spread(dy, found.row_of_slot, P, weights)
    assert weight is not None
    g = transposed_product(d, wo, sizes)
    h, d_pre, dot = hidden_gradient(problem.experts, pre, g, weight, wi_bias, expert)
    d_wo = kernel_gradient(h, d, sizes)
    # Spread again rather than kept: K times x's size would live from forward to backward.
    d_wi = kernel_gradient(move.spread(x, found.row_of_slot, P)[0], d_pre, sizes)
    d_rows = transposed_product(d_pre, wi, sizes)
    d_weights = move.of_slot(dot, found.row_of_slot)

    d_wi_bias = d_wo_bias = None
    if wi_bias is not None:
        # A column of ones as the left operand: sums each expert's rows, and only those. Eight, for alignment.
        d_wi_bias = kernel_gradient(jnp.ones((P, 8), d_pre.dtype), d_pre, sizes)[:, 0, :]
    if wo_bias is not None:
        of_expert = move.pieces(move.dense(weights, topk_idx, problem.E), axis=1)
        sums = jnp.einsum("tf,td->fd", of_expert, dy, preferred_element_type=jnp.float32)
        d_wo_bias = sums.reshape(move.PIECES, *wo_bias.shape).sum(axis=0).astype(wo_bias.dtype)
        along = jnp.einsum("td,ed->te", dy, wo_bias, preferred_element_type=jnp.float32)
        d_weights = d_weights + jnp.where(topk_idx >= 0, move.take(along, jnp.maximum(topk_idx, 0)), 0.0)
    return (d_wi, d_wo, d_wi_bias, d_wo_bias), d_rows, d_weights


def _expert_of_row(problem: Problem, topk_idx: Array, found: move.Plan) -> Array:
    slot = move.invert(found.row_of_slot, problem.routed_rows)
    return jnp.maximum(topk_idx.reshape(-1).at[slot].get(mode="promise_in_bounds"), 0)


def _weighted_bias(weights: Array, topk_idx: Array, bias: Array) -> Array:
    """sum_k w_tk * bias[topk_idx_tk], float32: [T, D]."""
    of_expert = move.pieces(move.dense(weights, topk_idx, bias.shape[0]), axis=1)
    return jnp.einsum("tf,fd->td", of_expert, jnp.tile(bias, (move.PIECES, 1)), preferred_element_type=jnp.float32)
