"""One tensor against its judge: ran, dtype, shape, finite, values, in that order, and which of them failed.

A value is measured in gauges (`Judged.gauge`), never by a tolerance, and by its worst element and worst row, never by a
mean: criteria over fractions or whole tensors pass a layer that lost a token. A comparison of nothing is not a pass.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

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
    got = np.asarray(got)
    if got.size == 0:
        return Finding(
            tensor=tensor,
            check="values",
            ok=empty_ok,
            message="" if empty_ok else f"{tensor} is empty: nothing was compared",
        )
    # Values keep their storage dtype until here: float64 holds every one of them exactly.
    have, want = got.astype(np.float64), np.asarray(judged.value)
    known, finite = np.isfinite(want), np.isfinite(have)
    if not known.any():
        return Finding(
            tensor=tensor,
            check="values",
            ok=False,
            message=f"the exact {tensor} is nowhere finite: nothing was compared",
        )
    wrong = known != finite
    if wrong.any():
        index = _first(wrong)
        what = "not finite" if known[index] else f"{have[index]:g} where the exact value is {want[index]:g}"
        return _at(
            tensor, index, have, judged, token, check="finite", ok=False, message=f"{tensor}{_where(index)} is {what}"
        )
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        error = np.where(known, abs(have - want), 0.0)
        ratio = np.where(error == 0, 0.0, error / judged.gauge)
    return _values(tensor, have, judged, error, ratio, token)


def same_bits(tensor: str, got: Any, want: Any) -> Finding:
    """Judges by equality of every bit; two NaN are equal whatever they carry, and 0 equals -0 only in bits."""
    want = np.asarray(want)
    early = _kind(tensor, got, want.shape, want.dtype)
    if early:
        return early
    got = np.asarray(got)
    differs = (
        got.view(np.uint8).reshape(*got.shape, -1) != want.view(np.uint8).reshape(*want.shape, -1)
        if got.ndim
        else (got.reshape(1).view(np.uint8) != want.reshape(1).view(np.uint8))
    )
    differs = differs.any(-1)
    if not np.issubdtype(want.dtype, np.integer) and want.dtype != bool:
        differs &= ~(np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64)))
    count = int(differs.sum())
    if not count:
        return Finding(tensor=tensor, check="values", ok=True)
    index = _first(differs)
    message = f"{tensor}{_where(index)} is {got[index]!s}, not {want[index]!s}; {count} of {want.size} elements differ"
    finding = Finding(
        tensor=tensor, check="values", ok=False, index=index, message=message, **_names(tensor, index, None)
    )
    return finding.replace(got=float(got[index]), want=float(want[index]))


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


def _values(tensor: str, have: np.ndarray, judged: Judged, error: np.ndarray, ratio: np.ndarray, token: Any) -> Finding:
    index = _largest(ratio)
    measured, message = float(ratio[index]) / ELEMENT_BAR, ""
    if judged.dof is not None and have.ndim == 2:
        known = np.isfinite(judged.value)
        gauge = np.sqrt((np.where(known, judged.gauge, 0.0) ** 2).sum(-1))
        with np.errstate(invalid="ignore", divide="ignore"):
            norm = np.sqrt((error**2).sum(-1))
            rows = np.where(norm == 0, 0.0, norm / gauge) / row_bar(min(judged.dof, have.shape[-1]))
        row = _largest(rows)
        if rows[row] > measured:
            measured = float(rows[row])
            index = (*row, int(ratio[row].argmax()))
            message = "its row as a whole: "
    ok = measured <= 1
    bins = np.bincount(np.minimum(ratio.ravel() * 4, BINS - 1).astype(int), minlength=BINS)
    if not ok:
        lies = f"{have[index]:.9g} lies {measured:.3g} bars from {judged.value[index]:.9g}"
        message = f"{tensor}{_where(index)}: {message}{lies} (gauge {judged.gauge[index]:.3g})"
    finding = _at(tensor, index, have, judged, token, check="values", ok=ok, message="" if ok else message)
    return finding.replace(measured=measured, histogram=tuple(int(b) for b in bins))


def _at(tensor: str, index: tuple[int, ...], have: np.ndarray, judged: Judged, token: Any, **fields: Any) -> Finding:
    return Finding(
        tensor=tensor,
        index=index,
        got=float(have[index]),
        want=float(judged.value[index]),
        gauge=float(judged.gauge[index]),
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


def _first(flags: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(flags.argmax()), flags.shape))


def _largest(values: np.ndarray) -> tuple[int, ...]:
    return _first(np.nan_to_num(values, nan=np.inf, posinf=np.inf))
