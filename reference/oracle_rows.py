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
from .oracle_repeats import Repeats


class Forward(NamedTuple):
    """What an expert gives a row, before (y) and after (weighted) the routing weight."""

    hidden: Hidden
    y: Any
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
    var_dpre_operand: Any
    """The same with what quantising x and dpre adds to their product, wi's gradient."""
    var_dpre_floor: Any
    """What the floor of x's format adds to that in each column, whatever x is; None without one."""
    weighted_h: Any
    var_weighted_h: Any
    """wo's gradient is the sum of weighted_h (outer) dy; the variance holds every rounding of w, h, w*h and w*dy."""
    var_common_h: Any
    """Of weighted_h for weight 1, which copies of the row share: it multiplies the square of `Repeats.dy`. None without copies."""
    var_floor: Any
    """What underflow of w*dy, in storage dtype or a quantised one, adds in each column, whatever dy is."""
    dbias: Any
    var_dbias: Any


def leaves_of(params: Params) -> tuple[Any, ...]:
    """The routed experts' leaves in the order of `Expert.of`, absent ones None."""
    return params.wi, params.wo, params.wi_bias, params.wo_bias


def forward(
    xp: Any, problem: Problem, noise: Noise, expert: Expert, x: Any, w: Any, var_w: Any, shared=False
) -> Forward:
    """The expert's rows; `shared` rows have weight 1, which nothing rounds and nothing multiplies.

    The variance admits the roundings of both weight placements: which one a layer uses is its own affair.
    """
    z = hidden_units(xp, problem, noise, expert, x)
    w = xp.ones_like(x[..., :1]) if shared else w[..., None]
    product = z.h @ expert.wo
    y = product if expert.wo_bias is None else product + expert.wo_bias
    wh, wy = w * z.h, w * y
    var_wh = w * w * z.var_h + (0.0 if shared else noise.rounded("weighted_h", wh))
    own = _activation_variance(xp, noise, expert, wh, w)
    _, var = noise.dot(wh, var_wh, expert.wo, expert.wo2, wh.shape[-1], own, expert.quantised_wo)
    var_wh = var_wh if own is None else var_wh + own
    var = var + w * w * noise.rounded("expert_y", product)
    if expert.wo_bias is not None:
        var = var + w * w * noise.rounded("expert_y_biased", y) + noise.rounded("weighted_y", w * expert.wo_bias)
    if shared:
        return Forward(z, y, wy, var, _lumps(var_wh * expert.wo2.sum(-1), 0.0))
    together = _weight_variance(noise, w, var_w[..., None]) * y * y
    var = var + noise.rounded("weighted_y", wy) + together
    return Forward(z, y, wy, var, _lumps(var_wh * expert.wo2.sum(-1), together.sum(-1)))


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
    repeats: Repeats | None = None,
) -> Backward:
    """Gradients of sum(dy * w * y) for rows with their own dy; `repeats` says which rows are copies of each other."""
    z = f.hidden
    width, depth = z.h.shape[-1], dy.shape[-1]
    w = xp.ones_like(x[..., :1]) if shared else w[..., None]
    coherent = 0.0 * w if shared else _weight_variance(noise, w, var_w[..., None])

    coarse = expert.turned_wo is not None
    own = noise.operands.variance("d_rows", "gradient", dy) if coarse else None
    c, var_dot = noise.dot(dy, 0.0 * dy, expert.wo.T, expert.wo2.T, depth, own, expert.turned_wo)
    var_c = var_dot if shared else var_dot + noise.rounded("unit_dh", c)
    dh = w * c
    var_dh = w * w * var_c + noise.rounded("dh", dh)
    if not shared:
        floor = noise.operands.fixed_floor("d_rows", "gradient")
        var_dh = var_dh + (noise.rounded("weighted_dy", w * dy) + floor) @ expert.wo2.T
    dweight, var_dweight = _dweight(xp, noise, expert, dy, f, c, var_c)

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
    if expert.quantised_wi is not None:
        bent = z.curvature**2 * z.var_gate
        var_dgate = var_dgate + var_dh * (z.var_up * z.reach**2 + z.up**2 * bent) + dh**2 * z.var_up * bent
    if problem.experts.gated:
        dup = dh * z.act * z.up_slope
        reach = xp.maximum(z.up_slope, xp.where(z.up_jump > 0, 1.0, 0.0))
        var_dup = (
            reach * (z.act**2 * var_dh + dh**2 * z.var_act) + noise.rounded("dpre", dup) + (dh * z.act * z.up_jump) ** 2
        )
        if expert.quantised_wi is not None:
            var_dup = var_dup + reach * var_dh * z.var_act
        dpre, var_dpre = xp.concatenate([dgate, dup], -1), xp.concatenate([var_dgate, var_dup], -1)
    else:
        dpre, var_dpre = dgate, var_dgate

    n, wi, wi2 = dpre.shape[-1], expert.wi.T, expert.wi2.T
    own = noise.operands.variance("d_rows", "gradient", dpre) if coarse else None
    halves = [
        (None, None) if own is None else (own[..., s], expert.turned_wi[s])
        for s in (slice(0, width), slice(width, None))
    ]
    dx, var_dx = noise.dot(dgate, var_dgate, wi[:width], wi2[:width], n, *halves[0])
    if problem.experts.gated:
        dx_up, var_dx_up = noise.dot(dpre[..., width:], var_dpre[..., width:], wi[width:], wi2[width:], n, *halves[1])
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
    common, var_dpre_row = None, var_dpre
    if repeats is not None:
        common = _common(xp, problem, noise, expert, z, relative, repeats)
        var_dpre = var_dpre + common.dpre
    var_operand, x_floor = var_dpre, None
    if coarse:
        ops = noise.operands
        u_x, u_d = ops.relative("d_kernel", "activation"), ops.relative("d_kernel", "gradient")
        floor_x, floor_d = (ops.fixed_floor("d_kernel", role) for role in ("activation", "gradient"))
        var_operand = (1 + u_x) * (var_dpre + u_d * dpre * dpre + floor_d) + u_x * dpre * dpre
        x_floor = floor_x * (dpre * dpre + var_operand) if floor_x else None
        var_wh = (1 + u_d) * (var_wh + u_x * wh * wh + floor_x * xp.maximum(w * w, 1.0)) + u_d * wh * wh
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
            "x": _lumps((var_dpre_row if own is None else var_dpre_row + own) * expert.wi2.sum(0), whole["x"]),
            "wi": _copied_lumps(_lumps(var_operand * x2[..., None], whole["wi"] * x2), common, "wi", x2),
            "wo": _copied_lumps(_lumps(var_wh * dy2[..., None], whole["wo"] * dy2), common, "wo", x2),
            "wi_bias": _copied_lumps(Lumps(whole["wi"], whole["wi"] ** 2), common, "wi_bias", x2),
            "wo_bias": _copied_lumps(Lumps(whole["wo_bias"], whole["wo_bias"] ** 2), common, "wo_bias", x2),
        },
        dweight=dweight,
        var_dweight=var_dweight,
        dpre=dpre,
        var_dpre=var_dpre + together["wi"],
        var_dpre_operand=var_operand + together["wi"],
        var_dpre_floor=x_floor,
        weighted_h=wh,
        var_weighted_h=var_wh + together["wo"],
        var_common_h=None if common is None else common.h,
        var_floor=(0.0 if shared else COUNT["weighted_dy"] * noise.tiny2) * z.h * z.h
        + (noise.operands.fixed_floor("d_kernel", "gradient") * xp.maximum(w * w, 1.0) * z.h * z.h if coarse else 0.0),
        dbias=w * dy,
        var_dbias=together["wo_bias"]
        + noise.rounded("weighted_dy", w * dy)
        + (0.0 if repeats is None else relative * repeats.dy**2),
    )


