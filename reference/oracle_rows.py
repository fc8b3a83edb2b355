"""One expert applied to rows of x, forward and backward, in float64 with the variance of every intermediate.

Rows are the last axis; leading axes are free, so the same formulas serve one token (NumPy) and a block of tokens (jnp).
Weights enter linearly: a row's backward pass is computed for weight 1 and scaled, and what an uncertain weight does to
it is a coherent error of the whole row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.scipy.special
import numpy as np
import scipy.special

from ..parity.problem import Params, Problem
from ..parity.tolerances import COUNT, ELEMENT_BAR
from .oracle_gauge import Lumps, Noise, transcendental


class Expert(NamedTuple):
    """One expert's float64 parameters and their squares; absent biases are None."""

    wi: Any
    wo: Any
    wi_bias: Any
    wo_bias: Any
    wi2: Any
    wo2: Any

    @classmethod
    def of(cls, wi: Any, wo: Any, wi_bias: Any = None, wo_bias: Any = None) -> Expert:
        """From float64 arrays."""
        return cls(wi, wo, wi_bias, wo_bias, wi * wi, wo * wo)


class Hidden(NamedTuple):
    """h = act * up of some rows, with slopes, curvatures, variances, and the jumps of the slopes at a near kink."""

    h: Any
    var_h: Any
    act: Any
    var_act: Any
    slope: Any
    """act'(gate), the value."""
    reach: Any
    """The largest |act'| within the gate's own error: what its error is multiplied by."""
    curvature: Any
    """Likewise |act''|."""
    slope_parts: Any
    """Sum of the magnitudes that float32 adds up to act'(gate)."""
    slope_jump: Any
    var_gate: Any
    up: Any
    """1 when not gated."""
    var_up: Any
    up_slope: Any
    """0 beyond the clamp."""
    up_jump: Any
    kinks: Any
    """Pre-activations within their own error of a kink, per row."""


class Forward(NamedTuple):
    """What an expert gives a row, before (y) and after (weighted) the routing weight."""

    hidden: Hidden
    y: Any
    var_y: Any
    weighted: Any
    var_weighted: Any
    lumps: Lumps


class Backward(NamedTuple):
    """Gradients of one expert's rows: dx for weight w, and the factors of its parameters' gradients."""

    dx: Any
    var_dx: Any
    lumps: Lumps
    dweight: Any
    var_dweight: Any
    dpre: Any
    var_dpre: Any
    weighted_h: Any
    var_weighted_h: Any
    """wo's gradient is the sum of weighted_h (outer) dy; the variance holds every rounding of w, h, w*h and w*dy."""
    var_floor: Any
    """What underflow of w*dy adds to that variance in each column, whatever dy is."""
    dbias: Any
    var_dbias: Any


def leaves_of(params: Params) -> tuple[Any, ...]:
    """The routed experts' leaves in the order of `Expert.of`, absent ones None."""
    return params.wi, params.wo, params.wi_bias, params.wo_bias


def forward(
    xp: Any, problem: Problem, noise: Noise, expert: Expert, x: Any, w: Any, var_w: Any, shared=False
) -> Forward:
    """The expert's rows; `shared` rows have weight 1, which nothing rounds and nothing multiplies."""
    late = problem.experts.weight_placement == "late" and not shared
    hidden = _hidden(xp, problem, noise, expert, x)
    unrounded, var = noise.dot(hidden.h, hidden.var_h, expert.wo, expert.wo2, hidden.h.shape[-1])
    y, var_y = unrounded, var + noise.rounded("expert_y", unrounded)
    if expert.wo_bias is not None:
        y = unrounded + expert.wo_bias
        var_y = var_y + noise.rounded("expert_y_biased", y)
    columns = expert.wo2.sum(-1)
    if shared:
        return Forward(hidden, y, var_y, y, var_y, _lumps(hidden.var_h * columns, 0.0))
    w = w[..., None]
    coherent = _weight_variance(noise, w, var_w[..., None])
    if late:
        var_weighted = w * w * var_y + noise.rounded("weighted_y", w * y)
        var_wh = w * w * hidden.var_h
    else:
        wh = w * hidden.h
        var_wh = w * w * hidden.var_h + noise.rounded("weighted_h", wh)
        out, var_weighted = noise.dot(wh, var_wh, expert.wo, expert.wo2, hidden.h.shape[-1])
        var_weighted = var_weighted + noise.rounded("expert_y", out)
        if expert.wo_bias is not None:
            var_weighted = (
                var_weighted + noise.rounded("weighted_y", w * expert.wo_bias) + noise.rounded("expert_y_biased", w * y)
            )
    together = coherent * y * y
    return Forward(hidden, y, var_y, w * y, var_weighted + together, _lumps(var_wh * columns, together.sum(-1)))


