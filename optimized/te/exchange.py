"""Moving tokens to the ranks that hold their experts, and back, by NCCL EP through Transformer Engine.

A token that visits several experts of one rank crosses once. Each expert's block is padded to 128 rows, with zeros; the
tail beyond the last block is never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from ...parity.interface import Unsupported
from ...parity.placement import expert_mesh, expert_ranks
from ...parity.problem import InvalidInput, Mesh, Problem, Routing
from ..xla.mesh import by_token, device_mesh
from .group import ALIGN, limits, start
from .support import facts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangeState:
    """What `ep_combine` needs of the dispatch. `row_weights` and `align` are the same in every exchange."""

    row_weights: Float[Array, "W P"]
    """The routing weight of each row, float32; undefined where no token is."""
    handle: Array
    """NCCL EP's routing state; data, so that every layer and every rematerialisation has its own."""
    padded_sizes: Int[Array, "W e"]
    """group_sizes, each rounded up to a multiple of align."""
    received: Int[Array, "W 1"]
    """Rows that each rank was sent, counted before any was dropped."""
    tokens: tuple[int, int] = field(metadata={"static": True})
    align: int = field(default=ALIGN, metadata={"static": True})
    """Local expert e starts at the sum of the earlier group sizes, each rounded up to a multiple of this."""


def ep_dispatch(
    problem: Problem, x: Float[Array, "W t D"], routing: Routing
) -> tuple[Float[Array, "W P D"], Int[Array, "W e"], ExchangeState]:
    """Every routed copy of a token lies once in the rows of the rank that holds its expert.

    rows[w, start(w, e):][: group_sizes[w, e]] are the tokens that visit local expert e of rank w; group_sizes are real
    counts. P is the most that any routing can send, so nothing is dropped. Rows that hold no token are undefined.
    Raises InvalidInput when E or T does not divide over the ranks, Unsupported with the number that failed when NCCL EP
    cannot run here.
    """
    from transformer_engine.jax.ep import ep_dispatch as dispatch

    W, t, _ = x.shape
    problem = on_ranks(problem, W, t)
    if routing.topk_idx.shape[0] != W * t:
        raise InvalidInput(f"the routing has {routing.topk_idx.shape[0]} tokens; accepted: {W * t}, as x has them")
    if not (able := limits(facts(), problem)):
        raise Unsupported(able.reason)
    group = start(problem)
    ids, weights = (a.reshape(W, t, problem.K) for a in (routing.topk_idx, routing.topk_weights))
    x, ids, weights = split(problem, x, ids, jnp.where(ids >= 0, weights, 0))
    rows, row_weights, handle, padded_sizes, received = dispatch(config(problem), ids, x, weights, group.capacity)
    return rows, group_sizes(problem, ids), ExchangeState(row_weights, handle, padded_sizes, received, (W, t))


def ep_combine(problem: Problem, rows: Float[Array, "W P D"], state: ExchangeState) -> Float[Array, "W t D"]:
    """A token's y is the sum of its rows, weighted (late) or plain (early): float32, rounded once.

    NCCL EP sums plain rows, so a late weight multiplies a row before it is sent, and that product is rounded too. A
    slot without an expert adds exactly 0, whatever its weight is.
    """
    from transformer_engine.jax.ep import ep_combine as combine

    problem = on_ranks(problem, *state.tokens)
    if problem.experts.weight_placement == "late":
        rows = (rows.astype(jnp.float32) * state.row_weights[..., None]).astype(rows.dtype)
    spec = (*by_token(mesh_for(problem)), None, None)
    return split(problem, combine(config(problem), state.handle, state.padded_sizes, rows, state.tokens, spec))[0]


def mesh_for(problem: Problem) -> Mesh:
    """The mesh that `on_ranks` has put there."""
    assert problem.mesh is not None
    return problem.mesh


def on_ranks(problem: Problem, W: int, t: int) -> Problem:
    """The problem at this number of tokens, with the mesh that its ranks lie on."""
    ep = expert_ranks(problem, W)
    return problem.replace(T=W * t, mesh=problem.mesh or expert_mesh(ep))


def config(problem: Problem) -> Any:
    """TE's per-layer settings."""
    from transformer_engine.jax.ep import EpLayerConfig

    return EpLayerConfig(top_k=problem.K, dispatch_output_per_expert_alignment=ALIGN)


def split(problem: Problem, *arrays: Array) -> tuple[Array, ...]:
    """The arrays, pinned so that each rank holds its own tokens: TE reads a rank's share from the sharding.

    Results of an exchange are pinned too. TE runs an exchange as an asynchronous region; when a caller wants its result
    whole, XLA gathers it inside that region, and its latency-hiding scheduler finds no order for two collectives there.
    """
    mesh = mesh_for(problem)
    sharding = NamedSharding(device_mesh(mesh), by_token(mesh))
    return tuple(jax.lax.with_sharding_constraint(a, sharding) for a in arrays)


def group_sizes(problem: Problem, topk_idx: Int[Array, "W t K"]) -> Int[Array, "W e"]:
    """Real rows of each expert; NCCL EP itself reports them rounded up."""
    W, ep = topk_idx.shape[0], mesh_for(problem).ep
    ids = topk_idx.reshape(W // ep, -1)
    counts = (ids[..., None] == jnp.arange(problem.E)).sum(1, dtype=jnp.int32)
    return counts.reshape(W, problem.E // ep)
