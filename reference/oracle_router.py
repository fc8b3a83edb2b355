"""The router in float64 with its error gauge: logits, scores, weights at given ids, and their gradients.

Experts are the last axis, leading axes are free. Scores, normalisation and scaling are float32 in every honest layer;
only the logits may be rounded to x's dtype (`logits_dtype="activation"`). Weights are taken at ids that the caller
gives, as a 0/1 row `chosen` over the experts, so nothing here sorts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..parity.problem import Params, Problem
from ..parity.tolerances import ELEMENT_BAR, SUMMATION, TRANSCENDENTAL, unit_roundoff
from .oracle_gauge import Lumps, Noise


class Scores(NamedTuple):
    """A token's view of all experts."""

    logits: Any
    var: Any
    bound: Any
    """Largest error that an honest layer's logit can show."""
    logsumexp: Any
    probs: Any
    """softmax(logits) over all experts."""
    score: Any
    slope: Any
    curvature: Any
    """Derivatives of an elementwise score; unused for softmax."""
    ranking: Any
    """What the choice is made by: score + expert_bias, or logits + expert_bias for softmax after the choice."""
    ranking_bound: Any
    relative: Any
    """Relative variance of one float32 score."""


class Weighted(NamedTuple):
    """Weights over the experts, 0 where not chosen."""

    weights: Any
    var: Any


def leaves_of(params: Params) -> tuple[Any, ...]:
    """The router's leaves in the order of `scores`, absent ones None."""
    return params.gate_kernel, params.gate_bias, params.expert_bias


def scores(xp: Any, problem: Problem, noise: Noise, leaves: Any, x: Any) -> Scores:
    """Logits and scores of x [..., D] with their errors."""
    r = problem.router
    gate_kernel, gate_bias, expert_bias = leaves
    product, var = noise.dot(x, 0.0 * x, gate_kernel, gate_kernel * gate_kernel, x.shape[-1])
    logits = product
    if gate_bias is not None:
        logits = product + gate_bias
        var = var + (SUMMATION * logits) ** 2
    bound = ELEMENT_BAR * xp.sqrt(var)
    if r.logits_dtype == "activation":
        var = var + noise.rounded("logits", logits)
        bound = bound + unit_roundoff(problem.dtype) * abs(logits)
        if gate_bias is not None:
            var = var + noise.rounded("logits_product", product)
            bound = bound + unit_roundoff(problem.dtype) * abs(product)

    top = logits.max(-1, keepdims=True)
    powers = xp.exp(logits - top)
    total = powers.sum(-1, keepdims=True)
    probs = powers / total
    span = abs(logits - top) if r.score == "softmax" else abs(logits)
    relative = SUMMATION**2 * ((TRANSCENDENTAL + span) ** 2 + (problem.E + problem.K + 2) / 3 + 4)
    if r.score == "softmax":
        score, slope, curvature = probs, probs, probs
        reach = probs * (bound + (probs * bound).sum(-1, keepdims=True))
    else:
        score, slope, curvature = _elementwise(xp, r.score, logits)
        reach = abs(slope) * bound
    if r.softmax_order == "after":
        ranking, ranking_bound = logits, bound
    else:
        ranking, ranking_bound = score, reach + ELEMENT_BAR * xp.sqrt(relative) * score
    if expert_bias is not None:
        ranking = ranking + expert_bias
        ranking_bound = ranking_bound + SUMMATION * abs(ranking)
    return Scores(
        logits,
        var,
        bound,
        (top + xp.log(total))[..., 0],
        probs,
        score,
        slope,
        curvature,
        ranking,
        ranking_bound,
        relative,
    )


def nothing(problem: Problem) -> Scores:
    """A token of zeros, which gives a batch without tokens its shapes."""
    zero = np.zeros(problem.E)
    return Scores(*(np.zeros(()) if name == "logsumexp" else zero for name in Scores._fields))


def weights(xp: Any, problem: Problem, s: Scores, chosen: Any) -> Weighted:
    """The weights of the chosen experts (`chosen` is a row of 0 and 1 over E)."""
    r = problem.router
    if r.score == "softmax":
        q, scale, leak = _softmax_shares(xp, problem, s, chosen)
        w = scale * q * chosen
        pull = q * (1 - leak) + leak * s.probs
        var = w**2 * ((1 - 2 * pull) * s.var + (pull**2 * s.var).sum(-1, keepdims=True))
        relative = s.relative
    else:
        var_score = s.slope**2 * s.var + s.score**2 * s.relative
        q, scale = _elementwise_shares(xp, problem, s, chosen)
        w = scale * s.score * chosen
        var = scale**2 * var_score * chosen
        if r.normalize:
            var = var * (1 - 2 * q) + w**2 * (q**2 * var_score * chosen / _nonzero(xp, s.score) ** 2).sum(
                -1, keepdims=True
            )
        relative = SUMMATION**2 * (problem.K + 8) / 3
    return Weighted(w, xp.maximum(var * chosen, 0.0) + w**2 * relative)


