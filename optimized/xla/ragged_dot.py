"""Sort, then `jax.lax.ragged_dot`: what JAX itself offers. On CPU, and by default on GPU, it is a masked dense product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ...parity.interface import Implementation, Support
from ...parity.problem import Problem
from .permute import permute, unpermute

MAX_OPERATIONS = 1e12
"""Forward and backward: about 20 s on two cores, at the 50 GFLOP/s measured there."""
MAX_BYTES = 2**31
"""One masked copy of the rows."""


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
    """Everything but quantised operands, and on CPU what its masked dense product makes too slow or too large."""
    if problem.recipe != "none":
        return Support(False, f"recipe is {problem.recipe!r}; ragged_dot computes 'none' only")
    if jax.default_backend() != "cpu":
        return Support(True)
    # Every expert multiplies all rows, from a copy of them in which the other experts' rows are 0.
    masked = problem.E * problem.routed_rows
    operations = 6 * masked * problem.D * (problem.wi_columns + problem.F)
    if operations > MAX_OPERATIONS:
        return Support(False, f"too slow on CPU: {operations:.1e} operations; runs up to {MAX_OPERATIONS:.0e}")
    size = 4 * masked * max(problem.D, problem.wi_columns)
    if size > MAX_BYTES:
        return Support(False, f"too large on CPU: {size:.1e} bytes of masked rows; runs up to {MAX_BYTES:.1e}")
    return Support(True)


IMPLEMENTATION = Implementation(
    name="ragged_dot",
    stages={"permute": permute, "unpermute": unpermute, "grouped_gemm": grouped_gemm},
    supports=supports,
    traits=frozenset({"deterministic"}),
    summary="sort, then jax.lax.ragged_dot",
)
