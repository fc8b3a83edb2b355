"""The routed experts in one pass over blocks of rows, forward, and one backward."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ...parity.problem import Params, Problem, Routing
from .activation import activate, activate_vjp
from .grouped_gemm import matmul
from .permute import Slots, combine, sort_slots
from .quantised import quantised_experts
from .visit import Block, block_sizes, visit


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts at a fixed routing: y_t = sum_k w_tk * (act(x_t @ wi_e + b_e) @ wo_e + c_e), e = idx_tk.

    With early placement w_tk multiplies h before wo, and c_e, which h does not carry. A biased product, h and a weighted
    h are rounded to the storage dtype; everything between, the sum over k and the sum over an expert's rows, is
    float32.

    Backward keeps only the pre-activations of the T*K rows; x and dy are gathered again, block by block. An idle
    expert's gradients are exactly 0. Not differentiable twice.
    """
    if problem.T == 0:
        return jnp.zeros_like(x)
    if problem.recipe != "none":
        return quantised_experts(problem, params, x, routing)
    leaves = _Leaves(
        params.wi,
        params.wo,
        params.need("wi_bias") if problem.experts.wi_bias else None,
        params.need("wo_bias") if problem.experts.wo_bias else None,
    )
    return _experts(problem, leaves, x, routing.topk_weights, routing.topk_idx)


class _Leaves(NamedTuple):
    """What belongs to one expert, or (with a leading E) to each; gradients too."""

    wi: Array
    wo: Array
    wi_bias: Array | None = None
    wo_bias: Array | None = None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(problem: Problem, leaves: _Leaves, x: Array, topk_weights: Array, topk_idx: Array) -> Array:
    return _forward(problem, leaves, x, topk_weights, topk_idx)[0]


def _forward(
    problem: Problem, leaves: _Leaves, x: Array, topk_weights: Array, topk_idx: Array
) -> tuple[Array, tuple[_Leaves, Array, Array, Slots, Array]]:
    early = problem.experts.weight_placement == "early"
    dot = _dot(problem)
    slots = sort_slots(problem, topk_idx)
    weights = topk_weights.reshape(-1)

    def block(of_e: _Leaves, b: Block, carry: tuple[Array, Array]) -> tuple[tuple[Array, Array], tuple]:
        pre, out = carry
        slot = b.read(slots.slot_of_row)
        pre_b = _plus(dot(x[slot // problem.K], of_e.wi), of_e.wi_bias).astype(x.dtype)
        h = activate(problem.experts, pre_b)
        w = weights[slot][:, None] if early else None
        h = h if w is None else h * w
        out_b = _plus(dot(h.astype(x.dtype), of_e.wo), of_e.wo_bias, w).astype(x.dtype)
        return (b.write(pre, pre_b), b.write(out, out_b)), ()

    R = problem.routed_rows
    carry = jnp.zeros((R, problem.wi_columns), x.dtype), jnp.zeros((R, problem.D), x.dtype)
    pre, out = _visit(problem, leaves, slots, block, carry)
    y = combine(out, slots.row_of_slot, None if early else topk_weights)
    return y, (leaves, x, topk_weights, slots, pre)


def _backward(
    problem: Problem, saved: tuple[_Leaves, Array, Array, Slots, Array], dy: Array
) -> tuple[_Leaves, Array, Array, None]:
    # Late and early placement have one gradient: both say out = w * (h @ wo + wo_bias).
    leaves, x, topk_weights, slots, pre = saved
    dot = _dot(problem)
    weights = topk_weights.reshape(-1)

    def block(
        of_e: _Leaves, b: Block, carry: tuple[Array, Array, _Leaves]
    ) -> tuple[tuple[Array, Array, _Leaves], _Leaves]:
        d_rows, d_weight, d_leaves = carry
        slot = b.read(slots.slot_of_row)
        token = slot // problem.K
        x_b, dy_b, w = b.select(x[token]), b.select(dy[token]), b.select(weights[slot])[:, None]
        h, vjp = activate_vjp(problem.experts, b.read_own(pre))
        d_h = dot(dy_b, of_e.wo, contract=(1, 1))
        d_w = (h * d_h).sum(axis=1)
        d_pre = vjp(d_h * w)
        part_wi_bias = part_wo_bias = None
        if of_e.wo_bias is not None:
            wide = dy_b.astype(jnp.float32)
            d_w = d_w + wide @ of_e.wo_bias.astype(jnp.float32)
            part_wo_bias = (w * wide).sum(axis=0)
        if of_e.wi_bias is not None:
            part_wi_bias = d_pre.sum(axis=0)
        d_pre = d_pre.astype(x.dtype)
        part = _Leaves(
            dot(x_b, d_pre, contract=(0, 0)),
            dot((h * w).astype(x.dtype), dy_b, contract=(0, 0)),
            part_wi_bias,
            part_wo_bias,
        )
        d_x = dot(d_pre, of_e.wi, contract=(1, 1)).astype(x.dtype)
        return (b.write(d_rows, d_x), b.write(d_weight, d_w), d_leaves), part

    def leave(e: Array, total: _Leaves, carry: tuple[Array, Array, _Leaves]) -> tuple[Array, Array, _Leaves]:
        d_rows, d_weight, d_leaves = carry
        put = jax.tree.map(
            lambda all, one: lax.dynamic_update_index_in_dim(all, one.astype(all.dtype), e, 0), d_leaves, total
        )
        return d_rows, d_weight, put

    R = problem.routed_rows
    carry = jnp.zeros((R, problem.D), x.dtype), jnp.zeros(R, jnp.float32), jax.tree.map(jnp.zeros_like, leaves)
    d_rows, d_weight, d_leaves = _visit(problem, leaves, slots, block, carry, leave=leave)
    row = slots.row_of_slot
    d_topk_weights = jnp.where(row < 0, 0.0, d_weight[jnp.maximum(row, 0)])
    return d_leaves, combine(d_rows, row, None), d_topk_weights, None


_experts.defvjp(_forward, _backward)


def _visit(problem: Problem, leaves: _Leaves, slots: Slots, block, carry, **kwargs):
    R = problem.routed_rows
    return visit(
        slots.group_sizes,
        block_sizes(R, problem.T),
        R,
        block,
        carry,
        enter=lambda e: jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, e, 0, keepdims=False), leaves),
        largest_group=problem.T,
        **kwargs,
    )


def _dot(problem: Problem):
    return partial(matmul, precision=lax.Precision.HIGHEST if problem.precision == "highest" else lax.Precision.DEFAULT)


def _plus(out: Array, bias: Array | None, weight: Array | None = None) -> Array:
    if bias is None:
        return out
    wide = bias.astype(jnp.float32)
    return out + (wide if weight is None else wide * weight)
