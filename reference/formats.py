"""Small floating-point element formats, and rounding to them that is exact on every backend.

| name | bits (sign, exponent, mantissa) | largest | smallest normal | infinities | NaN |
|------|---------------------------------|---------|-----------------|------------|-----|
| e4m3 | 1, 4, 3                         | 448     | 2^-6            | none       | one |
| e5m2 | 1, 5, 2                         | 57344   | 2^-14           | two        | six |
| e2m1 | 1, 2, 1                         | 6       | 1               | none       | none |

Source: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0 for e2m1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Format(NamedTuple):
    """One element format: how far it reaches and how finely it resolves."""

    name: str
    dtype: jnp.dtype
    mantissa: int
    """Stored mantissa bits."""
    emax: int
    """Exponent of the largest power of two."""
    emin: int
    """Exponent of the smallest normal."""
    largest: float


E4M3 = Format("e4m3", jnp.dtype(jnp.float8_e4m3fn), 3, 8, -6, 448.0)
E5M2 = Format("e5m2", jnp.dtype(jnp.float8_e5m2), 2, 15, -14, 57344.0)
E2M1 = Format("e2m1", jnp.dtype(jnp.float4_e2m1fn), 1, 2, 0, 6.0)
FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1)}


def round_to(x: Float[Array, "..."], element: Format) -> Float[Array, "..."]:
    """Rounds float32 values to the format's grid: to nearest, ties to even, saturating; the result is float32.

    Infinities and everything beyond the largest value become the largest value; NaN stays NaN; a zero keeps its sign.
    Below the smallest normal the grid is the subnormals'. Exact, because every step is a product with a power of two or an
    integer rounding: a backend's own cast may round twice on the way (float32 to float16 to eight bits).
    """
    x = x.astype(jnp.float32)
    clipped = jnp.clip(x, -element.largest, element.largest)
    exponent = jnp.maximum(_exponent(clipped), element.emin)
    quantum = _power_of_two(exponent - element.mantissa)
    return jnp.where(jnp.isnan(x), x, jnp.copysign(jnp.round(clipped / quantum) * quantum, x))


def cast(x: Float[Array, "..."], element: Format) -> Array:
    """`round_to`, stored in the format's own dtype; e2m1 has no NaN and raises no error for one: it stores 0."""
    rounded = round_to(x, element)
    if element is E2M1:
        rounded = jnp.where(jnp.isnan(rounded), 0.0, rounded)
    return rounded.astype(element.dtype)


def _exponent(x: Float[Array, "..."]) -> Array:
    """floor(log2(|x|)) from the bits; -127 for zeros and subnormals, whose grid is the smallest one anyway."""
    bits = x.view(jnp.uint32) >> 23 & 0xFF
    return bits.astype(jnp.int32) - 127


def _power_of_two(exponent: Array) -> Float[Array, "..."]:
    """2^exponent as float32, for exponents of normal numbers (-126 to 127)."""
    return ((exponent + 127).astype(jnp.uint32) << 23).view(jnp.float32)
