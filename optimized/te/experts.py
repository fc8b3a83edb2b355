"""The routed experts as one differentiable function around six grouped products.

forward:  x -gather-> rows -wi-> pre -act-> h -wo-> out -sum of a token's rows-> y
backward: dy -gather-> d -wo.T-> g -act-> (w h, d_pre, dw) -> d_wo = (w h).T d, d_wi = rows.T d_pre, d_pre -wi.T-> -sum-> dx

Saved between the two: the inputs, pre, and the index arrays. Nothing is scattered, nothing is padded, and rows beyond
the last expert's are never read: group sizes are exact.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...parity.problem import Params, Problem, Routing
from . import rows as move
from .grouped_gemm import kernel_gradient, product, transposed_product
from .hidden import hidden, hidden_gradient


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts at a fixed routing: y_t = sum_k w_tk * (act(x_t @ wi_e + b_e) @ wo_e + c_e), e = idx_tk.

    Both placements are as the contract has them forward; backward the weight is applied between the products for
    both, which is the same in exact arithmetic. A bias is added outside the product, in float32, so that TE
    keeps group sizes on the device. Each product is rounded to x's dtype; everything between is float32.
    """
    if problem.T == 0:
        return x
    kernels = (params.wi, params.wo, params.wi_bias, params.wo_bias)
    return _experts(problem, kernels, x, routing.topk_weights, routing.topk_idx)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(problem: Problem, kernels: tuple, x: Array, weights: Array, topk_idx: Array) -> Array:
    return _forward(problem, kernels, x, weights, topk_idx)[0]


def _forward(problem: Problem, kernels: tuple, x: Array, weights: Array, topk_idx: Array) -> tuple[Array, Any]:
    wi, wo, wi_bias, wo_bias = kernels
    late = problem.experts.weight_placement == "late"
    found = move.plan(topk_idx, problem.E, problem.routed_rows)
    rows = move.gather_rows(x, found.slot_of_row // problem.K)
    pre = product(rows, wi, found.group_sizes)
    weight = None if late else _of_row(weights, found)
    h = hidden(problem.experts, pre, weight, _row_bias(wi_bias, topk_idx, found))
    out = product(h, wo, found.group_sizes)
    bias = None if wo_bias is None else _weighted_bias(weights, topk_idx, wo_bias)
    y = move.sum_rows(out, found.row_of_slot, weights if late else None, bias=bias)
    return y, (kernels, x, weights, topk_idx, found, pre)


def _backward(problem: Problem, saved: Any, dy: Array) -> tuple:
    kernels, x, weights, topk_idx, found, pre = saved
    wi, wo, wi_bias, wo_bias = kernels
    sizes, token = found.group_sizes, found.slot_of_row // problem.K
    d = move.gather_rows(dy, token)
    g = transposed_product(d, wo, sizes)
    bias = _row_bias(wi_bias, topk_idx, found)
    h, d_pre, dot = hidden_gradient(problem.experts, pre, g, _of_row(weights, found), bias)
    d_wo = kernel_gradient(h, d, sizes)
    d_wi = kernel_gradient(move.gather_rows(x, token), d_pre, sizes)
    dx = move.sum_rows(transposed_product(d_pre, wi, sizes), found.row_of_slot)
    d_weights = move.of_slot(dot, found.row_of_slot)

    d_wi_bias = d_wo_bias = None
    if wi_bias is not None:
        # A column of ones as the left operand: sums each expert's rows, and only those. Eight, for alignment.
        ones = jnp.ones((d_pre.shape[0], 8), d_pre.dtype)
        d_wi_bias = kernel_gradient(ones, d_pre, sizes)[:, 0, :]
    if wo_bias is not None:
        of_expert = move.dense(weights, topk_idx, problem.E)
        d_wo_bias = move.exact_product("te,td->ed", of_expert, dy).astype(wo_bias.dtype)
        along = jnp.einsum("td,ed->te", dy, wo_bias, preferred_element_type=jnp.float32)
        d_weights = d_weights + jnp.where(topk_idx >= 0, move.take(along, jnp.maximum(topk_idx, 0)), 0.0)
    return (d_wi, d_wo, d_wi_bias, d_wo_bias), dx, d_weights, None


_experts.defvjp(_forward, _backward)


def _of_row(weights: Array, found: move.Plan) -> Array:
    return weights.reshape(-1).at[found.slot_of_row].get(mode="promise_in_bounds")


def _row_bias(bias: Array | None, topk_idx: Array, found: move.Plan) -> Array | None:
    if bias is None:
        return None
    return bias[jnp.maximum(topk_idx.reshape(-1)[found.slot_of_row], 0)]


def _weighted_bias(weights: Array, topk_idx: Array, bias: Array) -> Array:
    """sum_k w_tk * bias[topk_idx_tk], float32: [T, D]."""
    return move.exact_product("te,ed->td", move.dense(weights, topk_idx, bias.shape[0]), bias)
