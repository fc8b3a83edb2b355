"""Brings the rows of one expert together, and back: one sort of the slots, and gathers only, in both directions."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.problem import Problem, Routing


def permute(
    problem: Problem, x: Float[Array, "T D"], routing: Routing, *, align: int = 1
) -> tuple[Float[Array, "P D"], Int[Array, " E"], Int[Array, "T K"]]:
    """Sorts the routed rows by expert; inside an expert tokens keep their order.

    rows[row_of_slot[t, k]] = x[t], where expert e's rows start at the sum of the earlier counts, each rounded up to a
    multiple of `align`. Returns (rows, group_sizes, row_of_slot).

    `group_sizes` are real counts. Slots without an expert (-1) have row_of_slot -1. Rows that hold no token are
    undefined. x's gradient is a gather by row_of_slot, summed in float32 and rounded once: nothing is scattered but
    integers.
    """
    slots = sort_slots(problem, routing.topk_idx)
    row_of_slot = slots.row_of_slot
    if align > 1:
        shift = _first(-(-slots.group_sizes // align) * align) - slots.first
        row_of_slot = jnp.where(row_of_slot < 0, -1, row_of_slot + shift[jnp.maximum(routing.topk_idx, 0)])
    P = problem.padded_rows(align)
    if problem.T == 0:
        return jnp.zeros((P, problem.D), x.dtype), slots.group_sizes, row_of_slot
    return _spread(x, _slot_of_row(row_of_slot, P) // problem.K, row_of_slot), slots.group_sizes, row_of_slot


def unpermute(
    problem: Problem, rows: Float[Array, "P D"], routing: Routing, row_of_slot: Int[Array, "T K"]
) -> Float[Array, "T D"]:
    """Sums each token's rows, weighted: y_t = sum_k w_tk * rows[row_of_slot[t, k]]; w is 1 for early placement.

    Slots without an expert add exactly 0, whatever their weight; rows that hold no token are never read. Accumulates
    in float32 and rounds once to the rows' dtype. The rows' gradient is a gather of dy, 0 where a row holds no token.
    """
    if problem.T == 0:
        return jnp.zeros((0, problem.D), rows.dtype)
    late = problem.experts.weight_placement == "late"
    return combine(rows, row_of_slot, routing.topk_weights if late else None)


class Slots(NamedTuple):
    """The T*K slots in the order of their experts; slots without an expert come last."""

    slot_of_row: Int[Array, " R"]
    """Which slot t*K + k lies in each row; its token is slot // K."""
    row_of_slot: Int[Array, "T K"]
    """The inverse, -1 for no expert."""
    group_sizes: Int[Array, " E"]
    first: Int[Array, " E"]
    """Each expert's first row."""


def sort_slots(problem: Problem, topk_idx: Int[Array, "T K"]) -> Slots:
    """Sorts the slots by expert, stably: experts ascend, and inside an expert slots do."""
    n = problem.T * problem.K
    expert = jnp.where(topk_idx < 0, problem.E, topk_idx).astype(jnp.int32).reshape(n)
    slot = jnp.arange(n, dtype=jnp.int32)
    slot_of_row = jnp.argsort(expert, stable=True).astype(jnp.int32)
    row = jnp.zeros(n, jnp.int32).at[slot_of_row].set(slot, unique_indices=True)
    group_sizes = jnp.zeros(problem.E, jnp.int32).at[expert].add(1, mode="drop")
    row_of_slot = jnp.where(expert < problem.E, row, -1).reshape(problem.T, problem.K)
    return Slots(slot_of_row, row_of_slot, group_sizes, _first(group_sizes))


@jax.custom_vjp
def combine(
    rows: Float[Array, "P D"], row_of_slot: Int[Array, "T K"], weights: Float[Array, "T K"] | None
) -> Float[Array, "T D"]:
    """y_t = sum_k w_tk * rows[row_of_slot[t, k]], without weights the plain sum; -1 adds exactly 0."""
    slots = _of_slots(rows, row_of_slot)
    if weights is not None:
        slots = slots * jnp.where(row_of_slot < 0, 0.0, weights)[:, :, None]
    return slots.sum(axis=1).astype(rows.dtype)


def _combine_forward(rows: Array, row_of_slot: Array, weights: Array | None) -> tuple[Array, tuple]:
    return combine(rows, row_of_slot, weights), (rows, row_of_slot, weights)


def _combine_backward(saved: tuple, dy: Array) -> tuple[Array, None, Array | None]:
    rows, row_of_slot, weights = saved
    slot = _slot_of_row(row_of_slot, rows.shape[0], empty=-1)
    d = dy[jnp.maximum(slot, 0) // row_of_slot.shape[1]].astype(jnp.float32)
    if weights is not None:
        d = d * weights.reshape(-1)[jnp.maximum(slot, 0)][:, None]
    d_rows = jnp.where(slot[:, None] < 0, 0.0, d).astype(rows.dtype)
    if weights is None:
        return d_rows, None, None
    return d_rows, None, (_of_slots(rows, row_of_slot) * dy.astype(jnp.float32)[:, None, :]).sum(axis=2)


combine.defvjp(_combine_forward, _combine_backward)


@jax.custom_vjp
def _spread(x: Array, token_of_row: Array, row_of_slot: Array) -> Array:
    return x[token_of_row]


def _spread_forward(x: Array, token_of_row: Array, row_of_slot: Array) -> tuple[Array, Array]:
    return _spread(x, token_of_row, row_of_slot), row_of_slot


def _spread_backward(row_of_slot: Array, d_rows: Array) -> tuple[Array, None, None]:
    return combine(d_rows, row_of_slot, None), None, None


_spread.defvjp(_spread_forward, _spread_backward)


def _of_slots(rows: Array, row_of_slot: Array) -> Array:
    # Selected, not multiplied by 0: the row that stands in for "no expert" may hold NaN.
    taken = rows[jnp.maximum(row_of_slot, 0)].astype(jnp.float32)
    return jnp.where(row_of_slot[:, :, None] < 0, 0.0, taken)


def _slot_of_row(row_of_slot: Array, rows: int, *, empty: int = 0) -> Array:
    at = jnp.where(row_of_slot < 0, rows, row_of_slot).reshape(-1)
    slot = jnp.arange(at.shape[0], dtype=jnp.int32)
    return jnp.full(rows, empty, jnp.int32).at[at].set(slot, mode="drop")


def _first(sizes: Array) -> Array:
    return jnp.cumsum(sizes, dtype=jnp.int32) - sizes
