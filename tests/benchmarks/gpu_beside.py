"""What `te` is timed beside on a GPU: its own grouped GEMMs and nothing else, a dense GEMM, and its own experts in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from dropless.optimized.te import grouped_gemm as gg
from dropless.optimized.te import rows
from dropless.optimized.te.hidden import hidden, hidden_gradient
from dropless.parity.bounds import dense_gemm
from dropless.parity.inputs import Case
from dropless.parity.interface import Implementation
from dropless.parity.problem import Params, Routing
from dropless.parity.stages import stage_call
from dropless.parity.timing import Call, prepare

ALONE = {"experts": "experts' grouped GEMMs alone", "layer": "layer's grouped GEMMs alone"}
EXPERT_CALLS = ("experts forward", "experts forward+backward")

Makers = dict[str, Callable[[], Call]]
"""What compiles each call, by its name."""


def own_gemms(implementation: Implementation, cases: list[Case]) -> Makers:
    """The grouped GEMMs of the experts, at the routing they are given, and of the layer, at its own; and a dense one."""
    problem = cases[0].problem
    route = jax.jit(lambda p, x: implementation.stage("layer")(problem, p, x).routing)
    found: Makers = {"dense GEMM": lambda: dense_gemm(problem, problem.routed_rows)}
    for stage, routings in (
        ("experts", [c.routing for c in cases]),
        ("layer", [route(c.params, c.x) for c in cases]),
    ):
        found |= {f"{ALONE[stage]}{tail}": call for tail, call in gemms(cases, routings).items()}
    return found


def unquantised(implementation: Implementation, cases: list[Case]) -> Makers:
    """The same experts in bfloat16."""
    plain = [c.replace(problem=c.problem.replace(recipe="none")) for c in cases]
    return {f"bfloat16: {w}": lambda w=w: stage_call(implementation, w, plain) for w in EXPERT_CALLS}


def gemms(cases: list[Case], routings: list[Routing]) -> Makers:
    """The layer's grouped GEMMs and nothing else, on the very operands it has: two forward, six with the backward pass.

    What the operands hold decides how much power a product draws, and with it the clock: random ones of one size would
    be another measurement.
    """
    problem, spec = cases[0].problem, cases[0].problem.experts

    @jax.jit
    def operands(case_params: Params, x: Any, routing: Routing, dy: Any) -> tuple:
        at, P = rows.plan(routing.topk_idx, problem.E), problem.routed_rows
        found, weight = rows.spread(x, at.row_of_slot, P, routing.topk_weights)
        d, _ = rows.spread(dy, at.row_of_slot, P)
        pre = gg.product(found, case_params.wi, at.group_sizes)
        h = hidden(spec, pre, weight if spec.weight_placement == "early" else None)
        weighted_h, d_pre, _ = hidden_gradient(
            spec, pre, gg.transposed_product(d, case_params.wo, at.group_sizes), weight
        )
        return found, h, d, weighted_h, d_pre, at.group_sizes, case_params.wi, case_params.wo

    inputs = [operands(c.params, c.x, r, c.cotangent) for c, r in zip(cases, routings, strict=True)]

    def forward(found: Any, h: Any, d: Any, weighted_h: Any, d_pre: Any, sizes: Any, wi: Any, wo: Any) -> Any:
        return gg.product(found, wi, sizes), gg.product(h, wo, sizes)

    def both(found: Any, h: Any, d: Any, weighted_h: Any, d_pre: Any, sizes: Any, wi: Any, wo: Any) -> Any:
        return (
            forward(found, h, d, weighted_h, d_pre, sizes, wi, wo),
            (gg.transposed_product(d, wo, sizes), gg.kernel_gradient(weighted_h, d, sizes)),
            (gg.transposed_product(d_pre, wi, sizes), gg.kernel_gradient(found, d_pre, sizes)),
        )

    return {
        "": lambda: prepare("grouped GEMMs alone", forward, inputs),
        ", forward+backward": lambda: prepare("grouped GEMMs alone, forward+backward", both, inputs),
    }
