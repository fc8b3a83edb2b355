"""Laws of quantised experts: what no rounding excuses, since every operand here is a number that its format holds.

Each law brings a problem of its own, with group sizes around the blocks' edges, and judges the recipes that an
implementation says it supports: the case's own, or MXFP8 and FP8 with current scaling, or else all of them.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from . import running
from .compare import Finding, same_bits
from .draws import stream
from .inputs import Case, make_case
from .interface import Implementation
from .law import Law, law
from .law_tools import by_oracle, expect, real_rows, storage, with_routing
from .problem import RECIPES, Problem

SIZES = (1, 15, 16, 17, 31, 32, 33, 1)
"""Rows of each expert: around 16 and 32, and single ones."""

USUAL = ("mxfp8", "fp8-current")
"""What is judged of an implementation that supports more, when the case names no recipe."""

WIDTH = 64
"""D and F: two blocks of MXFP8, four of NVFP4."""

WIDE = 30
"""Binades between neighbouring columns: more than any eight-bit format spans."""


@law("exact-quantised", stage="experts", judged_by="bits", faults="I", needs={"no mesh", "recipe"}, scope="once")
def exact_quantised(implementation: Implementation, case: Case) -> list[Finding]:
    """With powers of two as operands, different ones an expert, quantised experts give the exact y and gradients."""
    findings = []
    for problem in _problems(implementation, case):
        made = _powers(problem, case.seed)
        want = _exact(made, _exponents(problem))
        got = running.experts(implementation, made)
        findings += [_of(problem, same_bits(n, _no_sign(got[n]), _no_sign(want[n]))) for n in want if n in got]
    return findings


@law(
    "quantised-columns",
    stage="experts",
    judged_by="bits",
    faults="I",
    needs={"no mesh", "recipe", "gradients"},
    scope="once",
)
def quantised_columns(implementation: Implementation, case: Case) -> list[Finding]:
    """Columns of dy (and of h, under MXFP8) that lie 30 binades apart give wo's exact gradient: its operands' blocks run along the rows."""
    findings = []
    for problem in _problems(implementation, case):
        if problem.recipe not in ("mxfp8", "fp8-block"):
            continue
        made, exponents = _powers(problem, case.seed), _exponents(problem)
        far = 2.0 ** (WIDE * (np.arange(WIDTH) % 2))
        made = made.replace(cotangent=storage(problem, _wide(made.cotangent) * far))
        if problem.recipe == "mxfp8":
            wi = _wide(made.params.wi)
            wi[:, :, WIDTH:] *= far
            made = made.replace(params=made.params.replace(wi=storage(problem, wi)))
        got = running.experts(implementation, made)
        if "wo" in got:
            want = _exact(made, exponents)["wo"]
            findings.append(_of(problem, same_bits("wo", _no_sign(got["wo"]), _no_sign(want))))
    return findings


@law(
    "quantised-boundaries",
    stage="experts",
    judged_by="bits",
    faults="I",
    needs={"no mesh", "recipe", "gradients", "no-expert"},
    scope="once",
)
def quantised_boundaries(implementation: Implementation, case: Case) -> list[Finding]:
    """Rows of other experts that are 2^24 times larger, and NaN in a token that goes nowhere, change no bit of an expert's gradients."""
    findings = []
    for problem in _problems(implementation, case):
        if problem.recipe == "nvfp4":
            continue  # its forward pass has one scale for the rows of all experts
        drawn = _drawn(problem, case.seed)
        ids = real_rows(drawn).copy()
        ids[-1] = -1
        drawn = with_routing(drawn, ids, np.asarray(drawn.routing.topk_weights))
        base = drawn.replace(x=_stored(drawn, _with_last(drawn, 0.0)))
        clean = running.experts(implementation, base)
        for expert in (2, 5):
            others = ~(ids == expert).any(axis=1)
            factor = np.where(others, 2.0**24, 1.0)[:, None]
            x = _with_last(drawn, np.nan) * factor
            dy = _stored(drawn, _wide(drawn.cotangent) * factor)
            got = running.experts(implementation, base.replace(x=_stored(drawn, x), cotangent=dy))
            for name in ("wi", "wo"):
                if name in got:
                    findings.append(_of(problem, same_bits(name, got[name][expert], clean[name][expert])))
    return findings


