"""The routed experts: two passes over blocks of rows forward, two backward, and between them whole arrays at once."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ...parity.problem import Params, Problem, Routing
from .activation import activate, activate_vjp
from .grouped_gemm import matmul, outer
from .permute import Slots, combine, sort_slots
from .quantised import quantised_experts
from .visit import Block, block_sizes, visit


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts at a fixed routing: y_t = sum_k w_tk * (act(x_t @ wi_e + b_e) @ wo_e + c_e), e = idx_tk.

    With early placement w_tk multiplies h before wo, and c_e, which h does not carry. Each product, its bias added, and a
    (weighted) h are rounded to the storage dtype; everything between, the sum over k and the sum over an expert's rows, is
    float32.

    Backward keeps only the pre-activations of the T*K rows; x and dy are gathered again. An idle expert's gradients are
    exactly 0. Not differentiable twice.
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
) -> tuple[Array, tuple[_Leaves, Array, Array, Array, Slots, Array]]:
    early = problem.experts.weight_placement == "early"
    slots = sort_slots(problem, topk_idx)
    w = topk_weights.reshape(-1)[slots.slot_of_row][:, None]
    pre = _times(problem, slots, x[slots.slot_of_row // problem.K], leaves.wi, leaves.wi_bias)
    h = activate(problem.experts, pre)
    h = (h * w if early else h).astype(x.dtype)
    out = _times(problem, slots, h, leaves.wo, leaves.wo_bias, w if early else None)
    y = combine(out, slots.row_of_slot, None if early else topk_weights)
    return y, (leaves, x, topk_weights, topk_idx, slots, pre)


def _backward(
    problem: Problem, saved: tuple[_Leaves, Array, Array, Array, Slots, Array], dy: Array
) -> tuple[_Leaves, Array, Array, None]:
    # Late and early placement have one gradient: both say out = w * (h @ wo + wo_bias).
    leaves, x, topk_weights, topk_idx, slots, pre = saved
    w = topk_weights.reshape(-1)[slots.slot_of_row][:, None]
    token = slots.slot_of_row // problem.K
    d_out = dy[token]
    d_h = _times(problem, slots, d_out, leaves.wo, transpose=True, dtype=jnp.float32)
    h, vjp = activate_vjp(problem.experts, pre)
    d_weight = (h * d_h).sum(axis=1)
    if leaves.wo_bias is not None:
        expert = jnp.maximum(topk_idx.reshape(-1)[slots.slot_of_row], 0)
        d_weight = d_weight + (d_out.astype(jnp.float32) * leaves.wo_bias[expert].astype(jnp.float32)).sum(axis=1)
    d_rows, d_leaves = _gradients(problem, leaves, slots, x[token], vjp(d_h * w), (h * w).astype(x.dtype), d_out, w)
    row = slots.row_of_slot
    d_topk_weights = jnp.where(row < 0, 0.0, d_weight[jnp.maximum(row, 0)])
    return d_leaves, combine(d_rows, row, None), d_topk_weights, None


_experts.defvjp(_forward, _backward)


def _times(
    problem: Problem,
    slots: Slots,
    rows: Array,
    kernels: Array,
    bias: Array | None = None,
    weight: Array | None = None,
    *,
    transpose: bool = False,
    dtype=None,
) -> Array:
    """Each row times its expert's kernel, plus the expert's bias (times the row's weight); 0 in rows of no expert."""
    dtype, precision = dtype or rows.dtype, _precision(problem)

    def block(of_e: tuple[Array, Array | None], b: Block, out: Array) -> tuple[Array, tuple]:
        kernel, bias = of_e
        product = matmul(b.read(rows), kernel, precision=precision, contract=(1, 1) if transpose else (1, 0))
        if bias is not None:
            wide = bias.astype(jnp.float32)
            product = product + (wide if weight is None else wide * b.read(weight))
        return b.write(out, product.astype(dtype)), ()

    out = jnp.zeros((rows.shape[0], kernels.shape[1 if transpose else 2]), dtype)
    return _visit(problem, (kernels, bias), slots, block, out)


def _gradients(
    problem: Problem, leaves: _Leaves, slots: Slots, x: Array, d_pre: Array, h: Array, d_out: Array, w: Array
) -> tuple[Array, _Leaves]:
    """d_x of every row, and d_wi = x.T @ d_pre, d_wo = h.T @ d_out (h weighted) and the biases' of every expert."""
    precision = _precision(problem)

    def block(wi: Array, b: Block, carry: tuple[Array, _Leaves]) -> tuple[tuple[Array, _Leaves], _Leaves]:
        d_rows, d_leaves = carry
        x_b, d_b, d_pre_b = b.read_own(x), b.read_own(d_out), b.read_own(d_pre)
        part = _Leaves(
            outer(x_b, d_pre_b.astype(x.dtype), precision=precision),
            outer(b.read_own(h), d_b, precision=precision),
            None if leaves.wi_bias is None else d_pre_b.sum(axis=0),
            None if leaves.wo_bias is None else (b.read_own(w) * d_b.astype(jnp.float32)).sum(axis=0),
        )
        d_x = matmul(d_pre_b.astype(x.dtype), wi, precision=precision, contract=(1, 1)).astype(x.dtype)
        return (b.write(d_rows, d_x), d_leaves), part

    def leave(e: Array, total: _Leaves, carry: tuple[Array, _Leaves]) -> tuple[Array, _Leaves]:
        d_rows, d_leaves = carry
        put = jax.tree.map(
            lambda all, one: lax.dynamic_update_index_in_dim(all, one.astype(all.dtype), e, 0), d_leaves, total
        )
        return d_rows, put

    # A buffer of its own: written over x, XLA copies all of x in every step.
    carry = jnp.zeros_like(x), jax.tree.map(jnp.zeros_like, leaves)
    return _visit(problem, leaves.wi, slots, block, carry, leave=leave)


def _visit(problem: Problem, leaves: Any, slots: Slots, block, carry, **kwargs):
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


def _precision(problem: Problem) -> lax.Precision:
    return lax.Precision.HIGHEST if problem.precision == "highest" else lax.Precision.DEFAULT
