"""One product per expert over contiguous groups of rows, as one block-sparse pass whose cost follows the real rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .visit import Block, block_sizes, visit

FEW = 16
"""Up to 16 rows a kernel's gradient is faster from transposed rows; above, XLA's other product uses both cores better."""


@jax.custom_vjp
def grouped_gemm(
    rows: Float[Array, "P A"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]
) -> Float[Array, "P B"]:
    """Multiplies each group of rows by its own expert's kernel.

    out[i] = rows[i] @ kernels[e] for i in group e, the groups contiguous from row 0; and backward, with d the
    cotangent: d_rows[i] = d[i] @ kernels[e].T, d_kernels[e] = rows[group e].T @ d[group e].

    An empty group's kernel gradient is exactly 0. Rows beyond the groups are never used, forward or backward, and give
    0. Accumulates in float32 at the highest precision; each result is rounded once.
    """
    return _forward(rows, kernels, group_sizes)[0]


def matmul(
    a: Array,
    b: Array,
    *,
    precision: lax.Precision = lax.Precision.HIGHEST,
    contract: tuple[int, int] = (1, 0),
) -> Array:
    """Sums over axis contract[0] of a and contract[1] of b, in float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def outer(
    a: Float[Array, "rows A"], b: Float[Array, "rows B"], *, precision: lax.Precision = lax.Precision.HIGHEST
) -> Float[Array, "A B"]:
    """a.T @ b in float32: one block's part of a kernel's gradient."""
    if a.shape[0] > FEW:
        return matmul(a, b, precision=precision, contract=(0, 0))
    return matmul(lax.optimization_barrier(a.T), b, precision=precision)


def _forward(rows: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    def block(kernel: Array, b: Block, out: Array) -> tuple[Array, tuple]:
        return b.write(out, matmul(b.read(rows), kernel).astype(rows.dtype)), ()

    out = jnp.zeros((rows.shape[0], kernels.shape[2]), rows.dtype)
    if rows.shape[0]:
        out = _visit(rows, kernels, group_sizes, block, out)
    return out, (rows, kernels, group_sizes)


def _backward(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, Array, None]:
    rows, kernels, group_sizes = saved

    def block(kernel: Array, b: Block, carry: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        d_rows, d_kernels = carry
        d_b = b.read(d)
        d_rows = b.write(d_rows, matmul(d_b, kernel, contract=(1, 1)).astype(rows.dtype))
        return (d_rows, d_kernels), outer(b.read_own(rows), b.select(d_b))

    def leave(e: Array, total: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return carry[0], lax.dynamic_update_index_in_dim(carry[1], total.astype(kernels.dtype), e, 0)

    carry = jnp.zeros_like(rows), jnp.zeros_like(kernels)
    if rows.shape[0]:
        carry = _visit(rows, kernels, group_sizes, block, carry, leave=leave)
    d_rows, d_kernels = carry
    return d_rows, d_kernels, None


grouped_gemm.defvjp(_forward, _backward)


def _visit(rows: Array, kernels: Array, group_sizes: Array, block, carry, **kwargs):
    P = rows.shape[0]
    return visit(
        group_sizes,
        block_sizes(P, P),
        P,
        block,
        carry,
        enter=lambda e: lax.dynamic_index_in_dim(kernels, e, 0, keepdims=False),
        largest_group=P,
        **kwargs,
    )
