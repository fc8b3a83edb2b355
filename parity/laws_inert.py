"""Laws of what must not matter: undefined rows, tokens that go nowhere, and what memory held before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from . import running
from .compare import Finding, same_bits
from .draws import stream
from .inputs import Case
from .interface import Implementation
from .law import Law, law
from .law_tools import by_bits_or_gauge, expect, real_rows, storage, with_routing
from .laws_structure import permuted
from .laws_values import loud
from .problem import Routing

POISONS = (float("nan"), float("inf"), 1e30)
"""What an undefined row may hold: 0 * NaN is NaN, Inf - Inf is NaN, and 1e30 survives where a NaN test would not."""

SLACK = 8
"""Rows beyond the groups that a grouped GEMM is given, as a receive buffer has."""


@law("inert-tokens", stage="experts", judged_by="bits", faults="BJ", needs={"no-expert", "T >= 2"})
def inert_tokens(implementation: Implementation, case: Case) -> list[Finding]:
    """What the tokens that go nowhere hold (NaN, Inf, 1e30, in x and in their weights) changes no bit of y or of any gradient."""
    made, lost = _with_lost_tokens(case, 0.0)
    clean = running.experts(implementation, made)
    findings = []
    for poison in POISONS:
        got = running.experts(implementation, _with_lost_tokens(case, poison)[0])
        findings += [_poisoned(f, poison) for f in by_bits_or_gauge(implementation, made, got, clean)]
        if "x" in got:
            findings.append(_poisoned(same_bits("x", got["x"][lost], np.zeros_like(got["x"][lost])), poison))
    return findings


@law("inert-rows", stage="unpermute", judged_by="bits", faults="BI", needs={"no mesh"})
def inert_rows(implementation: Implementation, case: Case) -> list[Finding]:
    """What rows that hold no token contain (NaN, Inf, 1e30) changes no bit of the combined y or of the weights' gradient."""
    problem = case.problem
    findings: list[Finding] = []
    for align in (1, 8):
        rows, _, places = permuted(implementation, case, align)
        unused = np.setdiff1d(np.arange(len(rows)), places)
        results = []
        for poison in (0.0, *POISONS):
            filled = rows.copy()
            filled[unused] = poison
            args = (jnp.asarray(filled), case.routing, jnp.asarray(places), case.cotangent)
            results.append(running.to_host(running.call(implementation, "unpermute", _unpermute_vjp, *args, problem)))
        for poison, (y, dw) in zip(POISONS, results[1:], strict=True):
            findings.append(_poisoned(same_bits("y", y, results[0][0]), poison))
            findings.append(_poisoned(same_bits("topk_weights", dw, results[0][1]), poison))
    return findings


@law("inert-gemm-rows", stage="grouped_gemm", judged_by="bits", faults="AB", needs={"no mesh", "device sizes"})
def inert_gemm_rows(implementation: Implementation, case: Case) -> list[Finding]:
    """What rows beyond the groups contain, in the operand and in the cotangent, changes no bit of the grouped product's real rows or gradients."""
    problem = case.problem
    rows, kernels, dy, sizes = _integer_gemm(case)
    real = int(sizes.sum())
    results = []
    for poison in (0.0, *POISONS):
        a, b = rows.copy(), dy.copy()
        a[real:] = poison
        b[real:] = poison
        args = (jnp.asarray(a), jnp.asarray(kernels), jnp.asarray(b), jnp.asarray(sizes))
        out, da, dk = running.to_host(running.call(implementation, "grouped_gemm", _gemm_vjp, *args, problem))
        results.append((out[:real], da[:real], dk))
    findings = []
    for poison, got in zip(POISONS, results[1:], strict=True):
        for name, one, clean in zip(("rows", "gradient of rows", "gradient of kernels"), got, results[0], strict=True):
            findings.append(_poisoned(same_bits(name, one, clean), poison))
    return findings


@law("exact-gemm", stage="grouped_gemm", judged_by="bits", faults="ACI", needs={"no mesh", "unquantised"})
def exact_gemm(implementation: Implementation, case: Case) -> list[Finding]:
    """Grouped products of small integers, forward and both gradients, are exact up to the one rounding to storage."""
    problem = case.problem
    rows, kernels, dy, sizes = _integer_gemm(case)
    real = int(sizes.sum())
    if "host-sync" in implementation.traits:
        rows, dy = rows[:real], dy[:real]
    args = (jnp.asarray(rows), jnp.asarray(kernels), jnp.asarray(dy), jnp.asarray(sizes))
    out, da, dk = running.to_host(running.call(implementation, "grouped_gemm", _gemm_vjp, *args, problem))
    wide = [np.asarray(v, np.float64) for v in (rows, kernels, dy)]
    wants = (np.zeros(dy.shape), np.zeros(rows.shape), np.zeros(kernels.shape))
    start = 0
    for e, n in enumerate(sizes):
        group = slice(start, start + n)
        wants[0][group] = wide[0][group] @ wide[1][e]
        wants[1][group] = wide[2][group] @ wide[1][e].T
        wants[2][e] = wide[0][group].T @ wide[2][group]
        start += n
    names = ("rows", "gradient of rows", "gradient of kernels")
    gots = (out[:real], da[:real], dk)
    return [
        same_bits(name, got + np.zeros_like(got), (want[: len(got)] + 0.0).astype(got.dtype))
        for name, got, want in zip(names, gots, wants, strict=True)
    ]


@law("dirty-memory", stage="experts", judged_by="bits", faults="ABJ")
def dirty_memory(implementation: Implementation, case: Case) -> list[Finding]:
    """Steps with huge values before it change no bit of a case's result, over three steps."""
    return repeated(implementation, case, lambda: running.experts(implementation, loud(case)), times=3)


