"""The whole layer, in the order of the equation: route, run the chosen experts, add the shared one."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..parity.problem import Output, Params, Problem, Routing
from .activation import activate
from .experts import experts
from .losses import losses
from .permute import count
from .routing import logits, route


def layer_of(*, route: Callable, experts: Callable) -> Callable:
    """Builds a `layer` stage from a router and experts: y_t = sum_k w_tk * FFN_{idx_tk}(x_t) + FFN_shared(x_t).

    A masked token may hold anything, NaN included: it is routed nowhere, counts in no loss and no group size, its row
    of y is exactly 0, and so is its gradient. Losses and counts come from the baseline's equations at the given
    routing; they are float32 and int32.
    """

    def layer(
        problem: Problem,
        params: Params,
        x: Float[Array, "T D"],
        *,
        mask: Bool[Array, " T"] | None = None,
        segment_ids: Int[Array, " T"] | None = None,
    ) -> Output:
        """Routes, runs the experts and reports the routing, its counts and the auxiliary losses."""
        if mask is not None:
            x = jnp.where(mask[:, None], x, 0)
        routing = route(problem, params, x)
        if mask is not None:
            keep = mask[:, None]
            routing = Routing(jnp.where(keep, routing.topk_idx, -1), jnp.where(keep, routing.topk_weights, 0.0))
        y = experts(problem, params, x, routing)
        if problem.experts.shared_F:
            shared = shared_expert(problem, params, x)
            shared = shared if mask is None else jnp.where(mask[:, None], shared, 0)
            y = (y.astype(jnp.float32) + shared.astype(jnp.float32)).astype(x.dtype)
        return Output(
            y,
            losses(problem, logits(problem, params, x), routing.topk_idx, mask=mask, segment_ids=segment_ids),
            routing,
            count(problem, routing.topk_idx),
        )

    return layer


def shared_expert(problem: Problem, params: Params, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Runs the expert that every token visits: act(x @ shared_wi) @ shared_wo, with the routed experts' roundings."""

    def matmul(a: Array, b: Array) -> Array:
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32).astype(x.dtype)

    h = activate(problem.experts, matmul(x, params.need("shared_wi")))
    return matmul(h.astype(x.dtype), params.need("shared_wo"))


layer = layer_of(route=route, experts=experts)
"""The baseline's layer."""
