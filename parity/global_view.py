"""The global view of an expert-parallel layer: the reference exchange around the baseline's experts, on one device.

What a mutant changes in one place, and what no law may kill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .interface import Implementation
from .mutant import patched, reference
from .placement import expert_mesh, token_ranks
from .problem import Params, Problem, Router, Routing


def dispatch(problem: Problem, x: Float[Array, "W t D"], routing: Routing) -> Any:
    """The reference's dispatch."""
    return reference("exchange").ep_dispatch(problem, x, routing)


def combine(problem: Problem, rows: Float[Array, "W P D"], state: Any) -> Float[Array, "W t D"]:
    """The reference's combine."""
    return reference("exchange").ep_combine(problem, rows, state)


def spread(
    *,
    dispatch: Callable[..., Any] = dispatch,
    combine: Callable[..., Any] = combine,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    layer: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> dict[str, Callable[..., Any]]:
    """The stages of the global view with some replaced; `around` wraps the experts, `layer` the whole layer."""
    experts = experts_around(dispatch, combine)
    stages = {"ep_dispatch": dispatch, "ep_combine": combine, "experts": experts if around is None else around(experts)}
    whole = patched(**stages)
    return whole if layer is None else whole | {"layer": layer(whole["layer"])}


def global_view() -> Implementation:
    """The honest one, which no law may kill."""
    return Implementation(name="global_view", stages=spread(), traits=frozenset({"deterministic"}))


def experts_around(dispatch: Callable[..., Any], combine: Callable[..., Any]) -> Callable[..., Array]:
    """`experts` in the global view: all ranks' rows are one batch with one slot each, for the baseline's experts."""

    def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """Runs every rank's experts on one device."""
        problem = grid(problem)
        W, T = ranks_of(problem), x.shape[0]
        fill = ((0, -T % W), (0, 0))
        ids = jnp.pad(routing.topk_idx, fill, constant_values=-1)
        sent = Routing(ids, jnp.pad(routing.topk_weights, fill))
        rows, sizes, state = dispatch(problem, jnp.pad(x, fill).reshape(W, -1, x.shape[1]), sent)
        P = rows.shape[1]
        late = problem.experts.weight_placement == "late"
        weights = jnp.ones((W, P), jnp.float32) if late else state.row_weights
        own = problem.replace(T=W * P, K=1, mesh=None, router=Router())
        run = reference("experts").experts
        expert = expert_of_row(problem, sizes, P)
        out = run(own, params, rows.reshape(W * P, -1), Routing(expert.reshape(-1, 1), weights.reshape(-1, 1)))
        return combine(problem, out.reshape(rows.shape), state).reshape(-1, x.shape[1])[:T]

    return experts


def expert_of_row(problem: Problem, sizes: Int[Array, "W e"], P: int) -> Int[Array, "W P"]:
    """The expert of each row of blocks without padding; -1 where no token is."""
    W, local = sizes.shape
    ends = jnp.cumsum(sizes, axis=1)
    row = jnp.arange(P)
    e = (row[None, :, None] >= ends[:, None, :]).sum(-1)
    expert = jnp.arange(W)[:, None] % (problem.E // local) * local + e
    return jnp.where(e < local, expert, -1).astype(jnp.int32)


def grid(problem: Problem) -> Problem:
    """The problem with a mesh: its own, or two data ranks of as many expert ranks as divide the experts, up to two."""
    if problem.mesh is not None:
        return problem
    return problem.replace(mesh=expert_mesh(2 if problem.E % 2 == 0 else 1, data=2))


def ranks_of(problem: Problem) -> int:
    """W of the problem's grid."""
    mesh = grid(problem).mesh
    assert mesh is not None
    return token_ranks(mesh)


def expert_ranks_of(problem: Problem, ranks: int) -> int:
    """The size of the expert axis when tokens lie on `ranks` ranks."""
    return ranks if problem.mesh is None else problem.mesh.ep
