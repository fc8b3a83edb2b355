"""The oracle's sums over slots and tokens: results of a token, parameters' gradients, and the auxiliary losses."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..parity.interface import Judged
from ..parity.problem import Params, Problem
from . import oracle_router as router
from .oracle_gauge import Lumps, Noise
from .oracle_repeats import Repeats


class TokenSum:
    """A [T, D] result: for each token a sum over slots, with what partial sums in storage dtype would add."""

    def __init__(self, tokens: int, width: int):
        self.value, self.var, self.squares = (np.zeros((tokens, width)) for _ in range(3))
        self.lump, self.lump2, self.n = (np.zeros((tokens, 1)) for _ in range(3))

    def add(self, t: Any, value: Any, var: Any, lumps: Lumps) -> None:
        """One more term for token t."""
        self.value[t] += value
        self.var[t] += var
        self.squares[t] += value * value
        self.lump[t] += lumps.total
        self.lump2[t] += lumps.squares
        self.n[t] += 1

    def part(self, noise: Noise) -> None:
        """The sum so far may be rounded before more is added."""
        self.var += np.where(self.n > 0, noise.rounded("part", self.value), 0.0)

    def judged(self, noise: Noise, name: str, kinks: int = 0) -> Judged:
        """Value, gauge and independent errors; tokens without any term are exactly 0."""
        gauge, dof = token_gauge(np, noise, name, self.value, self.var, self.squares, self.lump, self.lump2, self.n)
        return Judged(self.value, gauge, kinks, dof)


def token_gauge(
    xp: Any, noise: Noise, name: str, value: Any, var: Any, squares: Any, lump: Any, lump2: Any, n: Any
) -> tuple[Any, Any]:
    """(gauge [T, D], independent errors [T]) of a result whose own last rounding is `name`.

    A hidden unit's error, or a routing weight's, moves a whole row together: it is a lump, and a row that a few lumps
    dominate has as few independent errors, however wide it is.
    """
    var = var + noise.partial_sums(xp.maximum(n, 1), value, squares) + noise.rounded(name, value)
    return xp.sqrt(xp.where(n > 0, var, 0.0)), _independent(xp, var, lump[:, 0], lump2[:, 0])


def kernel_gauge(xp: Any, noise: Noise, parts: Any, n: Any, *, products: bool) -> tuple[Any, Any]:
    """(gauge, independent errors [B]) of a parameter's gradient over n tokens, in B blocks: its experts, or one.

    Without a token the gauge is exactly 0. A hidden unit's error moves a whole column, as far as the token's x goes.
    """
    value, var, squares, lump, lump2 = parts
    full = noise.parameter(xp.maximum(n, 1), value, var, squares, products=products)
    return xp.sqrt(xp.where(n > 0, full, 0.0)), _independent(xp, full.reshape(len(lump), -1), lump, lump2)


def independent(xp: Any, var: Any) -> Any:
    """Independent errors [1] of a tensor that is judged as one block and whose elements err one by one."""
    return _independent(xp, var.reshape(1, -1), 0.0, 0.0)


def _independent(xp: Any, var: Any, lump: Any, lump2: Any) -> Any:
    """(tr C)^2 / tr C^2 of a block's error covariance C = sum_i c_i v_i v_i^T + diagonal rest, N elements wide.

    The lumps' directions v_i are taken as random, so that two of them overlap by 1/N: N of them fill the block.
    """
    total, n = var.sum(-1), var.shape[-1]
    lump = xp.minimum(lump, total)
    rest = total - lump
    even = (var * var).sum(-1) * (rest / xp.where(total > 0, total, 1.0)) ** 2
    squared = lump2 + (xp.maximum(lump**2 - lump2, 0.0) + 2 * lump * rest) / n + even
    return total**2 / xp.where(squared > 0, squared, 1.0)


PER_EXPERT = ("wi", "wo", "wi_bias", "wo_bias")
"""The parameters whose first axis is the expert."""


class Gradients:
    """Everything an evaluation adds up."""

    def __init__(self, problem: Problem, noise: Noise, params: Params, *, backward: bool, kernels: bool):
        self.problem, self.noise, self.backward = problem, noise, backward
        self.y, self.x = TokenSum(problem.T, problem.D), TokenSum(problem.T, problem.D)
        self.dweight, self.var_dweight = np.zeros((problem.T, problem.K)), np.zeros((problem.T, problem.K))
        self.sums = {
            name: [np.zeros(leaf.shape) for _ in range(3)]
            + [np.zeros(problem.E if name in PER_EXPERT else 1) for _ in "12"]
            for name, leaf in params.named().items()
            if backward and kernels and name != "expert_bias"
        }
        self.steered = params.expert_bias is not None
        self.kinks = self.kinks_shared = 0

    def add_expert(self, e: int, x: np.ndarray, dy: np.ndarray, b: Any, repeats: Repeats | None) -> None:
        """One row of expert e; `repeats` as its backward pass had it."""
        self._outer("wi", e, x, b.dpre, b.var_dpre_operand, b.lumps["wi"])
        if "wi" in self.sums and b.var_dpre_floor is not None:
            self.sums["wi"][1][e] += b.var_dpre_floor
        self._outer("wo", e, dy, b.weighted_h, b.var_weighted_h, b.lumps["wo"], b.var_floor)
        self._copies("wo", e, b, repeats)
        self._sum("wi_bias", e, b.dpre, b.var_dpre, b.lumps["wi_bias"])
        self._sum("wo_bias", e, b.dbias, b.var_dbias, b.lumps["wo_bias"])

    def add_shared(self, x: np.ndarray, dy: np.ndarray, b: Any, repeats: Repeats | None) -> None:
        """One row of the shared expert."""
        self._outer("shared_wi", 0, x, b.dpre, b.var_dpre, b.lumps["wi"])
        self._outer("shared_wo", 0, dy, b.weighted_h, b.var_weighted_h, b.lumps["wo"], b.var_floor)
        self._copies("shared_wo", 0, b, repeats)

    def add_gate(self, x: np.ndarray, dlogits: np.ndarray, var: np.ndarray) -> None:
        """One token's share of the router's parameters."""
        self._outer("gate_kernel", 0, x, dlogits, var, router.gate_lumps(x, var))
        self._sum("gate_bias", 0, dlogits, var, Lumps(0.0, 0.0))

    def judged(self, counts: np.ndarray, tokens: int | None = None) -> dict[str, Judged]:
        """All tensors by name; `tokens` is the number of real ones in a layer, None for the routed experts alone."""
        problem, noise, layer = self.problem, self.noise, tokens is not None
        kinks = self.kinks + self.kinks_shared
        out = {"y": self.y.judged(noise, "y")}
        if not self.backward:
            return out
        out["x"] = self.x.judged(noise, "dx", kinks)
        if not layer:
            out["topk_weights"] = Judged(self.dweight, np.sqrt(self.var_dweight), 0, independent(np, self.var_dweight))
        for name, sums in self.sums.items():
            routed = name in PER_EXPERT
            if not routed and not layer:
                continue
            n = counts.reshape((-1,) + (1,) * (sums[0].ndim - 1)) if routed else np.asarray(tokens)
            gauge, dof = kernel_gauge(np, noise, sums, n, products=not name.endswith("bias"))
            kinked = {"wi": self.kinks, "wi_bias": self.kinks, "shared_wi": self.kinks_shared}.get(name, 0)
            out[name] = Judged(sums[0], gauge, kinked, dof)
        if layer and self.steered:
            zero = np.zeros(problem.E)
            out["expert_bias"] = Judged(zero, zero)
        return out

    def _outer(self, name: str, e: int, a: Any, b: Any, var_b: Any, lumps: Lumps, floor: Any = None) -> None:
        """Adds a (outer) b, or b (outer) a with a floor under b's variance."""
        if name not in self.sums:
            return
        turned = floor is not None
        for total, left, right in zip(self.sums[name], (a, a * a, a * a), (b, var_b, b * b), strict=False):
            into = total[e] if name in PER_EXPERT else total
            into += right[:, None] * left if turned else left[:, None] * right
        if turned:
            var = self.sums[name][1]
            var[e if name in PER_EXPERT else ...] += floor[:, None]
        self._lump(name, e, lumps)

    def _copies(self, name: str, e: int, b: Any, repeats: Repeats | None) -> None:
        if name in self.sums and repeats is not None:
            var = self.sums[name][1]
            var[e if name in PER_EXPERT else ...] += b.var_common_h[:, None] * repeats.dy**2

    def _sum(self, name: str, e: int, b: Any, var_b: Any, lumps: Lumps) -> None:
        if name not in self.sums:
            return
        for total, term in zip(self.sums[name], (b, var_b, b * b), strict=False):
            into = total[e] if name in PER_EXPERT else total
            into += term
        self._lump(name, e, lumps)

    def _lump(self, name: str, e: int, lumps: Lumps) -> None:
        self.sums[name][3][e] += lumps.total
        self.sums[name][4][e] += lumps.squares


