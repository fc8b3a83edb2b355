"""Brings the rows of one expert together, and back: raggedness as three index arrays of static shape."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..parity.problem import Problem, Routing


def permute(
    problem: Problem, x: Float[Array, "T D"], routing: Routing, *, align: int = 1
) -> tuple[Float[Array, "P D"], Int[Array, " E"], Int[Array, "T K"]]:
    """Sorts the routed rows by expert; inside an expert tokens keep their order.

    rows[row_of_slot[t, k]] = x[t], where expert e's rows start at the sum of the earlier counts, each rounded up to a
    multiple of `align`. Returns (rows, group_sizes, row_of_slot).

    `group_sizes` are real counts. Slots without an expert (-1) have row_of_slot -1; a token of such slots only is
    never read. Rows that hold no token are 0 here, and undefined by contract. x's gradient sums a token's rows in
    float32 and rounds once.
    """
    slots = problem.T * problem.K
    expert = jnp.where(routing.topk_idx < 0, problem.E, routing.topk_idx).astype(jnp.int32).reshape(slots)
    group_sizes = count(problem, routing.topk_idx)
    blocks = round_up(group_sizes, align)
    # Group E holds the slots without an expert: they sort behind everything, and the row they get is discarded.
    start = jnp.cumsum(jnp.append(jnp.int32(0), blocks), dtype=jnp.int32)
    first = jnp.cumsum(jnp.append(jnp.int32(0), group_sizes), dtype=jnp.int32)

    order = jnp.argsort(expert, stable=True).astype(jnp.int32)
    rank = jnp.zeros(slots, jnp.int32).at[order].set(jnp.arange(slots, dtype=jnp.int32))
    row_of_slot = jnp.where(expert < problem.E, start[expert] + rank - first[expert], -1)

    row_of_slot = row_of_slot.reshape(problem.T, problem.K)
    return gather(x, token_of_row(row_of_slot, problem.padded_rows(align))), group_sizes, row_of_slot


def unpermute(
    problem: Problem, rows: Float[Array, "P D"], routing: Routing, row_of_slot: Int[Array, "T K"]
) -> Float[Array, "T D"]:
    """Sums each token's rows, weighted: y_t = sum_k w_tk * rows[row_of_slot[t, k]]; w is 1 for early placement.

    Slots without an expert add exactly 0, whatever their weight; rows that hold no token are never read. Accumulates
    in float32 and rounds once to the rows' dtype.
    """
    late = problem.experts.weight_placement == "late"
    return combine(rows, row_of_slot, routing.topk_weights if late else None)


def token_of_row(row_of_slot: Int[Array, "T K"], rows: int) -> Int[Array, " P"]:
    """Inverts row_of_slot: token_of_row[row_of_slot[t, k]] = t, and T where a row holds no token."""
    tokens, k = row_of_slot.shape
    token = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), k)
    return jnp.full(rows, tokens, jnp.int32).at[_or_past(row_of_slot, rows).reshape(-1)].set(token, mode="drop")


def gather(x: Float[Array, "T D"], token: Int[Array, " P"]) -> Float[Array, "P D"]:
    """rows[i] = x[token[i]], and 0 where token is T."""
    return _read(x, token).astype(x.dtype)


def combine(
    rows: Float[Array, "P D"], row_of_slot: Int[Array, "T K"], weights: Float[Array, "T K"] | None
) -> Float[Array, "T D"]:
    """y_t = sum_k w_tk * rows[row_of_slot[t, k]], without weights the plain sum; -1 adds exactly 0."""
    slots = _read(rows, _or_past(row_of_slot, rows.shape[0]))
    if weights is not None:
        slots = slots * jnp.where(row_of_slot < 0, 0.0, weights)[:, :, None]
    return slots.sum(axis=1).astype(rows.dtype)


def count(problem: Problem, topk_idx: Int[Array, "T K"]) -> Int[Array, " E"]:
    """Counts each expert's rows: group_sizes_e = |{(t, k): topk_idx[t, k] = e}|; -1 is counted nowhere."""
    return jnp.zeros(problem.E, jnp.int32).at[_or_past(topk_idx, problem.E)].add(1, mode="drop")


def round_up(sizes: Int[Array, " E"], align: int) -> Int[Array, " E"]:
    """The smallest multiples of `align` that are not below `sizes`."""
    return (sizes + (align - 1)) // align * align


def _or_past(index: Array, size: int) -> Array:
    # jnp reads -1 as the last element; one past the end reads as 0, and is dropped when written.
    return jnp.where(index < 0, size, index)


def _read(x: Array, index: Array) -> Array:
    # float32, so that the transpose (a sum over what was read) accumulates in float32.
    if x.shape[0] == 0:  # no gather reads from nothing, not even to fill
        return jnp.zeros((*index.shape, x.shape[1]), jnp.float32)
    return x.astype(jnp.float32).at[index].get(mode="fill", fill_value=0)
