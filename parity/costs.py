"""What a layer has to do: floating-point operations of real rows, bytes that must move, and the roofline they imply."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np

from .problem import Problem

DENSE_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


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


def padded_rows(problem: Problem, implementation: str, group_sizes: np.ndarray) -> int:
    """Rows that an implementation's GEMMs compute for these counts; R of them are real.

    loop_and_pad computes T rows for each expert, capacity its budget, ragged_dot (without a GPU) all R rows for each expert,
    blocked the blocks that it visits; any other is taken to pad nothing.
    """
    rows = int(group_sizes.sum())
    if implementation == "loop_and_pad":
        return problem.T * problem.E
    if implementation == "ragged_dot":
        return rows * problem.E
    if implementation == "capacity":
        return problem.E * importlib.import_module("dropless.reference.capacity").rows_per_expert(problem)
    if implementation == "blocked":
        visit = importlib.import_module("dropless.optimized.xla.visit")
        blocks = np.asarray(visit.block_sizes(problem.routed_rows, problem.T))
        largest = blocks[-1]
        one = blocks[np.minimum(np.searchsorted(blocks, group_sizes), len(blocks) - 1)]
        several = -(-group_sizes // largest) * largest
        return int(np.where(group_sizes > largest, several, one)[group_sizes > 0].sum())
    return rows


def imbalance(group_sizes: np.ndarray) -> float:
    """Busiest expert's rows over the mean; 1 is perfect balance, 0 for no rows."""
    mean = float(np.mean(group_sizes)) if len(group_sizes) else 0.0
    return float(np.max(group_sizes)) / mean if mean else 0.0
