"""MXFP8: eight-bit values with one power-of-two scale (E8M0) per 32 consecutive values along the contracted axis.

    value = element * 2^(scale - 127)         scale is a byte; 255 is NaN

A block never crosses from one group into the next: a group whose size is not a multiple of 32 ends in a partial block,
which behaves as if filled with zeros. The scale array has a static bound of blocks; those beyond the last one in use are
padding, hold 255 (NaN) and are never read. Quantise along another axis for the other operand layout: the row-wise copy
(axis -1) feeds products over columns, the column-wise copy (axis 0, with group_sizes) feeds the weight gradient.

Two scale rules exist, and they differ by one binade for amax in (1.75, 2) * 2^n:

| rule | scale exponent                          | consequence |
|------|-----------------------------------------|-------------|
| ocp  | floor(log2(amax)) - emax                | values above largest * scale saturate, by up to 12.5 % for e4m3 |
| te   | ceil(log2(amax * (1 / largest)))        | nothing saturates; up to one bit of resolution is given up |

Source: OCP Microscaling Formats 1.0, section 6.3; Transformer Engine 2.20, common/util/ptx.cuh (`float_to_e8m0`), which
rounds the exponent up, treats an all-zero block as byte 0, and multiplies by 1 for that byte.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from .blocks import block_amax, block_count, block_of_position
from .formats import FORMATS, Format, cast

BLOCK = 32
NAN_SCALE = 255


def quantize(
    x: Float[Array, "..."],
    axis: int,
    group_sizes: Int[Array, " E"] | None = None,
    *,
    element: str = "e4m3",
    scale_rule: Literal["te", "ocp"] = "te",
) -> tuple[Array, UInt8[Array, "..."]]:
    """Quantises along `axis` in blocks of 32; `group_sizes` cut that axis into groups that no block crosses.

    Values keep x's shape in the element's dtype, to nearest even, saturating; scales are bytes with
    `block_count(...)` entries on `axis`. Positions beyond the groups become 0. NaN stays in its own element.
    """
    fmt = FORMATS[element]
    rows = jnp.moveaxis(x, axis, 0).astype(jnp.float32)
    flat = rows.reshape(rows.shape[0], -1)
    blocks = block_count(flat.shape[0], BLOCK, 1 if group_sizes is None else group_sizes.shape[0])
    block_id = block_of_position(flat.shape[0], BLOCK, group_sizes)
    scales = scale_byte(block_amax(flat, block_id, blocks), fmt, scale_rule)
    inside = block_id < blocks
    scaled = divide(flat, scales[jnp.minimum(block_id, blocks - 1)])
    values = cast(jnp.where(inside[:, None], scaled, 0.0), fmt)
    used = jnp.max(jnp.where(inside, block_id, -1), initial=-1) + 1
    scales = jnp.where((jnp.arange(blocks) < used)[:, None], scales, jnp.uint8(NAN_SCALE))
    return _back(values, rows.shape, axis), _back(scales, (blocks, *rows.shape[1:]), axis)


def dequantize(
    values: Array, scales: UInt8[Array, "..."], axis: int, group_sizes: Int[Array, " E"] | None = None
) -> Float[Array, "..."]:
    """The float32 numbers that `values` and `scales` stand for; exact, and 0 beyond the groups."""
    rows = jnp.moveaxis(values, axis, 0)
    flat = rows.reshape(rows.shape[0], -1).astype(jnp.float32)
    bytes_ = jnp.moveaxis(scales, axis, 0)
    blocks = bytes_.shape[0]
    block_id = block_of_position(flat.shape[0], BLOCK, group_sizes)
    scale = power_of_two(bytes_.reshape(blocks, -1)[jnp.minimum(block_id, blocks - 1)])
    # Select, not multiply: padding scales are NaN, and 0 * NaN is NaN.
    return _back(jnp.where((block_id < blocks)[:, None], flat * scale, 0.0), rows.shape, axis)


def scale_byte(amax: Float[Array, "..."], element: Format, scale_rule: str) -> UInt8[Array, "..."]:
    """The E8M0 byte of a block's largest magnitude; 0 for an all-zero block, 254 for an infinite one."""
    if scale_rule == "te":
        target = amax * jnp.float32(1.0 / element.largest)
        exponent, mantissa = _fields(target)
        up = (mantissa > 0) & (exponent < 254) & ~((exponent == 0) & (mantissa <= 0x400000))
        byte = exponent + up.astype(jnp.int32)
    else:
        byte = jnp.maximum(_fields(amax)[0] - element.emax, 0)
    byte = jnp.where(jnp.isinf(amax), 254, byte)
    return jnp.where(amax == 0, 0, jnp.minimum(byte, 254)).astype(jnp.uint8)


def power_of_two(byte: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """2^(byte - 127) in float32; byte 255 is NaN, byte 0 is the subnormal 2^-127."""
    bits = byte.astype(jnp.uint32) << 23
    value = jnp.where(byte == 0, jnp.uint32(0x00400000), bits).view(jnp.float32)
    return jnp.where(byte == NAN_SCALE, jnp.nan, value)


def divide(x: Float[Array, "..."], byte: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """x * 2^(127 - byte) in float32; byte 0 (an all-zero block, or one below every scale) leaves x as it is."""
    bits = jnp.minimum(254 - byte.astype(jnp.int32), 253)
    # 2^-127 is subnormal, and a backend that flushes it turns Inf * 2^-127 into NaN: halve first.
    halved = jnp.where(byte == 254, 0.5 * x, x)
    factor = (jnp.maximum(bits, 1).astype(jnp.uint32) << 23).view(jnp.float32)
    return jnp.where(byte == 0, x, halved * factor)


def _fields(x: Float[Array, "..."]) -> tuple[Array, Array]:
    bits = x.astype(jnp.float32).view(jnp.uint32)
    return (bits >> 23 & 0xFF).astype(jnp.int32), bits & 0x7FFFFF


def _back(flat: Array, shape: tuple[int, ...], axis: int) -> Array:
    return jnp.moveaxis(flat.reshape(shape), 0, axis)
