"""NVFP4: four-bit values (e2m1), one e4m3 scale per 16 of them, one float32 scale per tensor. Forward pass only.

    value = element * block_scale * tensor_scale
    encode = 6 * 448 / amax          tensor_scale = 1 / encode          block_scale = e4m3(block_amax * (1/6) * encode)
    element = cast(x * (encode / block_scale))

An all-zero block has block_scale 0 and stores zeros: its reciprocal is never taken. The block scale saturates at 448, which
is reached only by the block that holds the tensor's amax, so no scale becomes NaN (e4m3 has no infinity: 480 would).
Source: Transformer Engine 2.20, NVFP4 block scaling; round to nearest even, without the random Hadamard transform.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .blocks import block_amax, block_count, block_of_position
from .formats import E2M1, E4M3, cast

BLOCK = 16


def quantize(
    x: Float[Array, "..."], axis: int, group_sizes: Int[Array, " E"] | None = None
) -> tuple[Array, tuple[Array, Float[Array, ""]]]:
    """Quantises along `axis` in blocks of 16 that cross no group; values keep x's shape in float4_e2m1fn.

    The scales are (block scales in float8_e4m3fn with `block_count(...)` entries on `axis`, the tensor's float32 scale);
    padding block scales are NaN. NaN in x stores 0, since e2m1 has none: check for it before quantising.
    """
    rows = jnp.moveaxis(x, axis, 0).astype(jnp.float32)
    flat = rows.reshape(rows.shape[0], -1)
    blocks = block_count(flat.shape[0], BLOCK, 1 if group_sizes is None else group_sizes.shape[0])
    block_id = block_of_position(flat.shape[0], BLOCK, group_sizes)
    amax = block_amax(jnp.where((block_id < blocks)[:, None], flat, 0.0), block_id, blocks)
    largest = amax.max(initial=0.0)
    usable = (largest > 0) & jnp.isfinite(largest)
    quotient = jnp.float32(E2M1.largest * E4M3.largest) / jnp.where(usable, largest, 1.0)
    # Kept apart, or the compiler folds 1 / (a / b) into b / a.
    encode = lax.optimization_barrier(jnp.where(usable, jnp.minimum(quotient, jnp.finfo(jnp.float32).max), 1.0))
    block_scale = cast(amax * jnp.float32(1 / E2M1.largest) * encode, E4M3)
    inside = block_id < blocks
    per_block = block_scale.astype(jnp.float32)
    block_encode = lax.optimization_barrier(encode / jnp.where(per_block > 0, per_block, 1.0))
    at = jnp.minimum(block_id, blocks - 1)
    held = inside[:, None] & (per_block[at] > 0)
    values = cast(jnp.where(held, flat * block_encode[at], 0.0), E2M1)
    used = jnp.max(jnp.where(inside, block_id, -1), initial=-1) + 1
    padding = jnp.full_like(block_scale, jnp.nan)
    block_scale = jnp.where((jnp.arange(blocks) < used)[:, None], block_scale, padding)
    back = jnp.moveaxis(block_scale.reshape(blocks, *rows.shape[1:]), 0, axis)
    return jnp.moveaxis(values.reshape(rows.shape), 0, axis), (back, 1.0 / encode)


def dequantize(
    values: Array, scales: tuple[Array, Float[Array, ""]], axis: int, group_sizes: Int[Array, " E"] | None = None
) -> Float[Array, "..."]:
    """The float32 numbers that `values` and `scales` stand for; 0 beyond the groups."""
    block_scale, tensor_scale = scales
    rows = jnp.moveaxis(values, axis, 0)
    flat = rows.reshape(rows.shape[0], -1).astype(jnp.float32)
    per_block = jnp.moveaxis(block_scale, axis, 0).astype(jnp.float32)
    blocks = per_block.shape[0]
    block_id = block_of_position(flat.shape[0], BLOCK, group_sizes)
    scale = per_block.reshape(blocks, -1)[jnp.minimum(block_id, blocks - 1)] * tensor_scale
    exact = jnp.where((block_id < blocks)[:, None], flat * scale, 0.0)
    return jnp.moveaxis(exact.reshape(rows.shape), 0, axis)
