"""Low-precision grouped GEMMs by TE: what the reference's `recipes` emulates, with eight-bit operands in the product.

| recipe      | runs on | activations, kernels, gradients | group sizes | rows of a group |
|-------------|---------|---------------------------------|-------------|-----------------|
| fp8-current | 9.0     | e4m3, e4m3, e5m2: a scale per expert | copied to the host (TE's V1 path) | multiples of 16, at least 16 |
| mxfp8       | 10.0    | e4m3 with E8M0 per 32           | in device memory (V2)             | multiples of 128 |

Each tensor is quantised once, in both layouts: the rows' row-wise copy feeds rows @ kernel, their column-wise copy rows.T @ d,
and so on; what backward needs is kept quantised. Hopper multiplies eight-bit operands only with the contraction innermost,
hence multiples of 16 for the weight gradient. Groups are padded with zero rows, which change no scale and no sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.problem import Problem
from . import fp8, mxfp8, rows


class Layout(NamedTuple):
    """How a recipe's groups lie in their buffer."""

    align: int
    """Rows of a group are a multiple of it."""
    least: int
    """Of an expert without tokens. TE's V1 path gives the kernels behind an empty group the wrong scales."""
    whole: bool
    """Whether groups fill the buffer: the rest joins the last one, as zeros."""

    def rows(self, problem: Problem) -> int:
        """The static P that holds every routing."""
        if self.least:
            return -(-problem.routed_rows // self.align) * self.align + problem.E * self.least
        return problem.padded_rows(self.align)

    def sizes(self, group_sizes: Int[Array, " E"], P: int) -> Int[Array, " E"]:
        """Rows of each group, padding included."""
        padded = rows.rooms(group_sizes, align=self.align, least=self.least)
        return padded.at[-1].add(P - padded.sum(dtype=jnp.int32)) if self.whole else padded


LAYOUTS = {"fp8-current": Layout(16, 16, True), "mxfp8": Layout(mxfp8.ALIGN, 0, False)}
"""Of each recipe that TE multiplies."""

ELEMENTS = {
    "fp8-current": {"activation": "e4m3", "kernel": "e4m3", "gradient": "e5m2"},
    "mxfp8": {"activation": "e4m3", "kernel": "e4m3", "gradient": "e4m3"},
}
"""Element format of each operand, by its role."""


def quantised_gemm_of(recipe: str) -> Callable[..., Array]:
    """A grouped GEMM (rows [P, A], kernels [E, A, B], group_sizes [E]) -> [P, B] whose operands are quantised by `recipe`.

    Group sizes are the recipe's layout's, and padding rows are zeros. Accumulates in float32, rounds once to the operands'
    dtype; rounding an operand is transparent to gradients. An expert that has zero rows alone gets exactly 0 as its
    kernel's gradient. Rows beyond the groups are undefined, forward and backward.
    """
    return _GEMMS[recipe]


def _gemm_of(recipe: str) -> Callable[..., Array]:
    @jax.custom_vjp
    def quantised(
        rows: Float[Array, "P A"], kernels: Float[Array, "E A B"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "P B"]:
        return forward(rows, kernels, group_sizes)[0]

    def forward(rows: Array, kernels: Array, group_sizes: Array) -> tuple[Array, tuple[Any, Any, Array]]:
        te = _te()
        lhs = represent_both(recipe, rows, "activation", group_sizes)
        rhs = represent_both(recipe, kernels, "kernel")
        out = te.gemm(lhs.get_tensor(te.lhs), rhs.get_tensor(te.rhs), contracting_dims=((1,), (1,)))
        return out, (lhs.get_tensor(te.lhs_turned), rhs.get_tensor(te.rhs_turned), group_sizes)

    def backward(saved: tuple[Any, Any, Array], d: Array) -> tuple[Array, Array, None]:
        te, (lhs, rhs, group_sizes) = _te(), saved
        d_both = represent_both(recipe, d, "gradient", group_sizes)
        d_rows = te.gemm(d_both.get_tensor(te.lhs), rhs, contracting_dims=((1,), (2,)))
        d_kernels = te.gemm(lhs, d_both.get_tensor(te.rhs), contracting_dims=((0,), (0,)))
        if not LAYOUTS[recipe].least:  # nobody promises zeros where a group is empty
            d_kernels = jnp.where((group_sizes > 0)[:, None, None], d_kernels, 0)
        return d_rows, d_kernels, None

    quantised.defvjp(forward, backward)
    return quantised


def represent_both(recipe: str, a: Array, role: str, group_sizes: Array | None = None) -> Any:
    """An operand as a TE tensor of both layouts; `group_sizes` cut expert-sorted rows, and kernels have none."""
    quantize = {"fp8-current": fp8.quantize_both, "mxfp8": mxfp8.quantize_both}[recipe]
    return quantize(a, group_sizes, element=ELEMENTS[recipe][role])


_GEMMS = {recipe: _gemm_of(recipe) for recipe in LAYOUTS}


class _Names(NamedTuple):
    """What is used of the installed release: the product, and which layout each operand of it is read in."""

    gemm: Callable[..., Array]
    lhs: Any
    lhs_turned: Any
    rhs: Any
    rhs_turned: Any


@functools.cache
def _te() -> _Names:
    from transformer_engine.jax import cpp_extensions as tex
    from transformer_engine.jax.quantize import TensorUsage

    return _Names(tex.grouped_gemm, TensorUsage.LHS, TensorUsage.LHS_TRANS, TensorUsage.RHS, TensorUsage.RHS_TRANS)
