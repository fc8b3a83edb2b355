"""An honest live layer in NumPy: a float32 router by hand around the honest experts, with its choices as in `honest`."""

from __future__ import annotations

import dataclasses

import honest
import numpy as np
from dropless.parity.problem import Problem

F32 = np.float32


def layer(problem: Problem, leaves: dict, x, dy, cotangents, how: honest.How, rng: np.random.Generator) -> dict:
    """topk_idx, weights, losses, y and every gradient; leaves are NumPy, storage dtype."""
    dtype, T, E = x.dtype, problem.T, problem.E
    r = problem.router

    def q(a):
        return a.astype(dtype).astype(F32)

    def mm(a, b):
        return honest._matmul(a, b, how.order)

    x32, gate = x.astype(F32), leaves["gate_kernel"].astype(F32)
    narrow = r.logits_dtype == "activation"
    logits = mm(x32, gate)
    if "gate_bias" in leaves:
        logits = (q(logits) if narrow and how.bias_apart else logits) + leaves["gate_bias"].astype(F32)
    logits = q(logits) if narrow else logits
    powers = np.exp(logits - logits.max(1, keepdims=True))
    probs = powers / powers.sum(1, keepdims=True, dtype=F32)
    score, slope = _score(r.score, logits, probs, how)
    ranking = logits if r.softmax_order == "after" else score
    if "expert_bias" in leaves:
        ranking = ranking + leaves["expert_bias"]
    ids = _choose(problem, ranking)
    rows = np.arange(T)[:, None]
    chosen = score[rows, ids]
    if r.softmax_order == "after":
        z = np.exp(logits[rows, ids] - logits[rows, ids].max(1, keepdims=True))
        chosen = z / z.sum(1, keepdims=True, dtype=F32)
    total = chosen.sum(1, keepdims=True, dtype=F32) + F32(r.norm_eps)
    share = chosen / total if r.normalize else chosen
    w = share * F32(r.scaling)

    inner = {n: leaves[n] for n in ("wi", "wo", "wi_bias", "wo_bias") if n in leaves}
    out = honest.experts(problem, inner, x, ids, w, dy, how)
    y, dx = (out[n].astype(F32) for n in ("y", "x"))
    if problem.experts.shared_F:
        own = Problem(
            T=T, K=1, E=1, D=problem.D, F=problem.experts.shared_F, dtype=problem.dtype, experts=_shared(problem)
        )
        shared = {"wi": leaves["shared_wi"][None], "wo": leaves["shared_wo"][None]}
        got = honest.experts(own, shared, x, np.zeros((T, 1), np.int32), np.ones((T, 1), F32), dy, how)
        y, dx = y + got["y"].astype(F32), q(dx + got["x"].astype(F32))
        out["shared_wi"], out["shared_wo"] = got["wi"][0], got["wo"][0]

    dchosen = out.pop("topk_weights") * F32(r.scaling)
    if r.normalize:
        inward = (dchosen * chosen).sum(1, keepdims=True, dtype=F32) / (total * total)
        dchosen = dchosen / total - inward
    dscore = np.zeros((T, E), F32)
    if r.softmax_order == "after":
        base = chosen
        dscore[rows, ids] = base * (dchosen - (dchosen * base).sum(1, keepdims=True, dtype=F32))
        dlogits = dscore
    else:
        dscore[rows, ids] = dchosen
        dlogits = _softmax_back(probs, dscore) if r.score == "softmax" else dscore * slope
    losses, dloss = _losses(problem, logits, probs, score, slope, ids, cotangents)
    dlogits = dlogits + dloss
    dlogits = q(dlogits) if narrow else dlogits
    dx = dx + (q(mm(dlogits, gate.T)) if how.split_wi or narrow else mm(dlogits, gate.T))
    out |= {"y": y.astype(dtype), "x": dx.astype(dtype), "gate_kernel": mm(x32.T, dlogits).astype(dtype)}
    if "gate_bias" in leaves:
        out["gate_bias"] = honest._matmul(np.ones((1, T), F32), dlogits, how.order)[0].astype(dtype)
    return {**out, **losses, "weights": w, "topk_idx": ids}


