"""Expert parallelism on GPUs: NCCL EP around device-side grouped products, as one differentiable function.

forward:  x -dispatch-> rows -wi-> pre -act, weight-> h -wo-> out -combine-> y
backward: dy -dispatch-> d -wo.T-> g -act-> (w h, d_pre, dw) -> d_wo, d_wi, d_pre -wi.T-> -combine-> dx; dw -combine->

Each arrow over ranks is one NCCL EP call by the same routing state. The routing weight multiplies between the products,
F wide and in the pass that computes the activation, for both placements: they are equal in exact arithmetic, and no
pass over the D-wide receive buffer is left. The pass between the products takes the buffer's filled rows only. Saved:
the inputs, the received rows and their weights, pre, and the routing state.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.interface import Implementation, Support, Unsupported
from ...parity.placement import token_axes, token_ranks
from ...parity.problem import Params, Problem, Routing
from ..xla.mesh import by_expert, by_token, device_mesh, mesh_of
from . import rows as move
from .exchange import ep_combine, ep_dispatch
from .group import ALIGN, current, fits_in, limits, signature_of, start
from .grouped_gemm import kernel_gradient, product, transposed_product
from .hidden import hidden, hidden_gradient
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
    whole,
)
from .routing import route
from .support import facts, selection, several


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts of all ranks; T need not divide over them.

    Starts this process's NCCL EP group at the first call, while JAX traces if need be. Each product, the weighted h and
    what a rank sends back are rounded to x's dtype; a wo_bias is added where the token is, in float32. Raises
    Unsupported with the number that failed when NCCL EP cannot run here, InvalidInput when a group of other sizes runs.
    """
    return counted(problem, params, x, routing)[0]