class _Common(NamedTuple):
    """This row's share of what copies of a row add to sums over tokens, by the errors that they have in common."""

    dpre: Any
    """Added to the variance of dpre."""
    h: Any
    """Variance of h, for weight 1, that multiplies the square of `Repeats.dy`."""
    copies: Any
    """How many rows are equal: [..., 1]."""
    dy2: Any
    """Squared norm of `Repeats.dy`."""
    weight_wi: Any
    """Of dpre's share, what the weight's own error adds over all columns: it moves them together."""
    weight_wo: Any
    """The same of dy's columns."""


def _common(
    xp: Any, problem: Problem, noise: Noise, expert: Expert, z: Hidden, relative: Any, repeats: Repeats
) -> _Common:
    """Copies have one h, one slope, one x and one weight, and differ in dy, so dh alone errs apart in each.

    Quantised copies share the errors of x and h as operands too, and where dy is equal those of the gradients.
    """
    dh = repeats.dy @ expert.wo.T
    gate = (
        (z.up * z.curvature) ** 2 * z.var_gate
        + z.reach**2 * z.var_up
        + (noise.rounded("slope", z.slope) + transcendental(z.h * 0, z.slope_parts)) * z.up**2
        + (z.up * z.slope_jump) ** 2
    )
    dpre, factor = dh**2 * gate, z.up * z.slope
    if problem.experts.gated:
        reach = xp.maximum(z.up_slope, xp.where(z.up_jump > 0, 1.0, 0.0))
        dpre = xp.concatenate([dpre, dh**2 * (reach * z.var_act + (z.act * z.up_jump) ** 2)], -1)
        factor, dh = xp.concatenate([factor, z.act * z.up_slope], -1), xp.concatenate([dh, dh], -1)
    value2 = (dh * factor) ** 2
    operands = sum(noise.operands.relative("d_kernel", role) for role in ("activation", "gradient"))
    dy2 = (repeats.dy**2).sum(-1)
    return _Common(
        dpre=dpre + (operands + relative) * value2,
        h=z.var_h + ((COUNT["weighted_h"] + COUNT["weighted_dy"]) * noise.u2 + operands + relative) * z.h**2,
        copies=repeats.copies,
        dy2=dy2,
        weight_wi=relative[..., 0] * value2.sum(-1),
        weight_wo=relative[..., 0] * dy2,
    )


