"""The passes over rows that XLA would split or read twice, each as one Triton kernel through Pallas.

Every kernel has a twin in plain JAX in rows.py and hidden.py, which runs wherever Pallas's Triton backend does not, and
which tests hold it to. Offsets are 64-bit as soon as a buffer passes 2^32 bytes.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

WIDEST = 1024
"""Columns one program holds in registers."""
NARROWEST = 256
"""Columns below which a program has too few bytes in flight."""


SWITCH = "DROPLESS_TE_KERNELS"
"""Environment variable; `xla` keeps to the plain twins, should a JAX release compile the kernels wrongly."""


@functools.cache
def usable() -> bool:
    """Whether this process runs on a GPU, its JAX still has Pallas's Triton backend, and nobody said otherwise."""
    if jax.default_backend() != "gpu" or os.environ.get(SWITCH, "").lower() == "xla":
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
    C = chunk(D, 4 * WIDEST)

    def kernel(at_ref: Any, w_ref: Any, x_ref: Any, out_ref: Any, w_out_ref: Any) -> None:
        t, c = _backwards(pl, T), pl.program_id(1)
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
    """y_t = sum_k w_tk * rows[row_of_slot[t, k]] (+ bias_t, of any dtype), accumulated in float32 and rounded once."""
    pl, triton = _pallas()
    (T, K), D = row_of_slot.shape, rows.shape[1]
    C = chunk(D)

    def kernel(at_ref: Any, w_ref: Any, b_ref: Any, rows_ref: Any, out_ref: Any) -> None:
        t, c = pl.program_id(0), pl.program_id(1)
        cols = c * C + jnp.arange(C)
        inside = cols < D
        total = jnp.zeros((C,), jnp.float32)
        if bias is not None:
            total = triton.load(b_ref.at[t, cols], mask=inside, other=0.0).astype(jnp.float32)
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


