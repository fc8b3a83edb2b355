"""Honest experts in NumPy, with every permitted rounding as an explicit choice: what the gauge is calibrated on.

Products accumulate in float32 in a chosen order; everything the normative table names is rounded to storage dtype or
kept, as `How` says. Shares nothing with the oracle but the contract.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import scipy.special
from dropless.parity.problem import Problem

ORDERS = ("blas", "forward", "backward", "pairwise", "split")


@dataclass(frozen=True)
class How:
    """One honest implementation."""

    order: str = "blas"
    combine: str = "float32"
    """float32: one sum, one rounding. forward, backward: every partial sum in storage dtype, by ascending or descending slot."""
    split_wi: bool = False
    bias_apart: bool = False
    store_act: bool = True
    cast_weight: bool = False
    weight_first: bool = True
    """Late: w * dy before the product with wo.T, else after it."""
    weight_on_h: bool = False
    """wo's gradient from (w * h) and dy, else from h and (w * dy)."""
    dweight_from_h: bool = False
    round_terms: bool = False
    fused_backward: bool = False

    @classmethod
    def draw(cls, rng: np.random.Generator) -> How:
        """A random one."""
        flags = {f.name: bool(rng.integers(2)) for f in dataclasses.fields(cls) if f.type in ("bool", bool)}
        return cls(order=str(rng.choice(ORDERS)), combine=str(rng.choice(("float32", "forward", "backward"))), **flags)


def experts(problem: Problem, leaves: dict, x, ids, w, dy, how: How) -> dict[str, np.ndarray]:
    """y and every gradient, in storage dtype (topk_weights in float32); arrays are NumPy, storage dtype."""
    late, gated, clamp = problem.experts.weight_placement == "late", problem.experts.gated, problem.experts.clamp
    dtype, F = x.dtype, problem.F

    def q(a):
        return a.astype(dtype).astype(np.float32)

    def maybe(flag, a):
        return q(a) if flag else a.astype(np.float32)

    def mm(a, b):
        if problem.precision == "tf32":
            a, b = _tf32(a), _tf32(b)
        return _matmul(a, b, how.order)

    p = {name: leaf.astype(np.float32) for name, leaf in leaves.items()}
    x32, dy32, w32 = x.astype(np.float32), dy.astype(np.float32), w.astype(np.float32)
    cast = maybe(how.cast_weight, w32)
    out_rows, dx_rows = (np.zeros((problem.T, problem.K, problem.D), np.float32) for _ in range(2))
    dweights = np.zeros((problem.T, problem.K), np.float32)
    grads = {name: np.zeros(leaf.shape, np.float32) for name, leaf in p.items()}

    for e in range(problem.E):
        t, k = np.nonzero(ids == e)
        if not len(t):
            continue
        X, DY, W = x32[t], dy32[t], cast[t, k][:, None]
        wi, wo = p["wi"][e], p["wo"][e]

        def biased(a, b):
            return q(a) if b is None else q(q(a) + b) if how.bias_apart else q(a + b)

        bi = p["wi_bias"][e] if "wi_bias" in p else None
        bo = p["wo_bias"][e] if "wo_bias" in p else None
        halves = [slice(0, F), slice(F, 2 * F)] if gated else [slice(0, F)]
        if how.split_wi:
            pre = [biased(mm(X, wi[:, s]), None if bi is None else bi[s]) for s in halves]
        else:
            whole = biased(mm(X, wi), bi)
            pre = [whole[:, s] for s in halves]
        gate = pre[0] if clamp is None else np.minimum(pre[0], np.float32(clamp.limit))
        act, slope = (a.astype(np.float32) for a in _activation(problem, gate))
        act = maybe(how.store_act, act)
        up, open_up = np.ones_like(act), np.ones_like(act)
        if gated:
            up = pre[1]
            if clamp is not None:
                open_up = (abs(up) < clamp.limit).astype(np.float32)
                up = np.clip(up, -clamp.limit, clamp.limit) + np.float32(clamp.offset)
                up = maybe(how.store_act, up)
        h = q(act * up) if gated else q(act)
        if late:
            y = biased(mm(h, wo), bo)
            rows = W * y
        else:
            rows = mm(q(W * h), wo)
            if bo is not None:
                rows = q(q(rows) + q(W * bo)) if how.bias_apart else rows + W * bo
            rows = q(rows)
            y = None
        out_rows[t, k] = maybe(how.combine != "float32", rows)

        unit = q(mm(DY, wo.T))
        if late and how.weight_first:
            dyw = q(W * DY)
            dh = q(mm(dyw, wo.T))
        else:
            dyw = q(W * DY)
            dh = q(W * unit)
        if late and not how.dweight_from_h:
            terms = DY * y
        else:
            terms = unit * h
            if bo is not None:
                terms = np.concatenate([terms, DY * bo], 1)
        dweights[t, k] = maybe(how.round_terms, maybe(how.round_terms, terms).sum(1, dtype=np.float32))
        if clamp is not None:
            slope = slope * (pre[0] < clamp.limit)
        if how.fused_backward:
            dgate = q(dh * up * slope)
        else:
            dgate = q(q(dh * up) * q(slope))
        dpre = [dgate] + ([q(dh * act * open_up)] if gated else [])
        if how.split_wi and gated:
            dx = q(mm(dpre[0], wi[:, :F].T)) + q(mm(dpre[1], wi[:, F:].T))
        else:
            dx = mm(np.concatenate(dpre, 1), wi.T)
        dx_rows[t, k] = q(dx)
        dpre = np.concatenate(dpre, 1)
        grads["wi"][e] = mm(X.T, dpre)
        grads["wo"][e] = mm(q(W * h).T, DY) if how.weight_on_h or not late else mm(h.T, dyw)
        ones = np.ones((1, len(t)), np.float32)
        if bi is not None:
            grads["wi_bias"][e] = _matmul(ones, dpre, how.order)[0]
        if bo is not None:
            grads["wo_bias"][e] = _matmul(ones, dyw if how.bias_apart else W * DY, how.order)[0]
    out = {"y": _combine(out_rows, ids, how, q), "x": _combine(dx_rows, ids, how, q), **grads}
    return {**{name: a.astype(dtype) for name, a in out.items()}, "topk_weights": dweights}


