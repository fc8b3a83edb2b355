"""Low-precision experts by emulation, in the layout that real kernels use: groups padded to whole blocks of rows.

Same recipes and same bits as the reference's `recipes`, reached another way: a block is an axis of a reshaped array rather
than a segment of rows, scales come from `frexp`, and values from the backend's own eight- and four-bit casts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Role = Literal["activation", "kernel", "gradient"]

_BLOCK = {"mxfp8": 32, "fp8-block": 128, "nvfp4": 16}
_DTYPE = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.float4_e2m1fn}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


def grouped_gemm_of(recipe: str, grouped_gemm: Callable) -> Callable:
    """A grouped GEMM whose operands are quantised by `recipe`, forward and backward, around a given float32 one.

    Same contract as the stage; results are rounded once to the operands' dtype, and rounding is transparent to
    gradients.
    """

    @jax.custom_vjp
    def quantised(
        rows: Float[Array, "P A"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "P B"]:
        return forward(rows, kernels, group_sizes)[0]

    def forward(rows: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        lhs = represent(recipe, rows, 1, "activation", group_sizes)
        out = grouped_gemm(lhs, represent_kernels(recipe, kernels, 1), group_sizes)
        return out.astype(rows.dtype), (rows, kernels, group_sizes)

    def backward(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, Array, None]:
        rows, kernels, group_sizes = saved
        columns = represent(recipe, rows, 0, "activation", group_sizes)
        other = represent_kernels(recipe, kernels, 2)
        _, vjp = jax.vjp(lambda r, k: grouped_gemm(r, k, group_sizes), columns, other)
        # Each cotangent has a copy of its own, so each call gives one of the two products; XLA drops the other.
        d_rows, _ = vjp(represent(recipe, d, 1, "gradient", group_sizes))
        _, d_kernels = vjp(represent(recipe, d, 0, "gradient", group_sizes))
        return d_rows.astype(rows.dtype), d_kernels.astype(kernels.dtype), None

    quantised.defvjp(forward, backward)
    return quantised


def represent(
    recipe: str, rows: Float[Array, "P A"], axis: int, role: Role, group_sizes: Int[Array, " E"]
) -> Float[Array, "P A"]:
    """The float32 numbers that an expert-sorted operand stands for once quantised along `axis`; rows beyond the groups are 0."""
    P = rows.shape[0]
    ends = jnp.cumsum(group_sizes.astype(jnp.int32))
    row = jnp.arange(P, dtype=jnp.int32)
    group = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    rows = jnp.where((row < ends[-1])[:, None], rows, 0).astype(jnp.float32)
    if recipe == "none" or (recipe == "nvfp4" and (role == "gradient" or axis == 0)):
        return rows
    element = "e5m2" if role == "gradient" and recipe in ("fp8-current", "fp8-delayed") else "e4m3"
    if recipe == "fp8-delayed":
        return _through(rows, jnp.float32(1.0), element)
    if recipe == "fp8-current":
        E = group_sizes.shape[0]
        amax = jax.ops.segment_max(_magnitude(rows).max(axis=1, initial=0.0), group, E, indices_are_sorted=True)
        encode = _encode(jnp.maximum(amax, 0.0), element)[jnp.minimum(group, E - 1), None]
        return _through(rows, encode, element)
    if axis == 1:
        return _in_blocks(recipe, rows[:, :, None], element)[:, :, 0]
    block = _BLOCK[recipe]
    held = -(-group_sizes.astype(jnp.int32) // block) * block
    slots = (P // block + min(P, group_sizes.shape[0]) + 1) * block
    inside = jnp.minimum(group, group_sizes.shape[0] - 1)
    at = row + (jnp.cumsum(held) - held - (ends - group_sizes.astype(jnp.int32)))[inside]
    at = jnp.where(row < ends[-1], at, slots)
    aligned = jnp.zeros((1, slots, rows.shape[1]), jnp.float32).at[0, at].set(rows, mode="drop")
    found = _in_blocks(recipe, aligned, element)[0]
    return jnp.where((row < ends[-1])[:, None], found.at[at].get(mode="fill", fill_value=0), 0.0)


def represent_kernels(recipe: str, kernels: Float[Array, "E A B"], axis: int) -> Float[Array, "E A B"]:
    """The float32 numbers that the experts' kernels stand for once quantised along `axis` (1 or 2), each expert alone."""
    kernels = kernels.astype(jnp.float32)
    if recipe == "none" or (recipe == "nvfp4" and axis == 2):
        return kernels
    if recipe == "fp8-delayed":
        return _through(kernels, jnp.float32(1.0), "e4m3")
    if recipe == "fp8-current":
        return _through(
            kernels, _encode(_magnitude(kernels).max(axis=(1, 2), keepdims=True, initial=0.0), "e4m3"), "e4m3"
        )
    if recipe == "fp8-block":
        return _in_tiles(kernels)
    turned = kernels if axis == 1 else kernels.swapaxes(1, 2)
    if recipe == "nvfp4":
        found = jax.vmap(lambda k: _in_blocks(recipe, k[None], "e4m3")[0])(turned)
    else:
        found = _in_blocks(recipe, turned, "e4m3")
    return found if axis == 1 else found.swapaxes(1, 2)


