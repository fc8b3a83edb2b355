"""What a layer has to do: floating-point operations of real rows, bytes that must move, and the roofline they imply."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .problem import Problem

DENSE_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

PEAKS: dict[str, tuple[float, float]] = {
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
}
"""Data-sheet bf16 FLOP/s (dense) and memory bytes/s; elsewhere the roofline uses measured rates only."""


@dataclass(frozen=True)
class Cost:
    """Work of one stage."""

    flops: float
    """Multiply-adds of real rows, times two."""
    bytes: float
    """Every operand read once and every result written once."""

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def flops(problem: Problem, rows: int, *, backward: bool = False, shared: bool = False) -> float:
    """Useful FLOPs of the experts: 6*R*D*F forward when gated, 4*R*D*F otherwise; three times that with the backward pass.

    `rows` is the number R of real routed rows. `shared` counts the shared expert instead, over all T tokens.
    """
    matrices = 3 if problem.experts.gated else 2
    count, width = (problem.T, problem.experts.shared_F) if shared else (rows, problem.F)
    return 2.0 * matrices * count * problem.D * width * (3 if backward else 1)


def cost(problem: Problem, what: str, rows: int, busy: int | None = None) -> Cost:
    """Work of a timed call by name: a stage, `experts` or `layer`, then `forward` or `forward+backward`.

    `busy` is the number of experts that hold a row (only their weights must be read); by default min(E, R).
    """
    stage, _, direction = what.partition(" ")
    both = direction == "forward+backward"
    size = DENSE_DTYPE_BYTES[problem.dtype]
    busy = min(problem.E, rows) if busy is None else busy
    D, F, C = problem.D, problem.F, problem.wi_columns
    weights = busy * (D * C + F * D) * size
    tokens, routed = problem.T * D * size, rows * D * size
    if stage == "route":
        work = 2.0 * problem.T * D * problem.E
        moved = tokens + D * problem.E * size + problem.T * problem.K * 8
        return Cost(work, moved)
    if stage in ("permute", "unpermute"):
        return Cost(2.0 * rows * D if stage == "unpermute" else 0.0, tokens + routed)
    if stage == "grouped_gemm":
        return Cost(2.0 * rows * D * C, routed + busy * D * C * size + rows * C * size)
    forward = tokens * 2 + weights
    work = flops(problem, rows, backward=both)
    moved = forward + (tokens * 2 + weights * 2 if both else 0)
    if stage == "layer":
        times = 3 if both else 1
        work += flops(problem, rows, backward=both, shared=True) + 2.0 * problem.T * D * problem.E * times
    return Cost(work, moved)


def attainable(work: Cost, flops_per_s: float, bytes_per_s: float) -> float:
    """Roofline FLOP/s of some work: the smaller of the arithmetic rate and intensity times the memory rate."""
    return min(flops_per_s, work.intensity * bytes_per_s)


def padded_rows(problem: Problem, implementation: str, group_sizes: np.ndarray, align: int = 1) -> int:
    """Rows that an implementation's GEMMs compute for these counts; R of them are real.

    loop_and_pad computes T rows for each expert, capacity its capacity, ragged_dot on CPU all R rows for each expert;
    the others round each busy expert up to `align`.
    """
    rows = int(group_sizes.sum())
    if implementation == "loop_and_pad":
        return problem.T * problem.E
    if implementation == "capacity":
        share = (problem.capacity_factor or 1.0) * problem.routed_rows / problem.E
        return min(problem.T, math.ceil(share)) * problem.E
    if implementation == "ragged_dot":
        return rows * problem.E
    return int((-(-group_sizes // align) * align).sum())


def dense_shape(problem: Problem, rows: int) -> tuple[int, int, int]:
    """(M, contraction, N) of one dense GEMM with the FLOPs of the experts' forward pass."""
    matrices = 3 if problem.experts.gated else 2
    return max(rows, 1), problem.D, matrices * problem.F


def imbalance(group_sizes: np.ndarray) -> float:
    """Busiest expert's rows over the mean; 1 is perfect balance, 0 for no rows."""
    mean = float(np.mean(group_sizes)) if len(group_sizes) else 0.0
    return float(np.max(group_sizes)) / mean if mean else 0.0
