"""Where each routed row lies, found by counting, and the two ways of moving rows: spread tokens, or sum a token's own.

No sort: expert e's rows start where the earlier experts' end, and a token's row inside e is the number of earlier tokens
that chose e. Those counts are products with a triangle of ones, exact on tensor cores, two levels deep. The two moves
are each other's backward, so no gradient is ever scattered with atomics.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from . import kernels

BLOCK = 128
"""Tokens counted by one triangle: a bfloat16 holds every integer up to 256."""
UNROLLED = 16
"""Most slots per token that one kernel writes out one by one."""


class Plan(NamedTuple):
    """A routing as index arrays of static shape."""

    group_sizes: Int[Array, " E"]
    """Real rows of each expert."""
    row_of_slot: Int[Array, "T K"]
    """-1 where the slot names no expert."""


def plan(topk_idx: Int[Array, "T K"], experts: int, *, align: int = 1, least: int = 0) -> Plan:
    """Finds the row of every slot: start of its expert + number of earlier tokens that chose it.

    Each expert's start is a multiple of `align`, and it has room for `least` rows even without a token. A token's ids
    are distinct.
    """
    T = topk_idx.shape[0]
    blocks = -(-T // BLOCK)
    ids = jnp.pad(topk_idx, ((0, blocks * BLOCK - T), (0, 0)), constant_values=-1)
    hit = (ids[:, :, None] == jnp.arange(experts, dtype=ids.dtype)).any(axis=1)
    hit = hit.astype(jnp.bfloat16).reshape(blocks, BLOCK, experts)
    inside = jnp.einsum("ij,bje->bie", _earlier(BLOCK), hit, preferred_element_type=jnp.float32)
    inside = inside.astype(jnp.int32).reshape(blocks * BLOCK, experts)[:T]
    rank = jnp.take_along_axis(inside, jnp.maximum(topk_idx, 0), axis=1)
    totals = hit.sum(axis=1, dtype=jnp.float32).astype(jnp.bfloat16)
    return place(topk_idx, rank, totals, BLOCK, align=align, least=least)


def place(
    topk_idx: Int[Array, "T K"],
    rank: Int[Array, "T K"],
    totals: Float[Array, "B E"],
    block: int,
    *,
    align: int = 1,
    least: int = 0,
) -> Plan:
    """The plan, from each slot's rank inside its block of tokens and each block's counts."""
    blocks, experts = totals.shape
    if blocks <= kernels.BLOCKS:
        before = jnp.matmul(_earlier(blocks), totals, preferred_element_type=jnp.float32).astype(jnp.int32)
    else:  # the triangle would outgrow the counts
        before = jnp.cumsum(totals.astype(jnp.int32), axis=0) - totals.astype(jnp.int32)
    group_sizes = totals.sum(axis=0, dtype=jnp.float32).astype(jnp.int32)
    room = rooms(group_sizes, align=align, least=least)
    base = before + (jnp.cumsum(room, dtype=jnp.int32) - room)
    of_token = jnp.arange(topk_idx.shape[0], dtype=jnp.int32)[:, None] // block
    row = rank + base.reshape(-1)[of_token * experts + jnp.maximum(topk_idx, 0)]
    return Plan(group_sizes, jnp.where(topk_idx >= 0, row, -1))


def rooms(group_sizes: Int[Array, " E"], *, align: int = 1, least: int = 0) -> Int[Array, " E"]:
    """Rows that each expert takes up: its own, at least `least`, rounded up to a multiple of `align`."""
    return (jnp.maximum(group_sizes, least) + (align - 1)) // align * align


def invert(row_of_slot: Int[Array, "T K"], rows: int) -> Int[Array, " P"]:
    """slot_of_row: the slot t*K + k whose row this is, 0 where there is none."""
    at = row_of_slot.reshape(-1)
    slots = jnp.arange(at.shape[0], dtype=jnp.int32)
    # An index beyond the end is dropped; -1 would count from the end.
    at = jnp.where(at < 0, rows + slots, at)
    return jnp.zeros(rows, jnp.int32).at[at].set(slots, mode="drop", unique_indices=True)


def spread(
    x: Float[Array, "T D"],
    row_of_slot: Int[Array, "T K"],
    rows: int,
    weights: Float[Array, "T K"] | None = None,
) -> tuple[Float[Array, "P D"], Float[Array, " P"] | None]:
    """(rows[row_of_slot[t, k]] = x[t], the weights in the same order); what no slot names is undefined."""
    if kernels.usable() and row_of_slot.shape[1] <= UNROLLED:
        return kernels.spread(x, row_of_slot, rows, weights)
    slot = invert(row_of_slot, rows)
    found = x.at[slot // row_of_slot.shape[1]].get(mode="promise_in_bounds")
    return found, None if weights is None else weights.reshape(-1).at[slot].get(mode="promise_in_bounds")


def sum_rows(
    rows: Float[Array, "P D"],
    row_of_slot: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None = None,
    *,
    bias: Float[Array, "T D"] | None = None,
) -> Float[Array, "T D"]:
    """y_t = sum_k w_tk * rows[row_of_slot[t, k]] (+ bias_t), accumulated in float32 and rounded once.

    A slot without a row adds exactly 0 whatever the row or weight would hold: it is selected away, since 0 * NaN is NaN.
    """
    if kernels.usable() and row_of_slot.shape[1] <= UNROLLED:
        return kernels.sum_rows(rows, row_of_slot, weights, bias=bias)
    at = row_of_slot[:, :, None]
    terms = rows.at[jnp.maximum(row_of_slot, 0)].get(mode="promise_in_bounds").astype(jnp.float32)
    if weights is not None:
        terms = terms * weights[:, :, None]
    total = jnp.where(at >= 0, terms, 0.0).sum(axis=1)
    return (total if bias is None else bias.astype(jnp.float32) + total).astype(rows.dtype)


def of_slot(values: Float[Array, " P"], row_of_slot: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """A row's value at its slot; 0 for slots without a row."""
    return jnp.where(row_of_slot >= 0, values.at[jnp.maximum(row_of_slot, 0)].get(mode="promise_in_bounds"), 0.0)