def counted(
    problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing
) -> tuple[Float[Array, "T D"], Int[Array, " W"]]:
    """`experts`, and the rows that each rank was sent, counted before any was dropped."""
    if not (able := limits(facts(), problem)):
        raise Unsupported(able.reason)
    start(problem)
    T, W = x.shape[0], token_ranks(mesh_of(problem))
    t = -(-T // W)
    laid = on_ranks(problem, W, t)
    fill = ((0, W * t - T), (0, 0))
    ids = jnp.pad(routing.topk_idx, fill, constant_values=-1)
    weights = jnp.pad(routing.topk_weights, fill)
    kernels = (params.wi, params.wo, params.wi_bias, params.wo_bias)
    x, weights, ids = split(
        laid, *(a.reshape(W, t, a.shape[1]) for a in (jnp.pad(x, fill), jnp.where(ids >= 0, weights, 0), ids))
    )
    found: Any = _experts(laid, kernels, x, weights, ids)
    y, received = found
    return y.reshape(W * t, -1)[:T], received.reshape(W)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(problem: Problem, kernels: tuple, x: Array, weights: Array, topk_idx: Array) -> tuple[Array, Array]:
    return _forward(problem, kernels, x, weights, topk_idx)[0]


@whole
def _forward(problem: Problem, kernels: tuple, x: Array, weights: Array, topk_idx: Array) -> tuple[Any, Any]:
    wi, wo, wi_bias, wo_bias = kernels
    padded, received, handle = prepare(problem, topk_idx)
    rows, row_weights = dispatch(problem, handle, topk_idx, x, weights)
    real = group_sizes(problem, topk_idx)
    pre, out, row_weights = _per_rank(problem, _local_forward, 3)(
        (rows, row_weights, padded, real), {"wi": wi, "wo": wo, "wi_bias": wi_bias}
    )
    y = combine(problem, handle, out)
    if wo_bias is not None:
        y = (y.astype(jnp.float32) + _weighted_bias(problem, weights, topk_idx, wo_bias)).astype(x.dtype)
    saved = (kernels, weights, topk_idx, handle, Made(handle), padded, rows, row_weights, pre)
    return (y, received), saved


@whole
def _backward(problem: Problem, saved: Any, cotangents: tuple) -> tuple:
    kernels, weights, topk_idx, handle, made, padded, rows, row_weights, pre = saved
    wi, wo, wi_bias, wo_bias = kernels
    (dy,) = split(problem, cotangents[0])
    handle = again(problem, handle, topk_idx, made)
    d = combine_gradient(problem, handle, dy)
    dx_rows, dot, d_wi, d_wo, *d_bias = _per_rank(problem, _local_backward, 2, 2 + (wi_bias is not None))(
        (rows, row_weights, padded, pre, d), {"wi": wi, "wo": wo, "wi_bias": wi_bias}
    )
    dx, d_weights = dispatch_gradient(problem, handle, dx_rows, dot)
    d_wo_bias = None
    if wo_bias is not None:
        flat, ids = dy.reshape(-1, problem.D), topk_idx.reshape(-1, problem.K)
        of_expert = move.pieces(move.dense(weights.reshape(ids.shape), ids, problem.E), axis=1)
        sums = jnp.einsum("tf,td->fd", of_expert, flat, preferred_element_type=jnp.float32)
        d_wo_bias = sums.reshape(move.PIECES, *wo_bias.shape).sum(axis=0).astype(wo_bias.dtype)
        along = jnp.einsum("td,ed->te", flat, wo_bias, preferred_element_type=jnp.float32)
        found = jnp.where(ids >= 0, move.take(along, jnp.maximum(ids, 0)), 0.0)
        d_weights = d_weights + found.reshape(d_weights.shape)
    return (d_wi, d_wo, d_bias[0] if d_bias else None, d_wo_bias), dx, d_weights, None


_experts.defvjp(_forward, _backward)


def _local_forward(problem: Problem, arrays: tuple, held: dict[str, Array]) -> tuple[Array, ...]:
    rows, row_weights, padded, real = arrays
    pre = product(rows, held["wi"], padded)
    expert = _expert_of_row(padded, rows.shape[0]) if "wi_bias" in held else None
    weight = _weight_of_row(row_weights, padded, real)
    h = hidden(problem.experts, pre, weight, held.get("wi_bias"), expert, filled=padded.sum())
    return pre, product(h, held["wo"], padded), weight


def _local_backward(problem: Problem, arrays: tuple, held: dict[str, Array]) -> tuple[Array, ...]:
    rows, weight, padded, pre, d = arrays
    g = transposed_product(d, held["wo"], padded)
    expert = _expert_of_row(padded, rows.shape[0]) if "wi_bias" in held else None
    h, d_pre, dot = hidden_gradient(problem.experts, pre, g, weight, held.get("wi_bias"), expert, filled=padded.sum())
    grads = [kernel_gradient(rows, d_pre, padded), kernel_gradient(h, d, padded)]
    if "wi_bias" in held:
        # A column of ones as the left operand: sums each expert's rows, and only those. Eight, for alignment.
        grads.append(kernel_gradient(jnp.ones((d_pre.shape[0], 8), d_pre.dtype), d_pre, padded)[:, 0, :])
    if data := token_axes(mesh_of(problem))[:-1]:
        # Once over the data ranks, in float32: each rank's part was rounded already.
        grads = [jax.lax.psum(g.astype(jnp.float32), data).astype(g.dtype) for g in grads]
    return transposed_product(d_pre, held["wi"], padded), dot, *grads


def _expert_of_row(padded: Array, rows: int) -> Array:
    """The expert whose block each row lies in; the last one beyond the blocks."""
    return _by_row(_expert_of_tile(padded, rows), rows)


def _weight_of_row(row_weights: Array, padded: Array, real: Array) -> Array:
    """Each row's weight, 0 by selection where no token is: padding takes part in the kernels' gradients."""
    rows = row_weights.shape[0]
    end = (jnp.cumsum(padded) - padded + real)[_expert_of_tile(padded, rows)]
    return jnp.where(jnp.arange(rows) < _by_row(end, rows), row_weights, 0.0)


def _expert_of_tile(padded: Array, rows: int) -> Array:
    """The expert of each ALIGN rows. Compared with every block's end: a binary search would be a loop of small kernels."""
    first = jnp.arange(-(-rows // ALIGN)) * ALIGN
    found = (first[:, None] >= jnp.cumsum(padded)).sum(1, dtype=jnp.int32)
    return jnp.minimum(found, padded.shape[0] - 1)


def _by_row(of_tile: Array, rows: int) -> Array:
    return jnp.broadcast_to(of_tile[:, None], (of_tile.shape[0], ALIGN)).reshape(-1)[:rows]


def _per_rank(problem: Problem, local: Any, by_row: int, by_kernel: int = 0) -> Any:
    """Runs `local` on each rank's rows and kernels; its first `by_row` results have a row axis, the rest an expert axis."""
    mesh = mesh_of(problem)

    def rank(arrays: tuple, held: dict[str, Array]) -> tuple[Array, ...]:
        found = local(problem, tuple(a[0] for a in arrays), held)
        return tuple(a[None] if i < by_row else a for i, a in enumerate(found))

    def run(arrays: tuple, held: dict[str, Array | None]) -> tuple[Array, ...]:
        there = {name: a for name, a in held.items() if a is not None}
        out = (by_token(mesh),) * by_row + (by_expert(mesh),) * by_kernel
        mapped = jax.shard_map(
            rank, mesh=device_mesh(mesh), in_specs=(by_token(mesh), by_expert(mesh)), out_specs=out, check_vma=False
        )
        # As one piece: a `scan` would hoist the constants of TE's products out of its loop, as a shard_map without
        # operands, and XLA's import of shardings (JAX 0.11.2) ends the process on one.
        whole = jax.custom_batching.custom_vmap(mapped)
        whole.def_vmap(_no_batch)
        return whole(arrays, there)

    return run


def _no_batch(*_: Any) -> Any:
    raise NotImplementedError("te_ep under vmap; accepted: one batch, since NCCL EP exchanges one")


def _weighted_bias(problem: Problem, weights: Array, topk_idx: Array, bias: Array) -> Array:
    """sum_k w_tk * bias[topk_idx_tk], float32, in the shape of y."""
    ids = topk_idx.reshape(-1, problem.K)
    of_expert = move.pieces(move.dense(weights.reshape(ids.shape), ids, problem.E), axis=1)
    tiled = jnp.tile(bias, (move.PIECES, 1))
    found = jnp.einsum("tf,fd->td", of_expert, tiled, preferred_element_type=jnp.float32)
    return found.reshape(*weights.shape[:2], -1)


def supports(problem: Problem) -> Support:
    """Whether NCCL EP and the device-side products can do this problem; also whether it fits the group that runs."""
    if not (able := limits(facts(), problem)):
        return able
    if not (able := fits_in(current(), signature_of(problem))):
        return able
    return selection(problem.router, problem.K, problem.E)


def available() -> Support:
    """Whether this machine has what `te_ep` needs; the reason names the number that failed."""
    return several(facts())


IMPLEMENTATION = Implementation(
    name="te_ep",
    stages={"route": route, "ep_dispatch": ep_dispatch, "ep_combine": ep_combine, "experts": experts},
    supports=supports,
    available=available,
    traits=frozenset({"deterministic"}),
    summary="NCCL EP around device-side grouped products",
)
"""`te_ep` in the registry."""