@law("quantised-finite", stage="experts", judged_by="bits", faults="I", needs={"no mesh", "recipe"}, scope="once")
def quantised_finite(implementation: Implementation, case: Case) -> list[Finding]:
    """Zero blocks, zero kernels and values beyond every format stay finite, and a zero token's y is exactly 0."""
    findings = []
    for problem in _problems(implementation, case):
        drawn = _drawn(problem, case.seed)
        x, dy, wi = _wide(drawn.x), _wide(drawn.cotangent), _wide(drawn.params.wi)
        x[::5], x[1::5, :32], x[2::5] = 0.0, 0.0, x[2::5] * 2.0**15
        dy[::3], dy[1::3] = 0.0, dy[1::3] * 2.0**18
        wi[1], wi[2, :32] = 0.0, 0.0
        made = drawn.replace(x=storage(problem, x), cotangent=storage(problem, dy))
        made = made.replace(params=drawn.params.replace(wi=storage(problem, wi)))
        got = running.experts(implementation, made)
        for name, value in got.items():
            finite = np.isfinite(value.astype(np.float32)).all()
            findings.append(_of(problem, expect(name, finite, f"{name} holds a value that is not finite")))
        findings.append(_of(problem, same_bits("y", _no_sign(got["y"][::5]), np.zeros_like(got["y"][::5]))))
    return findings


@law("quantised-value", stage="experts", judged_by="gauge", faults="I", needs={"no mesh", "recipe"}, scope="once")
def quantised_value(implementation: Implementation, case: Case) -> list[Finding]:
    """Under a recipe y and every gradient are the unquantised oracle's, as far as rounding the operands explains."""
    findings = []
    for problem in _problems(implementation, case):
        drawn = _drawn(problem, case.seed)
        got = running.experts(implementation, drawn)
        findings += [_of(problem, f) for f in by_oracle(drawn, got, got)]
    return findings


LAWS: tuple[Law, ...] = (exact_quantised, quantised_columns, quantised_boundaries, quantised_finite, quantised_value)


def _problems(implementation: Implementation, case: Case) -> list[Problem]:
    """The laws' own problem under every recipe to be judged."""
    T = sum(SIZES) // 2
    own = Problem(T=T, K=2, E=len(SIZES), D=WIDTH, F=WIDTH, dtype="bfloat16")
    recipes = [case.problem.recipe] if case.problem.recipe != "none" else [r for r in RECIPES if r != "none"]
    able = [r for r in recipes if implementation.supports(own.replace(recipe=r))]
    usual = [r for r in able if r in USUAL]
    return [own.replace(recipe=r) for r in usual or able]


@functools.lru_cache(maxsize=32)
def _drawn(problem: Problem, seed: int) -> Case:
    return make_case(problem, seed=seed, routing=_ids(problem))


def _ids(problem: Problem) -> np.ndarray:
    """[T, 2] ids with exactly SIZES rows an expert; no group exceeds T, so a token's two experts differ."""
    return np.repeat(np.arange(len(SIZES)), SIZES).reshape(2, problem.T).T.astype(np.int32)


class _Exponents:
    """Powers of two of each expert's gate, up and wo; neighbours differ in each, and products stay within e4m3."""

    def __init__(self, E: int):
        e = np.arange(E)
        self.open = 5 + np.array([0, 3, 1, 2, 3, 0, 2, 1])[e % 8]
        self.up = e % 3 + 2 - self.open
        self.wo = -e


def _exponents(problem: Problem) -> _Exponents:
    return _Exponents(problem.E)


