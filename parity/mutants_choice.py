"""Mutants of classes E to G: who is chosen, with which weight, and what the auxiliary losses see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .mutant import Mutant, mutant, patched, reference
from .problem import Losses, Output, Routing


@mutant("E", "exact-experts", "experts")
def weights_of_sorted_slots() -> dict[str, Any]:
    """Experts are run in ascending order of id, with the weights in the order of the slots."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        return base(problem, params, x, Routing(jnp.sort(routing.topk_idx, axis=1), routing.topk_weights))

    return patched(experts=experts)


@mutant("E", "nan-route", "route")
def nan_row_repeats_an_expert() -> dict[str, Any]:
    """A row of NaN scores gets expert 0 in every slot, as an arg-max loop gives that never moves on."""
    base = reference("routing").route

    def route(problem, params, x):
        routing = base(problem, params, x)
        nan = jnp.isnan(x.astype(jnp.float32)).any(axis=1)
        return Routing(jnp.where(nan[:, None], 0, routing.topk_idx), routing.topk_weights)

    return patched(route=route)


@mutant("E", "ties", "route")
def tied_experts_taken_at_once() -> dict[str, Any]:
    """When all scores tie, removing the best removes them all, and later slots repeat the first expert."""
    base = reference("routing").route

    def route(problem, params, x):
        routing = base(problem, params, x)
        z = reference("routing").logits(problem, params, x)
        tied = z.max(axis=1) == z.min(axis=1)
        return Routing(jnp.where(tied[:, None], 0, routing.topk_idx), routing.topk_weights)

    return patched(route=route)


@mutant("E", "narrow-margin", "route")
def logits_in_bfloat16() -> dict[str, Any]:
    """Logits are rounded to bfloat16 before the choice, so close ones tie."""

    def rounded(z: jax.Array) -> jax.Array:
        return jax.lax.reduce_precision(z, exponent_bits=8, mantissa_bits=7)

    def route(problem, params, x):
        routing = reference("routing")
        chosen = routing.choose(problem, params, _scores(problem, rounded(routing.logits(problem, params, x))))
        return _weighted(problem, params, x, chosen)

    return patched(route=route)


@mutant("F", "scaling", "route")
def scaling_only_when_normalised() -> dict[str, Any]:
    """The scaling factor is applied inside the branch that normalises."""
    base = reference("routing").route

    def route(problem, params, x):
        kept = problem if problem.router.normalize else problem.replace(router_scaling=1.0)
        return base(kept, params, x)

    return patched(route=route)


@mutant("F", "normalisation", "route")
def always_normalises() -> dict[str, Any]:
    """Weights are divided by their sum whether or not the router normalises."""
    base = reference("routing").route

    def route(problem, params, x):
        return base(problem.replace(router_normalize=True), params, x)

    return patched(route=route)


@mutant("F", "negative-bias", "route")
def excluded_groups_score_zero() -> dict[str, Any]:
    """Experts of excluded groups are ranked at 0, which a negative bias puts above the eligible ones."""

    def route(problem, params, x):
        routing = reference("routing")
        ranked = _scores(problem, routing.logits(problem, params, x))
        if problem.router.selection_bias:
            ranked = ranked + params.expert_bias[None]
        if problem.router.groups > 1:
            ranked = jnp.where(routing._eligible(problem, ranked), ranked, 0.0)
        return _weighted(problem, params, x, jax.lax.top_k(ranked, problem.K)[1].astype(jnp.int32))

    return patched(route=route)


@mutant("F", "selection-bias", "route")
def bias_inside_the_weights() -> dict[str, Any]:
    """The weight of a chosen expert is its biased score."""

    def route(problem, params, x):
        routing = reference("routing")
        score = _scores(problem, routing.logits(problem, params, x))
        chosen = routing.choose(problem, params, score)
        bias = params.expert_bias if problem.router.selection_bias else jnp.zeros(problem.E, jnp.float32)
        return _weighted(problem, params, x, chosen, score + bias[None])

    return patched(route=route)


@mutant("F", "linear-weights", "experts", ordinary=False)
def weight_applied_twice() -> dict[str, Any]:
    """Both the expert's input side and its output side are weighted, so each row counts with its weight squared."""
    base = reference("experts").experts

    def experts(problem, params, x, routing):
        return base(problem, params, x, Routing(routing.topk_idx, routing.topk_weights**2))

    return patched(experts=experts)


@mutant("F", "top-1-gradient", "route")
def top_1_weight_is_constant() -> dict[str, Any]:
    """With one expert per token the weight is replaced by a constant of the same value, and the gate learns nothing."""
    base = reference("routing").route

    def route(problem, params, x):
        routing = base(problem, params, x)
        if problem.K > 1:
            return routing
        return Routing(routing.topk_idx, jax.lax.stop_gradient(routing.topk_weights))

    return patched(route=route)


@mutant("F", "update-bias", "update_bias")
def bias_never_updated() -> dict[str, Any]:
    """The selection bias is declared and returned as it came."""

    def update_bias(expert_bias, group_sizes, rate):
        return expert_bias + 0 * rate * group_sizes.astype(expert_bias.dtype)

    return patched(update_bias=update_bias)


