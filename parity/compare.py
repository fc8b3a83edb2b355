"""One tensor against its judge: ran, dtype, shape, finite, values, in that order, and which of them failed.

A value is measured in gauges (`Judged.gauge`), never by a tolerance, and by its worst element and worst row, never by a
mean: criteria over fractions or whole tensors pass a layer that lost a token. A comparison of nothing is not a pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .interface import Judged
from .tolerances import ELEMENT_BAR, row_bar

CHECKS = ("ran", "dtype", "shape", "finite", "values")
"""In the order in which they are made; each needs the ones before it."""

BINS = 28
"""Histogram bins of |error| / gauge, in steps of a quarter; the last holds everything beyond."""

TOKEN_FIRST = ("y", "x", "topk_weights", "topk_idx", "weights", "dlogits")
EXPERT_FIRST = ("wi", "wo", "wi_bias", "wo_bias", "group_sizes", "gate_bias", "expert_bias")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on one tensor."""

    tensor: str
    check: Literal["ran", "dtype", "shape", "finite", "values"]
    """The check that failed, or the last one made."""
    ok: bool
    measured: float | None = None
    """Largest error as a fraction of its bar: 1.0 is at the bar. None where bits are compared."""
    index: tuple[int, ...] | None = None
    """Where the worst element is."""
    token: int | None = None
    expert: int | None = None
    got: float | None = None
    want: float | None = None
    gauge: float | None = None
    kinks: int = 0
    histogram: tuple[int, ...] = ()
    """Elements by |error| / gauge, in steps of a quarter; the last bin holds everything beyond."""
    message: str = ""

    def replace(self, **changes: Any) -> Finding:
        """A copy with other fields."""
        return dataclasses.replace(self, **changes)


def judge(tensor: str, got: Any, judged: Judged, *, dtype: Any, empty_ok: bool = False, token: Any = None) -> Finding:
    """Judges `got` by the gauge: |error| <= 6 gauges for each element, and the row bar for rows with a dof.

    Where the exact value is NaN or infinite, `got` must not be finite either; elsewhere it must be. A gauge of 0 demands the
    exact value. Nothing to compare (no element, or no finite exact value) fails, unless empty_ok says that the problem
    holds no token. `token` maps rows to token numbers where rows are a sample.
    """
    early = _kind(tensor, got, judged.value.shape, dtype)
    if early:
        return early
    if not got.size:
        message = "" if empty_ok else f"{tensor} is empty: nothing was compared"
        return Finding(tensor=tensor, check="values", ok=empty_ok, message=message)
    found = _measure(got, judged)
    if not found.known:
        message = f"the exact {tensor} is nowhere finite: nothing was compared"
        return Finding(tensor=tensor, check="values", ok=False, message=message)
    if found.wrong:
        index = _unravel(found.wrong_at, got)
        finding = _at(tensor, index, got, judged, token, check="finite", ok=False)
        return finding.replace(message=f"{tensor}{_where(index)} is {finding.got:g}, the exact value {finding.want:g}")
    element = float(found.element) / ELEMENT_BAR
    by_row = float(found.row) > element
    measured = float(found.row) if by_row else element
    index = _unravel(found.row_at if by_row else found.element_at, got)
    finding = _at(tensor, index, got, judged, token, check="values", ok=measured <= 1)
    if not finding.ok:
        lies = f"{finding.got:.9g} where {finding.want:.9g} is exact (gauge {finding.gauge:.3g})"
        whole = "worst of its token, expert or tensor, which as a whole " if by_row else ""
        finding = finding.replace(message=f"{tensor}{_where(index)}: {whole}lies {measured:.3g} bars off: {lies}")
    return finding.replace(measured=measured, histogram=tuple(int(n) for n in np.asarray(found.histogram)))


def merge(findings: Iterable[Finding]) -> Finding:
    """The findings on the pieces of one tensor as one: the first failed check, else the largest error; counts add up."""
    each = list(findings)
    order = {check: i for i, check in enumerate(CHECKS)}
    worst = min(each, key=lambda f: (f.ok, order[f.check], -(f.measured or 0.0)))
    bins = [f.histogram for f in each if f.histogram]
    return worst.replace(
        kinks=sum(f.kinks for f in each), histogram=tuple(sum(column) for column in zip(*bins, strict=True))
    )


