"""A layer made slower on purpose: the wrapper that the guard's trials inject. Only tests use it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from dropless.parity import Implementation, Routing


def slower(implementation: Implementation, stage: str, share: float) -> Implementation:
    """The implementation with more work in one stage (grouped_gemm or experts) and the same result, bit for bit.

    grouped_gemm multiplies `share` of the columns again, experts runs `share` of the tokens again. What that costs is to be
    measured: a small product is slower per column than a large one.
    """
    fn = implementation.stage(stage)

    def grouped_gemm(rows, kernels, group_sizes):
        extra = fn(rows, kernels[:, :, : max(round(share * kernels.shape[2]), 1)], group_sizes)
        return _with(fn(rows, kernels, group_sizes), extra)

    def experts(problem, params, x, routing):
        part = problem.replace(T=max(round(share * problem.T), 1))
        few = Routing(routing.topk_idx[: part.T], routing.topk_weights[: part.T])
        return _with(fn(problem, params, x, routing), fn(part, params, x[: part.T], few))

    made = {"grouped_gemm": grouped_gemm, "experts": experts}[stage]
    name = f"{implementation.name} with a slower {stage}"
    return dataclasses.replace(implementation, name=name, stages={**implementation.stages, stage: made})


def _with(out: Any, extra: Any) -> Any:
    """`out`, but not before `extra` is there: an addition of 0 that no compiler may foresee, since 0 * nan is nan.

    The gradient goes through `extra` too, as zeros that no compiler foresees either: a slower stage is slower backward as well.
    """
    return out + (0.0 * jnp.max(extra)).astype(out.dtype)
