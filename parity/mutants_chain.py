"""Mutants of classes H, K and M: broken gradient chains, stale state, and outputs that a loose comparison lets pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .mutant import Mutant, mutant, patched, reference
from .problem import Routing


@mutant("H", "gradient-topk_weights", "experts", ordinary=False)
def no_gradient_for_the_weights() -> dict[str, Any]:
    """The combine's own backward returns no cotangent for the weights, which becomes zeros without a word."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        weights = jax.lax.stop_gradient(routing.topk_weights)
        return base(problem, params, x, Routing(routing.topk_idx, weights))

    return patched(experts=experts)


@mutant("H", "zero-weights", "experts")
def zero_weight_is_padding() -> dict[str, Any]:
    """A slot whose weight is exactly 0 is taken for padding, so its weight never gets a gradient."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        weights = jnp.where(routing.topk_weights == 0, 0.0, routing.topk_weights)
        return base(problem, params, x, Routing(routing.topk_idx, weights))

    return patched(experts=experts)


@mutant("H", "gradient-wo", "experts", ordinary=False)
def one_parameter_without_gradient() -> dict[str, Any]:
    """The last expert's wo receives no gradient."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        wo = params.wo.at[-1].set(jax.lax.stop_gradient(params.wo[-1]))
        return base(problem, params.replace(wo=wo), x, routing)

    return patched(experts=experts)


@mutant("H", "gradient-x", "experts", ordinary=False)
def first_slot_only_in_dx() -> dict[str, Any]:
    """The gradient of x comes through each token's first slot only."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        first = jnp.arange(problem.K) == 0
        kept = Routing(jnp.where(first, routing.topk_idx, -1), routing.topk_weights)
        rest = Routing(jnp.where(first, -1, routing.topk_idx), routing.topk_weights)
        a = base(problem, params, x, kept)
        return a + base(problem, params, jax.lax.stop_gradient(x), rest)

    return patched(experts=experts)


@mutant("H", "layer-gradients", "layer", ordinary=False)
def router_trained_by_losses_only() -> dict[str, Any]:
    """The layer cuts the gradient between the experts and the router; only the losses reach the gate."""
    base = reference("routing").route

    def route(problem, params, x):
        routing = base(problem, params, x)
        return Routing(routing.topk_idx, jax.lax.stop_gradient(routing.topk_weights))

    return patched(layer=reference("layer").layer_of(route=route, experts=reference("experts").experts))


@mutant("H", "gradient-wi_bias", "experts")
def bias_gradient_counts_lost_slots() -> dict[str, Any]:
    """Rows of no expert count in expert 0's bias gradient."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        y = base(problem, params, x, routing)
        if params.wi_bias is None:
            return y
        lost = (routing.topk_idx < 0).any()
        leak = jnp.where(lost, params.wi_bias[0].sum() - jax.lax.stop_gradient(params.wi_bias[0].sum()), 0)
        return y + leak.astype(y.dtype)

    return patched(experts=experts)


@mutant("K", "one-executable", "experts", raises=True)
def counts_read_on_the_host() -> dict[str, Any]:
    """The largest group size becomes a Python number, so nothing can be traced for all routings."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        sizes = reference("permute").count(problem, routing.topk_idx)
        return base(problem, params, x, routing) if int(sizes.max()) else jnp.zeros_like(x)

    return patched(experts=experts)


@mutant("K", "one-executable", "experts")
def ids_of_the_first_call() -> dict[str, Any]:
    """Routing metadata is kept by shape on the host, so a later call of the same shape runs the first one's ids."""
    base = reference("experts").experts
    kept: dict[tuple[int, ...], np.ndarray] = {}

    def recall(ids: np.ndarray) -> np.ndarray:
        return kept.setdefault(np.shape(ids), np.asarray(ids))

    def experts(problem, params, x, routing):
        ids = jax.pure_callback(recall, jax.ShapeDtypeStruct(routing.topk_idx.shape, jnp.int32), routing.topk_idx)
        return base(problem, params, x, Routing(ids, routing.topk_weights))

    return patched(experts=experts)