def same_bits(tensor: str, got: Any, want: Any) -> Finding:
    """Judges by equality of every bit; two NaN are equal whatever they carry, and 0 equals -0 only in bits."""
    want = np.asarray(want)
    early = _kind(tensor, got, want.shape, want.dtype)
    if early:
        return early
    if want.size == 0:  # shape and dtype are all there is to an empty tensor
        return Finding(tensor=tensor, check="values", ok=True)
    got, shape = np.atleast_1d(np.asarray(got)), want.shape
    want = np.atleast_1d(want)
    differs = (got.view(np.uint8).reshape(*got.shape, -1) != want.view(np.uint8).reshape(*want.shape, -1)).any(-1)
    if got.dtype.kind not in "biu":
        differs &= ~(np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64)))
    count = int(differs.sum())
    if not count:
        return Finding(tensor=tensor, check="values", ok=True)
    at = _unravel(differs.argmax(), got)
    index = at if shape else ()
    message = f"{tensor}{_where(index)} is {got[at]!s}, not {want[at]!s}; {count} of {want.size} elements differ"
    finding = Finding(tensor=tensor, check="values", ok=False, index=index, message=message)
    return finding.replace(got=float(got[at]), want=float(want[at]), **_names(tensor, index, None))


def _kind(tensor: str, got: Any, shape: tuple[int, ...], dtype: Any) -> Finding | None:
    if not hasattr(got, "dtype") or not hasattr(got, "shape"):
        return Finding(
            tensor=tensor, check="ran", ok=False, message=f"{tensor} is a {type(got).__name__}; accepted: an array"
        )
    if jnp.dtype(got.dtype) != jnp.dtype(dtype):
        message = f"{tensor} is {got.dtype}; accepted: {jnp.dtype(dtype).name}"
        return Finding(tensor=tensor, check="dtype", ok=False, message=message)
    if tuple(got.shape) != tuple(shape):
        message = f"{tensor} has shape {list(got.shape)}; accepted: {list(shape)}"
        return Finding(tensor=tensor, check="shape", ok=False, message=message)
    return None


class _Measured(NamedTuple):
    known: Any
    wrong: Any
    wrong_at: Any
    element: Any
    element_at: Any
    row: Any
    row_at: Any
    histogram: Any


def _measure(got: Any, judged: Judged) -> _Measured:
    """The reductions that a verdict needs, where the exact values lie: a large layer's never come to the host."""
    if isinstance(judged.value, jax.Array):
        with jax.enable_x64(True):
            return _Measured(*_reduce_jit(jnp.asarray(got), judged.value, judged.gauge, judged.dof))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return _reduce(np, np.asarray(got), judged.value, judged.gauge, judged.dof)


def _reduce(xp: Any, got: Any, want: Any, gauge: Any, dof: Any) -> _Measured:
    have = got.astype(np.float64)  # exact for every storage dtype
    known, finite = xp.isfinite(want), xp.isfinite(have)
    wrong = known != finite
    error = xp.where(known & finite, abs(have - want), 0.0)
    ratio = xp.where(error == 0, 0.0, error / gauge)
    ratio = xp.where(xp.isnan(ratio), np.inf, ratio)
    bins = xp.minimum(ratio * 4, BINS - 1).astype(np.int32).ravel()
    row, row_at = 0.0, 0
    if dof is not None:
        blocks = (dof.shape[0], -1)
        norm = xp.sqrt((error**2).reshape(blocks).sum(-1))
        size = xp.sqrt((xp.where(known, gauge, 0.0) ** 2).reshape(blocks).sum(-1))
        rows = xp.where(norm == 0, 0.0, norm / (row_bar(dof, xp) * size))
        rows = xp.where(xp.isnan(rows), np.inf, rows)
        at, width = rows.argmax(), want.size // dof.shape[0]
        row, row_at = rows[at], at * width + ratio.reshape(blocks)[at].argmax()
    return _Measured(
        known.any(),
        wrong.any(),
        wrong.argmax(),
        ratio.max(),
        ratio.argmax(),
        row,
        row_at,
        xp.bincount(bins, **({"minlength": BINS} if xp is np else {"length": BINS})),
    )


_reduce_jit = jax.jit(functools.partial(_reduce, jnp))


def _at(tensor: str, index: tuple[int, ...], have: Any, judged: Judged, token: Any, **fields: Any) -> Finding:
    with jax.enable_x64(True):
        got, want, gauge = (float(np.asarray(a[index])) for a in (have, judged.value, judged.gauge))
    return Finding(
        tensor=tensor,
        index=index,
        got=got,
        want=want,
        gauge=gauge,
        kinks=int(judged.kinks),
        **_names(tensor, index, token),
        **fields,
    )


def _names(tensor: str, index: tuple[int, ...], token: Any) -> dict[str, int]:
    if index and tensor in TOKEN_FIRST:
        return {"token": int(index[0] if token is None else token[index[0]])}
    if index and tensor in EXPERT_FIRST:
        return {"expert": int(index[0])}
    return {"expert": int(index[1])} if tensor == "gate_kernel" else {}


def _where(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]" if index else ""


def _unravel(at: Any, like: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(at), like.shape))
