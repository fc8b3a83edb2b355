"""The routed experts as a composition of stages: permute, two grouped products around an activation, unpermute."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..parity.problem import Params, Problem, Routing
from .activation import activate
from .grouped_gemm import grouped_gemm
from .permute import permute, unpermute


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts: y_t = sum_k w_tk * (act(x_t @ wi_e + b_e) @ wo_e + c_e), e = idx_tk.

    With early placement w_tk multiplies h before wo, and c_e, which h does not carry. Products, biased outputs and h
    are rounded to the storage dtype; the activation, the weighting and the sum over k are float32.
    """
    return experts_of(permute=permute, grouped_gemm=grouped_gemm, unpermute=unpermute)(problem, params, x, routing)


def experts_of(*, permute: Callable, grouped_gemm: Callable, unpermute: Callable) -> Callable:
    """Builds an `experts` stage from three others.

    What they leave in rows without a token is selected away before it meets an activation or a sum, forward and
    backward.
    """

    def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """Runs the routed experts at a fixed routing through the given stages."""
        early = problem.experts.weight_placement == "early"
        rows, group_sizes, row_of_slot = permute(problem, x, routing)
        expert = _of_row(row_of_slot, routing.topk_idx, rows.shape[0], empty=-1)
        weight = _of_row(row_of_slot, routing.topk_weights, rows.shape[0], empty=0.0)[:, None]
        held = (expert >= 0)[:, None]

        pre = grouped_gemm(rows, params.wi, group_sizes).astype(jnp.float32)
        if problem.experts.wi_bias:
            pre = pre + _of_expert(params.need("wi_bias"), expert)
        h = activate(problem.experts, jnp.where(held, pre, 0.0))
        if early:
            h = h * weight
        out = grouped_gemm(h.astype(x.dtype), params.wo, group_sizes)
        if problem.experts.wo_bias:
            bias = _of_expert(params.need("wo_bias"), expert) * (weight if early else 1.0)
            out = jnp.where(held, out.astype(jnp.float32) + bias, 0.0).astype(x.dtype)
        return unpermute(problem, out, routing, row_of_slot)

    return experts


def _of_row(row_of_slot: Int[Array, "T K"], of_slot: Array, rows: int, *, empty: float) -> Array:
    """Moves a value per slot to the slot's row; rows that hold no token get `empty`."""
    at = jnp.where(row_of_slot < 0, rows, row_of_slot)
    return jnp.full(rows, empty, of_slot.dtype).at[at].set(of_slot, mode="drop")


def _of_expert(bias: Float[Array, "E B"], expert: Int[Array, " P"]) -> Float[Array, "P B"]:
    # Widened before the gather: its transpose sums a whole expert's rows.
    return bias.astype(jnp.float32)[jnp.maximum(expert, 0)]