def _in_blocks(recipe: str, x: Float[Array, "N A B"], element: str) -> Float[Array, "N A B"]:
    """Quantises along the middle axis in the recipe's blocks, padded with zeros to whole ones."""
    block, (N, A, B) = _BLOCK[recipe], x.shape
    blocks = jnp.pad(x, ((0, 0), (0, -A % block), (0, 0))).reshape(N, -1, block, B)
    amax = _magnitude(blocks).max(axis=2, keepdims=True, initial=0.0)
    if recipe == "nvfp4":
        out = _two_scales(blocks, amax)
    elif recipe == "mxfp8":
        out = _through(blocks, 1 / _mx_scale(amax, element), element)
    else:
        out = _through(blocks, _floor_power(_encode(amax, element)), element)
    return out.reshape(N, -1, B)[:, :A]


def _in_tiles(kernels: Float[Array, "E A B"]) -> Float[Array, "E A B"]:
    E, A, B = kernels.shape
    block = _BLOCK["fp8-block"]
    padded = jnp.pad(kernels, ((0, 0), (0, -A % block), (0, -B % block)))
    tiles = padded.reshape(E, padded.shape[1] // block, block, padded.shape[2] // block, block)
    amax = _magnitude(tiles).max(axis=(2, 4), keepdims=True, initial=0.0)
    return _through(tiles, _floor_power(_encode(amax, "e4m3")), "e4m3").reshape(padded.shape)[:, :A, :B]


def _two_scales(blocks: Array, amax: Array) -> Array:
    encode = _encode(amax.max(initial=0.0), "e2m1", extra=448.0)
    scale = _cast(amax * jnp.float32(1 / 6) * encode, "e4m3")
    per_block = lax.optimization_barrier(encode / jnp.where(scale > 0, scale, 1.0))
    values = _cast(jnp.where(scale > 0, blocks * per_block, 0.0), "e2m1")
    return values * (scale * (1.0 / encode))


def _through(x: Array, encode: Array, element: str) -> Array:
    return _cast(x * encode, element) * (1.0 / encode)


def _cast(x: Array, element: str) -> Array:
    clipped = jnp.clip(x, -_LARGEST[element], _LARGEST[element])
    return clipped.astype(_DTYPE[element]).astype(jnp.float32)


def _magnitude(x: Array) -> Array:
    magnitude = jnp.abs(x)
    return jnp.where(jnp.isnan(magnitude), 0.0, magnitude)


def _encode(amax: Array, element: str, *, extra: float = 1.0) -> Array:
    usable = (amax > 0) & jnp.isfinite(amax)
    quotient = jnp.float32(_LARGEST[element] * extra) / jnp.where(usable, amax, 1.0)
    # Kept apart, or the compiler folds 1 / (a / b) into b / a.
    return lax.optimization_barrier(jnp.where(usable, jnp.minimum(quotient, jnp.finfo(jnp.float32).max), 1.0))


def _floor_power(encode: Array) -> Array:
    return jnp.ldexp(jnp.float32(0.5), jnp.frexp(encode)[1])


def _mx_scale(amax: Array, element: str) -> Array:
    """The power of two at or above amax / largest; 1 for an all-zero block, whose values are 0 under any scale."""
    mantissa, exponent = jnp.frexp(amax * jnp.float32(1 / _LARGEST[element]))
    up = jnp.where(mantissa == 0.5, exponent - 1, exponent)
    up = jnp.where(jnp.isinf(amax), 126, up)  # frexp says exponent 0 of infinity
    return jnp.where(amax > 0, jnp.ldexp(jnp.float32(1.0), jnp.clip(up, -126, 126)), 1.0)
