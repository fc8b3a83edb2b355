"""Moving tokens to the ranks that hold their experts, and back: what every expert-parallel layer must do.

The global view, with an explicit rank axis, on one device: a rank's send is an index into another rank's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..parity.demand import worst_case_rows
from ..parity.placement import expert_ranks
from ..parity.problem import InvalidInput, Problem, Routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangeState:
    """What `ep_combine` needs of the dispatch. `row_weights` and `align` are the same in every exchange."""

    row_weights: Float[Array, "W P"]
    """The routing weight of each row, float32; undefined where no token is."""
    rank_of_slot: Int[Array, "W t K"]
    row_of_slot: Int[Array, "W t K"]
    """-1 for no expert."""
    topk_weights: Float[Array, "W t K"]
    align: int = field(default=1, metadata={"static": True})
    """Local expert e starts at the sum of the earlier group sizes, each rounded up to a multiple of this."""


def ep_dispatch(
    problem: Problem, x: Float[Array, "W t D"], routing: Routing
) -> tuple[Float[Array, "W P D"], Int[Array, "W e"], ExchangeState]:
    """Every routed copy of a token lies once in the rows of the rank that holds its expert.

    rows[w, start(w, e) + i] is the i-th token, in order of source rank and token, that visits local expert e of rank w;
    group_sizes are real counts. P is the most that any routing can send, so nothing is dropped. Rows that hold no token
    are 0 here and undefined elsewhere. Raises InvalidInput when E or T does not divide over the ranks.
    """
    W, t, D = x.shape
    ep = expert_ranks(problem, W)
    local, groups, tokens = problem.E // ep, W // ep, ep * t
    if routing.topk_idx.shape[0] != W * t:
        raise InvalidInput(f"the routing has {routing.topk_idx.shape[0]} tokens; accepted: {W * t}, as x has them")
    ids = routing.topk_idx.reshape(groups, tokens * problem.K)
    chosen = ids[..., None] == jnp.arange(problem.E)
    counts = chosen.sum(1, dtype=jnp.int32)
    group_sizes = counts.reshape(W, local)
    start = (jnp.cumsum(group_sizes, axis=1) - group_sizes).reshape(groups, problem.E)
    earlier = jnp.cumsum(chosen, axis=1, dtype=jnp.int32) - 1
    place = jnp.take_along_axis(earlier + start[:, None], jnp.maximum(ids, 0)[..., None], axis=2)[..., 0]
    rank = jnp.arange(groups)[:, None] * ep + ids // local
    P = worst_case_rows(tokens, problem.K, local)
    flat = jnp.where(ids >= 0, rank * P + place, W * P).reshape(-1)  # one past the end: dropped by the scatter
    token = jnp.arange(W * t * problem.K) // problem.K
    rows = jnp.zeros((W * P, D), x.dtype).at[flat].set(x.reshape(W * t, D)[token], mode="drop")
    weights = routing.topk_weights.reshape(-1)
    row_weights = jnp.zeros(W * P, weights.dtype).at[flat].set(weights, mode="drop")
    slots = (W, t, problem.K)
    state = ExchangeState(
        row_weights.reshape(W, P),
        jnp.where(ids >= 0, rank, -1).reshape(slots),
        jnp.where(ids >= 0, place, -1).reshape(slots),
        routing.topk_weights.reshape(slots),
    )
    return rows.reshape(W, P, D), group_sizes, state


def ep_combine(problem: Problem, rows: Float[Array, "W P D"], state: ExchangeState) -> Float[Array, "W t D"]:
    """A token's y is the sum of its rows, weighted (late) or plain (early): float32, rounded once.

    A slot without an expert adds exactly 0, whatever its weight is.
    """
    there = state.row_of_slot >= 0
    found = rows[jnp.maximum(state.rank_of_slot, 0), jnp.maximum(state.row_of_slot, 0)].astype(jnp.float32)
    found = jnp.where(there[..., None], found, 0)  # before the product: 0 * NaN is NaN, in the weights' gradient too
    if problem.experts.weight_placement == "late":
        found = found * jnp.where(there, state.topk_weights, 0)[..., None]
    return found.sum(axis=2).astype(rows.dtype)
