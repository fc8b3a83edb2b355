"""Parameters for a problem, scaled so that every tensor that is compared stays of order one at every width."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from .draws import nonzeros, normals, quantiles
from .problem import Params, Problem


def make_params(problem: Problem, seed: int = 0, *, pre_rms: float | None = None) -> Params:
    """Random parameters in storage dtype: kernels normal and scaled by fan-in, biases of random sign and never zero.

    `pre_rms` is the root mean square of an expert's pre-activations: 1, or half the clamp's limit when there is a
    clamp, which puts about 5 % of them beyond it. An expert's output then has root mean square 1.
    """
    p, e = problem, problem.experts
    if pre_rms is None:
        pre_rms = 1.0 if e.clamp is None else e.clamp.limit / 2
    columns, shared_columns = p.wi_columns, (2 if e.gated else 1) * e.shared_F
    h = _h_rms(problem, pre_rms)

    def normal(name: str, shape: tuple[int, ...], std: float) -> Array:
        return jnp.asarray(normals(seed, name, shape, std, p.dtype))

    def bias(name: str, shape: tuple[int, ...], scale: float) -> Array:
        return jnp.asarray(nonzeros(seed, name, shape, scale, p.dtype))

    gate_bias, expert_bias = router_biases(problem, seed)
    return Params(
        gate_kernel=normal("gate_kernel", (p.D, p.E), p.D**-0.5),
        gate_bias=None if gate_bias is None else jnp.asarray(gate_bias),
        expert_bias=None if expert_bias is None else jnp.asarray(expert_bias),
        wi=normal("wi", (p.E, p.D, columns), pre_rms * p.D**-0.5),
        wo=normal("wo", (p.E, p.F, p.D), p.F**-0.5 / h),
        wi_bias=bias("wi_bias", (p.E, columns), 0.5 * pre_rms) if e.wi_bias else None,
        wo_bias=bias("wo_bias", (p.E, p.D), 0.5) if e.wo_bias else None,
        shared_wi=normal("shared_wi", (p.D, shared_columns), pre_rms * p.D**-0.5) if e.shared_F else None,
        shared_wo=normal("shared_wo", (e.shared_F, p.D), e.shared_F**-0.5 / h) if e.shared_F else None,
    )


def router_biases(problem: Problem, seed: int = 0) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(gate_bias in storage dtype, expert_bias float32) as the router's switches ask; the rest is None.

    A selection bias is about as large as the spread of the scores that it competes with.
    """
    r, gate_bias, expert_bias = problem.router, None, None
    if r.gate_bias:
        gate_bias = nonzeros(seed, "gate_bias", (problem.E,), 0.5, problem.dtype)
    if r.selection_bias:
        scale = 0.5 if r.softmax_order == "after" else 0.5 / problem.E if r.score == "softmax" else 0.1
        expert_bias = nonzeros(seed, "expert_bias", (problem.E,), scale, "float32")
    return gate_bias, expert_bias


def _h_rms(problem: Problem, pre_rms: float) -> float:
    """Root mean square of h for normal pre-activations, averaged over their quantiles."""
    e = problem.experts
    g = quantiles()[::16] * pre_rms
    if e.clamp is not None:
        gate = np.minimum(g, e.clamp.limit)
        act = gate / (1 + np.exp(-e.clamp.alpha * gate))
        up = np.clip(g, -e.clamp.limit, e.clamp.limit) + e.clamp.offset
    else:
        act = _activations(e.activation, g)
        up = g if e.gated else np.ones_like(g)
    return float(np.sqrt(np.mean(act**2) * np.mean(up**2)))


def _activations(name: str, g: np.ndarray) -> np.ndarray:
    if name == "relu2":
        return np.maximum(g, 0) ** 2
    if name == "silu":
        return g / (1 + np.exp(-g))
    # Both forms of GELU: they differ by less than a thousandth, far below what a scale needs.
    return g * np.array([0.5 * (1 + math.erf(v / math.sqrt(2))) for v in g])
