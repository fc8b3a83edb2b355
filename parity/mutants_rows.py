"""Mutants of classes A to D: idle experts, undefined rows, tile edges, narrow indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .mutant import Mutant, mutant, patched, reference


@mutant("A", "idle-gradients", "grouped_gemm experts")
def idle_gradient_of_the_next() -> dict[str, Any]:
    """The kernel gradient of an expert without tokens is its neighbour's, as when an empty loop runs one masked step."""
    return _with_kernel_gradient(lambda dk, sizes: jnp.where((sizes == 0)[:, None, None], jnp.roll(dk, 1, axis=0), dk))


@mutant("A", "idle-gradients", "grouped_gemm experts")
def idle_gradient_unwritten() -> dict[str, Any]:
    """The kernel gradient of an expert without tokens is never written and holds what memory held."""
    return _with_kernel_gradient(lambda dk, sizes: jnp.where((sizes == 0)[:, None, None], jnp.asarray(7, dk.dtype), dk))


@mutant("A", "busy-gradients", "grouped_gemm experts")
def busy_gradient_beside_idle() -> dict[str, Any]:
    """A busy expert that follows one without tokens gets a gradient half as large."""

    def halve(dk: jax.Array, sizes: jax.Array) -> jax.Array:
        after_idle = jnp.concatenate([jnp.zeros(1, bool), sizes[:-1] == 0])
        return jnp.where(after_idle[:, None, None], dk * jnp.asarray(0.5, dk.dtype), dk)

    return _with_kernel_gradient(halve)


@mutant("B", "inert-gemm-rows", "grouped_gemm experts")
def tail_in_the_last_gradient() -> dict[str, Any]:
    """The last expert's kernel gradient sums every row to the end of the buffer, undefined ones too."""
    base = reference("grouped_gemm").grouped_gemm

    def grouped_gemm(rows, kernels, group_sizes):
        return _own_backward(base, rows, kernels, group_sizes, _to_the_end)

    return patched(grouped_gemm=grouped_gemm)


@mutant("B", "inert-rows", "unpermute experts")
def combine_multiplies_by_zero() -> dict[str, Any]:
    """Slots of no expert read the last row times 0, and 0 times what an undefined row holds may be NaN."""

    def unpermute(problem, rows, routing, row_of_slot):
        late = problem.experts.weight_placement == "late"
        weights = routing.topk_weights if late else jnp.ones_like(routing.topk_weights)
        weights = jnp.where(row_of_slot < 0, jnp.float32(0), weights)
        picked = rows.astype(jnp.float32)[row_of_slot] * weights[..., None]
        unused = rows.astype(jnp.float32).at[row_of_slot.reshape(-1)].set(0.0, mode="drop")
        return (picked.sum(axis=1) + 0.0 * unused.sum(axis=0)).astype(rows.dtype)

    return patched(unpermute=unpermute)


@mutant("B", "inert-tokens", "experts")
def lost_tokens_masked_by_multiplying() -> dict[str, Any]:
    """A token that goes nowhere is multiplied by 0 instead of being left out, so its NaN spreads."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        real = (routing.topk_idx >= 0).any(axis=1)
        y = base(problem, params, x, routing)
        return y + (x * (1 - real.astype(x.dtype))[:, None]).sum(axis=0) * jnp.zeros((), x.dtype)

    return patched(experts=experts)


@mutant("B", "inert-rows", "unpermute experts")
def undefined_rows_go_to_token_0() -> dict[str, Any]:
    """Rows that hold no token are scattered to token 0 with weight 1, where they vanish only while they are 0."""
    base = reference("permute").unpermute

    def unpermute(problem, rows, routing, row_of_slot):
        unused = rows.at[jnp.where(row_of_slot < 0, rows.shape[0], row_of_slot).reshape(-1)].set(0, mode="drop")
        return base(problem, rows, routing, row_of_slot).at[0].add(unused.sum(axis=0))

    return patched(unpermute=unpermute)


@mutant("C", "exact-gemm", "grouped_gemm experts")
def row_past_a_tile_lost() -> dict[str, Any]:
    """A group of one row more than a multiple of 8 loses its last row."""
    base = reference("grouped_gemm").grouped_gemm

    def grouped_gemm(rows, kernels, group_sizes):
        last = jnp.cumsum(group_sizes) - 1
        hit = jnp.where(group_sizes % 8 == 1, last, rows.shape[0])
        return base(rows, kernels, group_sizes).at[hit].set(0, mode="drop")

    return patched(grouped_gemm=grouped_gemm)


@mutant("C", "exact-gemm", "grouped_gemm experts")
def gradient_from_aligned_offsets() -> dict[str, Any]:
    """The kernel gradient reads groups from offsets rounded down to a multiple of 4, right only for aligned groups."""
    base = reference("grouped_gemm").grouped_gemm

    def aligned(rows, dy, group_sizes):
        start = jnp.cumsum(group_sizes) - group_sizes
        return _segment_gradient(rows, dy, start // 4 * 4, group_sizes)

    def grouped_gemm(rows, kernels, group_sizes):
        return _own_backward(base, rows, kernels, group_sizes, aligned)

    return patched(grouped_gemm=grouped_gemm)


@mutant("C", "exact-gemm", "grouped_gemm experts")
def last_odd_column_lost() -> dict[str, Any]:
    """In groups of more than 8 rows the columns beyond a multiple of 16 are not written."""
    base = reference("grouped_gemm").grouped_gemm

    def grouped_gemm(rows, kernels, group_sizes):
        out = base(rows, kernels, group_sizes)
        i = jnp.arange(rows.shape[0])
        owner = jnp.searchsorted(jnp.cumsum(group_sizes), i, side="right")
        large = group_sizes[jnp.minimum(owner, group_sizes.shape[0] - 1)] > 8
        beyond = jnp.arange(out.shape[1]) >= out.shape[1] // 16 * 16
        return jnp.where(large[:, None] & beyond[None], jnp.zeros((), out.dtype), out)

    return patched(grouped_gemm=grouped_gemm)


@mutant("D", "rows-once", "permute experts")
def row_index_in_8_bits() -> dict[str, Any]:
    """Row indices are kept in 8 bits and wrap beyond 127 rows: the overflow of 32-bit offsets at a size that fits a test."""
    base = reference("permute").permute

    def permute(problem, x, routing, *, align=1):
        rows, group_sizes, row_of_slot = base(problem, x, routing, align=align)
        return rows, group_sizes, row_of_slot.astype(jnp.int8).astype(jnp.int32)

    return patched(permute=permute)


@mutant("D", "index-width", "unpermute experts")
def element_offset_in_32_bits() -> dict[str, Any]:
    """The combine finds elements by row * D + column in 32 bits, which wraps beyond 2^31 elements."""

    def unpermute(problem, rows, routing, row_of_slot):
        late = problem.experts.weight_placement == "late"
        weights = routing.topk_weights if late else jnp.ones_like(routing.topk_weights)
        column = jnp.arange(problem.D, dtype=jnp.int32)
        at = jnp.maximum(row_of_slot, 0)[..., None] * jnp.int32(problem.D) + column
        picked = rows[at // problem.D, at % problem.D].astype(jnp.float32)
        picked = jnp.where((row_of_slot < 0)[..., None], 0.0, picked * weights[..., None])
        return picked.sum(axis=1).astype(rows.dtype)

    return patched(unpermute=unpermute)


@mutant("D", "nowhere", "experts")
def minus_one_is_the_last_expert() -> dict[str, Any]:
    """A slot of -1 is read as the last expert, as negative indices are."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        ids = jnp.where(routing.topk_idx < 0, problem.E - 1, routing.topk_idx)
        return base(problem, params, x, type(routing)(ids, routing.topk_weights))

    return patched(experts=experts)


