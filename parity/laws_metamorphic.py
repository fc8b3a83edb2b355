"""Laws that relate two runs of one implementation, or a run and a plain dense layer: most need no oracle for the value."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from . import running
from .compare import Finding
from .draws import stream
from .inputs import Case
from .interface import Implementation
from .law import Law, law
from .law_tools import (
    by_bits,
    by_bits_or_gauge,
    by_gauge,
    dtype_of,
    judge,
    moved,
    oracle_view,
    real_rows,
    take,
    with_routing,
)
from .problem import Params, Problem, Routing

TOKEN_TENSORS = ("y", "x", "topk_weights")
"""What follows the tokens; the other tensors sum over them."""


@law("permute-tokens", stage="experts", judged_by="gauge", faults="BCJ", needs={"T >= 2"})
def permute_tokens(implementation: Implementation, case: Case) -> list[Finding]:
    """Permuting the tokens permutes y and the token gradients, and leaves the parameters' gradients."""
    order = stream(case.seed, "token order").permutation(case.problem.T)
    base = running.experts(implementation, case)
    permuted = running.experts(implementation, _take(case, order))
    want = {name: base[name][order] if name in TOKEN_TENSORS else base[name] for name in base}
    views = moved(oracle_view(case), rows=lambda name: order if name in TOKEN_TENSORS else None)
    return by_gauge(case.problem, views, permuted, want)


@law("prefix", stage="experts", judged_by="gauge", faults="BCEJ", needs={"T even", "no mesh"})
def prefix(implementation: Implementation, case: Case) -> list[Finding]:
    """The first half of the batch gives the first half of y and of the token gradients."""
    half = case.problem.T // 2
    base = running.experts(implementation, case)
    got = running.experts(implementation, _take(case, np.arange(half)))
    want = {name: base[name][:half] for name in TOKEN_TENSORS if name in base}
    views = moved(oracle_view(case), rows=lambda name: slice(half) if name in TOKEN_TENSORS else None)
    return by_gauge(case.problem, views, got, want)