def weights_backward(xp: Any, problem: Problem, s: Scores, chosen: Any, dw: Any, var_dw: Any) -> tuple[Any, Any]:
    """d(logits) of sum(dw * weights); dw is 0 where not chosen."""
    if problem.router.score != "softmax":
        q, scale = _elementwise_shares(xp, problem, s, chosen)
        return _elementwise_backward(xp, s, chosen, q, scale, dw, var_dw, problem.router.normalize)
    q, scale, leak = _softmax_shares(xp, problem, s, chosen)
    value, var = _softmax_backward(xp, s, q, scale, dw * chosen, var_dw * chosen)
    # Autodiff goes through the full softmax, where what the chosen have in common cancels only up to rounding.
    common = scale * (q * abs(dw)).sum(-1, keepdims=True)
    var = var + s.relative * ((s.probs + q) * common) ** 2
    # The eps of the denominator lets a little of the full softmax through.
    mean = scale * leak * (q * dw).sum(-1, keepdims=True)
    spill = mean**2 * (q**2 + s.probs**2) * (s.var + (s.probs**2 * s.var).sum(-1, keepdims=True))
    spill = spill + (scale * leak * (q - s.probs)) ** 2 * (q**2 * var_dw).sum(-1, keepdims=True)
    return value + mean * (q - s.probs), var + spill


def logits_backward(
    xp: Any, problem: Problem, noise: Noise, s: Scores, chosen: Any, dw: Any, var_dw: Any, dprobs: Any, dz: Any
) -> tuple[Any, Any]:
    """d(logits) of sum(dw * weights) + sum(dprobs * P) + dz * logsumexp^2, all parts and their rounding."""
    parts = [weights_backward(xp, problem, s, chosen, dw, var_dw), balance_backward(xp, problem, s, dprobs)]
    parts.append(z_backward(xp, s, dz))
    value = sum(v for v, _ in parts)
    var = sum(v for _, v in parts) + sum((2 * SUMMATION * v) ** 2 for v, _ in parts)
    if problem.router.logits_dtype == "activation":
        var = var + noise.rounded("dlogits", value)
    return value, var


def input_backward(noise: Noise, gate_kernel: Any, dlogits: Any, var: Any) -> tuple[Any, Any, Lumps]:
    """dx through the logits, its variance, and the parts of it that move a row together: one for each logit."""
    kernel2 = gate_kernel * gate_kernel
    dx, var_dx = noise.dot(dlogits, var, gate_kernel.T, kernel2.T, dlogits.shape[-1])
    parts = var * kernel2.sum(0)
    return dx, var_dx + noise.rounded("dx_router", dx), Lumps(parts.sum(-1), (parts * parts).sum(-1))


def gate_lumps(x: Any, var: Any) -> Lumps:
    """The parts of gate_kernel's gradient that move a column together: one for each token's logit."""
    parts = var * (x * x).sum(-1)[..., None]
    return Lumps(parts.sum(-1), (parts * parts).sum(-1))


def balance_backward(xp: Any, problem: Problem, s: Scores, dprobs: Any) -> tuple[Any, Any]:
    """d(logits) of sum(dprobs * P), P being the probabilities of the balance losses."""
    if problem.router.score == "softmax":
        return _softmax_backward(xp, s, s.probs, 1.0, dprobs, 0.0 * dprobs)
    total = s.score.sum(-1, keepdims=True)
    return _elementwise_backward(xp, s, xp.ones_like(s.score), s.score / total, 1 / total, dprobs, 0.0 * dprobs, True)


def z_backward(xp: Any, s: Scores, dz: Any) -> tuple[Any, Any]:
    """d(logits) of dz * logsumexp(logits)^2."""
    lse, p = s.logsumexp[..., None], s.probs
    value = 2 * dz * lse * p
    spread = (p**2 * s.var).sum(-1, keepdims=True)
    var = lse**2 * p**2 * s.var + 2 * lse * p**3 * (1 - lse) * s.var + p**2 * (1 - lse) ** 2 * spread
    return value, (2 * dz) ** 2 * xp.maximum(var, 0.0) + s.relative * ((2 * dz * p) ** 2 * (lse**2 + 1))


def probabilities(problem: Problem, s: Scores) -> Any:
    """P_te of the balance losses: softmax over all experts, or the scores divided by their sum."""
    return s.probs if problem.router.score == "softmax" else s.score / s.score.sum(-1, keepdims=True)


def loss_terms(xp: Any, problem: Problem, s: Scores, name: str, dprobs: Any, dz: Any) -> tuple[Any, Any]:
    """Each token's share of a loss that is linear in the probabilities (dprobs), or of z, with its variance."""
    if name == "z":
        slope, _ = z_backward(xp, s, dz)
        own = s.relative.max(-1) * (2 * dz * s.logsumexp) ** 2
        return dz * s.logsumexp**2, (slope**2 * s.var).sum(-1) + own
    slope, _ = balance_backward(xp, problem, s, dprobs)
    terms = dprobs * probabilities(problem, s)
    return terms.sum(-1), (slope**2 * s.var + s.relative * terms**2).sum(-1)


