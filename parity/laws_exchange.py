"""Laws of moving rows between ranks, bit for bit: payloads say where each row came from, so no tolerance is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import launch, running
from .compare import Finding, same_bits
from .demand import demand, group_counts, worst_case_rows
from .ep_cases import rank_routings, stored, token_payload, tokens_of, usual_ranks
from .inputs import Case
from .interface import Implementation
from .law import Law, law
from .law_tools import dyadic_weights, expect
from .problem import Problem, Routing

NEEDS = {"ranks"}
REPEATS = 5
"""Calls with other live buffers, and alternations of two shapes."""

NOTHING = np.float32(0)
"""Fills rows that hold no token where a law is not about them."""

_RUNS: dict[tuple[Any, ...], Callable[..., Any]] = {}


@law("ep-rows", stage="ep_dispatch", judged_by="bits", faults="AEJ", needs=NEEDS, scope="shape")
def ep_rows(implementation: Implementation, case: Case) -> list[Finding]:
    """Dispatch puts each routed copy of a token once into the block of its expert, on the rank that holds it, with its weight."""
    problem, W = on_ranks(case.problem)
    x = token_payload(problem.T, problem.D)
    if x is None:
        return []
    findings: list[Finding] = []
    for name, ids in rank_routings(problem, W, case.seed).items():
        weights = np.where(ids >= 0, 1 + np.arange(ids.size).reshape(ids.shape), np.nan).astype(np.float32)
        rows, sizes, row_weights, align = run(implementation, problem, _dispatched, x, ids, weights)
        findings.append(_blocks(problem, W, name, ids, weights, rows, sizes, row_weights, align))
    return findings


@law("ep-round-trip", stage="ep_combine", judged_by="bits", faults="BEHJ", needs=NEEDS, scope="shape")
def ep_round_trip(implementation: Implementation, case: Case) -> list[Finding]:
    """Experts that multiply by +1 or -1 give each token the sum of its signed weights times itself, and dispatch and combine have each other as gradients."""
    problem, W = on_ranks(case.problem)
    x = token_payload(problem.T, problem.D)
    if x is None:
        return []
    dy, findings = x[::-1].copy(), []
    for name, ids in rank_routings(problem, W, case.seed).items():
        weights = slot_weights(ids)
        y, d_x, d_weights = run(implementation, problem, _signed, x, ids, weights, dy, NOTHING)
        findings += round_trip(problem, name, ids, weights, x, dy, y, d_x, d_weights)
    return findings


@law("ep-tail", stage="ep_combine", judged_by="bits", faults="B", needs=NEEDS, scope="shape")
def ep_tail(implementation: Implementation, case: Case) -> list[Finding]:
    """Rows that hold no token may hold NaN, infinity or 1e30 and change no bit of any token, nor of any gradient."""
    problem, W = on_ranks(case.problem)
    x = token_payload(problem.T, problem.D)
    if x is None:
        return []
    findings: list[Finding] = []
    for name, ids in rank_routings(problem, W, case.seed).items():
        weights = slot_weights(ids)
        for poison in (np.nan, np.inf, 1e30):
            y, d_x, d_weights = run(implementation, problem, _signed, x, ids, weights, x, np.float32(poison))
            findings += round_trip(problem, f"{name}, {poison} beyond", ids, weights, x, x, y, d_x, d_weights)
    return findings


@law("ep-demand", stage="ep_dispatch", judged_by="bits", faults="JL", needs=NEEDS, scope="shape")
def ep_demand(implementation: Implementation, case: Case) -> list[Finding]:
    """What arrives is the demand counted from the ids, and the rows hold the worst case of any routing, with no more than a block an expert to spare."""
    problem, W = on_ranks(case.problem)
    ep = W if problem.mesh is None else problem.mesh.ep
    findings: list[Finding] = []
    for name, ids in rank_routings(problem, W, case.seed).items():
        x = np.ones((problem.T, problem.D))
        rows, sizes, _, align = run(implementation, problem, _dispatched, x, ids, slot_weights(ids))
        P, local, tokens = rows.shape[1], problem.E // ep, problem.T // W * ep
        needed = demand(ids, E=problem.E, ep=ep, groups=W // ep, align=align)
        got = (-(-sizes.astype(np.int64) // align) * align).sum(1)
        most = worst_case_rows(tokens, problem.K, local, align)
        findings += [
            expect(
                "group_sizes",
                np.array_equal(got, needed),
                f"{name}: {got.tolist()} rows arrived, {needed.tolist()} are needed",
            ),
            expect("rows", needed.max() <= P, f"{name}: {needed.max()} rows are needed, the buffer holds {P}"),
            expect("rows", most <= P <= most + align * local, f"the buffer holds {P} rows; the worst case is {most}"),
        ]
    return findings


@law("ep-apart", stage="ep_combine", judged_by="bits", faults="JK", needs=NEEDS, scope="once")
def ep_apart(implementation: Implementation, case: Case) -> list[Finding]:
    """Dispatches in flight at once, of opposite routings and in any order (A B A), do not share state, forward and backward."""
    problem, W = on_ranks(case.problem)
    x = token_payload(problem.T, problem.D)
    if x is None:
        return []
    first = rank_routings(problem, W, case.seed)["random"]
    second = (problem.E - 1 - first).astype(np.int32)
    weights = slot_weights(first)
    findings: list[Finding] = []
    outs = run(implementation, problem, _interleaved, x, first, weights, x[::-1].copy(), second)
    for ids, (y, d_x, d_weights) in zip((first, second, first), outs, strict=True):
        findings += round_trip(problem, "two in flight", ids, weights, x, x[::-1], y, d_x, d_weights)
    return findings


@law("ep-transforms", stage="ep_combine", judged_by="bits", faults="EJK", needs=NEEDS, scope="once")
def ep_transforms(implementation: Implementation, case: Case) -> list[Finding]:
    """Under `scan` over layers, each with its own routing, and under `jax.checkpoint` every exchange uses its own state."""
    problem, W = on_ranks(case.problem)
    x = token_payload(problem.T, problem.D)
    if x is None:
        return []
    families = rank_routings(problem, W, case.seed)
    stack = np.stack([families[n] for n in ("random", "never local", "one rank")])
    weights = np.stack([slot_weights(ids) for ids in stack])
    outs = run(implementation, problem, _scanned, x, stack, weights, x[::-1].copy())
    findings: list[Finding] = []
    for i, ids in enumerate(stack):
        y, d_weights = outs[0][i], outs[1][i]
        findings += round_trip(problem, f"layer {i} of a scan", ids, weights[i], x, x[::-1], y, None, d_weights)
    return findings


@law("ep-repeats", stage="ep_combine", judged_by="bits", faults="JK", needs=NEEDS, scope="once")
def ep_repeats(implementation: Implementation, case: Case) -> list[Finding]:
    """Repeated calls, of two alternating shapes, through other executables and with buffers elsewhere in memory, give the same bits."""
    problem, W = on_ranks(case.problem)
    half = problem.replace(T=max(problem.T // 2 // W, 1) * W)
    first: dict[int, Any] = {}
    kept: list[Any] = []
    findings: list[Finding] = []
    for i in range(REPEATS):
        for shape in (problem, half):
            x = token_payload(shape.T, shape.D)
            if x is None:
                return []
            ids = rank_routings(shape, W, case.seed)["random"]
            how = _signed_again if i == 1 and shape is problem else _signed
            got = run(implementation, shape, how, x, ids, slot_weights(ids), x, NOTHING)
            want = first.setdefault(shape.T, got)
            findings += [same_bits(n, g, w) for n, g, w in zip(("y", "x", "topk_weights"), got, want, strict=True)]
            # Odd sizes held and dropped in turn: the next call's buffers lie elsewhere.
            kept = [jnp.ones(1009 * (i + 2) + n) for n in range(3)] if i % 2 == 0 else []
    del kept
    return findings


LAWS: tuple[Law, ...] = (ep_rows, ep_round_trip, ep_tail, ep_demand, ep_apart, ep_transforms, ep_repeats)
"""Judged by bits, on any machine."""


def on_ranks(problem: Problem) -> tuple[Problem, int]:
    """The problem with T a multiple of its ranks, and the number of ranks."""
    W = usual_ranks(problem)
    return problem.replace(T=max(-(-problem.T // W), 2) * W), W


def slot_weights(ids: np.ndarray) -> np.ndarray:
    """Powers of two that differ between neighbouring slots, some exactly 0, NaN where there is no expert."""
    weights = dyadic_weights(ids)
    weights[:: max(len(ids) // 4, 1), 0] = 0.0
    return np.where(ids < 0, np.nan, weights).astype(np.float32)


def signs(E: int) -> np.ndarray:
    """+1 or -1 for each expert, in no simple pattern."""
    return np.where(np.arange(E) * 7 % 5 % 2 == 0, 1.0, -1.0).astype(np.float32)


def run(
    implementation: Implementation,
    problem: Problem,
    how: Callable[..., Any],
    x: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    *more: Any,
) -> Any:
    """`how(dispatch, combine, problem, x [W,t,D], ids, weights, ...)` under one cached `jit`; NumPy comes back."""
    W = usual_ranks(problem)
    dispatch, combine = implementation.stage("ep_dispatch"), implementation.stage("ep_combine")
    key = (how, dispatch, combine, problem, *sorted(running.OPTIONS.items()))
    if key not in _RUNS:
        options = running.OPTIONS or None
        _RUNS[key] = jax.jit(lambda *a: how(dispatch, combine, problem, *a), compiler_options=options)
    laid = [_lay(problem, W, a) if getattr(a, "shape", ()) == x.shape else a for a in (x, *more)]
    with running.blaming_target():
        return launch.to_host(_RUNS[key](laid[0], ids, weights, *laid[1:]))


def round_trip(
    problem: Problem,
    name: str,
    ids: np.ndarray,
    weights: np.ndarray,
    x: np.ndarray,
    dy: np.ndarray,
    y: Any,
    d_x: Any,
    d_weights: Any,
) -> list[Finding]:
    """y, and the gradients for the cotangent dy, of experts that multiply by their sign; all sums are exact."""
    sign = np.where(ids >= 0, signs(problem.E)[np.maximum(ids, 0)], 0.0)
    factor = np.where(ids >= 0, np.nan_to_num(weights) * sign, 0.0).sum(1)[:, None]
    along = sign * (x * dy).sum(1)[:, None]
    findings = [_named(same_bits("y", _flat(y), _plus0(stored(problem, factor * x))), name)]
    if d_x is not None:
        findings.append(_named(same_bits("x", _flat(d_x), _plus0(stored(problem, factor * dy))), name))
    findings.append(_named(same_bits("topk_weights", _plus0(d_weights), _plus0(along.astype(np.float32))), name))
    return findings


def _lay(problem: Problem, W: int, rows: np.ndarray) -> np.ndarray:
    return stored(problem, rows).reshape(W, -1, problem.D)


def _flat(y: Any) -> np.ndarray:
    y = np.asarray(y)
    return _plus0(y.reshape(-1, y.shape[-1]))


def _plus0(values: Any) -> np.ndarray:
    """-0 counts as 0: the sign of an exact zero says nothing about where a row went."""
    return np.asarray(values) + np.zeros_like(values)


def _named(finding: Finding, name: str) -> Finding:
    return finding if finding.ok else finding.replace(message=f"{name}: {finding.message}")


def _dispatched(dispatch, combine, problem, x, ids, weights):
    rows, sizes, state = dispatch(problem, x, Routing(ids, weights))
    return rows, sizes, state.row_weights, state.align


def _expert_of_row(problem: Problem, sizes, align: int, P: int):
    """[W, P]: the global expert whose block each row lies in, and whether it holds a token."""
    W, local = sizes.shape
    room = -(-sizes // align) * align
    ends = jnp.cumsum(room, axis=1)
    row = jnp.arange(P)
    e = jnp.minimum((row[None, :, None] >= ends[:, None, :]).sum(-1), local - 1)
    within = row - jnp.take_along_axis(ends - room, e, axis=1)
    held = (row < ends[:, -1:]) & (within < jnp.take_along_axis(sizes, e, axis=1))
    return jnp.arange(W)[:, None] % (problem.E // local) * local + e, held


def _through(dispatch, combine, problem, x, ids, weights, poison):
    """Dispatch, multiply each row by its expert's sign, fill what holds no token with poison, combine."""
    return _finish(combine, problem, poison, *dispatch(problem, x, Routing(ids, weights)))


