"""Mutants of expert parallelism: what the laws of exchange and of meshes can see, at least two for each class it has.

Each is a one-place change of `global_view`, which needs one device whatever the mesh, so the catalogue compiles quickly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from .global_view import combine, dispatch, expert_ranks_of, grid, ranks_of, spread
from .mutant import Mutant, mutant, reference
from .problem import Losses, Output, Problem, Routing


@mutant("J", "ep-rows", "ep_dispatch", ordinary=False)
def interleaved_experts() -> dict[str, Any]:
    """Global and local expert numbers are mixed up: rank id mod W."""

    def wrong(problem, x, routing):
        ep = expert_ranks_of(problem, x.shape[0])
        ids = routing.topk_idx
        moved = ids % ep * (problem.E // ep) + ids // ep
        return dispatch(problem, x, Routing(jnp.where(ids >= 0, moved, -1), routing.topk_weights))

    return spread(dispatch=wrong)


@mutant("J", "ep-round-trip", "ep_dispatch", ordinary=False)
def swapped_offsets() -> dict[str, Any]:
    """Offsets from the transposed size matrix."""

    def wrong(problem, x, routing):
        rows, sizes, state = dispatch(problem, x, routing)
        W = x.shape[0]
        ids = routing.topk_idx.reshape(W, -1)
        chosen = ids[..., None] == jnp.arange(problem.E)
        per_source = chosen.sum(1, dtype=jnp.int32)
        # Runs of the earlier ranks, with the size matrix transposed: right when it is symmetric.
        local = problem.E // expert_ranks_of(problem, W)
        ranks = per_source.reshape(W, -1, local)
        turned = jnp.swapaxes(ranks, 0, 1).reshape(W, problem.E) if ranks.shape[1] == W else per_source[::-1]
        shift = (jnp.cumsum(turned, 0) - turned) - (jnp.cumsum(per_source, 0) - per_source)
        moved = jnp.take_along_axis(shift, jnp.maximum(ids, 0), axis=1).reshape(state.row_of_slot.shape)
        there = jnp.clip(state.row_of_slot + moved, 0, rows.shape[1] - 1)
        return rows, sizes, dataclasses.replace(state, row_of_slot=jnp.where(state.row_of_slot >= 0, there, -1))

    return spread(dispatch=wrong)


@mutant("J", "ep-apart", "ep_dispatch ep_combine", ordinary=False)
def stale_handle() -> dict[str, Any]:
    """Combine uses the latest dispatch's state."""
    latest: list[Any] = [None]

    def wrong_dispatch(problem, x, routing):
        found = dispatch(problem, x, routing)
        latest[0] = found[2]
        return found

    def wrong_combine(problem, rows, state):
        return combine(problem, rows, latest[0])

    return spread(dispatch=wrong_dispatch, combine=wrong_combine)


