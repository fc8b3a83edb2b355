"""What no layer can beat: one dense GEMM with the same FLOPs, and a layer's own grouped GEMMs alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .inputs import Case, normals
from .interface import Implementation
from .problem import Problem
from .timing import Call, prepare

COPY_BYTES = 128 * 2**20
"""Of the array that `memory_copy` reads."""

DENSE_ROWS = 16384
"""Rows of the dense GEMM are capped: its rate no longer changes, and its operands stay small."""


def dense_gemm(problem: Problem, rows: int, variants: int = 3, *, full: bool = False) -> Call:
    """One dense product x[M, D] @ w[D, N] in the problem's dtype; N holds every matrix of one expert side by side.

    M is R, or less when R is large and `full` is off: what counts is the rate.
    """
    M = max(rows if full else min(rows, DENSE_ROWS), 1)
    N = (3 if problem.experts.gated else 2) * problem.F
    w = jnp.asarray(normals(0, "dense_w", (problem.D, N), problem.D**-0.5, problem.dtype))
    inputs = [(jnp.asarray(normals(v, "dense_x", (M, problem.D), 1.0, problem.dtype)), w) for v in range(variants)]
    return prepare("dense GEMM", lambda x, w: matmul(problem, x, w), inputs)


def dense_flops(problem: Problem, call: Call) -> float:
    """FLOPs of that product."""
    x, w = call.inputs[0]
    return 2.0 * x.shape[0] * w.shape[0] * w.shape[1]


def memory_copy(variants: int = 3) -> Call:
    """Reads an array far above any cache and writes one of its size: what memory gives."""
    inputs = [(jnp.full(COPY_BYTES // 4, float(v), jnp.float32),) for v in range(variants)]
    return prepare("memory copy", lambda x: x + 1.0, inputs)


def grouped_gemms(implementation: Implementation, cases: list[Case]) -> Call:
    """The implementation's own two grouped GEMMs on sorted rows, with nothing before, between or after them."""
    problem = cases[0].problem
    gemm, permute = implementation.stage("grouped_gemm"), implementation.stage("permute")
    F = problem.F

    def run(rows, group_sizes, wi, wo):
        hidden = gemm(rows, wi, group_sizes)
        return gemm(hidden[:, :F], wo, group_sizes)

    inputs = []
    for case in cases:
        rows, group_sizes, _ = jax.jit(lambda x, r: permute(problem, x, r))(case.x, case.routing)
        inputs.append((rows, group_sizes, case.params.wi, case.params.wo))
    return prepare("grouped GEMMs alone", run, inputs)


def matmul(problem: Problem, x: jax.Array, w: jax.Array) -> jax.Array:
    """x @ w at the problem's precision with float32 accumulation, rounded once to its dtype."""
    precision = jax.lax.Precision.HIGHEST if problem.dtype == "float32" and problem.precision == "highest" else None
    out = jax.lax.dot_general(x, w, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)
    return out.astype(problem.dtype)