@mutant("J", "layers-apart", "experts")
def two_layers_share_a_handle() -> dict[str, Any]:
    """Backward reads the ids of whichever layer of that shape ran forward last."""
    base = reference("experts").experts
    handle: dict[tuple[int, ...], np.ndarray] = {}

    def keep(ids: np.ndarray) -> np.ndarray:
        handle[np.shape(ids)] = np.array(ids)
        return np.asarray(ids)

    def last(ids: np.ndarray, after: np.ndarray) -> np.ndarray:
        return handle[np.shape(ids)]

    def called(fn: Callable[..., np.ndarray], *args: jax.Array) -> jax.Array:
        # Ordered by data: an ordered callback could not be differentiated.
        return jax.pure_callback(fn, jax.ShapeDtypeStruct(args[0].shape, jnp.int32), *args)

    def run(problem, params, x, ids, weights):
        return base(problem, params, x, Routing(ids, weights))

    def experts(problem, params, x, routing):
        @jax.custom_vjp
        def once(params, x, ids, weights):
            return run(problem, params, x, called(keep, ids), weights)

        def forward(params, x, ids, weights):
            return once(params, x, ids, weights), (params, x, ids, weights)

        def backward(saved, dy):
            params, x, ids, weights = saved
            found = called(last, ids, dy)
            _, pull = jax.vjp(lambda p, a, w: run(problem, p, a, found, w), params, x, weights)
            d_params, dx, dw = pull(dy)
            return d_params, dx, None, dw

        once.defvjp(forward, backward)
        return once(params, x, routing.topk_idx, routing.topk_weights)

    return patched(experts=experts)


def _after(change: Callable[[jax.Array, Any, Any], jax.Array]) -> dict[str, Any]:
    """The baseline's experts with a changed y: (y, problem, routing) -> y."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        return change(base(problem, params, x, routing), problem, routing)

    return patched(experts=experts)


@mutant("M", "value", "experts", ordinary=False)
def zeros() -> dict[str, Any]:
    """Everything is zero."""
    return _after(lambda y, problem, routing: jnp.zeros_like(y))


@mutant("M", "value", "experts", ordinary=False)
def negated() -> dict[str, Any]:
    """y has the wrong sign."""
    return _after(lambda y, problem, routing: -y)


@mutant("M", "value", "experts", ordinary=False)
def two_per_cent_too_large() -> dict[str, Any]:
    """y is 1.02 times what it should be."""
    return _after(lambda y, problem, routing: (y.astype(jnp.float32) * 1.02).astype(y.dtype))


@mutant("M", "value", "experts", ordinary=False)
def experts_rotated_by_one() -> dict[str, Any]:
    """Each token visits the experts after its own."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        ids = jnp.where(routing.topk_idx < 0, -1, (routing.topk_idx + 1) % problem.E)
        return base(problem, params, x, Routing(ids, routing.topk_weights))

    return patched(experts=experts)


@mutant("M", "exact-experts", "experts", ordinary=False)
def one_token_lost() -> dict[str, Any]:
    """The last token of a batch loses its y."""
    return _after(lambda y, problem, routing: y.at[-1].set(0))


@mutant("M", "value", "experts", ordinary=False)
def one_token_in_fifty_lost() -> dict[str, Any]:
    """Every fiftieth token, the first among them, loses its y."""
    return _after(
        lambda y, problem, routing: jnp.where((jnp.arange(problem.T) % 50 == 0)[:, None], jnp.zeros((), y.dtype), y)
    )


@mutant("M", "value", "experts", ordinary=False)
def lightest_choice_lost() -> dict[str, Any]:
    """Each token loses the slot of its smallest weight."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        lightest = jnp.argmin(routing.topk_weights, axis=1)[:, None] == jnp.arange(problem.K)
        return base(problem, params, x, Routing(jnp.where(lightest, -1, routing.topk_idx), routing.topk_weights))

    return patched(experts=experts)


MUTANTS: tuple[Mutant, ...] = (
    no_gradient_for_the_weights,
    zero_weight_is_padding,
    one_parameter_without_gradient,
    first_slot_only_in_dx,
    router_trained_by_losses_only,
    bias_gradient_counts_lost_slots,
    counts_read_on_the_host,
    ids_of_the_first_call,
    two_layers_share_a_handle,
    zeros,
    negated,
    two_per_cent_too_large,
    experts_rotated_by_one,
    one_token_lost,
    one_token_in_fifty_lost,
    lightest_choice_lost,
)
