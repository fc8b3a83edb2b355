"""Eight-bit floats with float32 scales: one per tensor (current or delayed), or one per 128 values (block scaling).

    value = element * scale          element = cast(value * encode)    encode = largest / amax, scale = 1 / encode

| recipe  | scale is taken from                         | scales are kept per |
|---------|---------------------------------------------|---------------------|
| current | this tensor's amax                          | group of rows, or tensor |
| delayed | the largest amax of earlier steps           | tensor |
| block   | this block's amax; encode rounded down to 2^n | 1 x 128 (activations, gradients), 128 x 128 (kernels) |

An amax of 0, or one that is infinite, gives scale 1. Delayed scaling can meet a value beyond its history: it saturates.
Source: Transformer Engine 2.20, common/recipe (`compute_scale_from_amax`; block scaling uses powers of two by default).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .blocks import block_amax, block_count, block_of_position
from .formats import FORMATS, Format, cast

BLOCK = 128
HISTORY = 1024
"""Transformer Engine's default length of an amax history."""


def quantize(
    x: Float[Array, "..."], axis: int, group_sizes: Int[Array, " E"] | None = None, *, element: str = "e4m3"
) -> tuple[Array, Float[Array, "..."]]:
    """Current scaling: one scale per tensor, or per group of positions along `axis` when `group_sizes` is given.

    Values keep x's shape; scales are float32 [E] or [1]. Positions beyond the groups become 0.
    """
    fmt = FORMATS[element]
    rows = jnp.moveaxis(x, axis, 0).astype(jnp.float32)
    flat = rows.reshape(rows.shape[0], -1)
    group, groups = _group_of_position(flat.shape[0], group_sizes)
    encode = encode_of(block_amax(flat, group, groups).max(axis=1, initial=0.0), fmt)
    scaled = flat * encode[jnp.minimum(group, groups - 1), None]
    values = cast(jnp.where((group < groups)[:, None], scaled, 0.0), fmt)
    return _back(values, rows.shape, axis), 1.0 / encode


def dequantize(
    values: Array, scales: Float[Array, "..."], axis: int, group_sizes: Int[Array, " E"] | None = None
) -> Float[Array, "..."]:
    """The float32 numbers that `values` and per-group `scales` stand for; 0 beyond the groups."""
    rows = jnp.moveaxis(values, axis, 0)
    flat = rows.reshape(rows.shape[0], -1).astype(jnp.float32)
    group, groups = _group_of_position(flat.shape[0], group_sizes)
    scaled = flat * scales[jnp.minimum(group, groups - 1), None]
    return jnp.moveaxis(jnp.where((group < groups)[:, None], scaled, 0.0).reshape(rows.shape), 0, axis)


def quantize_delayed(
    x: Float[Array, "..."], history: Float[Array, " H"], *, element: str = "e4m3"
) -> tuple[Array, Float[Array, " 1"], Float[Array, " H"]]:
    """Delayed scaling: (values, scale [1], next history); the scale comes from `history` alone, this amax is pushed in front.

    `history` holds earlier steps' amax, newest first, and zeros before the first step (scale 1). NaN does not enter it.
    """
    fmt = FORMATS[element]
    encode = encode_of(history.max(initial=0.0, keepdims=True), fmt)
    magnitude = jnp.abs(x.astype(jnp.float32))
    amax = jnp.where(jnp.isnan(magnitude), 0.0, magnitude).max(initial=0.0)
    values = cast(x.astype(jnp.float32) * encode[0], fmt)
    return values, 1.0 / encode, jnp.concatenate([amax[None], history[:-1]])


def quantize_blocks(
    x: Float[Array, "..."], axis: int, group_sizes: Int[Array, " E"] | None = None, *, element: str = "e4m3"
) -> tuple[Array, Float[Array, "..."]]:
    """Block scaling 1 x 128 along `axis`: one power-of-two scale per 128 values; no block crosses a group.

    Values keep x's shape; scales have `block_count(n, 128, groups)` entries on `axis`, and padding entries are NaN.
    """
    fmt = FORMATS[element]
    rows = jnp.moveaxis(x, axis, 0).astype(jnp.float32)
    flat = rows.reshape(rows.shape[0], -1)
    blocks = block_count(flat.shape[0], BLOCK, 1 if group_sizes is None else group_sizes.shape[0])
    block_id = block_of_position(flat.shape[0], BLOCK, group_sizes)
    encode = round_down_to_power_of_two(encode_of(block_amax(flat, block_id, blocks), fmt))
    inside = block_id < blocks
    scaled = flat * encode[jnp.minimum(block_id, blocks - 1)]
    values = cast(jnp.where(inside[:, None], scaled, 0.0), fmt)
    used = jnp.max(jnp.where(inside, block_id, -1), initial=-1) + 1
    scales = jnp.where((jnp.arange(blocks) < used)[:, None], 1.0 / encode, jnp.nan)
    return _back(values, rows.shape, axis), _back(scales, (blocks, *rows.shape[1:]), axis)