def loss_slopes(
    problem: Problem, counts: np.ndarray, sizes: np.ndarray, segment: np.ndarray, cotangents: tuple[float, float, float]
) -> tuple[np.ndarray, float]:
    """Gradients of the losses' weighted sum with respect to each token's probabilities [T, E] and logsumexp^2.

    counts [S, E] and sizes [S] are those of the segments that hold a real token; `segment` [T] indexes them.
    """
    balance, sequence, z = cotangents
    n, segments = sizes.sum(), len(sizes)
    if n == 0:
        return np.zeros((problem.T, problem.E)), 0.0
    whole = problem.E / (problem.K * n**2) * counts.sum(0)
    each = problem.E / (problem.K * sizes[:, None] ** 2) * counts / segments
    return balance * whole + sequence * each[segment], z / n


def segments_of(problem: Problem, ids: np.ndarray, real: np.ndarray, segment_ids: Any) -> tuple[Any, Any, Any]:
    """(counts [S, E], sizes [S], segment [T]) of the segments that hold at least one real token."""
    raw = np.zeros(problem.T, int) if segment_ids is None else np.asarray(segment_ids)
    present, inverse = np.unique(raw[real], return_inverse=True)
    segment = np.zeros(problem.T, int)
    segment[real] = inverse
    counts, sizes = np.zeros((len(present), problem.E)), np.bincount(inverse, minlength=len(present)).astype(float)
    for t in np.nonzero(real)[0]:
        np.add.at(counts[segment[t]], ids[t][ids[t] >= 0], 1.0)
    return counts, sizes, segment


def judge_losses(problem: Problem, scored: dict[int, Any], counts: Any, sizes: Any, segment: Any) -> dict[str, Judged]:
    """balance, sequence and z, float32 scalars; 0 and gauge 0 without a real token."""
    out, n = {}, len(scored)
    for name, cotangents in (("balance", (1.0, 0.0, 0.0)), ("sequence", (0.0, 1.0, 0.0)), ("z", (0.0, 0.0, 1.0))):
        dprobs, dz = loss_slopes(problem, counts, sizes, segment, cotangents)
        terms = [router.loss_terms(np, problem, s, name, dprobs[t], dz) for t, s in scored.items()]
        value, var = router.loss_total(problem, sum(v for v, _ in terms), sum(v for _, v in terms), n)
        out[name] = Judged(np.asarray(value, np.float64), np.sqrt(np.asarray(var, np.float64)))
    return out