def dense(values: Float[Array, "T K"], topk_idx: Int[Array, "T K"], experts: int) -> Float[Array, "T E"]:
    """values laid out by expert, 0 elsewhere: the transpose of `take`, without a scatter."""
    chosen = topk_idx[:, :, None] == jnp.arange(experts, dtype=topk_idx.dtype)
    return jnp.where(chosen, values[:, :, None], 0.0).sum(axis=1)


@jax.custom_vjp
def take(values: Float[Array, "T E"], topk_idx: Int[Array, "T K"]) -> Float[Array, "T K"]:
    """values[t, topk_idx[t, k]], with a backward that scatters nothing."""
    return jnp.take_along_axis(values, topk_idx, axis=1, mode="promise_in_bounds")


def _take_forward(values: Array, topk_idx: Array) -> tuple[Array, tuple[Array, Array]]:
    return take(values, topk_idx), (topk_idx, jnp.zeros(values.shape[1:], jnp.bool_))


def _take_backward(saved: tuple[Array, Array], d: Array) -> tuple[Array, None]:
    topk_idx, columns = saved
    return dense(d, topk_idx, columns.shape[0]), None


take.defvjp(_take_forward, _take_backward)


def chosen_ids(chosen: Bool[Array, "T E"], K: int) -> Int[Array, "T K"]:
    """The K set columns of each row, ascending."""
    E = chosen.shape[1]
    place = jnp.einsum("te,ef->tf", chosen.astype(jnp.bfloat16), _earlier(E).T, preferred_element_type=jnp.float32)
    # place[t, e]: how many chosen experts come before e.
    at = chosen[:, None, :] & (place[:, None, :] == jnp.arange(K, dtype=jnp.float32)[None, :, None])
    return jnp.where(at, jnp.arange(E, dtype=jnp.int32), 0).sum(axis=2)


def pieces(a: Float[Array, "..."], axis: int) -> Array:
    """Three bfloat16 arrays, one after the other along `axis`, whose sum is `a` to float32's 24 bits.

    A product of a float32 operand with a bfloat16 one then runs on tensor cores at full accuracy.
    """
    found = []
    for _ in range(PIECES):
        # Not a pair of casts: compilers may cancel those, and the remainder would be 0.
        piece = jax.lax.reduce_precision(a, exponent_bits=8, mantissa_bits=7)
        found.append(piece.astype(jnp.bfloat16))
        a = a - piece
    return jnp.concatenate(found, axis=axis)


PIECES = 3
"""bfloat16 significands of 8 bits in a float32's 24."""


def _earlier(n: int) -> Array:
    """[i, j] is 1 where j < i."""
    return jnp.tri(n, k=-1, dtype=jnp.bfloat16)
