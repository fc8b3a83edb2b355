"""MXFP8: eight-bit values with one power-of-two scale (E8M0) per 32 values along the contraction, by TE's own quantiser.

Both layouts come from one pass: row-wise blocks along a row, for products over columns, and column-wise blocks along an
expert's rows, for the weight gradient. TE's kernel reads group sizes in device memory where every group starts at a
multiple of 128 rows and both widths are multiples of 128, on compute capability 10.0 and newer; the scales come out in
the order in which cuBLAS reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 32
ALIGN = 128
"""Rows of a group, and columns: what TE's device-side kernel accepts."""


def quantize_both(x: Float[Array, "..."], group_sizes: Int[Array, " E"] | None = None, *, element: str = "e4m3") -> Any:
    """A TE tensor of both layouts, of [P, A] cut into groups of whole blocks of 128 rows, or of kernels [E, A, B].

    Rows beyond the groups are not read. The scale of a block is the power of two at or above amax / 448, so nothing
    saturates; MXFP8 knows e4m3 only.
    """
    if element != "e4m3":
        raise ValueError(f"element is {element!r}; MXFP8 accepts 'e4m3'")
    sizes = None if group_sizes is None else group_sizes.astype(jnp.int32)
    groups = x.shape[0] if sizes is None else sizes.shape[0]
    call, quantizer = _te()
    return call(x, quantizer(groups), sizes)


@functools.cache
def _te() -> tuple[Callable[..., Any], Callable[[int], Any]]:
    from transformer_engine.jax import cpp_extensions as tex
    from transformer_engine.jax import quantize as tq

    def quantizer(groups: int) -> Any:
        both = tq.QuantizeLayout.ROWWISE_COLWISE
        return tq.QuantizerFactory.create(1, tq.ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn, both, n_groups=groups)

    return tex.grouped_quantize, quantizer