def _shared(problem):
    return dataclasses.replace(problem.experts, shared_F=0, wi_bias=False, wo_bias=False)


def _score(kind, z, probs, how):
    if kind == "softmax":
        return probs, probs
    s = F32(1) / (F32(1) + np.exp(-z))
    if kind == "sigmoid":
        return s, s * (F32(1) - s)
    root = np.sqrt(np.log1p(np.exp(z)) if how.store_act else np.logaddexp(F32(0), z))
    return root, s / (F32(2) * root)


def _choose(problem, ranking):
    r = problem.router
    if r.groups > 1:
        by_group = np.sort(ranking.reshape(len(ranking), r.groups, -1), -1)[..., -r.group_score_topk :].sum(
            -1, dtype=F32
        )
        keep = np.argsort(-by_group, 1, kind="stable")[:, : r.group_topk]
        allowed = np.zeros((len(ranking), r.groups), bool)
        np.put_along_axis(allowed, keep, True, 1)
        ranking = np.where(np.repeat(allowed, problem.E // r.groups, 1), ranking, -np.inf)
    return np.argsort(-ranking, 1, kind="stable")[:, : problem.K].astype(np.int32)


def _softmax_back(p, d):
    return p * (d - (p * d).sum(1, keepdims=True, dtype=F32))


def _losses(problem, logits, probs, score, slope, ids, cotangents):
    T, K, E = problem.T, problem.K, problem.E
    balance, sequence, z = (F32(c) for c in cotangents)
    soft = problem.router.score == "softmax"
    total = score.sum(1, keepdims=True, dtype=F32)
    prob = probs if soft else score / total
    counts = np.bincount(ids.ravel(), minlength=E).astype(F32)
    scale = F32(E / (K * T * T))
    value = scale * (counts * prob.sum(0, dtype=F32)).sum(dtype=F32)
    top = logits.max(1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(1, dtype=F32))
    dprob = np.broadcast_to((balance + sequence) * scale * counts, prob.shape)
    if soft:
        grad = _softmax_back(prob, dprob)
    else:
        grad = slope * ((dprob - (prob * dprob).sum(1, keepdims=True, dtype=F32)) / total)
    grad = grad + (F32(2) * z / F32(T)) * lse[:, None] * probs
    return {"balance": value, "sequence": value, "z": np.mean(lse * lse, dtype=F32)}, grad


def draw_layer(problem: Problem, rng: np.random.Generator) -> Problem:
    """The same sizes with a random router and perhaps a shared expert; an even E, so that groups can be drawn."""
    E = max(2, problem.E // 2 * 2)
    kind = rng.choice(("softmax", "normalised", "after", "sigmoid", "sqrtsoftplus"))
    grouped = bool(rng.integers(2)) and E >= 4
    router = {
        "score": "softmax" if kind in ("softmax", "normalised", "after") else str(kind),
        "softmax_order": "after" if kind == "after" else "before",
        "normalize": kind == "normalised" or (kind in ("sigmoid", "sqrtsoftplus") and bool(rng.integers(2))),
        "norm_eps": float(rng.choice((0.0, 1e-20, 0.1))),
        "scaling": float(rng.choice((1.0, 2.5))),
        "gate_bias": bool(rng.integers(2)),
        "selection_bias": bool(rng.integers(2)),
        "logits_dtype": str(rng.choice(("float32", "activation"))),
        "groups": 2 if grouped else 1,
        "group_score_topk": 2 if grouped else 1,
    }
    K = min(problem.K, E // 2 if grouped else E)
    shared = int(rng.choice((0, 5)))
    changes = {f"router_{name}": value for name, value in router.items()}
    return problem.replace(E=E, K=K, experts_shared_F=shared, **changes)