def backward(
    xp: Any,
    problem: Problem,
    noise: Noise,
    expert: Expert,
    x: Any,
    w: Any,
    var_w: Any,
    dy: Any,
    f: Forward,
    shared=False,
) -> Backward:
    """Gradients of sum(dy * w * y) for rows with their own dy."""
    z = f.hidden
    width, depth = z.h.shape[-1], dy.shape[-1]
    late = problem.experts.weight_placement == "late" and not shared
    w = xp.ones_like(x[..., :1]) if shared else w[..., None]
    coherent = 0.0 * w if shared else _weight_variance(noise, w, var_w[..., None])

    c, var_dot = noise.dot(dy, 0.0 * dy, expert.wo.T, expert.wo2.T, depth)
    var_c = var_dot if shared else var_dot + noise.rounded("unit_dh", c)
    dh = w * c
    var_dh = w * w * var_c + noise.rounded("dh", dh)
    if late:
        var_dh = var_dh + noise.rounded("weighted_dy", w * dy) @ expert.wo2.T

    dweight, var_dweight = _dweight(noise, expert, dy, f, c, var_c, late, depth, width)

    dact = dh * z.up
    dgate = dact * z.slope
    var_dgate = (
        (z.up * z.reach) ** 2 * var_dh
        + (dh * z.reach) ** 2 * z.var_up
        + (dh * z.up * z.curvature) ** 2 * z.var_gate
        + noise.rounded("dact", dact) * z.reach**2
        + (noise.rounded("slope", z.slope) + transcendental(z.h * 0, z.slope_parts)) * dact**2
        + noise.rounded("dpre", dgate)
        + (dact * z.slope_jump) ** 2
    )
    if problem.experts.gated:
        dup = dh * z.act * z.up_slope
        reach = xp.maximum(z.up_slope, xp.where(z.up_jump > 0, 1.0, 0.0))
        var_dup = (
            reach * (z.act**2 * var_dh + dh**2 * z.var_act) + noise.rounded("dpre", dup) + (dh * z.act * z.up_jump) ** 2
        )
        dpre, var_dpre = xp.concatenate([dgate, dup], -1), xp.concatenate([var_dgate, var_dup], -1)
    else:
        dpre, var_dpre = dgate, var_dgate

    n, wi, wi2 = dpre.shape[-1], expert.wi.T, expert.wi2.T
    dx, var_dx = noise.dot(dgate, var_dgate, wi[:width], wi2[:width], n)
    if problem.experts.gated:
        dx_up, var_dx_up = noise.dot(dpre[..., width:], var_dpre[..., width:], wi[width:], wi2[width:], n)
        var_dx = var_dx + var_dx_up + noise.rounded("dx_half", dx) + noise.rounded("dx_half", dx_up)
        dx = dx + dx_up
    var_dx = var_dx + noise.rounded("dx_expert", dx)

    # A weight's own error moves the whole row together, so it is added after the products, from what weight 1 would give.
    unit = xp.where(w == 0, 1.0, w)
    relative = xp.where(w == 0, 0.0, coherent / (unit * unit))
    together = relative * dx * dx
    wh = w * z.h
    return Backward(
        dx=dx,
        var_dx=var_dx + together,
        lumps=_lumps(var_dpre * expert.wi2.sum(0), together.sum(-1)),
        dweight=dweight,
        var_dweight=var_dweight,
        dpre=dpre,
        var_dpre=var_dpre + relative * dpre * dpre,
        weighted_h=wh,
        var_weighted_h=w * w * z.var_h
        + coherent * z.h * z.h
        + (0.0 if shared else noise.rounded("weighted_h", wh) + COUNT["weighted_dy"] * noise.u2 * wh * wh),
        var_floor=(0.0 if shared else COUNT["weighted_dy"] * noise.tiny2) * z.h * z.h,
        dbias=w * dy,
        var_dbias=coherent * dy * dy + noise.rounded("weighted_dy", w * dy),
    )


def _weight_variance(noise: Noise, w: Any, var_w: Any) -> Any:
    return var_w + noise.rounded("weight", w)


def _lumps(parts: Any, together: Any) -> Lumps:
    return Lumps(parts.sum(-1) + together, (parts * parts).sum(-1) + together * together)


def _dweight(
    noise: Noise, expert: Expert, dy: Any, f: Forward, c: Any, var_c: Any, late: bool, depth: int, width: int
) -> tuple[Any, Any]:
    """sum(dy * y) for weight 1: late layers form it so, or as sum((dy @ wo.T) * h), as early ones do."""
    h, var_h = f.hidden.h, f.hidden.var_h
    value = (dy * f.y).sum(-1)
    terms = (c * h) ** 2
    var = (c * c * var_h + h * h * var_c).sum(-1)
    var = var + _sum_variance(noise, terms.sum(-1), width) + noise.per_total(max(depth, width)) * value**2
    if late or expert.wo_bias is not None:
        y = f.y if late else expert.wo_bias
        var = var + _sum_variance(noise, ((dy * y) ** 2).sum(-1), depth)
    if late:
        own = noise.rounded("expert_y", f.y)
        if expert.wo_bias is not None:
            own = own + noise.rounded("expert_y_biased", f.y)
        var = var + (dy * dy * own).sum(-1)
    return value, var + noise.rounded("dweight", value)