def dequantize_blocks(
    values: Array, scales: Float[Array, "..."], axis: int, group_sizes: Int[Array, " E"] | None = None
) -> Float[Array, "..."]:
    """The float32 numbers that `values` and per-block `scales` stand for; 0 beyond the groups."""
    rows = jnp.moveaxis(values, axis, 0)
    flat = rows.reshape(rows.shape[0], -1).astype(jnp.float32)
    per_block = jnp.moveaxis(scales, axis, 0)
    blocks = per_block.shape[0]
    block_id = block_of_position(flat.shape[0], BLOCK, group_sizes)
    scale = per_block.reshape(blocks, -1)[jnp.minimum(block_id, blocks - 1)]
    return _back(jnp.where((block_id < blocks)[:, None], flat * scale, 0.0), rows.shape, axis)


def quantize_tiles(x: Float[Array, "... A B"], *, element: str = "e4m3") -> tuple[Array, Float[Array, "... a b"]]:
    """Block scaling 128 x 128 over the last two axes (kernels): one power-of-two scale per tile; edge tiles may be partial."""
    fmt = FORMATS[element]
    magnitude = jnp.abs(x.astype(jnp.float32))
    tiles = _tiles(jnp.where(jnp.isnan(magnitude), 0.0, magnitude))
    encode = round_down_to_power_of_two(encode_of(tiles.max(axis=(-3, -1)), fmt))
    return cast(x.astype(jnp.float32) * _per_element(encode, x.shape), fmt), 1.0 / encode


def dequantize_tiles(values: Array, scales: Float[Array, "... a b"]) -> Float[Array, "... A B"]:
    """The float32 numbers that tile-scaled `values` stand for."""
    return values.astype(jnp.float32) * _per_element(scales, values.shape)


def encode_of(amax: Float[Array, "..."], element: Format) -> Float[Array, "..."]:
    """largest / amax in float32; 1 where amax is 0 or infinite; the largest float32 where the quotient overflows."""
    usable = (amax > 0) & jnp.isfinite(amax)
    quotient = jnp.float32(element.largest) / jnp.where(usable, amax, 1.0)
    encode = jnp.where(usable, jnp.minimum(quotient, jnp.finfo(jnp.float32).max), 1.0)
    # Kept apart, or the compiler turns 1 / (a / b) into b / a, and that into a product with a rounded reciprocal.
    return lax.optimization_barrier(encode)


def round_down_to_power_of_two(encode: Float[Array, "..."]) -> Float[Array, "..."]:
    """The largest power of two that is not above a positive normal number; under it nothing saturates."""
    return (encode.view(jnp.uint32) >> 23 << 23).view(jnp.float32)


def _group_of_position(length: int, group_sizes: Array | None) -> tuple[Array, int]:
    if group_sizes is None:
        return jnp.zeros(length, jnp.int32), 1
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    return jnp.searchsorted(ends, jnp.arange(length, dtype=jnp.int32), side="right").astype(jnp.int32), ends.shape[0]


def _back(flat: Array, shape: tuple[int, ...], axis: int) -> Array:
    return jnp.moveaxis(flat.reshape(shape), 0, axis)


def _tiles(x: Array) -> Array:
    """[..., A, B] -> [..., a, 128, b, 128], padded with zeros."""
    *lead, a, b = x.shape
    pad = [(0, 0)] * len(lead) + [(0, -a % BLOCK), (0, -b % BLOCK)]
    return jnp.pad(x, pad).reshape(*lead, -(-a // BLOCK), BLOCK, -(-b // BLOCK), BLOCK)


def _per_element(scales: Array, shape: tuple[int, ...]) -> Array:
    full = jnp.repeat(jnp.repeat(scales, BLOCK, axis=-2), BLOCK, axis=-1)
    return full[..., : shape[-2], : shape[-1]]
