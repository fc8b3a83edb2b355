"""Inputs whose routing is known in advance: tokens and gate kernels that realise a wanted set of experts.

A layer that cannot report its routing can only be judged where its routing is not in doubt. `margin_inputs` places
every token so far from a tie that no honest rounding of the logits changes its experts, and checks that on the rounded
values: the margin at the k-th place, and at the last eligible group, is compared with a bound of the logits' error.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from .choice import biased_scores, exact_logits, exact_scores
from .draws import NUMPY_DTYPES, normals, stream
from .params import router_biases
from .problem import InvalidInput, Params, Problem


class MarginInputs(NamedTuple):
    """What `margin_inputs` builds; the arrays are NumPy, in storage dtype (expert_bias float32)."""

    x: np.ndarray
    gate_kernel: np.ndarray
    gate_bias: np.ndarray | None
    expert_bias: np.ndarray | None
    margin: float
    """The smallest (gap between chosen and not chosen) / (bound of both errors) over all tokens; above 1."""

    def params(self, params: Params) -> Params:
        """`params` with the router's leaves replaced by these."""
        return params.replace(
            gate_kernel=jnp.asarray(self.gate_kernel),
            gate_bias=None if self.gate_bias is None else jnp.asarray(self.gate_bias),
            expert_bias=None if self.expert_bias is None else jnp.asarray(self.expert_bias),
        )


def margin_inputs(
    problem: Problem,
    topk_idx: Int[np.ndarray, "T K"],
    seed: int = 0,
    *,
    params: Params | None = None,
    keep_kernel: bool = False,
) -> MarginInputs:
    """(x, gate_kernel, biases) for which an honest router chooses exactly `topk_idx`, in any order of slots.

    Biases are those of `params`, else drawn; with `keep_kernel` the gate kernel is that of `params` too, and only x is
    built. Needs D at least as large as E, or, with a kernel of its own, as the number of distinct sets of experts.
    Raises InvalidInput when an id is -1, when a token's experts lie in more groups than stay eligible, when D is too
    small, or when no contrast of the logits gives every token a margin above the error bound.
    """
    ids = np.sort(np.asarray(topk_idx), axis=1)
    _check_wanted(problem, ids)
    kept = None
    if params is None:
        gate_bias, expert_bias = router_biases(problem, seed)
    else:
        gate_bias = None if params.gate_bias is None else np.asarray(params.gate_bias)
        expert_bias = None if params.expert_bias is None else np.asarray(params.expert_bias)
        kept = np.asarray(params.gate_kernel) if keep_kernel else None
    worst, best = 0, 0.0
    for contrast in (2.0, 4.0, 8.0):
        x, kernel = _place(problem, ids, gate_bias, kept, contrast, seed)
        margins = _margins(problem, ids, x, kernel, gate_bias, expert_bias)
        least = float(margins.min(initial=np.inf))
        if least > 1:
            return MarginInputs(x, kernel, gate_bias, expert_bias, least)
        if least > best:
            worst, best = int(margins.argmin()), least
    raise InvalidInput(
        f"token {worst} wants experts {ids[worst].tolist()} but its margin reaches {best:.2g} of the logits' error bound; "
        "accepted: a smaller expert_bias, or a set that the router can choose"
    )


def _check_wanted(problem: Problem, ids: np.ndarray) -> None:
    r = problem.router
    if ids.shape != (problem.T, problem.K):
        raise InvalidInput(f"topk_idx has shape {ids.shape}; accepted: T, K = {(problem.T, problem.K)}")
    if ids.size == 0:
        return
    if ids.min() < 0 or ids.max() >= problem.E:
        raise InvalidInput(f"topk_idx reaches from {ids.min()} to {ids.max()}; accepted: 0 to {problem.E - 1}")
    if problem.K > 1 and (ids[:, 1:] == ids[:, :-1]).any():
        raise InvalidInput("topk_idx names an expert twice for one token; accepted: distinct experts")
    groups = ids // (problem.E // r.groups)
    spans = 1 + (groups[:, 1:] != groups[:, :-1]).sum(axis=1)
    if spans.max() > r.group_topk:
        t = int(spans.argmax())
        raise InvalidInput(f"token {t} wants experts of {spans[t]} groups; accepted: up to group_topk, {r.group_topk}")