@law("split-batch", stage="experts", judged_by="gauge", faults="ABCGJ", needs={"T even", "no mesh"})
def split_batch(implementation: Implementation, case: Case) -> list[Finding]:
    """Two halves of a batch give the two halves of y, and parameter gradients that add up to the whole's."""
    T = case.problem.T
    base = running.experts(implementation, case)
    parts = [_take(case, np.arange(T // 2)), _take(case, np.arange(T // 2, T))]
    gots = [running.experts(implementation, part) for part in parts]
    whole_view, views = oracle_view(case), [oracle_view(part) for part in parts]
    findings = []
    for name, whole in base.items():
        if name in TOKEN_TENSORS:
            got = {name: np.concatenate([g[name] for g in gots])}
            findings += by_gauge(case.problem, whole_view, got, {name: whole})
            continue
        # Each half rounds its gradient once, and their sum is compared without another rounding.
        got = sum(g[name].astype(np.float64) for g in gots)
        gauge = np.sqrt(whole_view[name].gauge ** 2 + sum(view[name].gauge ** 2 for view in views))
        view = whole_view[name]._replace(value=whole.astype(np.float64), gauge=gauge)
        findings.append(judge(name, got, view, dtype="float64"))
    return findings


@law("relabel-experts", stage="experts", judged_by="gauge", faults="ADEIJ", needs={"E >= 2"})
def relabel_experts(implementation: Implementation, case: Case) -> list[Finding]:
    """Renaming the experts, in ids and parameters together, leaves y and renames the parameters' gradients."""
    ids = real_rows(case)
    order = stream(case.seed, "expert order").permutation(case.problem.E)  # new expert j is old expert order[j]
    new_name = np.argsort(order)
    leaves = {n: take(leaf, order) for n in running.EXPERT_LEAVES if (leaf := getattr(case.params, n)) is not None}
    renamed = with_routing(case, np.where(ids < 0, -1, new_name[ids]), np.asarray(case.routing.topk_weights)).replace(
        params=case.params.replace(**leaves)
    )
    base, got = running.experts(implementation, case), running.experts(implementation, renamed)
    want = {name: v[order] if name in running.EXPERT_LEAVES else v for name, v in base.items()}
    views = moved(oracle_view(case), rows=lambda name: order if name in running.EXPERT_LEAVES else None)
    return by_gauge(case.problem, views, got, want)


@law("permute-slots", stage="experts", judged_by="gauge", faults="EJ", needs={"K >= 2"})
def permute_slots(implementation: Implementation, case: Case) -> list[Finding]:
    """The order of a token's slots carries no meaning: only the weights' gradient follows it."""
    rng = stream(case.seed, "slot order")
    order = rng.permuted(np.tile(np.arange(case.problem.K), (case.problem.T, 1)), axis=1)

    def follow(v: np.ndarray) -> np.ndarray:
        return np.take_along_axis(v, order, axis=1)

    shuffled = with_routing(case, follow(real_rows(case)), follow(np.asarray(case.routing.topk_weights)))
    base, got = running.experts(implementation, case), running.experts(implementation, shuffled)
    want = {name: follow(v) if name == "topk_weights" else v for name, v in base.items()}
    views = moved(oracle_view(case), gauge=lambda name, g: follow(g) if name == "topk_weights" else g)
    return by_gauge(case.problem, views, got, want)


@law(
    "powers-of-two",
    stage="experts",
    judged_by="bits",
    faults="FI",
    # Between the products of float16 lie subnormal numbers, which round otherwise when they are doubled.
    needs={"no wo bias", "deterministic", "unquantised", "8-bit exponent"},
)
def powers_of_two(implementation: Implementation, case: Case) -> list[Finding]:
    """Doubling wo doubles y and every gradient but wo's own, which stays, to the last bit."""
    base = running.experts(implementation, case)
    wo = jnp.asarray(np.asarray(case.params.wo) * np.asarray(2, case.params.wo.dtype))
    got = running.experts(implementation, case.replace(params=case.params.replace(wo=wo)))
    want = {name: v if name == "wo" else v * np.asarray(2, v.dtype) for name, v in base.items()}
    return by_bits(got, want)


@law("linear-weights", stage="experts", judged_by="gauge", faults="F", needs={"unquantised"})
def linear_weights(implementation: Implementation, case: Case) -> list[Finding]:
    """Doubling the routing weights doubles y and the gradients of x and the parameters, once and not twice over; the weights' own gradient stays."""
    base = running.experts(implementation, case)
    doubled = with_routing(case, real_rows(case), 2 * np.asarray(case.routing.topk_weights))
    got = running.experts(implementation, doubled)
    want = {name: v.astype(np.float64) * (1 if name == "topk_weights" else 2) for name, v in base.items()}
    views = moved(oracle_view(case), gauge=lambda name, g: g if name == "topk_weights" else 2 * g)
    return by_gauge(case.problem, views, got, want)


@law("one-expert-is-dense", stage="experts", judged_by="gauge", faults="ACF", needs={"dropless"})
def one_expert_is_dense(implementation: Implementation, case: Case) -> list[Finding]:
    """With all tokens on one expert at weight 1 the layer is that expert's dense layer."""
    problem = case.problem
    T, K, E = problem.T, problem.K, problem.E
    hot = int(stream(case.seed, "hot expert").integers(E))
    ids = (hot + np.tile(np.arange(K), (T, 1))) % E
    weights = np.zeros((T, K), np.float32)
    weights[:, 0] = 1
    hot_case = with_routing(case, ids, weights)
    got = running.experts(implementation, hot_case)["y"]
    return [_dense_finding(hot_case, got, dense(problem, case.params, np.asarray(case.x), hot))]


@law("all-experts-are-a-mixture", stage="experts", judged_by="gauge", faults="EF", needs={"K = E", "dropless"})
def all_experts_are_a_mixture(implementation: Implementation, case: Case) -> list[Finding]:
    """When every token visits every expert the layer is the dense mixture with those weights."""
    ids, weights = real_rows(case), np.asarray(case.routing.topk_weights, np.float64)
    got = running.experts(implementation, case)["y"]
    x = np.asarray(case.x)
    want = np.zeros(x.shape)
    for e in range(case.problem.E):
        share = np.where(ids == e, weights, 0).sum(1)
        want += share[:, None] * dense(case.problem, case.params, x, e)
    return [_dense_finding(case, got, want)]


@law("tokens-apart", stage="experts", judged_by="bits", faults="BEJ", needs={"T >= 2", "unquantised"})
def tokens_apart(implementation: Implementation, case: Case) -> list[Finding]:
    """Changing one token's values changes its own row of y and no bit of any other."""
    token = case.seed % case.problem.T
    x = np.asarray(case.x).copy()
    x[token] = -2 * x[token] + 1
    base = running.experts(implementation, case)["y"]
    got = running.experts(implementation, case.replace(x=jnp.asarray(x)))["y"]
    others = np.arange(case.problem.T) != token
    return by_bits_or_gauge(implementation, case, {"y": got[others]}, {"y": base[others]}, others)


def dense(problem: Problem, params: Params, x: np.ndarray, expert: int) -> np.ndarray:
    """One expert applied to every token, in float64 NumPy: h = act(gate) * up (or act(pre)), h @ wo, with biases."""
    e = problem.experts
    pre = x.astype(np.float64) @ np.asarray(params.wi[expert], np.float64)
    if params.wi_bias is not None:
        pre = pre + np.asarray(params.wi_bias[expert], np.float64)
    if e.gated:
        gate, up = pre[:, : problem.F], pre[:, problem.F :]
        if e.clamp is not None:
            gate = np.minimum(gate, e.clamp.limit)
            h = gate / (1 + np.exp(-e.clamp.alpha * gate))
            h = h * (np.clip(up, -e.clamp.limit, e.clamp.limit) + e.clamp.offset)
        else:
            h = _ACTIVATIONS[e.activation](gate) * up
    else:
        h = _ACTIVATIONS[e.activation](pre)
    y = h @ np.asarray(params.wo[expert], np.float64)
    return y if params.wo_bias is None else y + np.asarray(params.wo_bias[expert], np.float64)


_erf = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS = {
    "silu": lambda v: v / (1 + np.exp(-v)),
    "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
    "gelu_erf": lambda v: 0.5 * v * (1 + _erf(v / np.sqrt(2))),
    "relu2": lambda v: np.maximum(v, 0) ** 2,
}


def _dense_finding(case: Case, got: np.ndarray, want: np.ndarray) -> Finding:
    view = oracle_view(case, grad=False)["y"]
    return judge("y", got, view._replace(value=want), dtype=dtype_of(case.problem, "y"))


def _take(case: Case, order: np.ndarray) -> Case:
    """The case's tokens in another order, or fewer of them."""
    marks = {name: take(v, order) for name in ("mask", "segment_ids") if (v := getattr(case, name)) is not None}
    return case.replace(
        problem=case.problem.replace(T=len(order)),
        x=take(case.x, order),
        routing=Routing(take(case.routing.topk_idx, order), take(case.routing.topk_weights, order)),
        cotangent=take(case.cotangent, order),
        **marks,
    )


LAWS: tuple[Law, ...] = (
    permute_tokens,
    prefix,
    split_batch,
    relabel_experts,
    permute_slots,
    powers_of_two,
    linear_weights,
    one_expert_is_dense,
    all_experts_are_a_mixture,
    tokens_apart,
)