def _powers(problem: Problem, seed: int) -> Case:
    """Operands that are signed powers of two: column 0 of x opens the gates, where silu is the identity.

    Every block then holds one magnitude or a few neighbouring ones, so any scale that is the block's own represents it
    exactly; sums have so few terms that float32 and bfloat16 hold them.
    """
    E, D, F, at = problem.E, problem.D, problem.F, _exponents(problem)
    f = np.arange(F - 1)
    wi, wo = np.zeros((E, D, 2 * F)), np.zeros((E, F, D))
    wi[:, 0, :F] = 2.0 ** at.open[:, None]
    wi[:, 1 + f, F + f] = _signs(seed, "wi", (E, F - 1)) * 2.0 ** at.up[:, None]
    wo[:, f, 1 + f] = _signs(seed, "wo", (E, F - 1)) * 2.0 ** at.wo[:, None]
    wo[:, f, (8 + f) % D] += _signs(seed, "wo again", (E, F - 1)) * 2.0 ** at.wo[:, None]
    x = _signs(seed, "x", (problem.T, D))
    x[:, 0] = 1.0
    drawn = _drawn(problem, seed)
    first = 0.5 ** (1 + np.arange(problem.T) % 2)
    made = with_routing(drawn, _ids(problem), np.stack([first, 0.75 - first], axis=1).astype(np.float32))
    return made.replace(
        x=storage(problem, x),
        params=drawn.params.replace(wi=storage(problem, wi), wo=storage(problem, wo)),
        cotangent=storage(problem, _signs(seed, "dy", (problem.T, D))),
    )


def _exact(case: Case, at: _Exponents) -> dict[str, np.ndarray]:
    """y and every gradient where silu is the identity, in storage dtype; float64 loses nothing on the way."""
    problem, ids = case.problem, real_rows(case)
    x, dy, wi, wo = (_wide(a) for a in (case.x, case.cotangent, case.params.wi, case.params.wo))
    w, F = np.asarray(case.routing.topk_weights, np.float64), problem.F
    y, dx, dw = np.zeros_like(x), np.zeros_like(x), np.zeros_like(w)
    dwi, dwo = np.zeros_like(wi), np.zeros_like(wo)
    for e in range(problem.E):
        t, k = np.nonzero(ids == e)
        gate, up = x[t] @ wi[e, :, :F], x[t] @ wi[e, :, F:]
        h, weight = gate * up, w[t, k][:, None]
        np.add.at(y, t, weight * (h @ wo[e]))
        dh = (weight * dy[t]) @ wo[e].T
        dpre = np.concatenate([dh * up, dh * gate], axis=1)
        np.add.at(dx, t, dpre @ wi[e].T)
        dw[t, k] = (dy[t] * (h @ wo[e])).sum(axis=1)
        dwi[e], dwo[e] = x[t].T @ dpre, h.T @ (weight * dy[t])
    stored = {"y": y, "x": dx, "wi": dwi, "wo": dwo}
    dtype = np.asarray(case.x).dtype
    return {**{name: a.astype(dtype) for name, a in stored.items()}, "topk_weights": dw.astype(np.float32)}


def _with_last(case: Case, value: float) -> np.ndarray:
    x = _wide(case.x)
    x[-1] = value
    return x


def _stored(case: Case, values: np.ndarray) -> jnp.ndarray:
    return jnp.asarray(values.astype(np.asarray(case.x).dtype))


def _wide(array: object) -> np.ndarray:
    return np.array(array).astype(np.float64)


def _no_sign(array: np.ndarray) -> np.ndarray:
    # Adding 0 turns -0 into +0: the sign of an exact zero says nothing about a scale.
    return array + np.zeros_like(array)


def _signs(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    return stream(seed, f"powers {name}").integers(0, 2, shape) * 2.0 - 1.0


def _of(problem: Problem, finding: Finding) -> Finding:
    return finding if finding.ok else finding.replace(message=f"{problem.recipe}: {finding.message}")
