"""Which choices of experts an honest router may make, given that its logits carry rounding errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..parity.compare import Finding, judge
from ..parity.interface import Judged
from ..parity.problem import Problem, Routing
from . import oracle_router as router


class Verdict(NamedTuple):
    """One answer per token."""

    ok: np.ndarray
    """The ids are distinct, in range and admissible (all -1, for a masked token)."""
    differs: np.ndarray
    """Another set than the exact one; admissible only near a tie."""
    near_tie: np.ndarray
    """The exact set is not the only admissible one."""
    tie: np.ndarray
    """The k-th and the next score are exactly equal."""


@dataclass(frozen=True)
class RouteView:
    """What the oracle knows of a batch's routing; every array is [T, E] float64."""

    problem: Problem
    logits: np.ndarray
    logits_bound: np.ndarray
    """Largest error of an honest layer's logits."""
    ranking: np.ndarray
    """The scores that are ranked, selection bias included."""
    ranking_bound: np.ndarray

    scores: router.Scores
    """The same batch, for the weights at given ids."""

    @classmethod
    def of(cls, problem: Problem, scores: router.Scores) -> RouteView:
        """From a batch's Scores."""
        return cls(problem, scores.logits, scores.bound, scores.ranking, scores.ranking_bound, scores)

    def best(self) -> np.ndarray:
        """The exact choice [T, K]; lower index wins ties."""
        rows = [best_choice(self.problem, r) for r in self.ranking]
        return np.array(rows, np.int32).reshape(len(self.ranking), self.problem.K)

    def weights(self, topk_idx: Any) -> Judged:
        """The weights [T, K] at given ids; exactly 0 at -1."""
        ids = np.asarray(topk_idx)
        at = np.where(ids >= 0, ids, 0)
        chosen = np.zeros((len(ids), self.problem.E))
        rows, slots = np.nonzero(ids >= 0)
        chosen[rows, ids[rows, slots]] = 1.0
        with np.errstate(all="ignore"):
            w = router.weights(np, self.problem, self.scores, chosen)
            value, var = (np.where(ids >= 0, np.take_along_axis(a, at, -1), 0.0) for a in w)
        return Judged(value, np.sqrt(var))

    def findings(self, routing: Routing, mask: Any | None = None, *, weights: bool = True) -> list[Finding]:
        """A routing judged: admissible sets of distinct experts, then the weights of those sets by gauge."""
        p = self.problem
        ids = np.asarray(routing.topk_idx)
        if ids.shape != (p.T, p.K) or ids.dtype.kind != "i":
            kind = "shape" if ids.dtype.kind == "i" else "dtype"
            return [
                Finding(
                    tensor="topk_idx",
                    check=kind,
                    ok=False,
                    message=f"topk_idx is {ids.dtype} {list(ids.shape)}; accepted: int32 {[p.T, p.K]}",
                )
            ]
        verdict = self.admissible(ids, mask)
        bad = np.nonzero(~verdict.ok)[0]
        if len(bad):
            return [self._inadmissible(int(bad[0]), ids, len(bad))]
        note = f"{int(verdict.near_tie.sum())} near ties, {int(verdict.tie.sum())} ties, {int(verdict.differs.sum())} differ"
        found = [Finding(tensor="topk_idx", check="values", ok=True, message=note)]
        if weights:
            found.append(judge("weights", routing.topk_weights, self.weights(ids), dtype="float32", empty_ok=p.T == 0))
        return found

    def _inadmissible(self, t: int, ids: np.ndarray, count: int) -> Finding:
        best = best_choice(self.problem, self.ranking[t])
        return Finding(
            tensor="topk_idx",
            check="values",
            ok=False,
            index=(t,),
            token=t,
            message=f"token {t} chose experts {ids[t].tolist()}, best are {sorted(best.tolist())}, and no rounding of the "
            f"logits excuses it; {count} of {len(ids)} tokens",
        )

    def admissible(self, topk_idx: Any, mask: Any | None = None) -> Verdict:
        """Judges chosen sets; the order within a token's slots carries no meaning."""
        ids = np.asarray(topk_idx)
        real = np.ones(len(ids), bool) if mask is None else np.asarray(mask)
        verdicts = [
            self._token(t, ids[t]) if real[t] else (bool((ids[t] == -1).all()), False, False, False)
            for t in range(len(ids))
        ]
        return Verdict(*np.array(verdicts, bool).reshape(len(ids), 4).T)

    def _token(self, t: int, ids: np.ndarray) -> tuple[bool, bool, bool, bool]:
        p = self.problem
        if len(set(ids.tolist())) != len(ids) or ids.min() < 0 or ids.max() >= p.E:
            return False, True, False, False
        score, bound = self.ranking[t], self.ranking_bound[t]
        if not np.isfinite(score).all():
            return True, False, False, False
        best = best_choice(p, score)
        near, tie = self._near(score, bound, best)
        differs = set(ids.tolist()) != set(best.tolist())
        return not differs or admissible(p, score, bound, ids), differs, near, tie

    def _near(self, score: np.ndarray, bound: np.ndarray, best: np.ndarray) -> tuple[bool, bool]:
        """Whether one exchange of a chosen expert for another would be admissible, and whether one is an exact tie."""
        p = self.problem
        if p.K == p.E:
            return False, False
        rest = np.setdiff1d(np.arange(p.E), best)
        eligible = rest
        if p.router.groups > 1:
            groups, size = _groups(p, score), p.E // p.router.groups
            order = np.argsort(-groups, kind="stable")
            slack = p.router.group_score_topk * bound.max()
            cut = p.router.group_topk
            if cut < p.router.groups and groups[order[cut - 1]] - groups[order[cut]] <= 2 * slack:
                return True, bool(groups[order[cut - 1]] == groups[order[cut]])
            eligible = rest[np.isin(rest // size, order[:cut])]
        if not len(eligible):
            return False, False
        near = (score[best] - bound[best]).min() <= (score[eligible] + bound[eligible]).max()
        return bool(near), bool(score[best].min() == score[eligible].max())


def admissible(problem: Problem, score: np.ndarray, bound: np.ndarray, ids: np.ndarray) -> bool:
    """Whether true scores within `bound` of `score` exist for which `ids` is the best choice.

    Every chosen score plus its bound reaches every eligible unchosen score less its own; with groups, the same rule
    first says which groups may, must and cannot stay.
    """
    r = problem.router
    floor = (score[ids] + bound[ids]).min()
    low = score - bound
    low[ids] = -np.inf
    if r.groups == 1:
        return bool(floor >= low.max())
    size = problem.E // r.groups
    groups = _groups(problem, score)
    slack = r.group_score_topk * bound.reshape(r.groups, size).max(-1)
    upper, lower = groups + slack, groups - slack
    beaten_for_sure = np.array([(lower > upper[g]).sum() for g in range(r.groups)])
    may_be_beaten = np.array([(upper >= lower[g]).sum() - 1 for g in range(r.groups)])
    cannot, must = beaten_for_sure >= r.group_topk, may_be_beaten < r.group_topk
    used = np.zeros(r.groups, bool)
    used[ids // size] = True
    staying = used | must
    if (used & cannot).any() or staying.sum() > r.group_topk:
        return False
    tops = low.reshape(r.groups, size).max(-1)
    fillers = ~staying & ~cannot & (tops <= floor)
    return bool(floor >= tops[staying].max() and staying.sum() + fillers.sum() >= r.group_topk)


def best_choice(problem: Problem, score: np.ndarray) -> np.ndarray:
    """The K best experts, groups first; lower index wins ties."""
    r = problem.router
    if r.groups > 1:
        keep = np.argsort(-_groups(problem, score), kind="stable")[: r.group_topk]
        stays = np.isin(np.arange(problem.E) // (problem.E // r.groups), keep)
        score = np.where(stays, score, -np.inf)
    return np.argsort(-score, kind="stable")[: problem.K].astype(np.int32)


def _groups(problem: Problem, score: np.ndarray) -> np.ndarray:
    r = problem.router
    return np.sort(score.reshape(r.groups, -1), -1)[:, -r.group_score_topk :].sum(-1)
