"""Expert parallelism by XLA: tokens go to the ranks that hold their experts and come back, all under `shard_map`.

y and every gradient are those of one device, whatever the mesh. A gradient of expert weights is summed once over the
data ranks, by the transpose of their copying. Gate, shared expert and losses see the global batch, so the baseline's
layer around these experts needs no change: XLA splits it over the same devices.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...parity.interface import Implementation, Support
from ...parity.placement import token_ranks
from ...parity.problem import Params, Problem, Router, Routing
from . import blocked
from .exchange import ep_combine, ep_dispatch, exchange_of, local_combine, local_dispatch
from .mesh import by_expert, by_token, device_mesh, fits, mesh_of
from .transport import default_transport, send_slots

EXPERT_LEAVES = ("wi", "wo", "wi_bias", "wo_bias")
"""The parameters that lie with their experts."""


def experts_over(
    local: Callable[..., Array], *, transport: str | None = None, capacity: int | None = None
) -> Callable[..., Array]:
    """An `experts` stage that runs `local`, an `experts` of one device, on each rank's rows and experts.

    The rows of a rank are a batch of its own: P tokens with one slot each. `capacity` bounds P; None takes the worst
    case, which no routing exceeds. Raises InvalidInput when the mesh does not fit the devices or the experts.
    """

    def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
        """Runs the routed experts of all ranks; T need not divide over them."""
        mesh = mesh_of(problem)
        devices = device_mesh(mesh)
        moves = transport or default_transport(devices)
        T = x.shape[0]
        missing = -T % token_ranks(mesh)
        fill = ((0, missing), (0, 0))
        ids = jnp.pad(routing.topk_idx, fill, constant_values=-1)
        weights = {n: getattr(params, n) for n in EXPERT_LEAVES if getattr(params, n) is not None}

        def rank(x, ids, topk_weights, weights):
            rows, group_sizes, plan = local_dispatch(problem, mesh, moves, x, ids, capacity)
            late = problem.experts.weight_placement == "late"
            sent = None if late else jnp.asarray(send_slots(mesh.ep_axis, moves, topk_weights[..., None], plan))
            out = _run_local(local, problem, weights, rows, group_sizes, None if sent is None else sent[:, 0])
            return local_combine(problem, mesh, moves, out, topk_weights, plan)

        split = by_token(mesh)
        held = {n: by_expert(mesh) for n in weights}
        run = jax.shard_map(rank, mesh=devices, in_specs=(split, split, split, held), out_specs=split, check_vma=False)
        return run(jnp.pad(x, fill), ids, jnp.pad(routing.topk_weights, fill), weights)[:T]

    return experts


def implementation(transport: str | None = None) -> Implementation:
    """`xla_ep` over one transport, `padded` or `ragged`; None takes what the devices can do."""
    dispatch, combine = (ep_dispatch, ep_combine) if transport is None else exchange_of(transport)
    return Implementation(
        name="xla_ep" if transport is None else f"xla_ep_{transport}",
        stages={
            "ep_dispatch": dispatch,
            "ep_combine": combine,
            "experts": experts_over(blocked.experts, transport=transport),
        },
        supports=_supports,
        available=_available,
        traits=frozenset({"deterministic"}),
        summary="expert parallelism under shard_map",
    )


def local_problem(problem: Problem, rows: int) -> Problem:
    """What one rank computes: `rows` tokens with one slot each, over its own experts."""
    experts = problem.E // mesh_of(problem).ep
    return problem.replace(T=rows, K=1, E=experts, mesh=None, router=Router())


def _run_local(local, problem, weights, rows, group_sizes, row_weights):
    P = rows.shape[0]
    place = jnp.arange(P)
    ends = jnp.cumsum(group_sizes)
    expert = jnp.where(place < ends[-1], jnp.searchsorted(ends, place, side="right"), -1).astype(jnp.int32)
    of_row = jnp.ones(P, jnp.float32) if row_weights is None else row_weights
    own = local_problem(problem, P)
    params = Params(gate_kernel=jnp.zeros((problem.D, own.E), rows.dtype), **weights)
    return local(own, params, rows, Routing(expert[:, None], of_row[:, None]))


def _supports(problem: Problem) -> Support:
    if problem.capacity_factor is not None:
        return Support(False, f"capacity_factor is {problem.capacity_factor}; accepted: None, since nothing is dropped")
    if problem.recipe != "none":
        return Support(False, f"recipe is {problem.recipe!r}; xla_ep computes 'none' only")
    if not (here := fits(problem)):
        return here
    return blocked.IMPLEMENTATION.supports(local_problem(problem, max(problem.T, 1)))


def _available() -> Support:
    devices = jax.device_count()
    return Support(devices >= 2, "" if devices >= 2 else f"needs 2 or more devices, {devices} is here")


IMPLEMENTATION = implementation()
"""Over the transport that fits the devices."""