def _with_kernel_gradient(change: Callable[[jax.Array, jax.Array], jax.Array]) -> dict[str, Any]:
    """The baseline with a grouped product whose kernel gradient is changed afterwards."""
    base = reference("grouped_gemm").grouped_gemm

    @jax.custom_vjp
    def grouped_gemm(rows, kernels, group_sizes):
        return base(rows, kernels, group_sizes)

    def forward(rows, kernels, group_sizes):
        return base(rows, kernels, group_sizes), (rows, kernels, group_sizes)

    def backward(saved, dy):
        rows, kernels, group_sizes = saved
        _, pull = jax.vjp(lambda a, k: base(a, k, group_sizes), rows, kernels)
        d_rows, d_kernels = pull(dy)
        return d_rows, change(d_kernels, group_sizes), None

    grouped_gemm.defvjp(forward, backward)
    return patched(grouped_gemm=grouped_gemm)


def _own_backward(base, rows, kernels, group_sizes, kernel_gradient):
    @jax.custom_vjp
    def product(rows, kernels):
        return base(rows, kernels, group_sizes)

    def forward(rows, kernels):
        return product(rows, kernels), (rows, kernels)

    def backward(saved, dy):
        rows, kernels = saved
        _, pull = jax.vjp(lambda a: base(a, kernels, group_sizes), rows)
        d_kernels = kernel_gradient(rows, dy, group_sizes)
        return pull(dy)[0], d_kernels.astype(kernels.dtype)

    product.defvjp(forward, backward)
    return product(rows, kernels)


def _to_the_end(rows: jax.Array, dy: jax.Array, group_sizes: jax.Array) -> jax.Array:
    start = jnp.cumsum(group_sizes) - group_sizes
    busy = jnp.max(jnp.where(group_sizes > 0, jnp.arange(group_sizes.shape[0]), -1))
    longer = jnp.where(jnp.arange(group_sizes.shape[0]) == busy, rows.shape[0] - start, group_sizes)
    return _segment_gradient(rows, dy, start, longer)


def _segment_gradient(rows: jax.Array, dy: jax.Array, start: jax.Array, sizes: jax.Array) -> jax.Array:
    i = jnp.arange(rows.shape[0])
    own = (start[:, None] <= i) & (i < (start + sizes)[:, None])

    def one(mine: jax.Array) -> jax.Array:
        a, b = (jnp.where(mine[:, None], v, jnp.zeros((), v.dtype)).astype(jnp.float32) for v in (rows, dy))
        return jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST)

    return jax.vmap(one)(own)


MUTANTS: tuple[Mutant, ...] = (
    idle_gradient_of_the_next,
    idle_gradient_unwritten,
    busy_gradient_beside_idle,
    tail_in_the_last_gradient,
    combine_multiplies_by_zero,
    lost_tokens_masked_by_multiplying,
    undefined_rows_go_to_token_0,
    row_past_a_tile_lost,
    gradient_from_aligned_offsets,
    last_odd_column_lost,
    row_index_in_8_bits,
    element_offset_in_32_bits,
    minus_one_is_the_last_expert,
)
