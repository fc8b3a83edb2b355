"""Eight-bit floats with one float32 scale per group of rows, or per kernel: TE's own quantiser under this package's scales.

    value = element * scale_inv      element = cast(value * scale)      scale = largest / amax, scale_inv = 1 / scale

TE's `grouped_quantize` would take the scales itself, one group after another: E small steps, NaN in one token sets its
whole expert's scale to 1, and an amax below 1.3e-36 gives an infinite one. So the scales are computed here, all at once and
as the reference does, and handed to the kernel that `grouped_quantize` calls. The kernel copies group sizes to the host.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

ELEMENTS = {"e4m3": (jnp.float8_e4m3fn, 448.0), "e5m2": (jnp.float8_e5m2, 57344.0)}
"""Element type and its largest number."""


def quantize_both(x: Float[Array, "..."], group_sizes: Int[Array, " E"] | None = None, *, element: str = "e4m3") -> Any:
    """Current scaling: a TE tensor of both layouts, [P, A] with a scale per group, or [E, A, B] with one per kernel.

    The sizes add up to P: TE quantises every row. Values beyond the largest saturate, NaN stays NaN in its own element,
    and an amax of 0 or one that is infinite gives scale 1.
    """
    sizes = jnp.ones(x.shape[0], jnp.int32) if group_sizes is None else group_sizes.astype(jnp.int32)
    return scaled(x, encode(x, sizes, element), group_sizes, element=element)


def scaled(
    x: Float[Array, "..."], scale: Float[Array, " E"], group_sizes: Int[Array, " E"] | None, *, element: str
) -> Any:
    """The TE tensor under given scales: elements are cast(x * scale), and 1 / scale is kept beside them."""
    te, (dtype, _) = _te(), ELEMENTS[element]
    sizes = jnp.ones(x.shape[0], jnp.int32) if group_sizes is None else group_sizes.astype(jnp.int32)
    row, column, scale_inv, _, _ = te.kernel.outer_primitive.bind(
        x,
        scale,
        sizes,
        out_dtype=dtype,
        scaling_mode=te.mode.value,
        q_layout=te.both,
        flatten_axis=-1,
        scale_dtype=jnp.float32,
    )
    return te.tensor(
        data=row,
        scale_inv=scale_inv,
        colwise_data=column,
        colwise_scale_inv=scale_inv,
        scaling_mode=te.mode,
        dq_dtype=x.dtype,
        q_layout=te.both,
        data_layout="NT",
        flatten_axis=-1,
        first_dims=None if group_sizes is None else sizes,
        original_shape=x.shape,
    )


def encode(x: Float[Array, "..."], sizes: Int[Array, " E"], element: str) -> Float[Array, " E"]:
    """largest / amax of each group in float32; NaN is ignored, and 1 stands where amax is 0 or infinite."""
    E, P = sizes.shape[0], x.shape[0]
    magnitude = jnp.abs(x.astype(jnp.float32)).reshape(P, -1)
    amax = jnp.where(jnp.isnan(magnitude), 0.0, magnitude).max(axis=1)
    if x.ndim == 2:
        group = jnp.repeat(jnp.arange(E, dtype=jnp.int32), sizes, total_repeat_length=P)
        amax = jax.ops.segment_max(amax, group, E, indices_are_sorted=True)
    usable = (amax > 0) & jnp.isfinite(amax)
    quotient = jnp.float32(ELEMENTS[element][1]) / jnp.where(usable, amax, 1.0)
    # Kept apart, or the compiler folds 1 / (a / b) into b / a.
    return lax.optimization_barrier(jnp.where(usable, jnp.minimum(quotient, jnp.finfo(jnp.float32).max), 1.0))


class _Names(NamedTuple):
    """What is used of the installed release."""

    kernel: Any
    tensor: Any
    mode: Any
    both: Any


@functools.cache
def _te() -> _Names:
    from transformer_engine.jax import quantize as tq
    from transformer_engine.jax.cpp_extensions.quantization import GroupedQuantizePrimitive

    mode, layout = tq.ScalingMode.CURRENT_TENSOR_SCALING, tq.QuantizeLayout.ROWWISE_COLWISE
    return _Names(GroupedQuantizePrimitive, tq.ScaledTensorFactory.create, mode, layout)