def hidden(
    act: Callable[..., Array],
    parts: int,
    pre: Float[Array, "P I"],
    weight: Float[Array, " P"] | None = None,
    bias: Float[Array, "E I"] | None = None,
    expert: Int[Array, " P"] | None = None,
    *,
    filled: Int[Array, ""] | None = None,
    interpret: bool = False,
) -> Float[Array, "P F"]:
    """h = act(*the parts of pre + bias[expert]), times the row's weight if there is one; rows from `filled` on stay unwritten."""
    pl, triton = _pallas()
    P, F = pre.shape[0], pre.shape[1] // parts
    C = chunk(F)

    def kernel(filled_ref: Any, pre_ref: Any, w_ref: Any, b_ref: Any, e_ref: Any, h_ref: Any) -> None:
        r = _backwards(pl, P)

        @pl.when(r < filled_ref[0])
        def _() -> None:
            for c in range(-(-F // C)):
                cols = c * C + jnp.arange(C)
                inside = cols < F
                values = _parts(triton, pre_ref, b_ref, e_ref, bias is not None, r, parts, F, cols, inside)
                h = act(*values)
                triton.store(h_ref.at[r, cols], (h if weight is None else h * w_ref[r]).astype(pre.dtype), mask=inside)

    args = (_count(filled, P), pre, *_or_nothing(weight, bias, expert, pre.dtype))
    return _call(kernel, jax.ShapeDtypeStruct((P, F), pre.dtype), (P,), args, interpret)


def hidden_gradient(
    act: Callable[..., Array],
    parts: int,
    pre: Float[Array, "P I"],
    d: Float[Array, "P F"],
    weight: Float[Array, " P"],
    bias: Float[Array, "E I"] | None = None,
    expert: Int[Array, " P"] | None = None,
    *,
    filled: Int[Array, ""] | None = None,
    interpret: bool = False,
) -> tuple[Float[Array, "P F"], Float[Array, "P I"], Float[Array, " P"]]:
    """(w * h, gradient of pre, gradient of w) in one pass, where h = act(*the parts of pre) and d is w * h's cotangent.

    From row `filled` on the gradient of w is 0 and the other two stay unwritten.
    """
    pl, triton = _pallas()
    P, F = d.shape
    C = chunk(F)

    def kernel(
        filled_ref: Any,
        pre_ref: Any,
        d_ref: Any,
        w_ref: Any,
        b_ref: Any,
        e_ref: Any,
        h_ref: Any,
        dpre_ref: Any,
        dw_ref: Any,
    ) -> None:
        r = _backwards(pl, P)

        @pl.when(r < filled_ref[0])
        def _() -> None:
            w = w_ref[r]
            dot = jnp.zeros((C,), jnp.float32)
            for c in range(-(-F // C)):
                cols = c * C + jnp.arange(C)
                inside = cols < F
                values = _parts(triton, pre_ref, b_ref, e_ref, bias is not None, r, parts, F, cols, inside)
                h, pull = jax.vjp(act, *values)
                own = triton.load(d_ref.at[r, cols], mask=inside, other=0.0).astype(jnp.float32)
                dot = dot + own * h
                triton.store(h_ref.at[r, cols], (w * h).astype(pre.dtype), mask=inside)
                for p, gradient in enumerate(pull(w * own)):
                    triton.store(dpre_ref.at[r, p * F + cols], gradient.astype(pre.dtype), mask=inside)
            dw_ref[r] = jnp.sum(dot)

        @pl.when(r >= filled_ref[0])
        def _() -> None:
            dw_ref[r] = 0.0

    out = [
        jax.ShapeDtypeStruct((P, F), pre.dtype),
        jax.ShapeDtypeStruct((P, parts * F), pre.dtype),
        jax.ShapeDtypeStruct((P,), jnp.float32),
    ]
    w, b, e = _or_nothing(weight, bias, expert, pre.dtype)
    h, d_pre, dw = _call(kernel, out, (P,), (_count(filled, P), pre, d, w, b, e), interpret)
    return h, d_pre, dw


def select(
    ranked: Float[Array, "T E"], K: int, *, interpret: bool = False
) -> tuple[Int[Array, "T K"], Int[Array, "T K"], Float[Array, "B E"]]:
    """Picks each token's K highest, the lower index on ties, and counts while it is at it.

    Returns (topk_idx, the number of earlier tokens of the same block that chose the expert too, each block's counts).
    Every value is finite. Blocks have `block_of(T, E)` tokens.
    """
    pl, triton = _pallas()
    T, E = ranked.shape
    B, C = block_of(T, E), max(16, 1 << (E - 1).bit_length())

    def kernel(z_ref: Any, idx_ref: Any, rank_ref: Any, total_ref: Any) -> None:
        block = pl.program_id(0)
        tokens, cols = block * B + jnp.arange(B), jnp.arange(C)[None, :]
        real = (tokens[:, None] < T) & (cols < E)
        z = triton.load(z_ref.at[tokens[:, None], cols], mask=real, other=-jnp.inf)
        free, picks = real, []
        for _ in range(K):
            best = jnp.max(jnp.where(free, z, -jnp.inf), axis=1)
            pick = jnp.min(jnp.where(free & (z == best[:, None]), cols, C), axis=1)
            free = free & (cols != pick[:, None])
            picks.append(pick)
        hit = (real & ~free).astype(jnp.bfloat16)
        i = jnp.arange(B)
        before = jnp.dot((i[:, None] > i[None, :]).astype(jnp.bfloat16), hit, preferred_element_type=jnp.float32)
        for k, pick in enumerate(picks):
            rank = jnp.sum(jnp.where(cols == pick[:, None], before, 0.0), axis=1).astype(jnp.int32)
            triton.store(idx_ref.at[tokens, k], pick, mask=tokens < T)
            triton.store(rank_ref.at[tokens, k], rank, mask=tokens < T)
        count = jnp.sum(hit.astype(jnp.float32), axis=0).astype(jnp.bfloat16)
        triton.store(total_ref.at[block, jnp.arange(C)], count, mask=jnp.arange(C) < E)

    blocks = pl.cdiv(T, B)
    out = [
        jax.ShapeDtypeStruct((T, K), jnp.int32),
        jax.ShapeDtypeStruct((T, K), jnp.int32),
        jax.ShapeDtypeStruct((blocks, E), jnp.bfloat16),
    ]
    return tuple(_call(kernel, out, (blocks,), (ranked,), interpret))


def block_of(T: int, E: int) -> int:
    """Tokens that one program of `select` ranks: few, for many programs, but at most BLOCKS of them."""
    wide = max(16, 1 << (E - 1).bit_length())
    return max(16, min(128, 1024 // wide), 1 << (max(1, -(-T // BLOCKS)) - 1).bit_length())


def can_select(T: int, E: int) -> bool:
    """Whether a block's scores fit one program's registers, and its counts a bfloat16."""
    block = block_of(T, E)
    return block <= 256 and block * max(16, 1 << (E - 1).bit_length()) <= SCORES


BLOCKS = 1024
"""Blocks of tokens whose counts are summed by one product with a triangle."""
SCORES = 8192
"""Scores one program of `select` holds in registers."""


def chunk(width: int, widest: int = WIDEST) -> int:
    """Columns per program: a power of two that divides the width where a large one does, else one that covers it masked."""
    largest = width & -width
    if largest >= NARROWEST:
        return min(largest, widest)
    return min(1 << (width - 1).bit_length(), WIDEST)


def _backwards(pl: Any, rows: int) -> Any:
    # Last row first: what the step before this pass wrote or read last is still in the cache.
    return rows - 1 - pl.program_id(0)


def _parts(
    triton: Any, pre: Any, bias: Any, expert: Any, biased: bool, r: Any, parts: int, F: int, cols: Array, inside: Array
) -> list[Array]:
    def read(ref: Any, row: Any, at: Array) -> Array:
        return triton.load(ref.at[row, at], mask=inside, other=0.0).astype(jnp.float32)

    values = [read(pre, r, p * F + cols) for p in range(parts)]
    return [v + read(bias, expert[r], p * F + cols) for p, v in enumerate(values)] if biased else values


def _count(filled: Array | None, rows: int) -> Array:
    return jnp.full((1,), rows, jnp.int32) if filled is None else filled.astype(jnp.int32).reshape(1)


def _or_nothing(weight: Array | None, bias: Array | None, expert: Array | None, dtype: Any) -> tuple[Array, ...]:
    return (
        jnp.zeros((1,), jnp.float32) if weight is None else weight,
        jnp.zeros((1, 1), dtype) if bias is None else bias,
        jnp.zeros((1,), jnp.int32) if expert is None else expert,
    )


def _call(kernel: Callable, out: Any, grid: Sequence[int], args: tuple, interpret: bool) -> Any:
    pl, triton = _pallas()
    parameters = triton.CompilerParams(num_warps=4, num_stages=1)
    call = pl.pallas_call(kernel, out_shape=out, grid=tuple(grid), compiler_params=parameters, interpret=interpret)
    return call(*args)


def _pallas() -> tuple[Any, Any]:
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    return pallas, triton
