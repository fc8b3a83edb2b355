"""What naive code does: read the routing on the host, then one dense product per busy expert over its own rows.

No row is padded and no expert idles, but the shapes follow the data: the host waits for the device at every call, and
each new count is a new program to compile. Nothing of it can be traced by `jit`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..parity.interface import Implementation, Support
from ..parity.problem import Params, Problem, Routing
from .activation import activate
from .dense import product
from .layer import layer_of
from .routing import route


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts one by one: y_t = sum over e of w_te * (act(x_t @ wi_e + b_e) @ wo_e + c_e).

    Eager only: the routing must be concrete, also under `jax.vjp`. Each product, its bias added, is rounded to the
    storage dtype, and so is h; y sums in float32, in expert order, and is rounded once.
    """
    topk_idx = np.asarray(routing.topk_idx)  # the host copy
    early = problem.experts.weight_placement == "early"
    x32 = x.astype(jnp.float32)  # so that the transpose of the gathers below sums in float32
    y = jnp.zeros((problem.T, problem.D), jnp.float32)
    for e in np.unique(topk_idx[topk_idx >= 0]):
        token, slot = np.nonzero(topk_idx == e)
        w = routing.topk_weights[token, slot][:, None]
        bias = params.need("wi_bias")[e] if problem.experts.wi_bias else None
        pre = product(problem, x32[token].astype(x.dtype), params.wi[e], bias)
        h = activate(problem.experts, pre) * (w if early else 1.0)
        bias = params.need("wo_bias")[e] if problem.experts.wo_bias else None
        out = product(problem, h.astype(x.dtype), params.wo[e], bias, bias_weight=w if early else None)
        y = y.at[token].add(out.astype(jnp.float32) * (1.0 if early else w))
    return y.astype(x.dtype)


layer = layer_of(route=route, experts=experts)


def supports(problem: Problem) -> Support:
    """Everything but quantised operands."""
    if problem.recipe != "none":
        return Support(False, f"recipe is {problem.recipe!r}; loop_host computes 'none' only")
    return Support(True)


IMPLEMENTATION = Implementation(
    name="loop_host",
    stages={"experts": experts, "layer": layer},
    supports=supports,
    traits=frozenset({"host-sync", "eager", "deterministic"}),
    summary="per-expert loop on counts copied to the host; recompiles",
)
