"""Laws of the live layer: it routes admissibly, and at its own routes it is the oracle's layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from . import running
from .compare import Finding, judge, same_bits
from .draws import stream
from .inputs import Case
from .interface import Implementation
from .law import Law, law
from .law_tools import dtype_of, expect, layer_view, live_case, route_findings
from .problem import Output, Routing

NO_LOSSES = (0.0, 0.0, 0.0)
LOSSES = ("balance", "sequence", "z")
COEFFICIENTS = (0.5, 0.25, 0.125)
"""Cotangents of the losses, large enough that a missing one shows in the gradients."""
OWN = {"own layer", "reports routing", "dropless"}


@law("layer-routes", stage="layer", judged_by="gauge", faults="EFJ", needs={"reports routing"})
def layer_routes(implementation: Implementation, case: Case) -> list[Finding]:
    """The routing that a layer reports is admissible, its weights are right, and its group sizes count it."""
    out, _ = running.layer(implementation, case, loss_cotangents=COEFFICIENTS)
    findings = route_findings(case, reported(out))
    ids = np.asarray(reported(out).topk_idx)
    if out.group_sizes is not None and "drops" not in implementation.traits:
        counts = np.bincount(ids[ids >= 0], minlength=case.problem.E).astype(np.int32)
        findings.append(same_bits("group_sizes", out.group_sizes, counts))
    return findings


@law("layer-value", stage="layer", judged_by="gauge", faults="BCDFM", needs={"reports routing", "dropless"})
def layer_value(implementation: Implementation, case: Case) -> list[Finding]:
    """At its own routes a layer's y is the weighted sum of its experts, plus the shared expert."""
    out, _ = running.layer(implementation, case, loss_cotangents=COEFFICIENTS)
    return _replayed(case, out, {"y": out.y}, None)


@law(
    "layer-gradients",
    stage="layer",
    judged_by="gauge",
    faults="BEGH",
    needs={"reports routing", "dropless", "gradients"},
    scope="shape",
)
def layer_gradients(implementation: Implementation, case: Case) -> list[Finding]:
    """At its own routes every gradient is the oracle's by name: x, the gate's leaves, the experts' and the shared expert's."""
    out, grads = running.layer(implementation, case, loss_cotangents=COEFFICIENTS)
    coefficients = NO_LOSSES if out.losses is None else COEFFICIENTS
    return _replayed(case, out, grads, coefficients)


@law(
    "expert-bias-gradient",
    stage="layer",
    judged_by="bits",
    faults="F",
    needs={"selection bias", "gradients"},
    scope="shape",
)
def expert_bias_gradient(implementation: Implementation, case: Case) -> list[Finding]:
    """The bias that steers selection has a gradient of exactly 0."""
    _, grads = running.layer(implementation, case, loss_cotangents=COEFFICIENTS)
    return [same_bits("expert_bias", grads["expert_bias"] + 0, np.zeros_like(grads["expert_bias"]))]


@law("masked-tokens", stage="layer", judged_by="bits", faults="BG", needs=OWN | {"no-expert", "T >= 2"})
def masked_tokens(implementation: Implementation, case: Case) -> list[Finding]:
    """A masked token may hold anything: its row of y is 0, it is counted nowhere, and no bit of y, losses or gradients shows what it holds."""
    mask = stream(case.seed, "mask").random(case.problem.T) < 0.7
    mask[0] = True
    mask[-1] = False
    results = []
    for held in (0.0, float("nan"), 1e30):
        x = np.asarray(case.x).copy()
        with np.errstate(over="ignore"):  # 1e30 is infinite in float16
            x[~mask] = held
        made = case.replace(x=jnp.asarray(x), mask=jnp.asarray(mask), segment_ids=segments(case))
        results.append((held, *running.layer(implementation, made, loss_cotangents=COEFFICIENTS)))
    _, clean, clean_grads = results[0]
    findings = [same_bits("y", clean.y[~mask] + 0, np.zeros_like(clean.y[~mask]))]
    if clean.group_sizes is not None:
        rows = int(mask.sum()) * case.problem.K
        counted = int(clean.group_sizes.sum())
        findings.append(
            expect("group_sizes", counted == rows, f"{counted} rows are counted; {rows} belong to real tokens")
        )
    for held, out, grads in results[1:]:
        pairs = {"y": (out.y, clean.y), **{n: (grads[n], clean_grads[n]) for n in grads}}
        if out.losses is not None and clean.losses is not None:
            pairs |= {n: (getattr(out.losses, n), getattr(clean.losses, n)) for n in LOSSES}
        for name, (got, want) in pairs.items():
            found = same_bits(name, got, want)
            if not found.ok:
                found = found.replace(message=f"masked tokens that hold {held:g} changed it: {found.message}")
            findings.append(found)
    return findings


@law(
    "unreported-routes", stage="layer", judged_by="gauge", faults="BCDEFH", needs={"opaque", "gradients"}, scope="drawn"
)
def unreported_routes(implementation: Implementation, case: Case) -> list[Finding]:
    """A layer that does not report its routes is right, in y and gradients, on inputs whose experts are not in doubt."""
    made = live_case(case)
    if made is None:
        return []
    out, grads = running.layer(implementation, made, loss_cotangents=NO_LOSSES)
    known = Output(out.y, routing=made.routing)
    return _replayed(made, known, {"y": out.y, **grads}, NO_LOSSES)


def segments(case: Case) -> jnp.ndarray:
    """Up to three segments of consecutive tokens."""
    return jnp.asarray(np.sort(stream(case.seed, "segments").integers(0, 3, case.problem.T)).astype(np.int32))


def _replayed(
    case: Case, out: Output, got: dict[str, Any], coefficients: tuple[float, float, float] | None
) -> list[Finding]:
    """Findings on each tensor against the oracle's layer at the ids of `out`; without coefficients no gradient is."""
    view = layer_view(case, reported(out).topk_idx, loss_cotangents=coefficients)
    return [judge(n, got[n], view[n], dtype=dtype_of(case.problem, n)) for n in got if n in view]


def reported(out: Output) -> Routing:
    """The routing that a layer reported; laws that need one are not asked of a layer that reports none."""
    if out.routing is None:
        message = "layer reported no routing; accepted: Output.routing, or the trait opaque"
        raise running.WrongKind(Finding(tensor="topk_idx", check="ran", ok=False, message=message))
    return out.routing


LAWS: tuple[Law, ...] = (
    layer_routes,
    layer_value,
    layer_gradients,
    expert_bias_gradient,
    masked_tokens,
    unreported_routes,
)