def _finish(combine, problem, poison, rows, sizes, state):
    expert, held = _expert_of_row(problem, sizes, state.align, rows.shape[1])
    factor = jnp.asarray(signs(problem.E))[expert]
    if problem.experts.weight_placement == "early":
        factor = factor * state.row_weights
    out = jnp.where(held[..., None], rows.astype(jnp.float32) * factor[..., None], poison)
    return combine(problem, out.astype(rows.dtype), state)


def _signed(dispatch, combine, problem, x, ids, weights, dy, poison):
    y, vjp = jax.vjp(lambda x, w: _through(dispatch, combine, problem, x, ids, w, poison), x, weights)
    return y, *vjp(dy)


def _signed_again(dispatch, combine, problem, x, ids, weights, dy, poison):
    """The same in another executable."""
    return _signed(dispatch, combine, problem, x, ids, weights, dy, poison)


def _interleaved(dispatch, combine, problem, x, ids, weights, dy, other):
    """Both dispatches before either combine; the backwards in the order of the forwards, then the first again."""

    def both(x1, w1, x2, w2):
        sent = [dispatch(problem, x1, Routing(ids, w1)), dispatch(problem, x2, Routing(other, w2))]
        return tuple(_finish(combine, problem, 0.0, *s) for s in sent)

    ys, vjp = jax.vjp(both, x, weights, x, weights)
    d_x1, d_w1, d_x2, d_w2 = vjp((dy, dy))
    again, vjp = jax.vjp(lambda x, w: _through(dispatch, combine, problem, x, ids, w, 0.0), x, weights)
    return (ys[0], d_x1, d_w1), (ys[1], d_x2, d_w2), (again, *vjp(dy))


