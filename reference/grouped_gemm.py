"""One product per expert over contiguous blocks of rows, one expert at a time."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def grouped_gemm(
    rows: Float[Array, "P A"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]
) -> Float[Array, "P B"]:
    """Multiplies each block of rows by its own expert's kernel.

    out[i] = rows[i] @ kernels[e] for i in block e, the blocks contiguous from row 0; and backward, with d the
    cotangent: d_rows[i] = d[i] @ kernels[e].T, d_kernels[e] = rows[block e].T @ d[block e].

    An empty block's kernel gradient is exactly 0. Rows beyond the blocks are never used (selected away, since
    0 * NaN is NaN) and give 0. Accumulates in float32 at the highest precision; each result is rounded once.
    """
    return _forward(rows, kernels, group_sizes)[0]


def _forward(rows: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    def expert(out: Array, of_e: tuple[Array, Array]) -> tuple[Array, None]:
        kernel, own = of_e
        return jnp.where(own[:, None], _matmul(rows, kernel), out), None

    out = jnp.zeros((rows.shape[0], kernels.shape[2]), rows.dtype)
    out, _ = jax.lax.scan(expert, out, (kernels, _blocks(rows, group_sizes)))
    return out, (rows, kernels, group_sizes)


def _backward(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, Array, None]:
    rows, kernels, group_sizes = saved

    def expert(d_rows: Array, of_e: tuple[Array, Array]) -> tuple[Array, Array]:
        kernel, own = of_e
        rows_e, d_e = (jnp.where(own[:, None], a, 0) for a in (rows, d))
        return jnp.where(own[:, None], _matmul(d_e, kernel.T), d_rows), _matmul(rows_e.T, d_e).astype(kernel.dtype)

    d_rows, d_kernels = jax.lax.scan(expert, jnp.zeros_like(rows), (kernels, _blocks(rows, group_sizes)))
    return d_rows, d_kernels, None


grouped_gemm.defvjp(_forward, _backward)


def _blocks(rows: Array, group_sizes: Array) -> Array:
    """own[e, i]: whether row i lies in block e."""
    end = jnp.cumsum(group_sizes)[:, None]
    i = jnp.arange(rows.shape[0], dtype=end.dtype)[None, :]
    return (end - group_sizes[:, None] <= i) & (i < end)


def _matmul(a: Array, b: Array) -> Array:
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return product.astype(a.dtype)
