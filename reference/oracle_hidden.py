"""The first half of an expert in float64: h = act(gate) * up of some rows, its slopes, and the kinks that are near."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.scipy.special
import numpy as np
import scipy.special

from ..parity.problem import Problem
from ..parity.tolerances import ELEMENT_BAR
from .oracle_gauge import Expert, Noise, transcendental


class Hidden(NamedTuple):
    """h = act * up of some rows, with slopes, curvatures, variances, and the jumps of the slopes at a near kink."""

    h: Any
    var_h: Any
    act: Any
    var_act: Any
    slope: Any
    """act'(gate), the value."""
    reach: Any
    """What dh's error is multiplied by: act', where it bends sharply its largest within the gate's error; with quantised operands its
    root mean square there."""
    curvature: Any
    """What the gate's error is multiplied by in the slope: likewise of act''."""
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


def hidden_units(xp: Any, problem: Problem, noise: Noise, expert: Expert, x: Any) -> Hidden:
    """h of rows x [..., D].

    Where a pre-activation lies within its own error (6 gauges) of a clamp's edge or of relu2's kink, an honest layer may
    be on the other side: slopes then are the larger of both, and their jump is kept apart for the backward pass. With
    quantised operands that error is no longer small: products of two errors count too, here and in the backward pass, and
    moments over the error replace derivatives.
    """
    coarse = expert.quantised_wi is not None
    own = noise.operands.variance("forward", "activation", x, amax=expert.amax_x) if coarse else None
    pre, var_pre = noise.dot(x, 0.0 * x, expert.wi, expert.wi2, x.shape[-1], own, expert.quantised_wi)
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
        bend = xp.where(gate + near > 0, 2.0, 0.0)
        steep = 2 * xp.maximum(gate + near, 0.0)
    reachable = xp.where(inside | close, 1.0, 0.0)
    moved = (steep**2 * var_gate, steep, bend)
    if coarse:
        moved = _far(xp, problem, gate, xp.sqrt(var_gate), act, slope)
    reach, bend = reachable * moved[1], reachable * moved[2]
    slope_jump = xp.where(close, slope, 0.0)
    slope = xp.where(inside, slope, 0.0)
    var_act = reachable * moved[0] + noise.rounded("act", act) + transcendental(gate, value_parts)
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
    if coarse:
        var_h = var_h + var_act * var_up
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


def _far(xp: Any, problem: Problem, z: Any, sigma: Any, act: Any, slope: Any) -> tuple[Any, Any, Any]:
    """(E (act(z+d) - act(z))^2, root of E act'(z+d)^2, root of E (act'(z+d) - act'(z))^2 over sigma), d normal of sigma.

    For errors so large that act is no straight line within them, as with operands of 2 to 4 bits, where powers of d say too little: at
    z = -8, SiLU's slope and curvature are almost 0, and both are far from it an error of 3 away. The clamp bends act here, and
    the jump of its slope is not in these moments: one expectation would water down what happens rarely, and then in full.
    """
    clamp = problem.experts.clamp
    moved = turned = steep = 0.0 * z
    for node, weight in zip(*_NORMAL, strict=True):
        at = z + node * sigma
        act_at, slope_at = _activation(xp, problem, at if clamp is None else xp.minimum(at, clamp.limit))[:2]
        moved = moved + weight * (act_at - act) ** 2
        steep = steep + weight * slope_at**2
        turned = turned + weight * (slope_at - slope) ** 2
    return moved, xp.sqrt(steep), xp.sqrt(turned) / xp.where(sigma > 0, sigma, 1.0)


def _normal_nodes(n: int) -> tuple[list[float], list[float]]:
    """Gauss's rule for the standard normal density; Python's floats, which promote nothing."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(n)
    return nodes.tolist(), (weights / weights.sum()).tolist()


_NORMAL = _normal_nodes(7)


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