def loss_total(problem: Problem, value: Any, var: Any, tokens: Any) -> tuple[Any, Any]:
    """A loss and its variance from the sums of its tokens' shares: float32 sums of positive terms."""
    return value, var + SUMMATION**2 * ((tokens + problem.E + 2) / 3 + 8) * value**2


def _softmax_shares(xp: Any, problem: Problem, s: Scores, chosen: Any) -> tuple[Any, Any, Any]:
    """(q, scale, leak): the weights are scale * q at the chosen; leak is norm_eps / (its denominator)."""
    r = problem.router
    if r.softmax_order == "after":
        return _within(xp, s, chosen), r.scaling / (1 + (r.norm_eps if r.normalize else 0.0)), 0.0
    if not r.normalize:
        return s.probs, r.scaling, 0.0
    total = (s.probs * chosen).sum(-1, keepdims=True)
    leak = r.norm_eps / _nonzero(xp, total + r.norm_eps)
    return _within(xp, s, chosen), r.scaling * (1 - leak), leak


def _within(xp: Any, s: Scores, chosen: Any) -> Any:
    """softmax over the chosen experts, 0 elsewhere and where none is chosen."""
    top = xp.where(chosen > 0, s.logits, -np.inf).max(-1, keepdims=True)
    top = xp.where(top == -np.inf, 0.0, top)
    powers = xp.where(chosen > 0, xp.exp(xp.where(chosen > 0, s.logits, top) - top), 0.0)
    return powers / _nonzero(xp, powers.sum(-1, keepdims=True))


def _elementwise_shares(xp: Any, problem: Problem, s: Scores, chosen: Any) -> tuple[Any, Any]:
    """(q, scale): the weights are scale * score at the chosen; q is their share of the denominator."""
    r = problem.router
    total = _nonzero(xp, (s.score * chosen).sum(-1, keepdims=True) + r.norm_eps)
    return s.score * chosen / total, r.scaling / total if r.normalize else r.scaling + 0.0 * total


def _softmax_backward(xp: Any, s: Scores, q: Any, scale: Any, a: Any, var_a: Any) -> tuple[Any, Any]:
    """d(logits) of scale * sum(a * q), q being a softmax; the curvature carries the logits' own errors."""
    b = a - (q * a).sum(-1, keepdims=True)
    value = scale * q * b
    from_a = (1 - 2 * q) * var_a + (q**2 * var_a).sum(-1, keepdims=True)
    m0, m1, m2 = ((q**2 * s.var * b**i).sum(-1, keepdims=True) for i in range(3))
    from_logits = b**2 * s.var * (1 - 4 * q) + b**2 * m0 + 2 * b * m1 + m2
    parts = abs(a) + (q * abs(a)).sum(-1, keepdims=True)
    var = xp.maximum(from_a, 0.0) + xp.maximum(from_logits, 0.0) + s.relative * parts**2
    return value, (scale * q) ** 2 * var


def _elementwise_backward(
    xp: Any, s: Scores, chosen: Any, q: Any, scale: Any, a: Any, var_a: Any, normalize: bool
) -> tuple[Any, Any]:
    """d(logits) of sum(a * weights) for scores that know only their own logit."""
    a = a * chosen
    slope = s.slope * chosen
    if not normalize:
        var = (a * s.curvature) ** 2 * s.var + slope**2 * var_a + s.relative * (a * slope) ** 2
        return scale * slope * a, scale**2 * var
    b = a - (q * a).sum(-1, keepdims=True)
    m0, m1, m2 = ((slope**2 * s.var * b**i * chosen).sum(-1, keepdims=True) for i in range(3))
    # Second derivative: scale * [diag(curvature b) - slope slope' (b + b') scale'], scale' = 1 / denominator.
    unit = q / _nonzero(xp, s.score * chosen)
    diagonal = s.curvature * b
    from_logits = (
        diagonal**2 * s.var * chosen
        - 4 * diagonal * b * slope**2 * unit * s.var
        + (slope * unit) ** 2 * (b**2 * m0 + 2 * b * m1 + m2)
    )
    from_a = slope**2 * ((1 - 2 * q) * var_a + (q**2 * var_a).sum(-1, keepdims=True))
    parts = slope * (abs(a) + (q * abs(a)).sum(-1, keepdims=True))
    var = xp.maximum(from_a, 0.0) + xp.maximum(from_logits, 0.0) + s.relative * parts**2
    return scale * slope * b, scale**2 * var


def _elementwise(xp: Any, kind: str, z: Any) -> tuple[Any, Any, Any]:
    s = 1 / (1 + xp.exp(-z))
    if kind == "sigmoid":
        return s, s * (1 - s), s * (1 - s) * (1 - 2 * s)
    root = xp.sqrt(xp.logaddexp(0.0, z))
    return root, s / (2 * root), s * (1 - s) / (2 * root) - s**2 / (4 * root**3)


def _nonzero(xp: Any, value: Any) -> Any:
    return xp.where(value == 0, 1.0, value)
