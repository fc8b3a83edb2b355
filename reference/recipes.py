"""Low-precision experts by emulation: quantise each product's operands, multiply what they stand for, accumulate in float32.

| recipe      | activations           | kernels               | gradients             |
|-------------|-----------------------|-----------------------|-----------------------|
| fp8-current | e4m3, one expert's rows share a scale | e4m3, one scale an expert | e5m2, as activations |
| fp8-delayed | e4m3, the tensor's scale from its history | e4m3, likewise | e5m2, likewise |
| fp8-block   | e4m3, 1 x 128         | e4m3, 128 x 128       | e4m3, 1 x 128         |
| mxfp8       | e4m3, 32 and E8M0     | e4m3, 32 and E8M0     | e4m3, 32 and E8M0     |
| nvfp4       | e2m1, 16 and e4m3     | e2m1, 16 and e4m3     | not quantised         |

Every product quantises along its own contraction: out = rows @ kernel along A, d_rows = d @ kernel.T along B, and
d_kernel = rows.T @ d along the expert's rows, so activations and gradients exist as a row-wise and a column-wise copy that
differ. Products of two elements are exact in float32. A `Problem` keeps no state between steps, so fp8-delayed is its first step:
an empty history and scale 1. Which operands are quantised follows Transformer Engine's recipes (common/recipe: hybrid
e4m3/e5m2 for tensor scaling, e4m3 everywhere for block scaling and MXFP8).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import fp8, mxfp8, nvfp4

Role = Literal["activation", "kernel", "gradient"]


ROLES: tuple[Role, ...] = ("activation", "kernel", "gradient")


def grouped_gemm_of(recipe: str, grouped_gemm: Callable, *, roles: tuple[Role, ...] = ROLES) -> Callable:
    """A grouped GEMM whose operands are quantised by `recipe`, forward and backward, around a given float32 one.

    Same contract as the stage: contiguous blocks from row 0, an empty block's kernel gradient exactly 0, rows beyond the
    blocks never matter. Results are rounded once to the operands' dtype. Rounding is transparent to gradients
    (straight-through), as in the layers it stands for. Operands whose role is not in `roles` stay as they are: what one
    of them costs alone can then be seen.
    """
    of = {role: recipe if role in roles else "none" for role in ROLES}

    @jax.custom_vjp
    def quantised(
        rows: Float[Array, "P A"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "P B"]:
        return forward(rows, kernels, group_sizes)[0]

    def forward(rows: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        lhs = represent(of["activation"], rows, 1, "activation", group_sizes)
        rhs = represent_kernels(of["kernel"], kernels, 1)
        return grouped_gemm(lhs, rhs, group_sizes).astype(rows.dtype), (rows, kernels, group_sizes)

    def backward(saved: tuple[Array, Array, Array], d: Array) -> tuple[Array, Array, None]:
        rows, kernels, group_sizes = saved
        d_wise = represent(of["gradient"], d, 1, "gradient", group_sizes)
        d_columns = represent(of["gradient"], d, 0, "gradient", group_sizes)
        rows_columns = represent(of["activation"], rows, 0, "activation", group_sizes)
        kernels_other = represent_kernels(of["kernel"], kernels, 2)
        # The product is linear in each operand, so its own gradients are the two backward products.
        _, rows_vjp = jax.vjp(lambda r: grouped_gemm(r, kernels_other, group_sizes), rows.astype(jnp.float32))
        _, kernels_vjp = jax.vjp(lambda k: grouped_gemm(rows_columns, k, group_sizes), kernels.astype(jnp.float32))
        return rows_vjp(d_wise)[0].astype(rows.dtype), kernels_vjp(d_columns)[0].astype(kernels.dtype), None

    quantised.defvjp(forward, backward)
    return quantised


def represent(
    recipe: str, rows: Float[Array, "P A"], axis: int, role: Role, group_sizes: Int[Array, " E"]
) -> Float[Array, "P A"]:
    """The float32 numbers that an expert-sorted operand stands for once quantised along `axis`; rows beyond the groups are 0."""
    # A scale that is taken over a whole tensor must not see what undefined rows hold.
    held = jnp.arange(rows.shape[0])[:, None] < jnp.sum(group_sizes)
    rows = jnp.where(held, rows, 0).astype(jnp.float32)
    cut = group_sizes if axis == 0 else None
    element = "e5m2" if role == "gradient" and recipe in ("fp8-current", "fp8-delayed") else "e4m3"
    if recipe == "fp8-current":
        return fp8.dequantize(*fp8.quantize(rows, 0, group_sizes, element=element), 0, group_sizes)
    if recipe == "fp8-delayed":
        return _first_step(rows, element)
    if recipe == "fp8-block":
        return fp8.dequantize_blocks(*fp8.quantize_blocks(rows, axis, cut, element=element), axis, cut)
    if recipe == "mxfp8":
        return mxfp8.dequantize(*mxfp8.quantize(rows, axis, cut, element=element), axis, cut)
    if recipe == "nvfp4":
        return rows if role == "gradient" or axis == 0 else nvfp4.dequantize(*nvfp4.quantize(rows, axis), axis)
    return rows


def represent_kernels(recipe: str, kernels: Float[Array, "E A B"], axis: int) -> Float[Array, "E A B"]:
    """The float32 numbers that the experts' kernels stand for once quantised along `axis` (1 or 2), each expert alone."""
    return jax.vmap(partial(_represent_kernel, recipe, axis=axis - 1))(kernels.astype(jnp.float32))


def _represent_kernel(recipe: str, kernel: Float[Array, "A B"], *, axis: int) -> Float[Array, "A B"]:
    if recipe == "fp8-current":
        return fp8.dequantize(*fp8.quantize(kernel, 0), 0)
    if recipe == "fp8-delayed":
        return _first_step(kernel, "e4m3")
    if recipe == "fp8-block":
        return fp8.dequantize_tiles(*fp8.quantize_tiles(kernel))
    if recipe == "mxfp8":
        return mxfp8.dequantize(*mxfp8.quantize(kernel, axis), axis)
    if recipe == "nvfp4":
        return nvfp4.dequantize(*nvfp4.quantize(kernel, axis), axis) if axis == 0 else kernel
    return kernel


def _first_step(x: Array, element: str) -> Array:
    values, scale, _ = fp8.quantize_delayed(x, jnp.zeros(1), element=element)
    return values.astype(jnp.float32) * scale
