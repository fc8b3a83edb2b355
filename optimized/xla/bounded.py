"""Expert parallelism in less room than the worst case: reported when it overflows, and never a dropped row.

The worst case holds every token of the exchanging ranks min(K, e) times over, most of it empty at ordinary loads. With
a bound, demand is counted first, exactly; a routing that exceeds it runs the worst-case program in the same step. The
cost of the fallback: a second program in the executable (about twice the code and compile time), both of whose
buffers XLA reserves, and for that step the time of the worst case. So a bound buys time at ordinary loads, not memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...parity.demand import worst_case_rows
from ...parity.placement import token_ranks
from ...parity.problem import InvalidInput, Params, Problem, Routing
from .blocked import experts as local_experts
from .mesh import mesh_of
from .xla_ep import experts_over


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bound:
    """What a bounded step found out about its capacity."""

    demand: Int[Array, " W"]
    """Rows that each rank needed."""
    overflowed: Bool[Array, ""]
    """Whether a rank needed more than the capacity, and the worst-case program ran."""


def bounded_experts(capacity: int, *, transport: str | None = None) -> Callable[..., tuple[Float[Array, "T D"], Bound]]:
    """`experts` in `capacity` rows a rank, returning (y, Bound): y is the dropless one in every case.

    Raises InvalidInput unless capacity is 1 row or more; one beyond the worst case is cut down to it.
    """
    if capacity < 1:
        raise InvalidInput(f"capacity is {capacity} rows a rank; accepted: 1 or more")

    def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing):
        """Runs within the capacity where the routing allows it, and at the worst case otherwise."""
        needed = device_demand(problem, routing)
        most = worst_case_of(problem)
        wide = experts_over(local_experts, transport=transport)
        if capacity >= most:
            return wide(problem, params, x, routing), Bound(needed, jnp.zeros((), bool))
        narrow = experts_over(local_experts, transport=transport, capacity=capacity)
        overflowed = needed.max() > capacity
        y = jax.lax.cond(overflowed, lambda *a: wide(problem, *a), lambda *a: narrow(problem, *a), params, x, routing)
        return y, Bound(needed, overflowed)

    return experts


def device_demand(problem: Problem, routing: Routing) -> Int[Array, " W"]:
    """The rows that each rank needs under this routing, counted on the device."""
    mesh = mesh_of(problem)
    ranks = token_ranks(mesh)
    groups = ranks // mesh.ep
    ids = jnp.pad(routing.topk_idx, ((0, -routing.topk_idx.shape[0] % ranks), (0, 0)), constant_values=-1)
    ids = ids.reshape(groups, -1)
    rank = jnp.where(ids >= 0, ids // (problem.E // mesh.ep), mesh.ep)
    return (rank[..., None] == jnp.arange(mesh.ep)).sum(1, dtype=jnp.int32).reshape(ranks)


def worst_case_of(problem: Problem) -> int:
    """The rows of a rank that no routing of this problem exceeds."""
    mesh = mesh_of(problem)
    tokens = -(-problem.T // token_ranks(mesh)) * mesh.ep
    return worst_case_rows(tokens, problem.K, problem.E // mesh.ep)