def _copied_lumps(own: Lumps, common: _Common | None, name: str, x2: Any) -> Lumps:
    """The row's lumps with those of its copies, of which each holds an equal share: n shares are one lump, not n."""
    if common is None:
        return own
    if name in ("wi_bias", "wo_bias"):
        parts = (common.weight_wi if name == "wi_bias" else common.weight_wo)[..., None]
    else:
        parts = common.dpre * x2[..., None] if name == "wi" else common.h * common.dy2[..., None]
    more = common.copies[..., 0] * (parts * parts).sum(-1)
    # wi's total has them already, in the variance of dpre.
    return Lumps(own.total + (0.0 if name == "wi" else parts.sum(-1)), own.squares + more)


def _activation_variance(xp: Any, noise: Noise, expert: Expert, wh: Any, w: Any) -> Any:
    """What quantising h, or w * h, adds to w * h; None when it is not quantised."""
    if expert.quantised_wo is None:
        return None
    floor = noise.operands.fixed_floor("forward", "activation")
    amax = None if expert.amax_h is None else expert.amax_h * xp.maximum(abs(w), 1.0)
    return noise.operands.variance("forward", "activation", wh, amax=amax) + floor * xp.maximum(w * w - 1.0, 0.0)


def _weight_variance(noise: Noise, w: Any, var_w: Any) -> Any:
    return var_w + noise.rounded("weight", w)


def _dweight(xp: Any, noise: Noise, expert: Expert, dy: Any, f: Forward, c: Any, var_c: Any) -> tuple[Any, Any]:
    """sum(dy * y) for weight 1: late layers form it so, early ones as sum((dy @ wo.T) * h) + sum(dy * wo_bias)."""
    h, var_h = f.hidden.h, f.hidden.var_h
    value = (dy * f.y).sum(-1)
    own = noise.rounded("expert_y", f.y)
    if expert.wo_bias is not None:
        own = own + noise.rounded("expert_y_biased", f.y)
    var = (c * c * var_h + h * h * var_c).sum(-1) + (dy * dy * own).sum(-1)
    own_h = _activation_variance(xp, noise, expert, h, xp.ones_like(h[..., :1]))
    if own_h is not None:
        var = var + (c * c * own_h + (h * h + var_h + own_h) * (dy * dy @ expert.quantised_wo.T)).sum(-1)
        var = var + ((var_h + own_h) * var_c).sum(-1)
    var = var + _sum_variance(noise, c * h) + _sum_variance(noise, dy * f.y)
    if expert.wo_bias is not None:
        var = var + _sum_variance(noise, dy * expert.wo_bias)
    return value, var + noise.per_total(max(h.shape[-1], dy.shape[-1])) * value**2 + noise.rounded("dweight", value)


def _sum_variance(noise: Noise, terms: Any) -> Any:
    squares, n = (terms * terms).sum(-1), terms.shape[-1]
    return COUNT["dweight_terms"] * (noise.u2 * squares + n * noise.tiny2) + noise.per_square(n) * squares


def _lumps(parts: Any, together: Any) -> Lumps:
    return Lumps(parts.sum(-1) + together, (parts * parts).sum(-1) + together * together)
