"""The routed experts with quantised operands: rows laid out as the recipe's products want them, zeros between the groups."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.problem import Experts, Params, Problem, Routing
from . import rows as move
from .grouped_gemm import kernel_gradient
from .hidden import act
from .permute import unpermute
from .recipes import LAYOUTS, quantised_gemm_of


def quantised_experts(
    problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing
) -> Float[Array, "T D"]:
    """`experts` under `problem.recipe`: every operand of every grouped product is quantised, forward and backward.

    Products are rounded to x's dtype, and so is h; activation, biases, weighting and combine are float32. The weight stands
    where the problem says in both directions, so the operands are the reference's: dy comes weighted for late placement.
    """
    if problem.T == 0:
        return jnp.zeros_like(x)
    layout, gemm = LAYOUTS[problem.recipe], quantised_gemm_of(problem.recipe)
    spec, early = problem.experts, problem.experts.weight_placement == "early"
    P, slots = layout.rows(problem), problem.routed_rows
    found = move.plan(routing.topk_idx, problem.E, align=layout.align, least=layout.least)
    sizes = layout.sizes(found.group_sizes, P)
    at = jnp.where(found.row_of_slot < 0, P + jnp.arange(slots).reshape(problem.T, -1), found.row_of_slot)
    slot = (
        jnp.full(P, slots, jnp.int32)
        .at[at.reshape(-1)]
        .set(jnp.arange(slots, dtype=jnp.int32), mode="drop", unique_indices=True)
    )
    held = (slot < slots)[:, None]
    expert = jnp.maximum(routing.topk_idx.reshape(-1).at[slot].get(mode="fill", fill_value=0), 0)
    weight = _of_row(routing.topk_weights, found.row_of_slot, slot)[:, None] if early else None

    pre = gemm(_spread(x, found.row_of_slot, slot // problem.K), params.wi, sizes)
    bias = None if params.wi_bias is None else _of_expert(params.wi_bias, expert, sizes)
    h = _hidden(spec, pre, bias, held, weight)
    out = gemm(h, params.wo, sizes)
    if spec.wo_bias:
        bias = _of_expert(params.need("wo_bias"), expert, sizes)
        out = jnp.where(held, out.astype(jnp.float32) + (bias if weight is None else bias * weight), 0.0)
        out = out.astype(x.dtype)
    return unpermute(problem, out, routing, found.row_of_slot)


@partial(jax.checkpoint, static_argnums=(0,))
def _hidden(spec: Experts, pre: Array, bias: Array | None, held: Array, weight: Array | None) -> Array:
    """act(gate) * up of pre + bias, times the weight; 0 in rows without a token. Recomputed in the backward pass."""
    z = jnp.where(held, pre.astype(jnp.float32), 0.0)
    z = z if bias is None else z + bias
    h = act(spec, *jnp.split(z, 2, axis=1)) if spec.gated else act(spec, z)
    return jnp.where(held, h if weight is None else h * weight, 0.0).astype(pre.dtype)


@jax.custom_vjp
def _spread(x: Float[Array, "T D"], row_of_slot: Int[Array, "T K"], token: Int[Array, " P"]) -> Float[Array, "P D"]:
    """Each row its token, 0 where there is none; its gradient sums a token's rows."""
    return x.at[token].get(mode="fill", fill_value=0)


def _spread_forward(x: Array, row_of_slot: Array, token: Array) -> tuple[Array, Array]:
    return _spread(x, row_of_slot, token), row_of_slot


def _spread_backward(row_of_slot: Array, d: Array) -> tuple[Array, None, None]:
    return move.sum_rows(d, row_of_slot), None, None


_spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def _of_row(values: Float[Array, "T K"], row_of_slot: Int[Array, "T K"], slot: Int[Array, " P"]) -> Float[Array, " P"]:
    """Each row its slot's value, 0 where there is none."""
    return values.reshape(-1).at[slot].get(mode="fill", fill_value=0)


def _of_row_forward(values: Array, row_of_slot: Array, slot: Array) -> tuple[Array, Array]:
    return _of_row(values, row_of_slot, slot), row_of_slot


def _of_row_backward(row_of_slot: Array, d: Array) -> tuple[Array, None, None]:
    return move.of_slot(d, row_of_slot), None, None


_of_row.defvjp(_of_row_forward, _of_row_backward)


@jax.custom_vjp
def _of_expert(bias: Float[Array, "E B"], expert: Int[Array, " P"], sizes: Int[Array, " E"]) -> Float[Array, "P B"]:
    """Each row its expert's bias in float32. The gradient sums an expert's rows in one grouped product, never by atomics."""
    return bias.astype(jnp.float32)[expert]


def _of_expert_forward(bias: Array, expert: Array, sizes: Array) -> tuple[Array, tuple[Array, Array]]:
    return _of_expert(bias, expert, sizes), (sizes, jnp.zeros(0, bias.dtype))


def _of_expert_backward(saved: tuple[Array, Array], d: Array) -> tuple[Array, None, None]:
    sizes, like = saved
    # A column of ones as the left operand; eight, for alignment.
    return kernel_gradient(jnp.ones((d.shape[0], 8), like.dtype), d.astype(like.dtype), sizes)[:, 0, :], None, None


_of_expert.defvjp(_of_expert_forward, _of_expert_backward)