@mutant("F", "groups", "route")
def group_limit_off_by_one() -> dict[str, Any]:
    """One more group than group_topk stays eligible."""
    base = reference("routing").route

    def route(problem, params, x):
        wider = min(problem.router.group_topk + 1, problem.router.groups)
        return base(problem.replace(router_group_topk=wider), params, x)

    return patched(route=route)


@mutant("G", "loss-gradient-of-all", "layer")
def loss_of_chosen_probabilities() -> dict[str, Any]:
    """The balance loss averages probabilities over the chosen experts only, as a softmax after the choice has them."""

    def probabilities(problem, logits, topk_idx):
        chosen = jnp.zeros(logits.shape, bool).at[jnp.arange(problem.T)[:, None], topk_idx].set(True, mode="drop")
        return jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf), axis=1)

    return _with_losses(_balance_of(probabilities))


@mutant("G", "losses-see-real-tokens", "layer")
def losses_count_padding() -> dict[str, Any]:
    """Masked tokens are averaged like real ones."""

    def losses(problem, params, x, out, mask, segment_ids):
        routing = reference("routing")
        routed = routing.route(problem, params, x)
        return reference("losses").losses(problem, routing.logits(problem, params, x), routed.topk_idx)

    return _with_losses(losses)


@mutant("G", "losses", "layer")
def sequence_loss_over_the_batch() -> dict[str, Any]:
    """The sequence loss is taken over the whole batch and ignores segments."""

    def losses(problem, params, x, out, mask, segment_ids):
        return Losses(balance=out.losses.balance, sequence=out.losses.balance, z=out.losses.z)

    return _with_losses(losses)


@mutant("G", "losses-at-balance", "layer")
def nan_gradient_at_balance() -> dict[str, Any]:
    """The loss passes through a standard deviation, whose gradient at 0 is NaN."""

    def losses(problem, params, x, out, mask, segment_ids):
        z = reference("routing").logits(problem, params, x)
        spread = jnp.sqrt(jnp.square(z - z.mean(axis=1, keepdims=True)).sum())
        return Losses(out.losses.balance + 0.0 * spread, out.losses.sequence, out.losses.z)

    return _with_losses(losses)


@mutant("G", "losses-at-collapse", "layer")
def loss_is_always_one() -> dict[str, Any]:
    """Counts come from a routing map that is filled evenly, so the balance loss never moves."""

    def losses(problem, params, x, out, mask, segment_ids):
        one = out.losses.balance / jax.lax.stop_gradient(out.losses.balance)
        return Losses(one, one, out.losses.z)

    return _with_losses(losses)


def _scores(problem: Any, z: jax.Array) -> jax.Array:
    return z if problem.router.softmax_order == "after" else reference("routing").SCORES[problem.router.score](z)


def _weighted(problem: Any, params: Any, x: jax.Array, chosen: jax.Array, score: jax.Array | None = None) -> Routing:
    """The baseline's weights at given ids."""
    router = problem.router
    if score is None:
        score = _scores(problem, reference("routing").logits(problem, params, x))
    weights = jnp.take_along_axis(score, chosen, axis=1)
    if router.softmax_order == "after":
        weights = jax.nn.softmax(weights, axis=1)
    if router.normalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + router.norm_eps)
    return Routing(chosen, weights * router.scaling)


def _with_losses(losses: Callable[..., Losses]) -> dict[str, Any]:
    """The baseline's layer with other losses: (problem, params, x, Output, mask, segment_ids) -> Losses."""
    own = patched()
    base = own["layer"]

    def layer(problem, params, x, *, mask=None, segment_ids=None):
        out = base(problem, params, x, mask=mask, segment_ids=segment_ids)
        return Output(out.y, losses(problem, params, x, out, mask, segment_ids), out.routing, out.group_sizes)

    return patched(layer=layer)


def _balance_of(probabilities: Callable[..., jax.Array]) -> Callable[..., Losses]:
    def losses(problem, params, x, out, mask, segment_ids):
        z = reference("routing").logits(problem, params, x)
        ids = out.routing.topk_idx
        real = jnp.ones(problem.T, bool) if mask is None else mask
        p = jnp.where(real[:, None], probabilities(problem, z, ids), 0.0)
        counts = jnp.zeros(problem.E, jnp.float32).at[jnp.where(ids < 0, problem.E, ids)].add(1.0, mode="drop")
        n = jnp.maximum(real.sum(dtype=jnp.float32), 1.0)
        balance = problem.E / problem.K * jnp.sum(counts * p.sum(axis=0)) / n**2
        return Losses(balance, out.losses.sequence, out.losses.z)

    return losses


MUTANTS: tuple[Mutant, ...] = (
    weights_of_sorted_slots,
    nan_row_repeats_an_expert,
    tied_experts_taken_at_once,
    logits_in_bfloat16,
    scaling_only_when_normalised,
    always_normalises,
    excluded_groups_score_zero,
    bias_inside_the_weights,
    weight_applied_twice,
    top_1_weight_is_constant,
    bias_never_updated,
    group_limit_off_by_one,
    loss_of_chosen_probabilities,
    losses_count_padding,
    sequence_loss_over_the_batch,
    nan_gradient_at_balance,
    loss_is_always_one,
)