def _scanned(dispatch, combine, problem, x, stack, weights, dy):
    """Layers one after the other, each on the same x so that sums stay exact; rematerialised in the backward."""

    def layers(weights):
        def step(carry, one):
            ids, w = one
            through = jax.checkpoint(lambda w: _through(dispatch, combine, problem, x, ids, w, 0.0))
            return carry, through(w)

        return jax.lax.scan(step, jnp.zeros(()), (stack, weights))[1]

    ys, vjp = jax.vjp(layers, weights)
    return ys, vjp(jnp.broadcast_to(dy, ys.shape))[0]


def _blocks(problem, W, name, ids, weights, rows, sizes, row_weights, align) -> Finding:
    """Every block against the tokens that chose its expert, in any order."""
    ep = W if problem.mesh is None else problem.mesh.ep
    local, groups = problem.E // ep, W // ep
    align = int(align)
    want = group_counts(ids, E=problem.E, groups=groups).reshape(W, local)
    if not np.array_equal(sizes, want):
        return expect("group_sizes", False, f"{name}: group_sizes are {sizes.tolist()}, the ids say {want.tolist()}")
    room = -(-sizes // align) * align
    starts = np.cumsum(room, axis=1) - room
    per_group = problem.T // groups
    for w in range(W):
        for e in range(local):
            expert, first = w % ep * local + e, w // ep * per_group
            token, slot = np.nonzero(ids[first : first + per_group] == expert)
            block = slice(starts[w, e], starts[w, e] + sizes[w, e])
            got = tokens_of(rows[w, block], problem.T)
            order = np.argsort(got, kind="stable")
            if not np.array_equal(got[order], token + first):
                message = f"{name}: rank {w}, expert {expert} holds tokens {got[order].tolist()}, not {(token + first).tolist()}"
                return expect("rows", False, message, expert=expert)
            if not np.array_equal(row_weights[w, block][order], weights[token + first, slot]):
                return expect(
                    "topk_weights", False, f"{name}: rank {w}, expert {expert} has other rows' weights", expert=expert
                )
    return expect("rows", True, "")
