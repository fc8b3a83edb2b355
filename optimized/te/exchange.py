"""Moving tokens to the ranks that hold their experts, and back, by NCCL EP through Transformer Engine.

A token that visits several experts of one rank crosses once. Each expert's block is padded to 128 rows, with zeros; the
tail beyond the last block is never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.interface import Unsupported
from ...parity.problem import InvalidInput, Problem, Routing
from .group import ALIGN, limits, start
from .nccl_ep import (
    Made,
    again,
    combine,
    combine_gradient,
    dispatch,
    dispatch_gradient,
    group_sizes,
    on_ranks,
    prepare,
    split,
)
from .support import facts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangeState:
    """What `ep_combine` needs of the dispatch. `row_weights` and `align` are the same in every exchange."""

    row_weights: Float[Array, "W P"]
    """The routing weight of each row, float32; undefined where no token is."""
    handle: Array
    """NCCL EP's routing state, for use in the program that made it."""
    topk_idx: Int[Array, "W t K"]
    """What the routing state was made from."""
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
    W, t, _ = x.shape
    problem = on_ranks(problem, W, t)
    if routing.topk_idx.shape[0] != W * t:
        raise InvalidInput(f"the routing has {routing.topk_idx.shape[0]} tokens; accepted: {W * t}, as x has them")
    if not (able := limits(facts(), problem)):
        raise Unsupported(able.reason)
    start(problem)
    ids, weights = (a.reshape(W, t, problem.K) for a in (routing.topk_idx, routing.topk_weights))
    x, ids, weights = split(problem, x, ids, jnp.where(ids >= 0, weights, 0))
    padded_sizes, received, handle = prepare(problem, ids)
    sent: Any = _send(problem, handle, ids, x, weights)
    rows, row_weights = sent
    return rows, group_sizes(problem, ids), ExchangeState(row_weights, handle, ids, padded_sizes, received, (W, t))


def ep_combine(problem: Problem, rows: Float[Array, "W P D"], state: ExchangeState) -> Float[Array, "W t D"]:
    """A token's y is the sum of its rows, weighted (late) or plain (early): float32, rounded once.

    NCCL EP sums plain rows, so a late weight multiplies a row before it is sent, and that product is rounded too. A
    slot without an expert adds exactly 0, whatever its weight is.
    """
    problem = on_ranks(problem, *state.tokens)
    if problem.experts.weight_placement == "late":
        rows = (rows.astype(jnp.float32) * state.row_weights[..., None]).astype(rows.dtype)
    found: Any = _bring(problem, state.handle, state.topk_idx, rows)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send(problem: Problem, handle: Array, topk_idx: Array, x: Array, weights: Array) -> tuple[Array, Array]:
    return dispatch(problem, handle, topk_idx, x, weights)


def _send_forward(problem: Problem, handle: Array, topk_idx: Array, x: Array, weights: Array) -> tuple[Any, Any]:
    return dispatch(problem, handle, topk_idx, x, weights), (handle, topk_idx, Made(handle))


def _send_backward(problem: Problem, saved: Any, d: tuple[Array, Array]) -> tuple:
    return None, None, *dispatch_gradient(problem, again(problem, *saved), *d)


_send.defvjp(_send_forward, _send_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _bring(problem: Problem, handle: Array, topk_idx: Array, rows: Array) -> Array:
    return combine(problem, handle, rows)


def _bring_forward(problem: Problem, handle: Array, topk_idx: Array, rows: Array) -> tuple[Any, Any]:
    return combine(problem, handle, rows), (handle, topk_idx, Made(handle))


def _bring_backward(problem: Problem, saved: Any, dy: Array) -> tuple:
    return None, None, combine_gradient(problem, again(problem, *saved), dy)


_bring.defvjp(_bring_forward, _bring_backward)
