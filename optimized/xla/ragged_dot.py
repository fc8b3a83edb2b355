"""Sort, then `jax.lax.ragged_dot`: what JAX itself offers. On CPU, and by default on GPU, it is a masked dense product."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ...parity.interface import Implementation, Support
from ...parity.problem import Problem
from .permute import permute, unpermute


def grouped_gemm(
    rows: Float[Array, "P A"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]
) -> Float[Array, "P B"]:
    """Multiplies each group of rows by its own expert's kernel, through `jax.lax.ragged_dot`.

    Rows beyond the groups are set to 0 before the product: JAX leaves open what they hold after it, and its gradient
    multiplies them by 0. Accumulates in float32 at the highest precision and rounds once.
    """
    held = jnp.arange(rows.shape[0])[:, None] < group_sizes.sum()
    out = lax.ragged_dot(
        jnp.where(held, rows, 0),
        kernels,
        group_sizes.astype(jnp.int32),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return jnp.where(held, out, 0.0).astype(rows.dtype)


def supports(problem: Problem) -> Support:
    """Everything but quantised operands."""
    if problem.recipe != "none":
        return Support(False, f"recipe is {problem.recipe!r}; ragged_dot computes 'none' only")
    return Support(True)


IMPLEMENTATION = Implementation(
    name="ragged_dot",
    stages={"permute": permute, "unpermute": unpermute, "grouped_gemm": grouped_gemm},
    supports=supports,
    traits=frozenset({"deterministic"}),
    summary="sort, then jax.lax.ragged_dot",
)
