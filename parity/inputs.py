"""Numbers for a problem: parameters, tokens, routings and cotangents, already rounded to storage dtype.

`make_case` is the one call that suites, timers and tests need. All values come from NumPy streams keyed by the seed and
the tensor's name, so the same seed gives the same bits on every machine and JAX version. Nothing is zero, equal or
symmetric by accident: biases are never 0, and the weights of a token's slots always differ, since equal weights would
hide a mixed-up slot.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from .choice import choose, tie_pairs, within_groups
from .draws import NUMPY_DTYPES, normals, stream
from .margins import MarginInputs, margin_inputs
from .params import make_params
from .patterns import routing_ids
from .problem import InvalidInput, Params, Problem, Routing
from .trace import check_ids

__all__ = [
    "Case",
    "MarginInputs",
    "make_case",
    "make_cotangent",
    "make_params",
    "make_weights",
    "make_x",
    "margin_inputs",
]


@dataclass(frozen=True)
class Case:
    """One problem with numbers: everything that an implementation and its judge need. Arrays are in storage dtype."""

    problem: Problem
    params: Params
    x: Float[Array, "T D"]
    routing: Routing
    cotangent: Float[Array, "T D"]
    """Of y, in `problem.dtype`, standard normal."""
    seed: int
    mask: Bool[Array, " T"] | None = None
    """True is a real token; the `layer` stage reads it, `experts` reads the routing only."""
    segment_ids: Int[Array, " T"] | None = None
    label: str = ""

    def replace(self, **changes: Any) -> Case:
        """A copy with other parts."""
        return dataclasses.replace(self, **changes)


def make_case(
    problem: Problem,
    *,
    seed: int = 0,
    pattern: str | None = "zipf",
    routing: Routing | Int[np.ndarray, "T K"] | None = None,
    exponent: float = 1.0,
    x: Float[Array, "T D"] | None = None,
    mask: Bool[np.ndarray, " T"] | None = None,
    segment_ids: Int[np.ndarray, " T"] | None = None,
    live: bool = False,
    params: Params | None = None,
    pre_rms: float | None = None,
) -> Case:
    """A case whose routing is drawn from a named pattern, or given as a `Routing` or as ids; weights are random.

    pattern None takes the ids that an exact router chooses on x. live=True builds x, gate_kernel and biases for which
    a layer's own router chooses the drawn ids, with a margin (`margin_inputs`; not together with x); ids drawn from a
    pattern are first brought within the router's groups. Without it the router's choice on x has nothing to do with the
    drawn ids. Given `params` are used as they are, gate kernel included. A masked token is routed nowhere.
    Raises InvalidInput when the pattern, the given arrays or the margin cannot be had at this problem.
    """
    given = params is not None
    params = params if given else make_params(problem, seed, pre_rms=pre_rms)
    tokens = make_x(problem, seed) if x is None else _given_x(problem, x)
    ids, label = _ids(problem, params, tokens, seed, pattern, routing, exponent)
    if live:
        if x is not None:
            raise InvalidInput("live inputs were asked for together with x; accepted: one of the two")
        if routing is None:
            ids = within_groups(problem, ids, seed)
        made = margin_inputs(problem, ids, seed, params=params, keep_kernel=given)
        tokens, params = made.x, params if given else made.params(params)
    elif pattern == "ties" and routing is None and not given:
        params = tie_pairs(params)
    if mask is not None:
        mask = _per_token(problem, "mask", mask).astype(bool)
        ids = np.where(mask[:, None], ids, -1)
    if segment_ids is not None:
        segment_ids = _per_token(problem, "segment_ids", segment_ids)
    if isinstance(routing, Routing):
        weights = np.where(ids < 0, 0, np.asarray(routing.topk_weights))
    else:
        weights = make_weights(problem, ids, seed)
    return Case(
        problem=problem,
        params=params,
        x=jnp.asarray(tokens),
        routing=Routing(jnp.asarray(ids, jnp.int32), jnp.asarray(weights, jnp.float32)),
        cotangent=jnp.asarray(make_cotangent(problem, seed)),
        seed=seed,
        mask=None if mask is None else jnp.asarray(mask),
        segment_ids=None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32),
        label=label,
    )


def make_x(problem: Problem, seed: int = 0) -> np.ndarray:
    """Tokens [T, D]: standard normal, in storage dtype."""
    return normals(seed, "x", (problem.T, problem.D), 1.0, problem.dtype)


def make_cotangent(problem: Problem, seed: int = 0) -> np.ndarray:
    """A cotangent of y [T, D]: standard normal, in storage dtype."""
    return normals(seed, "cotangent", (problem.T, problem.D), 1.0, problem.dtype)


def make_weights(problem: Problem, topk_idx: Int[np.ndarray, "T K"], seed: int = 0) -> Float[np.ndarray, "T K"]:
    """Float32 weights, positive, about `scaling` in sum, a token's own ones apart by scaling/K**2 or more; 0 for id -1."""
    T, K = topk_idx.shape
    rng = stream(seed, "topk_weights")
    levels = rng.permuted(np.tile(np.arange(K), (T, 1)), axis=1)
    # Jitter spans half a level, so neighbouring levels never meet.
    weights = (levels + 0.25 + 0.5 * rng.random((T, K))) * (2 * problem.router.scaling / K**2)
    return np.where(topk_idx < 0, 0, weights).astype(np.float32)


def _given_x(problem: Problem, x: Any) -> np.ndarray:
    x = np.asarray(x)
    if x.shape != (problem.T, problem.D):
        raise InvalidInput(f"x has shape {x.shape}; accepted: T, D = {(problem.T, problem.D)}")
    return x.astype(NUMPY_DTYPES[problem.dtype])


def _per_token(problem: Problem, name: str, values: Any) -> np.ndarray:
    values = np.asarray(values)
    if values.shape != (problem.T,):
        raise InvalidInput(f"{name} has shape {values.shape}; accepted: T = {problem.T} values")
    return values


def _ids(
    problem: Problem,
    params: Params,
    x: np.ndarray,
    seed: int,
    pattern: str | None,
    given: Routing | Int[np.ndarray, "T K"] | None,
    exponent: float,
) -> tuple[np.ndarray, str]:
    if given is not None:
        ids = np.asarray(given.topk_idx if isinstance(given, Routing) else given)
        check_ids(ids, problem.E)
        if ids.shape != (problem.T, problem.K):
            raise InvalidInput(f"topk_idx has shape {ids.shape}; accepted: T, K = {(problem.T, problem.K)}")
        return ids.astype(np.int32), "given"
    if pattern is None:
        return choose(problem, params, x), "router"
    label = f"{pattern} {exponent:g}" if pattern == "zipf" else pattern
    return routing_ids(pattern, problem.T, problem.K, problem.E, seed, exponent), label
