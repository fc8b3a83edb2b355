"""The whole layer, in the order of the equation: route, run the chosen experts, add the shared one."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..parity.problem import Output, Params, Problem, Routing
from . import routing as router
from .activation import activate
from .dense import product
from .experts import experts
from .losses import losses
from .permute import count


def layer(
    problem: Problem,
    params: Params,
    x: Float[Array, "T D"],
    *,
    mask: Bool[Array, " T"] | None = None,
    segment_ids: Int[Array, " T"] | None = None,
) -> Output:
    """Routes tokens, runs their experts, adds the shared one: y_t = sum_k w_tk * FFN_idx_tk(x_t) + FFN_shared(x_t).

    Reports the routing, its counts and the auxiliary losses (float32, over all real tokens). A masked token may hold
    anything, NaN included: it is routed nowhere, counts in no loss and no group size, and its row of y is exactly 0,
    as is its gradient.
    """
    return layer_of(route=router.route, experts=experts)(problem, params, x, mask=mask, segment_ids=segment_ids)


def layer_of(*, route: Callable, experts: Callable) -> Callable:
    """Builds a `layer` stage from a router and experts; logits for the losses are this folder's."""

    def layer(
        problem: Problem,
        params: Params,
        x: Float[Array, "T D"],
        *,
        mask: Bool[Array, " T"] | None = None,
        segment_ids: Int[Array, " T"] | None = None,
    ) -> Output:
        """Routes, runs the experts and reports the routing, its counts and the auxiliary losses."""
        x = _where(mask, x, 0)
        routing = route(problem, params, x)
        routing = Routing(_where(mask, routing.topk_idx, -1), _where(mask, routing.topk_weights, 0))
        y = experts(problem, params, x, routing)
        if problem.experts.shared_F:
            shared = _where(mask, shared_expert(problem, params, x), 0)
            y = (y.astype(jnp.float32) + shared.astype(jnp.float32)).astype(x.dtype)
        logits = router.logits(problem, params, x)
        loss = losses(problem, logits, routing.topk_idx, mask=mask, segment_ids=segment_ids)
        return Output(y, loss, routing, count(problem, routing.topk_idx))

    return layer


def shared_expert(problem: Problem, params: Params, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Runs the expert that every token visits with weight 1: act(x @ shared_wi) @ shared_wo, rounded like others."""
    h = activate(problem.experts, product(problem, x, params.need("shared_wi")))
    return product(problem, h.astype(x.dtype), params.need("shared_wo"))


def _where(mask: Array | None, a: Array, otherwise: int) -> Array:
    return a if mask is None else jnp.where(mask[:, None], a, otherwise)
