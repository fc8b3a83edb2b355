"""One expert applied to rows of x, forward and backward, in float64 with the variance of every intermediate.

Rows are the last axis; leading axes are free, so the same formulas serve one token (NumPy) and a block of tokens (jnp).
Weights enter linearly: a row's backward pass is computed for weight 1 and scaled, and what an uncertain weight does to
it is a coherent error of the whole row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..parity.problem import Params, Problem
from ..parity.tolerances import COUNT
from .oracle_gauge import Expert, Lumps, Noise, transcendental
from .oracle_hidden import Hidden, hidden_units


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
    lumps: dict[str, Lumps]
    """By the name of what the gradient is of: x, wi, wo, wi_bias, wo_bias."""
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
    hidden = hidden_units(xp, problem, noise, expert, x)
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
    wh, x2, dy2 = w * z.h, (x * x).sum(-1), (dy * dy).sum(-1)
    var_wh = w * w * z.var_h
    if not shared:
        var_wh = var_wh + noise.rounded("weighted_h", wh) + COUNT["weighted_dy"] * noise.u2 * wh * wh
    together = {
        "x": relative * dx * dx,
        "wi": relative * dpre * dpre,
        "wo": coherent * z.h * z.h,
        "wo_bias": coherent * dy * dy,
    }
    whole = {name: row.sum(-1) for name, row in together.items()}
    return Backward(
        dx=dx,
        var_dx=var_dx + together["x"],
        lumps={
            "x": _lumps(var_dpre * expert.wi2.sum(0), whole["x"]),
            "wi": _lumps(var_dpre * x2[..., None], whole["wi"] * x2),
            "wo": _lumps(var_wh * dy2[..., None], whole["wo"] * dy2),
            "wi_bias": Lumps(whole["wi"], whole["wi"] ** 2),
            "wo_bias": Lumps(whole["wo_bias"], whole["wo_bias"] ** 2),
        },
        dweight=dweight,
        var_dweight=var_dweight,
        dpre=dpre,
        var_dpre=var_dpre + together["wi"],
        weighted_h=wh,
        var_weighted_h=var_wh + together["wo"],
        var_floor=(0.0 if shared else COUNT["weighted_dy"] * noise.tiny2) * z.h * z.h,
        dbias=w * dy,
        var_dbias=together["wo_bias"] + noise.rounded("weighted_dy", w * dy),
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