def _sum_variance(noise: Noise, squares: Any, n: int) -> Any:
    return COUNT["dweight_terms"] * (noise.u2 * squares + n * noise.tiny2) + noise.per_square(n) * squares


def _hidden(xp: Any, problem: Problem, noise: Noise, expert: Expert, x: Any) -> Hidden:
    pre, var_pre = noise.dot(x, 0.0 * x, expert.wi, expert.wi2, x.shape[-1])
    var_pre = var_pre + noise.rounded("pre", pre)
    if expert.wi_bias is not None:
        pre = pre + expert.wi_bias
        var_pre = var_pre + noise.rounded("pre_biased", pre)
    width = expert.wo.shape[0]
    gate, var_gate = pre[..., :width], var_pre[..., :width]
    near = ELEMENT_BAR * xp.sqrt(var_gate)
    clamp = problem.experts.clamp

    inside, close = gate < np.inf, gate > np.inf
    if clamp is not None:
        inside, close = gate < clamp.limit, abs(gate - clamp.limit) <= near
        gate = xp.minimum(gate, clamp.limit)
    act, slope, curvature, value_parts, slope_parts = _activation(xp, problem, gate)
    steep, bend = slope, curvature
    if problem.experts.activation == "relu2":
        steep, bend = 2 * xp.maximum(gate + near, 0.0), xp.where(gate + near > 0, 2.0, 0.0)
    reachable = xp.where(inside | close, 1.0, 0.0)
    reach, bend = reachable * steep, reachable * bend
    slope_jump = xp.where(close, slope, 0.0)
    slope = xp.where(inside, slope, 0.0)
    var_act = reach**2 * var_gate + noise.rounded("act", act) + transcendental(gate, value_parts)
    kinks = close.sum(-1)
    if not problem.experts.gated:
        one, zero = xp.ones_like(act), xp.zeros_like(act)
        return Hidden(
            act,
            var_act,
            act,
            var_act,
            slope,
            reach,
            bend,
            slope_parts,
            slope_jump,
            var_gate,
            one,
            zero,
            one,
            zero,
            kinks,
        )

    up, var_up = pre[..., width:], var_pre[..., width:]
    up_slope, up_jump = xp.ones_like(up), xp.zeros_like(up)
    if clamp is not None:
        up_close = abs(abs(up) - clamp.limit) <= ELEMENT_BAR * xp.sqrt(var_up)
        up_slope = xp.where(abs(up) < clamp.limit, 1.0, 0.0)
        up_jump = xp.where(up_close, 1.0, 0.0)
        up = xp.clip(up, -clamp.limit, clamp.limit) + clamp.offset
        var_up = xp.where((up_slope > 0) | up_close, var_up, 0.0) + noise.rounded("up_offset", up)
        kinks = kinks + up_close.sum(-1)
    h = act * up
    var_h = up**2 * var_act + act**2 * var_up + noise.rounded("h", h)
    return Hidden(
        h,
        var_h,
        act,
        var_act,
        slope,
        reach,
        bend,
        slope_parts,
        slope_jump,
        var_gate,
        up,
        var_up,
        up_slope,
        up_jump,
        kinks,
    )


def _activation(xp: Any, problem: Problem, z: Any) -> tuple[Any, Any, Any, Any, Any]:
    """act, its first two derivatives, and the magnitudes that float32 adds up to the first two."""
    kind, clamp = problem.experts.activation, problem.experts.clamp
    if kind == "relu2":
        r = xp.maximum(z, 0.0)
        return r * r, 2 * r, xp.where(z > 0, 2.0, 0.0), 0.0 * z, 0.0 * z
    if kind == "silu":
        alpha = 1.0 if clamp is None else clamp.alpha
        s = 1 / (1 + xp.exp(-alpha * z))
        tail = alpha * z * s * (1 - s)
        curvature = alpha * s * (1 - s) * (2 + alpha * z * (1 - 2 * s))
        return z * s, s + tail, curvature, abs(z * s), s + abs(tail)
    if kind == "gelu_erf":
        cdf = 0.5 * (1 + _erf(xp, z / np.sqrt(2.0)))
        pdf = xp.exp(-z * z / 2) / np.sqrt(2 * np.pi)
        return z * cdf, cdf + z * pdf, pdf * (2 - z * z), abs(z) / 2, 1 + abs(z * pdf)
    k, cubic = np.sqrt(2 / np.pi), 0.044715
    t = xp.tanh(k * (z + cubic * z**3))
    sech2, inner = 1 - t * t, k * (1 + 3 * cubic * z * z)
    tail = 0.5 * z * sech2 * inner
    curvature = sech2 * inner + 0.5 * z * sech2 * (6 * k * cubic * z) - z * t * sech2 * inner**2
    return 0.5 * z * (1 + t), 0.5 * (1 + t) + tail, curvature, abs(z) / 2, 1 + abs(tail)


def _erf(xp: Any, z: Any) -> Any:
    return scipy.special.erf(z) if xp is np else jax.scipy.special.erf(z)
