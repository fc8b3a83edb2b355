"""One rank's plan of an exchange, and the three moves made by it. Everything here runs inside `shard_map`.

A rank lines its slots up by expert id, so that what goes to one rank is one run. What arrives lies by source rank, and
a last gather puts it in order of local expert, then source rank, then token. Every move is a gather by a known
permutation, so each move's gradient is the opposite move, and no scatter-add is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ...parity.problem import InvalidInput

TRANSPORTS = ("padded", "ragged")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Plan:
    """Where everything goes, for one rank; -1 is nowhere. S places in the send buffer, V in the receive buffer."""

    slot_of_send: Int[Array, " S"]
    send_of_slot: Int[Array, "t K"]
    row_of_received: Int[Array, " V"]
    received_of_row: Int[Array, " P"]
    counts: Int[Array, "W E"]
    """Slots of every source rank for every expert of the exchanging group."""
    group_sizes: Int[Array, " e"]


def default_transport(devices: jax.sharding.Mesh) -> str:
    """`padded` on CPU, where `ragged_all_to_all` does not exist; `ragged` elsewhere."""
    return "padded" if devices.devices.flat[0].platform == "cpu" else "ragged"


def plan_exchange(topk_idx: Int[Array, "t K"], E: int, ep: int, P: int, axis: str, transport: str) -> Plan:
    """The plan for this rank's tokens and experts; ranks tell each other their counts, ep * E integers.

    Rows beyond P have no place: the caller sees to it that the demand stays within P. Raises InvalidInput for an
    unknown transport.
    """
    if transport not in TRANSPORTS:
        raise InvalidInput(f"transport is {transport!r}; accepted: {', '.join(TRANSPORTS)}")
    t, K = topk_idx.shape
    e, slots = E // ep, t * K
    ids = topk_idx.reshape(-1)
    key = jnp.where(ids >= 0, ids, E)
    order = jnp.argsort(key, stable=True)
    place = jnp.zeros(slots, jnp.int32).at[order].set(jnp.arange(slots, dtype=jnp.int32))
    counts = lax.all_gather(jnp.bincount(key, length=E + 1)[:E].astype(jnp.int32), axis)
    me = lax.axis_index(axis)

    sizes = counts.reshape(ep, ep, e).sum(2)  # [source, destination]
    run_start = _before(sizes[me])
    to = jnp.minimum(ids // e, ep - 1)
    if transport == "padded":
        room = t * min(K, e)
        width, send_start, arrival = ep * room, jnp.arange(ep) * room, jnp.arange(ep) * room
    else:
        width, send_start, arrival = slots, run_start, _before(sizes[:, me])
    send_of_slot = jnp.where(ids >= 0, place - run_start[to] + send_start[to], -1)
    slot_of_send = _inverse(send_of_slot, width)

    mine = lax.dynamic_slice_in_dim(counts, me * e, e, axis=1)  # [source, local expert]
    group_sizes = mine.sum(0)
    received = width if transport == "padded" else ep * t * min(K, e)
    row = jnp.arange(P, dtype=jnp.int32)
    expert = _run_of(group_sizes, row)
    within = row - _before(group_sizes)[expert]
    upto = jnp.cumsum(mine, axis=0)[:, expert]  # [source, row]
    source = jnp.minimum((within >= upto).sum(0), ep - 1)
    first = jnp.take_along_axis(upto, source[None], 0)[0] - mine[source, expert]
    run = (_before(mine, axis=1) + arrival[:, None])[source, expert]
    received_of_row = jnp.where(row < group_sizes.sum(), run + within - first, -1)
    return Plan(
        slot_of_send.astype(jnp.int32),
        send_of_slot.reshape(t, K).astype(jnp.int32),
        _inverse(received_of_row, received).astype(jnp.int32),
        received_of_row.astype(jnp.int32),
        counts,
        group_sizes,
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def send_tokens(axis: str, transport: str, x: Float[Array, "t D"], plan: Plan) -> Float[Array, "P D"]:
    """Each slot's token, in its row. The gradient of x is the sum over its slots, float32, rounded once."""
    K = plan.send_of_slot.shape[1]
    return _forth(axis, transport, x, jnp.where(plan.slot_of_send >= 0, plan.slot_of_send // K, -1), plan)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def send_slots(axis: str, transport: str, slots: Float[Array, "t K C"], plan: Plan) -> Float[Array, "P C"]:
    """Each slot's own values, in its row."""
    return _forth(axis, transport, slots.reshape(-1, slots.shape[-1]), plan.slot_of_send, plan)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def return_rows(axis: str, transport: str, rows: Float[Array, "P D"], plan: Plan) -> Float[Array, "t K D"]:
    """Each row, back in its slot; exactly 0 in a slot without an expert. Rows that hold no token are not read."""
    return _take(_back(axis, transport, rows, plan), plan.send_of_slot)


def _send_tokens_bwd(axis, transport, plan, d_rows):
    d_slots = return_rows(axis, transport, d_rows, plan)
    return jnp.asarray(d_slots, jnp.float32).sum(1).astype(d_rows.dtype), None


def _return_rows_bwd(axis, transport, plan, d_slots):
    return send_slots(axis, transport, d_slots, plan), None


send_tokens.defvjp(lambda axis, transport, x, plan: (send_tokens(axis, transport, x, plan), plan), _send_tokens_bwd)
send_slots.defvjp(
    lambda axis, transport, slots, plan: (send_slots(axis, transport, slots, plan), plan),
    lambda axis, transport, plan, d_rows: (return_rows(axis, transport, d_rows, plan), None),
)
return_rows.defvjp(
    lambda axis, transport, rows, plan: (return_rows(axis, transport, rows, plan), plan), _return_rows_bwd
)


def _forth(axis: str, transport: str, values: Array, index: Array, plan: Plan) -> Array:
    sent = _take(values, index)
    ep = plan.counts.shape[0]
    if transport == "padded":
        arrived = _all_to_all(axis, sent, ep)
    else:
        sizes, me = _sizes(plan), lax.axis_index(axis)
        room = jnp.zeros((plan.row_of_received.shape[0], sent.shape[1]), sent.dtype)
        # Where this rank's run starts on each receiver: behind the runs of the ranks before it.
        starts = _before(sizes, axis=0)[me]
        arrived = ragged_all_to_all(sent, room, _before(sizes[me]), sizes[me], starts, sizes[:, me], axis)
    return _take(arrived, plan.received_of_row)


def _back(axis: str, transport: str, rows: Array, plan: Plan) -> Array:
    sent = _take(rows, plan.row_of_received)
    ep = plan.counts.shape[0]
    if transport == "padded":
        return _all_to_all(axis, sent, ep)
    sizes, me = _sizes(plan), lax.axis_index(axis)
    room = jnp.zeros((plan.slot_of_send.shape[0], rows.shape[1]), rows.dtype)
    starts = _before(sizes, axis=1)[:, me]  # where each source lined up what it sent to this rank
    return ragged_all_to_all(sent, room, _before(sizes[:, me]), sizes[:, me], starts, sizes[me], axis)


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, axis: str):
    """`jax.lax.ragged_all_to_all`; where the collective does not exist (CPU), the same result by an all-gather.

    The stand-in moves ep times the bytes. It is there so that the offsets are exercised without a GPU.
    """
    offsets = [o.astype(jnp.int32) for o in (input_offsets, send_sizes, output_offsets, recv_sizes)]
    if jax.default_backend() != "cpu":
        return lax.ragged_all_to_all(operand, output, *offsets, axis_name=axis)
    everyone, first, size, start = (lax.all_gather(a, axis) for a in (operand, *offsets[:3]))
    me, place = lax.axis_index(axis), jnp.arange(operand.shape[0])
    for source in range(everyone.shape[0]):
        kept = place < size[source, me]
        data = jnp.take(everyone[source], first[source, me] + place, axis=0, mode="clip")
        target = jnp.where(kept, start[source, me] + place, output.shape[0])
        output = output.at[target].set(data, mode="drop")
    return output


def _all_to_all(axis: str, sent: Array, ep: int) -> Array:
    blocks = sent.reshape(ep, -1, sent.shape[-1])
    return lax.all_to_all(blocks, axis, 0, 0, tiled=True).reshape(sent.shape)


def _sizes(plan: Plan) -> Array:
    ep = plan.counts.shape[0]
    return plan.counts.reshape(ep, ep, -1).sum(2)


def _take(values: Array, index: Array) -> Array:
    """values[index], and exactly 0 where the index is -1."""
    found = jnp.take(values, jnp.maximum(index, 0), axis=0, mode="clip")
    return jnp.where((index >= 0)[..., None], found, jnp.zeros((), values.dtype))


def _inverse(index: Array, size: int) -> Array:
    """The place p with index[p] == i, for each i below size; -1 where there is none."""
    places = jnp.arange(index.shape[0], dtype=jnp.int32)
    return jnp.full(size, -1, jnp.int32).at[jnp.where(index >= 0, index, size)].set(places, mode="drop")


def _before(sizes: Array, axis: int = 0) -> Array:
    """The sum of the earlier entries."""
    return jnp.cumsum(sizes, axis=axis) - sizes


def _run_of(sizes: Array, place: Array) -> Array:
    """Which run of consecutive places each place lies in; the last one beyond the end."""
    return jnp.minimum(jnp.searchsorted(jnp.cumsum(sizes), place, side="right"), sizes.shape[0] - 1)