@law("repeatable", stage="experts", judged_by="bits", faults="EJK", needs={"deterministic"}, scope="shape")
def repeatable(implementation: Implementation, case: Case) -> list[Finding]:
    """Twenty calls with other allocations between them give the same bits."""
    rng = stream(case.seed, "allocations")

    def allocate() -> None:
        held = [jax.device_put(np.full(int(n), n, np.float32)) for n in rng.integers(1, 100_000, 4)]
        jax.block_until_ready(held)

    return repeated(implementation, case, allocate, times=20)


@law("nan-rows", stage="experts", judged_by="bits", faults="BEIJ", needs={"T >= 2", "unquantised"})
def nan_rows(implementation: Implementation, case: Case) -> list[Finding]:
    """A token that holds NaN spoils its own row of y and no bit of any other."""
    spoilt = stream(case.seed, "nan rows").random(case.problem.T) < 0.3
    spoilt[case.seed % case.problem.T] = True
    clean = running.experts(implementation, case)["y"]
    x = np.asarray(case.x).copy()
    x[spoilt] = np.nan
    got = running.experts(implementation, case.replace(x=jnp.asarray(x)))["y"]
    visited = spoilt & (real_rows(case) >= 0).any(1) & (np.asarray(case.routing.topk_weights) != 0).any(1)
    return [
        *by_bits_or_gauge(implementation, case, {"y": got[~spoilt]}, {"y": clean[~spoilt]}, ~spoilt),
        expect("y", np.isnan(got[visited]).any(1).all(), "a token that holds NaN gave a row of y without NaN"),
    ]


@law("inputs-untouched", stage="experts", judged_by="bits", faults="JM", scope="once")
def inputs_untouched(implementation: Implementation, case: Case) -> list[Finding]:
    """A call leaves its parameters, x and routing as they were, and so does a backward of its own, with y's gradient."""
    leaves = {**case.params.named(), "x": case.x, "topk_idx": case.routing.topk_idx}
    leaves |= {"topk_weights": case.routing.topk_weights, "gradient of y": case.cotangent}
    before = {name: np.array(leaf, copy=True) for name, leaf in leaves.items()}
    # A NumPy layer is given arrays that it can write into.
    kind = np.array if "numpy" in implementation.traits else jnp.array
    held = (case.params, case.x, case.routing, case.cotangent)
    *own, dy = jax.tree.map(lambda leaf: kind(leaf, copy=True), held)
    jax.block_until_ready(implementation.stage("experts")(case.problem, *own))
    given_away = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(own))
    if "experts_vjp" in implementation.stages and not given_away:
        jax.block_until_ready(implementation.stage("experts_vjp")(case.problem, *own, dy))
    params, x, routing = own
    after = {**params.named(), "x": x, "topk_idx": routing.topk_idx, "topk_weights": routing.topk_weights}
    after["gradient of y"] = dy
    gone = [name for name, leaf in after.items() if isinstance(leaf, jax.Array) and leaf.is_deleted()]
    findings = [expect(name, False, f"the call gave away the caller's {name}") for name in gone]
    return findings + [same_bits(n, np.asarray(after[n]), before[n]) for n in after if n not in gone]


def repeated(implementation: Implementation, case: Case, between, *, times: int) -> list[Finding]:
    """Every later result against the first; `between` runs before each of them."""
    first = running.experts(implementation, case)
    findings: list[Finding] = []
    for _ in range(times - 1):
        between()
        again = running.experts(implementation, case.replace(label=case.label))
        found = by_bits_or_gauge(implementation, case, again, first)
        findings += [f for f in found if not f.ok] or found[:1]
    return findings


def _with_lost_tokens(case: Case, held: float) -> tuple[Case, np.ndarray]:
    ids, weights = real_rows(case).copy(), np.asarray(case.routing.topk_weights).copy()
    lost = stream(case.seed, "lost tokens").random(case.problem.T) < 0.3
    lost[case.seed % case.problem.T] = True
    x = np.asarray(case.x).copy()
    ids[lost] = -1
    weights[lost] = held
    with np.errstate(over="ignore"):  # 1e30 is infinite in float16
        x[lost] = held
    return with_routing(case, ids, weights).replace(x=jnp.asarray(x)), lost


def _integer_gemm(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    problem, ids = case.problem, real_rows(case)
    rng = stream(case.seed, "integers")
    sizes = np.bincount(ids[ids >= 0], minlength=problem.E).astype(np.int32)
    P = problem.routed_rows + SLACK

    def integers(shape: tuple[int, ...]) -> np.ndarray:
        return np.array(storage(problem, rng.integers(-4, 5, shape)))

    rows, dy = integers((P, problem.D)), integers((P, problem.wi_columns))
    rows[sizes.sum() :], dy[sizes.sum() :] = 0, 0
    return rows, integers((problem.E, problem.D, problem.wi_columns)), dy, sizes


def _gemm_vjp(fn, rows, kernels, dy, sizes, problem):
    out, pull = jax.vjp(lambda a, k: fn(a, k, sizes), rows, kernels)
    return out, *pull(dy)


def _unpermute_vjp(fn, rows, routing, places, dy, problem):
    y, pull = jax.vjp(lambda w: fn(problem, rows, Routing(routing.topk_idx, w), places), routing.topk_weights)
    return y, pull(dy)[0]


def _poisoned(finding: Finding, poison: float) -> Finding:
    if finding.ok:
        return finding
    return finding.replace(message=f"undefined values of {poison:g} changed it: {finding.message}")


LAWS: tuple[Law, ...] = (
    inert_tokens,
    inert_rows,
    inert_gemm_rows,
    exact_gemm,
    dirty_memory,
    repeatable,
    nan_rows,
    inputs_untouched,
)
