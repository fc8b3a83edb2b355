"""The passes over rows that XLA would split or read twice, each as one Triton kernel through Pallas.

Every kernel has a twin in plain JAX in rows.py and hidden.py, which runs wherever Pallas's Triton backend does not, and
which tests hold it to. Offsets are 64-bit as soon as a buffer passes 2^32 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WIDEST = 1024
"""Columns one program holds in registers."""
NARROWEST = 256
"""Columns below which a program has too few bytes in flight."""


@functools.cache
def usable() -> bool:
    """Whether this process runs on a GPU and its JAX still has Pallas's Triton backend."""
    if jax.default_backend() != "gpu":
        return False
    try:
        from jax.experimental.pallas import triton
    except ImportError:
        return False
    return hasattr(triton, "CompilerParams")


def spread(
    x: Float[Array, "T D"],
    row_of_slot: Int[Array, "T K"],
    rows: int,
    weights: Float[Array, "T K"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "P D"], Float[Array, " P"] | None]:
    """Writes each token to its K rows, reading it once, and its weights beside them; other rows stay unwritten."""
    pl, triton = _pallas()
    (T, K), D = row_of_slot.shape, x.shape[1]
    C = chunk(D)

    def kernel(at_ref: Any, w_ref: Any, x_ref: Any, out_ref: Any, w_out_ref: Any) -> None:
        t, c = pl.program_id(0), pl.program_id(1)
        cols = c * C + jnp.arange(C)
        value = triton.load(x_ref.at[t, cols], mask=cols < D)
        for k in range(K):
            row = at_ref[t, k]
            triton.store(out_ref.at[jnp.maximum(row, 0), cols], value, mask=(cols < D) & (row >= 0))
            if weights is not None:
                triton.store(w_out_ref.at[jnp.maximum(row, 0)], w_ref[t, k], mask=(row >= 0) & (c == 0))

    out = [jax.ShapeDtypeStruct((rows, D), x.dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)]
    w = jnp.zeros((1, 1), jnp.float32) if weights is None else weights
    found, w_rows = _call(kernel, out, (T, pl.cdiv(D, C)), (row_of_slot, w, x), interpret)
    return found, (None if weights is None else w_rows)


def sum_rows(
    rows: Float[Array, "P D"],
    row_of_slot: Int[Array, "T K"],
    weights: Float[Array, "T K"] | None = None,
    *,
    bias: Float[Array, "T D"] | None = None,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """y_t = sum_k w_tk * rows[row_of_slot[t, k]] (+ bias_t), accumulated in float32 and rounded once."""
    pl, triton = _pallas()
    (T, K), D = row_of_slot.shape, rows.shape[1]
    C = chunk(D)

    def kernel(at_ref: Any, w_ref: Any, b_ref: Any, rows_ref: Any, out_ref: Any) -> None:
        t, c = pl.program_id(0), pl.program_id(1)
        cols = c * C + jnp.arange(C)
        inside = cols < D
        total = jnp.zeros((C,), jnp.float32)
        if bias is not None:
            total = triton.load(b_ref.at[t, cols], mask=inside, other=0.0)
        for k in range(K):
            row = at_ref[t, k]
            # Masked, not multiplied: a slot without a row reads nothing.
            term = triton.load(rows_ref.at[jnp.maximum(row, 0), cols], mask=inside & (row >= 0), other=0.0)
            term = term.astype(jnp.float32)
            if weights is not None:
                term = jnp.where(row >= 0, term * w_ref[t, k], 0.0)
            total = total + term
        triton.store(out_ref.at[t, cols], total.astype(rows.dtype), mask=inside)

    one = jnp.zeros((1, 1), jnp.float32)
    args = (row_of_slot, one if weights is None else weights, one if bias is None else bias, rows)
    out = jax.ShapeDtypeStruct((T, D), rows.dtype)
    return _call(kernel, out, (T, pl.cdiv(D, C)), args, interpret)


def hidden_gradient(
    act: Callable[..., Array],
    parts: int,
    pre: Float[Array, "P I"],
    d: Float[Array, "P F"],
    weight: Float[Array, " P"],
    bias: Float[Array, "E I"] | None = None,
    expert: Int[Array, " P"] | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "P F"], Float[Array, "P I"], Float[Array, " P"]]:
    """(w * h, gradient of pre, gradient of w) in one pass, where h = act(*the parts of pre) and d is w * h's cotangent."""
    pl, triton = _pallas()
    P, F = d.shape
    C = chunk(F)

    def kernel(
        pre_ref: Any, d_ref: Any, w_ref: Any, b_ref: Any, e_ref: Any, h_ref: Any, dpre_ref: Any, dw_ref: Any
    ) -> None:
        r = pl.program_id(0)
        w = w_ref[r]
        dot = jnp.zeros((C,), jnp.float32)
        for c in range(-(-F // C)):
            cols = c * C + jnp.arange(C)
            inside = cols < F

            def read(ref: Any, row: Any, at: Array, inside: Array = inside) -> Array:
                return triton.load(ref.at[row, at], mask=inside, other=0.0).astype(jnp.float32)

            values = [read(pre_ref, r, p * F + cols) for p in range(parts)]
            if bias is not None:
                values = [v + read(b_ref, e_ref[r], p * F + cols) for p, v in enumerate(values)]
            h, pull = jax.vjp(act, *values)
            own = read(d_ref, r, cols)
            dot = dot + own * h
            triton.store(h_ref.at[r, cols], (w * h).astype(pre.dtype), mask=inside)
            for p, gradient in enumerate(pull(w * own)):
                triton.store(dpre_ref.at[r, p * F + cols], gradient.astype(pre.dtype), mask=inside)
        dw_ref[r] = jnp.sum(dot)

    out = [
        jax.ShapeDtypeStruct((P, F), pre.dtype),
        jax.ShapeDtypeStruct((P, parts * F), pre.dtype),
        jax.ShapeDtypeStruct((P,), jnp.float32),
    ]
    b = jnp.zeros((1, 1), pre.dtype) if bias is None else bias
    e = jnp.zeros((1,), jnp.int32) if expert is None else expert
    h, d_pre, dw = _call(kernel, out, (P,), (pre, d, weight, b, e), interpret)
    return h, d_pre, dw


def chunk(width: int) -> int:
    """Columns per program: a power of two that divides the width where a large one does, else one that covers it masked."""
    largest = width & -width
    if largest >= NARROWEST:
        return min(largest, WIDEST)
    return min(1 << (width - 1).bit_length(), WIDEST)


def _call(kernel: Callable, out: Any, grid: Sequence[int], args: tuple, interpret: bool) -> Any:
    pl, triton = _pallas()
    parameters = triton.CompilerParams(num_warps=4, num_stages=1)
    call = pl.pallas_call(kernel, out_shape=out, grid=tuple(grid), compiler_params=parameters, interpret=interpret)
    return call(*args)


def _pallas() -> tuple[Any, Any]:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    return pallas, triton
