"""Transformer Engine's own expert-parallel block, `moe()`, as an opaque peer: gate to combine in one call.

Its signature differs between releases, so it is called by the names that it has. It reports no routing and no losses,
computes its logits in x's dtype, and has no shared expert.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...parity.interface import Implementation, Support, Unsupported
from ...parity.placement import token_axes, token_ranks
from ...parity.problem import Output, Params, Problem
from ..xla.mesh import mesh_of
from .group import current, fits_in, limits, signature_of, start
from .nccl_ep import on_ranks, split
from .support import facts, selection, several

ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu"}
"""The contract's word -> TE's."""


def layer(
    problem: Problem,
    params: Params,
    x: Float[Array, "T D"],
    *,
    mask: Bool[Array, " T"] | None = None,
    segment_ids: Int[Array, " T"] | None = None,
) -> Output:
    """y of `moe()`; nothing else is known of it. Raises Unsupported for a mask, which `moe()` cannot take."""
    if mask is not None:
        raise Unsupported("a mask was given; TE's moe() routes every token")
    if not (able := supports(problem)):
        raise Unsupported(able.reason)
    from transformer_engine.jax.moe import moe

    group = start(problem)
    W = token_ranks(mesh_of(problem))
    laid = on_ranks(problem, W, problem.T // W)
    (tokens,) = split(laid, x.reshape(W, problem.T // W, problem.D))
    args, kwargs = arguments(inspect.signature(moe), laid, params, group.capacity)
    out = moe(tokens, *args, **kwargs)
    (y,) = split(laid, out[0] if isinstance(out, tuple) else out)  # or XLA gathers all of y inside TE's exchange
    return Output(y.reshape(problem.T, problem.D))


def arguments(
    signature: inspect.Signature, problem: Problem, params: Params, capacity: int
) -> tuple[list[Any], dict[str, Any]]:
    """What to call `moe` with after x: positional arrays and keywords, only those that this release has.

    Releases before 2.20 take the gate and up halves of wi apart. Raises Unsupported when a release has neither.
    """
    r, mesh = problem.router, mesh_of(problem)
    names = signature.parameters
    halves = jnp.split(params.wi, 2, axis=-1)
    if "wi" in names:
        arrays: dict[str, Any] = {"wi": params.wi}
    elif {"wi_0", "wi_1"} <= set(names):
        arrays = {"wi_0": halves[0], "wi_1": halves[1]}
    else:
        raise Unsupported(f"moe() takes {', '.join(names)}; accepted: wi, or wi_0 and wi_1")
    arrays |= {"gate_kernel": params.gate_kernel, "wo": params.wo, "expert_bias": params.expert_bias}
    axes = {
        name: () for name in names if name.endswith("_kernel_axes")
    }  # no logical axes: shardings are given as arrays'
    wanted = arrays | {
        "num_experts": problem.E,
        "num_experts_per_tok": problem.K,
        "activation_type": ACTIVATIONS[problem.experts.activation],
        "score_function": r.score,
        "use_pre_softmax": r.score == "softmax" and r.softmax_order == "before",
        "num_groups": r.groups if r.groups > 1 else None,
        "group_topk": r.group_topk if r.groups > 1 else None,
        "scaling_factor": r.scaling,
        "apply_topk_weights_early": problem.experts.weight_placement == "early",
        "ep_axis": mesh.ep_axis,
        "data_parallelism_axes": token_axes(mesh)[:-1],
        "dtype": jnp.float32,  # of the routing weights
        "recv_capacity_per_rank": capacity,
        **axes,
    }
    keywords = {name: value for name, value in wanted.items() if name in names}
    positional = [name for name in names if name in arrays and names[name].kind is inspect.Parameter.POSITIONAL_ONLY]
    return [keywords.pop(name) for name in positional], keywords


def supports(problem: Problem) -> Support:
    """Whether `moe()` computes this problem here; names the first value that it declines."""
    for declines in (_machine, computes, _group):
        if not (able := declines(problem)):
            return able
    return Support(True)


def computes(problem: Problem) -> Support:
    """Whether `moe()` means the same layer as the problem does, on any machine."""
    r, x, ranks = problem.router, problem.experts, token_ranks(mesh_of(problem))
    weights = _weights(problem)
    facts: list[tuple[bool, str]] = [
        (x.gated, f"gated is {x.gated}; moe() has gated experts only"),
        (x.activation in ACTIVATIONS, f"activation is {x.activation!r}; accepted: {', '.join(ACTIVATIONS)}"),
        (x.clamp is None, "experts are clamped; moe() has no clamp"),
        (not (x.wi_bias or x.wo_bias), "experts have biases; moe() then needs a receive buffer without slack"),
        (x.shared_F == 0, f"shared_F is {x.shared_F}; moe() has no shared expert"),
        (not r.gate_bias, "gate_bias is True; moe() has none"),
        (r.logits_dtype == "activation", f"logits_dtype is {r.logits_dtype!r}; moe() computes logits in x's dtype"),
        (
            not (r.selection_bias and r.score == "softmax"),
            "selection_bias with softmax scores; moe() accepts the others",
        ),
        (not weights, weights),
        (problem.T % ranks == 0, f"{problem.T} tokens on {ranks} ranks; moe() accepts a multiple of {ranks}"),
    ]
    for holds, reason in facts:
        if not holds:
            return Support(False, reason)
    return selection(r, problem.K, problem.E)


def _weights(problem: Problem) -> str:
    """Why TE's fused router weighs otherwise; empty when it weighs alike."""
    r = problem.router
    if r.score == "softmax":
        return "normalize is True; moe() never renormalises softmax scores" if r.normalize else ""
    if r.normalize != (problem.K > 1):
        return f"normalize is {r.normalize} at top-k {problem.K}; moe() normalises {r.score} when top-k > 1"
    return ""


def _machine(problem: Problem) -> Support:
    return limits(facts(), problem)


def _group(problem: Problem) -> Support:
    return fits_in(current(), signature_of(problem))


def available() -> Support:
    """Whether this machine has what `te_block` needs; the reason names the number that failed."""
    if not (here := several(facts())):
        return here
    try:
        _moe()
    except ImportError as error:
        return Support(False, f"this Transformer Engine has no moe(): {error}")
    return Support(True)


def _moe() -> Callable[..., Any]:
    from transformer_engine.jax.moe import moe

    return moe


IMPLEMENTATION = Implementation(
    name="te_block",
    stages={"layer": layer},
    supports=supports,
    available=available,
    traits=frozenset({"opaque"}),
    summary="Transformer Engine's own moe(): the peer to beat",
)
"""`te_block` in the registry."""
