"""Brings the rows of one expert together, and back, by gathers alone in both directions."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.problem import Problem, Routing
from . import rows as move


def permute(
    problem: Problem, x: Float[Array, "T D"], routing: Routing, *, align: int = 1
) -> tuple[Float[Array, "P D"], Int[Array, " E"], Int[Array, "T K"]]:
    """Sorts the routed rows by expert; inside an expert tokens keep their order.

    rows[row_of_slot[t, k]] = x[t], where expert e's rows start at the sum of the earlier counts, each rounded up to a
    multiple of `align`. Returns (rows, group_sizes, row_of_slot). Rows that hold no token repeat token 0, and are
    undefined by contract. x's gradient sums a token's rows in float32 and rounds once.
    """
    found = move.plan(routing.topk_idx, problem.E, problem.padded_rows(align), align=align)
    return _dispatch(x, found.slot_of_row // problem.K, found.row_of_slot), found.group_sizes, found.row_of_slot


def unpermute(
    problem: Problem, rows: Float[Array, "P D"], routing: Routing, row_of_slot: Int[Array, "T K"]
) -> Float[Array, "T D"]:
    """Sums each token's rows, weighted: y_t = sum_k w_tk * rows[row_of_slot[t, k]]; w is 1 for early placement.

    Slots without an expert add exactly 0, whatever their weight; rows that hold no token are never read. Accumulates
    in float32 and rounds once to the rows' dtype.
    """
    late = problem.experts.weight_placement == "late"
    return _combine(late, rows, routing.topk_weights, row_of_slot)


@jax.custom_vjp
def _dispatch(x: Array, token_of_row: Array, row_of_slot: Array) -> Array:
    return move.gather_rows(x, token_of_row)


def _dispatch_forward(x: Array, token_of_row: Array, row_of_slot: Array) -> tuple[Array, Array]:
    return move.gather_rows(x, token_of_row), row_of_slot


def _dispatch_backward(row_of_slot: Array, d: Array) -> tuple[Array, None, None]:
    return move.sum_rows(d, row_of_slot), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(late: bool, rows: Array, weights: Array, row_of_slot: Array) -> Array:
    return move.sum_rows(rows, row_of_slot, weights if late else None)


def _combine_forward(late: bool, rows: Array, weights: Array, row_of_slot: Array) -> tuple[Array, tuple]:
    return _combine(late, rows, weights, row_of_slot), (rows, weights, row_of_slot)


def _combine_backward(late: bool, saved: tuple, dy: Array) -> tuple[Array, Array, None]:
    rows, weights, row_of_slot = saved
    K = weights.shape[1]
    slot = move.invert(row_of_slot, rows.shape[0])
    held = (
        jnp.zeros(rows.shape[0], bool).at[jnp.where(row_of_slot < 0, rows.shape[0], row_of_slot)].set(True, mode="drop")
    )
    d = move.gather_rows(dy, slot // K).astype(jnp.float32)
    if not late:
        return jnp.where(held[:, None], d, 0.0).astype(rows.dtype), jnp.zeros_like(weights), None
    w = weights.reshape(-1)[slot]
    dot = jnp.sum(jnp.where(held[:, None], d * rows.astype(jnp.float32), 0.0), axis=1)
    d_rows = jnp.where(held[:, None], d * w[:, None], 0.0).astype(rows.dtype)
    return d_rows, move.of_slot(dot, row_of_slot), None


_combine.defvjp(_combine_forward, _combine_backward)
