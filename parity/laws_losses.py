"""Laws of the auxiliary losses: their anchors, what they are averaged over, and who feels their gradient."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import running
from .compare import Finding, judge, same_bits
from .draws import stream
from .inputs import Case
from .interface import Implementation, Judged
from .law import Law, law
from .law_tools import dtype_of, expect, layer_view
from .laws_layer import COEFFICIENTS, LOSSES, OWN, reported, segments

ULPS = 64 * 2.0**-24
"""Gauge of a float32 mean whose exact value is known: its terms are equal, so only their own few roundings remain."""


@law("losses", stage="layer", judged_by="gauge", faults="G", needs=OWN)
def losses(implementation: Implementation, case: Case) -> list[Finding]:
    """The balance, sequence and z losses have the oracle's values, over real tokens and inside segments."""
    marked = _marked(case)
    out, _ = running.layer(implementation, marked, loss_cotangents=COEFFICIENTS)
    if out.losses is None:
        return []
    view = layer_view(marked, reported(out).topk_idx)
    return [judge(n, getattr(out.losses, n), view[n], dtype=dtype_of(case.problem, n)) for n in LOSSES]


@law("losses-at-balance", stage="layer", judged_by="gauge", faults="G", needs=OWN, scope="shape")
def losses_at_balance(implementation: Implementation, case: Case) -> list[Finding]:
    """A gate of zeros gives balance and sequence losses of 1, a z loss of log(E)^2, and finite gradients."""
    out, grads = running.layer(
        implementation, _gate(case, np.zeros(case.params.gate_kernel.shape)), loss_cotangents=(1.0, 1.0, 1.0)
    )
    if out.losses is None:
        return []
    want = {"balance": 1.0, "sequence": 1.0, "z": math.log(case.problem.E) ** 2}
    findings = [_near(n, getattr(out.losses, n), v) for n, v in want.items()]
    for name in ("x", "gate_kernel"):
        findings.append(
            expect(name, np.isfinite(grads[name]).all(), f"at a gate of zeros the gradient of {name} is not finite")
        )
    return findings


@law(
    "losses-at-collapse",
    stage="layer",
    judged_by="gauge",
    faults="G",
    needs=OWN | {"one group", "softmax before"},
    scope="shape",
)
def losses_at_collapse(implementation: Implementation, case: Case) -> list[Finding]:
    """When all tokens choose the same K experts with equal probability the balance loss is E / K."""
    problem = case.problem
    chosen = stream(case.seed, "collapse").permutation(problem.E)[: problem.K]
    kernel = np.zeros((problem.D, problem.E))
    kernel[0, chosen] = 64.0  # exp(-64) of the rest is below float32's resolution of the sum
    x = np.asarray(case.x).copy()
    x[:, 0] = 1.0
    collapsed = _gate(case, kernel).replace(x=jnp.asarray(x))
    out, _ = running.layer(implementation, collapsed, loss_cotangents=COEFFICIENTS)
    if out.losses is None:
        return []
    want = problem.E / problem.K
    return [_near("balance", out.losses.balance, want), _near("sequence", out.losses.sequence, want)]


@law("losses-see-real-tokens", stage="layer", judged_by="bits", faults="G", needs=OWN | {"no-expert", "T >= 2"})
def losses_see_real_tokens(implementation: Implementation, case: Case) -> list[Finding]:
    """What masked tokens hold, and so where they would have gone, changes no bit of any loss."""
    mask = np.arange(case.problem.T) < max(1, case.problem.T // 2)
    outs = []
    for sign in (1, -1):
        x = np.asarray(case.x).copy()
        x[~mask] = sign * np.asarray(case.params.gate_kernel)[:, 0].astype(x.dtype)
        made = case.replace(x=jnp.asarray(x), mask=jnp.asarray(mask), segment_ids=segments(case))
        outs.append(running.layer(implementation, made, loss_cotangents=COEFFICIENTS)[0])
    if outs[0].losses is None:
        return []
    return [same_bits(n, getattr(outs[1].losses, n), getattr(outs[0].losses, n)) for n in LOSSES]


@law(
    "loss-gradient-of-all",
    stage="layer",
    judged_by="bits",
    faults="G",
    needs=OWN | {"K < E", "gradients"},
    scope="shape",
)
def loss_gradient_of_all(implementation: Implementation, case: Case) -> list[Finding]:
    """The balance loss pushes the logits of experts that no token chose: their gate columns have a gradient."""
    # One expert's logits lie 8 below where they would: its probability is small, and its gradient is not 0.
    shunned, kernel, x = case.seed % case.problem.E, np.array(case.params.gate_kernel), np.array(case.x)
    x[:, 0], kernel[0, shunned] = 1, kernel[0, shunned] - 8
    quiet = _gate(case, kernel).replace(x=jnp.asarray(x), cotangent=jnp.asarray(np.zeros_like(case.cotangent)))
    out, grads = running.layer(implementation, quiet, loss_cotangents=(1.0, 0.0, 0.0))
    if out.losses is None:
        return []
    unchosen = np.setdiff1d(np.arange(case.problem.E), np.asarray(reported(out).topk_idx))
    silent = [int(e) for e in unchosen if not np.any(grads["gate_kernel"][:, e])]
    return [expect("gate_kernel", not silent, f"the balance loss gives the unchosen experts {silent[:8]} no gradient")]


def _marked(case: Case) -> Case:
    T = case.problem.T
    mask = stream(case.seed, "loss mask").random(T) < 0.8
    return case.replace(mask=jnp.asarray(mask | (np.arange(T) == 0)), segment_ids=segments(case))


def _gate(case: Case, kernel: np.ndarray) -> Case:
    leaves = {
        n: jnp.asarray(np.zeros(v.shape, v.dtype))
        for n in ("gate_bias", "expert_bias")
        if (v := getattr(case.params, n)) is not None
    }
    leaves["gate_kernel"] = jnp.asarray(np.asarray(kernel).astype(case.params.gate_kernel.dtype))
    return case.replace(params=case.params.replace(**leaves))


def _near(name: str, got: Any, want: float) -> Finding:
    value = np.asarray(want, np.float64)
    return judge(name, np.asarray(got), Judged(value, np.abs(value) * ULPS + 0.0), dtype="float32")


LAWS: tuple[Law, ...] = (
    losses,
    losses_at_balance,
    losses_at_collapse,
    losses_see_real_tokens,
    loss_gradient_of_all,
)