@mutant("J", "ep-round-trip", "ep_dispatch", ordinary=False)
def dropped_overflow() -> dict[str, Any]:
    """Rows beyond the expected load are silently dropped."""

    def wrong(problem, x, routing):
        rows, sizes, state = dispatch(problem, x, routing)
        capacity = max(5 * x.shape[1] * problem.K // 4, 1)  # a quarter above balanced load
        kept = (state.row_of_slot >= 0) & (state.row_of_slot < capacity)
        return rows, sizes, dataclasses.replace(state, row_of_slot=jnp.where(kept, state.row_of_slot, -1))

    return spread(dispatch=wrong)


@mutant("J", "ep-demand", "ep_dispatch", ordinary=False)
def expected_capacity() -> dict[str, Any]:
    """The buffer is sized for the expected load."""

    def wrong(problem, x, routing):
        rows, sizes, state = dispatch(problem, x, routing)
        capacity = min(max(5 * x.shape[1] * problem.K // 4, 1), rows.shape[1])
        kept = jnp.where(state.row_of_slot < capacity, state.row_of_slot, -1)
        state = dataclasses.replace(state, row_weights=state.row_weights[:, :capacity], row_of_slot=kept)
        return rows[:, :capacity], jnp.minimum(sizes, capacity), state

    return spread(dispatch=wrong)


@mutant("A", "ep-routings", "experts", ordinary=False)
def idle_rank_garbage() -> dict[str, Any]:
    """An idle rank's weight gradient is never written."""

    def around(experts):
        def wrong(problem, params, x, routing):
            held = _held_by_rank(problem, routing)
            zero = params.wi - jax.lax.stop_gradient(params.wi)
            garbage = jnp.where(held[:, None, None], jnp.zeros_like(zero), zero)
            return experts(problem, params, x, routing) + garbage.sum()

        return wrong

    return spread(around=around)


@mutant("A", "ep-routings", "ep_dispatch", ordinary=False)
def skipped_backward() -> dict[str, Any]:
    """An idle rank sends no gradient back for its tokens."""

    def wrong(problem, x, routing):
        _, sizes, _ = dispatch(problem, x, routing)
        idle = (sizes.sum(1) == 0)[:, None, None]
        return dispatch(problem, jnp.where(idle, jax.lax.stop_gradient(x), x), routing)

    return spread(dispatch=wrong)


@mutant("B", "ep-tail", "ep_combine", ordinary=False)
def masked_by_product() -> dict[str, Any]:
    """Empty slots are multiplied by 0, not selected away."""

    def wrong(problem, rows, state):
        there = (state.row_of_slot >= 0)[..., None]
        P = rows.shape[1]
        # The last row for what has no expert, times 0: which is 0 until that row holds NaN.
        place = jnp.where(state.row_of_slot >= 0, state.row_of_slot, P - 1)
        found = rows[jnp.maximum(state.rank_of_slot, 0), place].astype(jnp.float32)
        if problem.experts.weight_placement == "late":
            found = found * jnp.where(there[..., 0], state.topk_weights, 0)[..., None]
        return (found * there.astype(jnp.float32)).sum(axis=2).astype(rows.dtype)

    return spread(combine=wrong)


@mutant("B", "ep-tail", "ep_combine", ordinary=False)
def tail_read() -> dict[str, Any]:
    """An empty slot reads beyond the rows."""

    def wrong(problem, rows, state):
        # One row too many is taken for full: an empty last slot reads what lies behind its rank's rows.
        P = rows.shape[1]
        last = state.row_of_slot[..., -1:]
        place = jnp.concatenate([state.row_of_slot[..., :-1], jnp.where(last < 0, P - 1, last)], axis=-1)
        rank = jnp.maximum(state.rank_of_slot, 0)
        weights = jnp.where(state.row_of_slot >= 0, state.topk_weights, 1)
        return combine(
            problem, rows, dataclasses.replace(state, row_of_slot=place, rank_of_slot=rank, topk_weights=weights)
        )

    return spread(combine=wrong)


@mutant("E", "ep-round-trip", "ep_dispatch", ordinary=False)
def mispaired_weights() -> dict[str, Any]:
    """Weights in the order of ids, rows in the order of slots."""

    def wrong(problem, x, routing):
        order = jnp.argsort(routing.topk_idx, axis=1)
        return dispatch(problem, x, Routing(routing.topk_idx, jnp.take_along_axis(routing.topk_weights, order, axis=1)))

    return spread(dispatch=wrong)


@mutant("E", "ep-rows", "ep_dispatch", ordinary=False)
def padding_to_expert_0() -> dict[str, Any]:
    """Slots without an expert are sent to expert 0."""

    def wrong(problem, x, routing):
        real = routing.topk_idx >= 0
        return dispatch(problem, x, Routing(jnp.maximum(routing.topk_idx, 0), jnp.where(real, routing.topk_weights, 0)))

    return spread(dispatch=wrong)


@mutant("G", "ep-layer", "layer", ordinary=False)
def per_rank_loss() -> dict[str, Any]:
    """Losses are averaged over ranks' own losses."""
    return spread(layer=lambda layer: _with_losses(layer, lambda losses: jax.tree.map(jnp.mean, losses)))


@mutant("G", "ep-layer", "layer", ordinary=False)
def first_rank_loss() -> dict[str, Any]:
    """Losses are those of rank 0's tokens."""
    return spread(layer=lambda layer: _with_losses(layer, lambda losses: jax.tree.map(lambda a: a[0], losses)))


@mutant("H", "ep-mesh", "experts", ordinary=False)
def double_counted() -> dict[str, Any]:
    """The gradient of wi is summed over data ranks twice."""

    def around(experts):
        def wrong(problem, params, x, routing):
            groups = _data_ranks(problem)
            return experts(problem, params.replace(wi=_scaled_gradient(params.wi, groups)), x, routing)

        return wrong

    return spread(around=around)


@mutant("H", "ep-mesh", "experts", ordinary=False)
def averaged_over_data() -> dict[str, Any]:
    """The gradient of wo is averaged over data ranks."""

    def around(experts):
        def wrong(problem, params, x, routing):
            groups = _data_ranks(problem)
            return experts(problem, params.replace(wo=_scaled_gradient(params.wo, 1 / groups)), x, routing)

        return wrong

    return spread(around=around)


@mutant("H", "ep-round-trip", "ep_dispatch", ordinary=False)
def weights_without_gradient() -> dict[str, Any]:
    """The weights' gradient ends at the dispatch."""

    def wrong(problem, x, routing):
        return dispatch(problem, x, Routing(routing.topk_idx, jax.lax.stop_gradient(routing.topk_weights)))

    return spread(dispatch=wrong)


@mutant("H", "ep-round-trip", "ep_dispatch", ordinary=False)
def weight_0_is_padding() -> dict[str, Any]:
    """A row of weight exactly 0 is taken for padding."""

    def wrong(problem, x, routing):
        ids = jnp.where(routing.topk_weights == 0, -1, routing.topk_idx)
        _, sizes, _ = dispatch(problem, x, routing)
        rows, _, state = dispatch(problem, x, Routing(ids, routing.topk_weights))
        return rows, sizes, state

    return spread(dispatch=wrong)


@mutant("H", "ep-layer", "layer", ordinary=False)
def gate_averaged() -> dict[str, Any]:
    """The gate's gradient is averaged over ranks."""

    def around_layer(layer):
        def wrong(problem, params, x, *, mask=None, segment_ids=None):
            W = ranks_of(problem)
            scaled = params.replace(gate_kernel=_scaled_gradient(params.gate_kernel, 1 / W))
            return layer(problem, scaled, x, mask=mask, segment_ids=segment_ids)

        return wrong

    return spread(layer=around_layer)


MUTANTS: tuple[Mutant, ...] = (
    interleaved_experts,
    swapped_offsets,
    stale_handle,
    dropped_overflow,
    expected_capacity,
    idle_rank_garbage,
    skipped_backward,
    masked_by_product,
    tail_read,
    mispaired_weights,
    padding_to_expert_0,
    per_rank_loss,
    first_rank_loss,
    double_counted,
    averaged_over_data,
    weights_without_gradient,
    weight_0_is_padding,
    gate_averaged,
)
"""At least two for each class that expert parallelism has."""


def _with_losses(layer: Callable[..., Output], merge: Callable[[Losses], Losses]) -> Callable[..., Output]:
    """The layer with losses merged from those of each rank's own tokens."""

    def wrong(problem, params, x, *, mask=None, segment_ids=None):
        out = layer(problem, params, x, mask=mask, segment_ids=segment_ids)
        W = ranks_of(problem)
        t = problem.T // W
        own = problem.replace(T=t, mesh=None)
        base = reference("layer").layer

        def of_rank(x, mask, segment_ids):
            return base(own, params, x, mask=mask, segment_ids=segment_ids).losses

        parts = [None if a is None else a.reshape(W, t, *a.shape[1:]) for a in (x, mask, segment_ids)]
        each = [of_rank(*(None if a is None else a[w] for a in parts)) for w in range(W)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        return dataclasses.replace(out, losses=merge(stacked))

    return wrong


def _scaled_gradient(leaf: Array, factor: float) -> Array:
    """The leaf itself, whose gradient comes back `factor` times."""

    @jax.custom_vjp
    def same(a):
        return a

    same.defvjp(lambda a: (a, None), lambda _, d: ((d.astype(jnp.float32) * factor).astype(d.dtype),))
    return same(leaf)


def _held_by_rank(problem: Problem, routing: Routing) -> Array:
    """[E]: whether the rank of each expert has any row."""
    counts = (routing.topk_idx.reshape(-1, 1) == jnp.arange(problem.E)).sum(0)
    ep = expert_ranks_of(grid(problem), ranks_of(problem))
    return jnp.repeat(counts.reshape(ep, -1).sum(1) > 0, problem.E // ep)


def _data_ranks(problem: Problem) -> int:
    return ranks_of(problem) // expert_ranks_of(grid(problem), ranks_of(problem))