def _combine(rows, ids, how, q):
    total = np.zeros((rows.shape[0], rows.shape[2]), np.float32)
    slots = range(rows.shape[1])
    for k in reversed(slots) if how.combine == "backward" else slots:
        added = total + rows[:, k]
        added = added if how.combine == "float32" else q(added)
        total = np.where((ids[:, k] >= 0)[:, None], added, total)
    return total


def _matmul(a, b, order):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    n = a.shape[1]
    if order == "blas" or n == 0:
        return a @ b
    if order == "split":
        return sum((a[:, i::4] @ b[i::4] for i in range(4)), np.zeros((a.shape[0], b.shape[1]), np.float32))
    if order == "pairwise":
        terms = a[:, :, None] * b[None]
        while terms.shape[1] > 1:
            if terms.shape[1] % 2:
                terms = np.concatenate([terms, np.zeros_like(terms[:, :1])], 1)
            terms = terms[:, 0::2] + terms[:, 1::2]
        return terms[:, 0]
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i in range(n) if order == "forward" else reversed(range(n)):
        total = total + a[:, i : i + 1] * b[i]
    return total


def _tf32(a):
    bits = np.ascontiguousarray(a, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFFE000)).view(np.float32)


def _activation(problem, z):
    """act and its slope, evaluated in float32."""
    one = np.float32(1)
    kind = problem.experts.activation
    if kind == "relu2":
        r = np.maximum(z, np.float32(0))
        return r * r, 2 * r
    if kind == "silu":
        alpha = np.float32(1 if problem.experts.clamp is None else problem.experts.clamp.alpha)
        s = scipy.special.expit(alpha * z)
        return z * s, s * (one + alpha * z * (one - s))
    if kind == "gelu_erf":
        cdf = np.float32(0.5) * (one + scipy.special.erf(z * np.float32(np.sqrt(0.5))))
        return z * cdf, cdf + z * np.exp(np.float32(-0.5) * z * z) * np.float32(1 / np.sqrt(2 * np.pi))
    k, c = np.float32(np.sqrt(2 / np.pi)), np.float32(0.044715)
    t = np.tanh(k * (z + c * z * z * z))
    slope = np.float32(0.5) * (one + t) + np.float32(0.5) * z * (one - t * t) * k * (one + 3 * c * z * z)
    return np.float32(0.5) * z * (one + t), slope
