"""Moving tokens to the ranks that hold their experts, and back, by XLA's collectives under `shard_map`.

Two transports. `padded`: one all-to-all whose message to each rank has the worst case's size; runs anywhere. `ragged`:
`ragged_all_to_all`, which sends what there is; GPUs and TPUs. Neither removes copies of a token that go to one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.demand import worst_case_rows
from ...parity.placement import check_mesh, expert_mesh, expert_ranks
from ...parity.problem import InvalidInput, Mesh, Problem, Routing
from .mesh import by_token, device_mesh
from .transport import Plan, default_transport, plan_exchange, return_rows, send_slots, send_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangeState:
    """What `ep_combine` needs of the dispatch. `row_weights` and `align` are the same in every exchange."""

    row_weights: Float[Array, "W P"]
    """The routing weight of each row, float32; undefined where no token is."""
    topk_weights: Float[Array, "W t K"]
    plan: Plan
    """Each leaf with a leading rank axis."""
    align: int = field(default=1, metadata={"static": True})
    """Local expert e starts at the sum of the earlier group sizes, each rounded up to a multiple of this."""


def ep_dispatch(
    problem: Problem, x: Float[Array, "W t D"], routing: Routing
) -> tuple[Float[Array, "W P D"], Int[Array, "W e"], ExchangeState]:
    """Every routed copy of a token lies once in the rows of the rank that holds its expert.

    rows[w, start(w, e) + i] is the i-th token, in order of source rank and token, that visits local expert e of rank w;
    group_sizes are real counts. P is the most that any routing can send, so nothing is dropped. Rows that hold no token
    are undefined. Raises InvalidInput when E or T does not divide over the ranks, or devices are missing.
    """
    return exchange_of()[0](problem, x, routing)


def ep_combine(problem: Problem, rows: Float[Array, "W P D"], state: ExchangeState) -> Float[Array, "W t D"]:
    """A token's y is the sum of its rows, weighted (late) or plain (early): float32, rounded once.

    A slot without an expert adds exactly 0, whatever its weight is.
    """
    return exchange_of()[1](problem, rows, state)


def exchange_of(transport: str | None = None) -> tuple[Callable, Callable]:
    """(ep_dispatch, ep_combine) over one transport, `padded` or `ragged`; None takes what the devices can do."""
    return partial(_dispatch, transport), partial(_combine, transport)


def local_dispatch(
    problem: Problem,
    mesh: Mesh,
    transport: str,
    x: Float[Array, "t D"],
    topk_idx: Int[Array, "t K"],
    capacity: int | None = None,
) -> tuple[Float[Array, "P D"], Int[Array, " e"], Plan]:
    """One rank's part of the dispatch, inside `shard_map`: its tokens out, its experts' rows in.

    `capacity` is P; None takes the worst case. A smaller one holds only routings whose demand stays within it.
    """
    tokens = mesh.ep * x.shape[0]
    P = worst_case_rows(tokens, problem.K, problem.E // mesh.ep) if capacity is None else capacity
    plan = plan_exchange(topk_idx, problem.E, mesh.ep, P, mesh.ep_axis, transport)
    return send_tokens(mesh.ep_axis, transport, x, plan), plan.group_sizes, plan


def local_combine(
    problem: Problem,
    mesh: Mesh,
    transport: str,
    rows: Float[Array, "P D"],
    topk_weights: Float[Array, "t K"],
    plan: Plan,
) -> Float[Array, "t D"]:
    """One rank's part of the combine, inside `shard_map`."""
    found = jnp.asarray(return_rows(mesh.ep_axis, transport, rows, plan), jnp.float32)
    if problem.experts.weight_placement == "late":
        found = found * jnp.where(plan.send_of_slot >= 0, topk_weights, 0)[..., None]
    return found.sum(axis=1).astype(rows.dtype)


def _dispatch(transport: str | None, problem: Problem, x: Array, routing: Routing):
    W, t, _ = x.shape
    mesh = _mesh_for(problem, W)
    if routing.topk_idx.shape[0] != W * t:
        raise InvalidInput(f"the routing has {routing.topk_idx.shape[0]} tokens; accepted: {W * t}, as x has them")
    devices = device_mesh(mesh)
    transport = transport or default_transport(devices)

    def rank(x, ids, weights):
        rows, group_sizes, plan = local_dispatch(problem, mesh, transport, x[0], ids[0])
        row_weights = jnp.asarray(send_slots(mesh.ep_axis, transport, weights[0][..., None], plan))[:, 0]
        return jax.tree.map(lambda a: a[None], (rows, group_sizes, row_weights, plan))

    spec = by_token(mesh)
    slots = (W, t, problem.K)
    weights = routing.topk_weights.reshape(slots)
    run = jax.shard_map(rank, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    rows, group_sizes, row_weights, plan = run(x, routing.topk_idx.reshape(slots), weights)
    return rows, group_sizes, ExchangeState(row_weights, weights, plan)


def _combine(transport: str | None, problem: Problem, rows: Array, state: ExchangeState):
    mesh = _mesh_for(problem, rows.shape[0])
    devices = device_mesh(mesh)
    transport = transport or default_transport(devices)

    def rank(rows, weights, plan):
        plan = jax.tree.map(lambda a: a[0], plan)
        return local_combine(problem, mesh, transport, rows[0], weights[0], plan)[None]

    spec = by_token(mesh)
    run = jax.shard_map(rank, mesh=devices, in_specs=spec, out_specs=spec, check_vma=False)
    return run(rows, state.topk_weights, state.plan)


def _mesh_for(problem: Problem, ranks: int) -> Mesh:
    ep = expert_ranks(problem, ranks)
    mesh = problem.mesh or expert_mesh(ep)
    check_mesh(mesh)
    return mesh
