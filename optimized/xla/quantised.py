"""The routed experts with quantised operands: permute, two block-sparse products by emulation, unpermute."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...parity.problem import Params, Problem, Routing
from .activation import activate
from .grouped_gemm import grouped_gemm
from .permute import permute, unpermute
from .recipes import grouped_gemm_of


def quantised_experts(
    problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing
) -> Float[Array, "T D"]:
    """`experts` under `problem.recipe`: every operand of every grouped product is quantised, forward and backward.

    Products accumulate in float32 and are rounded to x's dtype, and so is h; activation, weighting and combine are
    float32. Works on whole arrays, so it costs more memory than the unquantised pass.
    """
    if problem.T == 0:
        return jnp.zeros_like(x)
    gemm = grouped_gemm_of(problem.recipe, grouped_gemm)
    early = problem.experts.weight_placement == "early"
    rows, group_sizes, row_of_slot = permute(problem, x, routing)
    P = rows.shape[0]
    at = jnp.where(row_of_slot < 0, P, row_of_slot)
    expert = jnp.full(P, -1, jnp.int32).at[at].set(routing.topk_idx.astype(jnp.int32), mode="drop")
    weight = jnp.zeros(P, jnp.float32).at[at].set(routing.topk_weights, mode="drop")[:, None]
    held, of_row = (expert >= 0)[:, None], jnp.maximum(expert, 0)

    pre = gemm(rows, params.wi, group_sizes).astype(jnp.float32)
    if problem.experts.wi_bias:
        pre = (pre + params.need("wi_bias").astype(jnp.float32)[of_row]).astype(x.dtype).astype(jnp.float32)
    h = activate(problem.experts, jnp.where(held, pre, 0.0))
    out = gemm((h * weight if early else h).astype(x.dtype), params.wo, group_sizes)
    if problem.experts.wo_bias:
        bias = params.need("wo_bias").astype(jnp.float32)[of_row] * (weight if early else 1.0)
        out = jnp.where(held, out.astype(jnp.float32) + bias, 0.0).astype(x.dtype)
    return unpermute(problem, out, routing, row_of_slot)
