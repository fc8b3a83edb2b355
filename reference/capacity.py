"""The contrast: every expert holds a fixed number of rows, and what does not fit is dropped, and reported.

Shapes are static and no larger than the budget, which is why layers were written like this; the price is lost tokens
whenever the routing is skewed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..parity.interface import Implementation, Support
from ..parity.problem import Params, Problem, Routing
from .activation import activate
from .dense import product
from .layer import layer_of
from .permute import combine, count, gather, permute, token_of_row
from .routing import route


class Dropped(NamedTuple):
    """What overflowed: rows, tokens that lost at least one expert, and rows by expert."""

    rows: Int[Array, ""]
    tokens: Int[Array, ""]
    by_expert: Int[Array, " E"]


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts on what fits: the sum of the dropless layer, without the dropped terms.

    Equal, term for term, to a dropless layer at `keep(problem, routing)`; nothing is renormalised. The roundings are
    the baseline's.
    """
    early = problem.experts.weight_placement == "early"
    row_of_slot = _place(problem, routing)
    budget = rows_per_expert(problem)

    def by_expert(a: Array) -> Array:
        return a.reshape(problem.E, budget, a.shape[-1])

    rows = by_expert(gather(x, token_of_row(row_of_slot, problem.E * budget)))
    w = None
    if early:
        at = jnp.where(row_of_slot < 0, problem.E * budget, row_of_slot)
        w = jnp.zeros(problem.E * budget, jnp.float32).at[at].set(routing.topk_weights, mode="drop")
        w = by_expert(w[:, None])
    pre = product(problem, rows, params.wi, params.need("wi_bias") if problem.experts.wi_bias else None)
    h = activate(problem.experts, pre)
    h = (h if w is None else h * w).astype(x.dtype)
    out = product(problem, h, params.wo, params.need("wo_bias") if problem.experts.wo_bias else None, bias_weight=w)
    return combine(out.reshape(-1, problem.D), row_of_slot, None if early else routing.topk_weights)


def rows_per_expert(problem: Problem) -> int:
    """The budget: ceil(capacity_factor * T * K / E), never more than T; a factor of None is 1, the balanced share."""
    factor = 1.0 if problem.capacity_factor is None else problem.capacity_factor
    return min(problem.T, math.ceil(factor * problem.routed_rows / problem.E))


def keep(problem: Problem, routing: Routing) -> Routing:
    """The routing that is left: each expert keeps its first tokens, up to the budget; dropped slots become -1."""
    fits = _place(problem, routing) >= 0
    return Routing(jnp.where(fits, routing.topk_idx, -1), jnp.where(fits, routing.topk_weights, 0.0))


def dropped(problem: Problem, routing: Routing) -> Dropped:
    """Counts what `experts` drops at this routing."""
    lost = (_place(problem, routing) < 0) & (routing.topk_idx >= 0)
    return Dropped(
        rows=lost.sum(dtype=jnp.int32),
        tokens=lost.any(axis=1).sum(dtype=jnp.int32),
        by_expert=jnp.maximum(count(problem, routing.topk_idx) - rows_per_expert(problem), 0),
    )


def _place(problem: Problem, routing: Routing) -> Int[Array, "T K"]:
    """Each slot's row among the E * budget rows, -1 for no expert or no room; earlier tokens come first."""
    budget = rows_per_expert(problem)
    nothing = jnp.zeros((problem.T, 0), jnp.float32)
    _, group_sizes, row_of_slot = permute(problem, nothing, routing)
    expert = jnp.maximum(routing.topk_idx, 0)
    rank = row_of_slot - (jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes)[expert]
    return jnp.where((row_of_slot >= 0) & (rank < budget), expert * budget + rank, -1)


layer = layer_of(route=route, experts=experts)


def supports(problem: Problem) -> Support:
    """Everything but quantised operands."""
    return Support(
        problem.recipe == "none",
        "" if problem.recipe == "none" else f"recipe is {problem.recipe!r}; capacity computes 'none' only",
    )


IMPLEMENTATION = Implementation(
    name="capacity",
    stages={"experts": experts, "layer": layer},
    supports=supports,
    traits=frozenset({"drops", "deterministic"}),
    summary="drops overflow and reports it: the contrast",
)
