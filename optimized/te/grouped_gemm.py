"""One product per expert over contiguous blocks of rows, in one call to cuBLAS through Transformer Engine.

TE has two paths. V2 reads group sizes in device memory: nothing is copied to the host and one executable serves every
routing. V1 copies them to the host, waits, and launches one product per expert. Only V2 is taken here; a call that TE would
silently send to V1 raises `Unsupported` instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.interface import Support, Unsupported


@jax.custom_vjp
def grouped_gemm(
    rows: Float[Array, "P A"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]
) -> Float[Array, "P B"]:
    """Multiplies each block of rows by its own expert's kernel.

    out[i] = rows[i] @ kernels[e] for i in block e, the blocks contiguous from row 0. Accumulates in float32 and rounds
    once. Rows beyond the blocks are never read and are left unwritten, forward and backward; an empty block's kernel
    gradient is exactly 0. Raises Unsupported where TE would copy group sizes to the host.
    """
    return product(rows, kernels, group_sizes)


def _forward(rows: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return product(rows, kernels, group_sizes), (rows, kernels, group_sizes)


def _backward(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, Array, None]:
    rows, kernels, group_sizes = saved
    return transposed_product(d, kernels, group_sizes), kernel_gradient(rows, d, group_sizes), None


grouped_gemm.defvjp(_forward, _backward)


def product(rows: Float[Array, "P A"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]) -> Array:
    """rows[i] @ kernels[e] for i in block e: [P, B]."""
    return _call(rows, group_sizes, kernels, None, ((1,), (1,)))


def transposed_product(d: Float[Array, "P B"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]) -> Array:
    """d[i] @ kernels[e].T for i in block e: [P, A]. The kernel is read as it lies, never transposed in memory."""
    return _call(d, group_sizes, kernels, None, ((1,), (2,)))


def kernel_gradient(rows: Float[Array, "P A"], d: Float[Array, "P B"], group_sizes: Int[Array, " E"]) -> Array:
    """rows[block e].T @ d[block e]: [E, A, B]; exactly 0 for an empty block."""
    return _call(rows, group_sizes, d, group_sizes, ((0,), (0,)))


def path(dtype: Any) -> tuple[Literal["V2", "V1"], str]:
    """Which of TE's paths a product of this dtype takes on this machine, and why not V2."""
    from transformer_engine.jax.cpp_extensions.gemm import is_v2_grouped_gemm_supported
    from transformer_engine.jax.quantize import ScalingMode

    ok, reason = is_v2_grouped_gemm_supported(ScalingMode.NO_SCALING, jnp.dtype(dtype), False)
    return ("V2" if ok else "V1"), reason


def _call(lhs: Array, lhs_sizes: Array | None, rhs: Array, rhs_sizes: Array | None, contracting: Any) -> Array:
    grouped, gemm = _te()
    if not (device_side := _device_side(lhs.dtype)):
        raise Unsupported(device_side.reason)
    return gemm(grouped(lhs, lhs_sizes), grouped(rhs, rhs_sizes), contracting_dims=contracting)


@functools.cache
def _device_side(dtype: Any) -> Support:
    taken, reason = path(dtype)
    return Support(taken == "V2", "" if taken == "V2" else f"TE would copy group sizes to the host: {reason}")


@functools.cache
def _te() -> tuple[Callable[[Array, Array | None], Any], Callable[..., Array]]:
    """(tensor of blocks, product) of the installed release."""
    from transformer_engine.jax import cpp_extensions as tex

    def grouped(data: Array, sizes: Array | None) -> Any:
        # Without a quantizer TE only labels the data with its block sizes.
        return tex.grouped_quantize(data, None, None if sizes is None else sizes.astype(jnp.int32))

    return grouped, tex.grouped_gemm
