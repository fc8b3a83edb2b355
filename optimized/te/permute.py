"""Brings the rows of one expert together, and back, by gathers alone in both directions."""

from __future__ import annotations

from functools import partial
from typing import Any

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
    multiple of `align`. Returns (rows, group_sizes, row_of_slot). Rows that hold no token are undefined. x's gradient
    sums a token's rows in float32 and rounds once.
    """
    found = move.plan(routing.topk_idx, problem.E, align=align)
    rows: Any = _spread(problem.padded_rows(align), x, found.row_of_slot)
    return rows, found.group_sizes, found.row_of_slot


def unpermute(
    problem: Problem, rows: Float[Array, "P D"], routing: Routing, row_of_slot: Int[Array, "T K"]
) -> Float[Array, "T D"]:
    """Sums each token's rows, weighted: y_t = sum_k w_tk * rows[row_of_slot[t, k]]; w is 1 for early placement.

    Slots without an expert add exactly 0, whatever their weight; rows that hold no token are never read. Accumulates
    in float32 and rounds once to the rows' dtype.
    """
    late = problem.experts.weight_placement == "late"
    return _sum(late, rows, routing.topk_weights, row_of_slot)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(rows: int, x: Array, row_of_slot: Array) -> Array:
    return move.spread(x, row_of_slot, rows)[0]


def _spread_forward(rows: int, x: Array, row_of_slot: Array) -> tuple[Array, Array]:
    return _spread(rows, x, row_of_slot), row_of_slot


def _spread_backward(_: int, row_of_slot: Array, d: Array) -> tuple[Array, None]:
    return move.sum_rows(d, row_of_slot), None


_spread.defvjp(_spread_forward, _spread_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(late: bool, rows: Array, weights: Array, row_of_slot: Array) -> Array:
    return move.sum_rows(rows, row_of_slot, weights if late else None)


def _sum_forward(late: bool, rows: Array, weights: Array, row_of_slot: Array) -> tuple[Array, tuple]:
    return _sum(late, rows, weights, row_of_slot), (rows, weights, row_of_slot)


def _sum_backward(late: bool, saved: tuple, dy: Array) -> tuple[Array, Array, None]:
    rows, weights, row_of_slot = saved
    P = rows.shape[0]
    slot = move.invert(row_of_slot, P)
    held = row_of_slot.reshape(-1).at[slot].get(mode="promise_in_bounds") == jnp.arange(P, dtype=jnp.int32)
    d = dy.at[slot // weights.shape[1]].get(mode="promise_in_bounds").astype(jnp.float32)
    scale = weights.reshape(-1)[slot] if late else jnp.ones(P, jnp.float32)
    d_rows = jnp.where(held[:, None], d * scale[:, None], 0.0).astype(rows.dtype)
    if not late:
        return d_rows, jnp.zeros_like(weights), None
    dot = jnp.where(held[:, None], d * rows.astype(jnp.float32), 0.0).sum(axis=1)
    return d_rows, move.of_slot(dot, row_of_slot), None


_sum.defvjp(_sum_forward, _sum_backward)
