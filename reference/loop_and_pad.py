"""The baseline: one expert after another, each padded to the worst case of T rows, so that every shape is static.

An expert may receive all T tokens, hence T rows for each of the E experts, of which T*K hold tokens: E/K times the
useful work, whatever the routing. Rows lie sorted by expert, so an expert's T rows are one slice: its own rows first,
then whatever follows. Written slices run over into the rows of later experts, which overwrite them. Gradients have
their own rule, which keeps the T*K real pre-activations, not E*T padded ones, and runs no product twice.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..parity.interface import Implementation
from ..parity.problem import Params, Problem, Routing
from .activation import activate
from .dense import matmul, product
from .experts import experts_of
from .grouped_gemm import grouped_gemm
from .layer import layer_of
from .permute import combine, gather, permute, token_of_row, unpermute
from .recipes import grouped_gemm_of
from .routing import route, update_bias


def experts(problem: Problem, params: Params, x: Float[Array, "T D"], routing: Routing) -> Float[Array, "T D"]:
    """Runs the routed experts: y_t = sum_k w_tk * (act(x_t @ wi_e + b_e) @ wo_e + c_e), e = idx_tk.

    With early placement w_tk multiplies h before wo, and c_e. Each product, its bias added, is rounded once to the
    storage dtype, and so is a (weighted) h; everything between accumulates in float32. Under a recipe the operands are
    quantised by emulation (see recipes.py), in one product over all rows instead of one an expert.
    """
    if problem.T == 0:
        return jnp.zeros_like(x)
    if problem.recipe != "none":
        gemm = grouped_gemm_of(problem.recipe, grouped_gemm)
        return experts_of(permute=permute, grouped_gemm=gemm, unpermute=unpermute)(problem, params, x, routing)
    leaves = {name: leaf for name, leaf in params.named().items() if name in ("wi", "wo")}
    if problem.experts.wi_bias:
        leaves["wi_bias"] = params.need("wi_bias")
    if problem.experts.wo_bias:
        leaves["wo_bias"] = params.need("wo_bias")
    return _experts(problem, leaves, x, routing.topk_weights, routing.topk_idx)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(problem: Problem, leaves: dict[str, Array], x: Array, topk_weights: Array, topk_idx: Array) -> Array:
    return _forward(problem, leaves, x, topk_weights, topk_idx)[0]


def _forward(problem: Problem, leaves: dict, x: Array, topk_weights: Array, topk_idx: Array) -> tuple[Array, tuple]:
    early = problem.experts.weight_placement == "early"
    routing = Routing(topk_idx, topk_weights)
    _, group_sizes, row_of_slot = permute(problem, x, routing)
    # T rows more than there are slots: the last expert's slice must not be moved back to fit.
    token = token_of_row(row_of_slot, problem.routed_rows + problem.T)
    rows, weight = gather(x, token), _weight_of_row(row_of_slot, topk_weights, token)
    first = jnp.cumsum(group_sizes, dtype=jnp.int32) - group_sizes

    def expert(carry: tuple[Array, Array], of_e: tuple[dict, Array]) -> tuple[tuple[Array, Array], None]:
        (pre, out), (leaf, at) = carry, of_e
        pre_e = product(problem, _slice(problem, rows, at), leaf["wi"], leaf.get("wi_bias"))
        h = activate(problem.experts, pre_e)
        w = _slice(problem, weight, at)[:, None] if early else None
        h = h if w is None else h * w
        out_e = product(problem, h.astype(x.dtype), leaf["wo"], leaf.get("wo_bias"), bias_weight=w)
        return (_write(pre, pre_e, at), _write(out, out_e, at)), None

    pre = jnp.zeros((rows.shape[0], problem.wi_columns), x.dtype)
    (pre, out), _ = lax.scan(expert, (pre, jnp.zeros_like(rows)), (leaves, first))
    y = unpermute(problem, out, routing, row_of_slot)
    return y, (leaves, rows, weight, pre, token, first, group_sizes, row_of_slot)


def _backward(problem: Problem, saved: tuple, dy: Array) -> tuple[dict, Array, Array, None]:
    """The chain rule, one expert at a time; c is wo_bias, d an expert's rows of dy, w their weights.

    d_h = d @ wo.T, d_w = <h, d_h> + <d, c>, d_pre = act'(pre) * w * d_h, d_x = d_pre @ wi.T;
    d_wi = x.T @ d_pre, d_wo = h.T @ (w * d), and the biases' are the column sums of d_pre and w * d.
    """
    early = problem.experts.weight_placement == "early"
    leaves, rows, weight, pre, token, first, group_sizes, row_of_slot = saved
    d_out = gather(dy, token)

    def expert(carry: tuple[Array, Array], of_e: tuple[dict, Array, Array]) -> tuple[tuple[Array, Array], dict]:
        (d_rows, d_weight), (leaf, at, size) = carry, of_e
        own = (jnp.arange(problem.T, dtype=jnp.int32) < size)[:, None]

        def mine(a: Array) -> Array:
            # Selected wherever a sum over rows follows: the slice's other rows are other experts', NaN perhaps.
            return jnp.where(own, a, 0)

        x_e, d_e = mine(_slice(problem, rows, at)), mine(_slice(problem, d_out, at))
        w = mine(_slice(problem, weight, at)[:, None])
        h, activate_vjp = jax.vjp(lambda p: activate(problem.experts, p), _slice(problem, pre, at))
        h = mine(h)
        d_h = matmul(problem, d_e, leaf["wo"].T)
        d_w = jnp.sum(h * d_h, axis=1)
        if "wo_bias" in leaf:
            d_w = d_w + matmul(problem, d_e, leaf["wo_bias"][:, None])[:, 0]
        d_pre = mine(activate_vjp(mine(d_h * w))[0])
        wd = d_e.astype(jnp.float32) * w
        # Early placement's operand of wo was the weighted h; the same product, rounded as forward was.
        lhs, rhs = ((h * w).astype(dy.dtype), d_e) if early else (h.astype(dy.dtype), wd.astype(dy.dtype))
        d_leaf = {"wi": matmul(problem, x_e.T, d_pre), "wo": matmul(problem, lhs.T, rhs)}
        if "wi_bias" in leaf:
            d_leaf["wi_bias"] = d_pre.sum(axis=0, dtype=jnp.float32)
        if "wo_bias" in leaf:
            d_leaf["wo_bias"] = wd.sum(axis=0)
        d_x = matmul(problem, d_pre, leaf["wi"].T).astype(dy.dtype)
        d_leaf = {name: d.astype(leaf[name].dtype) for name, d in d_leaf.items()}
        return (_write(d_rows, d_x, at), _write(d_weight, d_w, at)), d_leaf

    (d_rows, d_weight), d_leaves = lax.scan(
        expert, (jnp.zeros_like(rows), jnp.zeros_like(weight)), (leaves, first, group_sizes)
    )
    slot = jnp.maximum(row_of_slot, 0)
    return d_leaves, combine(d_rows, row_of_slot, None), jnp.where(row_of_slot < 0, 0.0, d_weight[slot]), None


_experts.defvjp(_forward, _backward)


def _weight_of_row(row_of_slot: Array, topk_weights: Array, token: Array) -> Array:
    at = jnp.where(row_of_slot < 0, token.shape[0], row_of_slot)
    return jnp.zeros(token.shape[0], jnp.float32).at[at].set(topk_weights, mode="drop")


def _slice(problem: Problem, rows: Array, at: Array) -> Array:
    return lax.dynamic_slice_in_dim(rows, at, problem.T)


def _write(rows: Array, new: Array, at: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(rows, new, at, 0)


layer = layer_of(route=route, experts=experts)


IMPLEMENTATION = Implementation(
    name="loop_and_pad",
    stages={
        "route": route,
        "permute": permute,
        "unpermute": unpermute,
        "grouped_gemm": grouped_gemm,
        "experts": experts,
        "layer": layer,
        "update_bias": update_bias,
    },
    traits=frozenset({"deterministic"}),
    summary="the baseline: every expert padded to the worst case, static shapes",
)