def _place(
    problem: Problem,
    ids: np.ndarray,
    gate_bias: np.ndarray | None,
    kept: np.ndarray | None,
    contrast: float,
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """x and gate_kernel whose logits are `contrast` or more for wanted experts and about 0 for the others."""
    T, D, E, K = problem.T, problem.D, problem.E, problem.K
    rows, of_token = ids, np.arange(T)
    if E > D and T > D:
        rows, of_token = np.unique(ids, axis=0, return_inverse=True)
        of_token = of_token.reshape(-1)
    if E > D and (len(rows) > D or kept is not None):
        least = E if kept is not None else min(E, len(rows))
        raise InvalidInput(f"D is {D} for {E} experts and {len(rows)} distinct sets; accepted: D at least {least}")
    rng = stream(seed, "margin")
    logits = rng.uniform(-0.5, 0.5, (len(rows), E))
    levels = contrast + (rng.permuted(np.tile(np.arange(K), (len(rows), 1)), axis=1) + 0.5) / K
    np.put_along_axis(logits, rows, levels, axis=1)
    if gate_bias is not None:
        logits = logits - gate_bias.astype(np.float64)
    if E <= D:
        # Any x whose part in the span of the kernel's columns gives the logits; the rest of x is free.
        if kept is None:
            kept = _settle(problem, _orthonormal(stream(seed, "margin.basis"), D, E), "kernel", 13, seed)
        wide = kept.astype(np.float64)
        noise = normals(seed, "margin.noise", (T, D), 1.0, "float32").astype(np.float64)
        x = noise + np.linalg.solve(wide.T @ wide, (logits - noise @ wide).T).T @ wide.T
        return _settle(problem, x, "x", 7, seed), kept
    basis = _orthonormal(rng, D, len(rows))
    noise = rng.standard_normal((D, E)) / np.sqrt(D)
    kernel = noise + basis @ (logits / np.sqrt(D) - basis.T @ noise)
    x = (basis.T * np.sqrt(D))[of_token]
    return _settle(problem, x, "x", 7, seed), _settle(problem, kernel, "kernel", 13, seed)


def _orthonormal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    q, r = np.linalg.qr(rng.standard_normal((rows, columns)))
    return q * np.sign(np.diag(r))


def _settle(problem: Problem, values: np.ndarray, name: str, bits: int, seed: int) -> np.ndarray:
    """Rounds to a grid, then fills the lower digits from a stream.

    Linear algebra differs in its last bits from one library to another. On a coarse grid it does not, and the digits
    below the grid come from integers.
    """
    coarse = np.round(values * 2.0**bits) / 2.0**bits
    fine = normals(seed, f"margin.{name}", values.shape, 2.0 ** -(bits + 3), "float32")
    return (coarse + fine).astype(NUMPY_DTYPES[problem.dtype])


def _margins(
    problem: Problem,
    ids: np.ndarray,
    x: np.ndarray,
    kernel: np.ndarray,
    gate_bias: np.ndarray | None,
    expert_bias: np.ndarray | None,
) -> np.ndarray:
    """Per token, (gap) / (sum of both error bounds) at the k-th place and at the last eligible group; the smaller one."""
    logits = exact_logits(x, kernel, gate_bias)
    biased = biased_scores(problem, logits, expert_bias)
    error = _score_error(problem, logits, _logit_error(problem, x, kernel, logits))
    low, high = biased - error, biased + error
    wanted = np.zeros(logits.shape, bool)
    np.put_along_axis(wanted, ids, True, axis=1)
    ratio = np.full(len(ids), np.inf)
    r = problem.router
    if r.groups > 1:
        shape = (len(ids), r.groups, problem.E // r.groups)

        def of_groups(values: np.ndarray) -> np.ndarray:
            return np.sort(values.reshape(shape), axis=2)[:, :, -r.group_score_topk :].sum(axis=2)

        needed = wanted.reshape(shape).any(axis=2)
        # A wanted group must not be beaten by so many others that it falls out: compare it with the group_topk-th best rival.
        rivals = np.sort(np.where(needed, -np.inf, of_groups(high)), axis=1)[:, ::-1]
        place = r.group_topk - needed.sum(axis=1)
        rival = np.take_along_axis(rivals, np.minimum(place, r.groups - 1)[:, None], axis=1)[:, 0]
        least = np.where(needed, of_groups(low), np.inf).min(axis=1)
        ratio = _ratio(least, rival, _spread(of_groups(high) - of_groups(low)))
        # Experts of other groups may or may not be eligible; they must lose either way.
    gap_low = np.where(wanted, low, np.inf).min(axis=1)
    gap_high = np.where(wanted, -np.inf, high).max(axis=1, initial=-np.inf)
    return np.minimum(ratio, _ratio(gap_low, gap_high, _spread(2 * error)))


def _ratio(low: np.ndarray, high: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """1 where the intervals just touch; above 1 where they are apart."""
    return np.where(np.isneginf(high), np.inf, 1 + (low - high) / spread)


def _spread(widths: np.ndarray) -> np.ndarray:
    return np.maximum(widths.max(axis=1), np.finfo(np.float64).tiny)


def _logit_error(problem: Problem, x: np.ndarray, kernel: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Worst case of a float32 product of D terms, and of one rounding to x's dtype (a layer may do that on its own)."""
    D = problem.D
    unit = 2.0**-24 if problem.precision == "highest" else 2.0**-11
    # The bound itself needs no more than float32: its own error is a few parts in a million.
    magnitude = np.abs(x.astype(np.float32)) @ np.abs(kernel.astype(np.float32))
    terms = 2 if problem.precision == "tf32" else 0
    storage = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[problem.dtype]
    return ((D + 2) * 2.0**-24 + terms * unit) * magnitude + 2 * storage * np.abs(logits)


def _score_error(problem: Problem, logits: np.ndarray, error: np.ndarray) -> np.ndarray:
    """What an error of the logits becomes in the scores, with float32 rounding of the scores on top."""
    r = problem.router
    widest = error.max(axis=1, keepdims=True)
    if r.softmax_order == "after":
        return error + 4 * 2.0**-24 * np.abs(logits)
    if r.score == "softmax":
        p = exact_scores(problem, logits)
        return p * np.expm1(2 * np.minimum(widest, 8.0)) + 16 * 2.0**-24 * p
    slope = {"sigmoid": 0.25, "sqrtsoftplus": 0.33}[r.score]
    return slope * error + 16 * 2.0**-24 * np.abs(exact_scores(problem, logits))
