"""One dense product as every layer here rounds it."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..parity.problem import Problem


def product(
    problem: Problem,
    a: Float[Array, "*e N A"],
    kernel: Float[Array, "*e A B"],
    bias: Float[Array, "*e B"] | None = None,
    *,
    bias_weight: Float[Array, "*e N 1"] | None = None,
) -> Float[Array, "*e N B"]:
    """a @ kernel + bias * bias_weight, accumulated in float32 and rounded once to a's dtype."""
    out = matmul(problem, a, kernel)
    if bias is not None:
        row = bias.astype(jnp.float32)[..., None, :]
        out = out + (row if bias_weight is None else row * bias_weight)
    return out.astype(a.dtype)


def matmul(problem: Problem, a: Float[Array, "*e N A"], b: Float[Array, "*e A B"]) -> Float[Array, "*e N B"]:
    """a @ b in float32, not rounded; float32 operands are multiplied at the problem's precision."""
    precision = lax.Precision.HIGHEST if problem.precision == "highest" else lax.Precision.DEFAULT
    return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)
