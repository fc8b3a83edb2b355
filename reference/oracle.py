"""The oracle: a dropless layer in float64 NumPy, one token at a time, with the rounding error an honest layer may show.

No sort, no padding, no grouped product and no automatic differentiation: a token's vector meets one expert's matrix, and
every gradient is written by hand. It shares nothing with what it judges. Values are exact for the given storage-dtype
inputs; gauges follow `parity.tolerances`. Slow by design; `oracle_device` computes the same at full width.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..parity.interface import Implementation, Judged
from ..parity.problem import Losses, Output, Params, Problem, Routing
from . import oracle_router as router
from . import oracle_rows as rows
from .oracle_gauge import Noise
from .oracle_repeats import contents_of, repeats
from .oracle_routes import RouteView, best_choice
from .oracle_totals import Gradients, independent, judge_losses, loss_slopes, segments_of


def judge_experts(
    problem: Problem,
    params: Params,
    x: Any,
    routing: Routing,
    cotangent: Any | None = None,
    *,
    kernels: bool = True,
) -> dict[str, Judged]:
    """Routed experts at a fixed routing: y, and with a cotangent the gradients of x, topk_weights and every kernel.

    kernels=False leaves those of the kernels and biases out, which at full width do not fit a host.

    A slot of id -1 adds nothing and has gradient exactly 0; an expert without tokens has value and gauge exactly 0.
    """
    ids, w = np.asarray(routing.topk_idx), wide(routing.topk_weights)
    with np.errstate(all="ignore"):
        return (
            _Run(problem, params, x, cotangent, kernels).experts(ids, w, np.zeros_like(w)).judged(_counts(problem, ids))
        )


def judge_layer(
    problem: Problem,
    params: Params,
    x: Any,
    topk_idx: Any,
    cotangent: Any | None = None,
    *,
    mask: Any | None = None,
    segment_ids: Any | None = None,
    loss_cotangents: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> dict[str, Judged]:
    """A live layer, replayed at the ids it chose: y, weights, balance, sequence, z, and with a cotangent all gradients.

    loss_cotangents belong to (balance, sequence, z). expert_bias has gradient exactly 0. Masked tokens are exactly 0.
    """
    ids = np.array(topk_idx)
    if mask is not None:
        ids[~np.asarray(mask)] = -1
    run = _Run(problem, params, x, cotangent)
    with np.errstate(all="ignore"):
        return run.layer(
            ids, np.ones(problem.T, bool) if mask is None else np.asarray(mask), segment_ids, loss_cotangents
        )


def judge_route(problem: Problem, params: Params, x: Any) -> RouteView:
    """Logits, ranking scores and their error bounds, and what is admissible as a choice."""
    with np.errstate(all="ignore"):
        run = _Run(problem, params, x, None)
        scored = [run.score(t) for t in range(problem.T)] or [router.nothing(problem)]
        return RouteView.of(
            problem, router.Scores(*(np.stack(leaves)[: problem.T] for leaves in zip(*scored, strict=True)))
        )


def route(problem: Problem, params: Params, x: Any) -> Routing:
    """Values only: the exact choice, lower index winning ties, and its weights."""
    with np.errstate(all="ignore"):
        run = _Run(problem, params, x, None)
        ids: Any = np.zeros((problem.T, problem.K), np.int32)
        w: Any = np.zeros((problem.T, problem.K), np.float32)
        for t in range(problem.T):
            s = run.score(t)
            ids[t] = best_choice(problem, s.ranking)
            w[t] = router.weights(np, problem, s, _chosen(problem, ids[t])).weights[ids[t]]
    return Routing(ids, w)


def experts(problem: Problem, params: Params, x: Any, routing: Routing) -> np.ndarray:
    """Values only, rounded once to the storage dtype."""
    return judge_experts(problem, params, x, routing)["y"].value.astype(problem.dtype)


def experts_vjp(problem: Problem, params: Params, x: Any, routing: Routing, dy: Any) -> dict[str, np.ndarray]:
    """Gradients by name, rounded once."""
    judged = judge_experts(problem, params, x, routing, dy)
    return {
        name: j.value.astype(np.float32 if name == "topk_weights" else problem.dtype)
        for name, j in judged.items()
        if name != "y"
    }


def layer(problem: Problem, params: Params, x: Any, *, mask: Any = None, segment_ids: Any = None) -> Output:
    """Values only: route, experts, shared expert and losses."""
    chosen = route(problem, params, x)
    j = judge_layer(problem, params, x, chosen.topk_idx, mask=mask, segment_ids=segment_ids)
    ids: Any = np.array(chosen.topk_idx)
    if mask is not None:
        ids[~np.asarray(mask)] = -1
    single: dict[str, Any] = {
        name: j[name].value.astype(np.float32) for name in ("weights", "balance", "sequence", "z")
    }
    sizes: Any = _counts(problem, ids).astype(np.int32)
    return Output(
        y=j["y"].value.astype(problem.dtype),
        losses=Losses(single["balance"], single["sequence"], single["z"]),
        routing=Routing(ids, single["weights"]),
        group_sizes=sizes,
    )


def wide(array: Any) -> np.ndarray:
    """float64, whatever the storage dtype."""
    return np.asarray(array).astype(np.float64)


IMPLEMENTATION = Implementation(
    name="oracle",
    stages={"route": route, "experts": experts, "layer": layer, "experts_vjp": experts_vjp},
    traits=frozenset({"deterministic", "numpy"}),
    summary="float64 NumPy, one token at a time, own backward",
)


class _Run:
    """One evaluation: parameters widened once, sums filled token by token."""

    def __init__(self, problem: Problem, params: Params, x: Any, cotangent: Any | None, kernels: bool = True):
        self.problem, self.noise = problem, Noise(problem)
        self.params, self.kernels = params, kernels
        self.leaves = [None if leaf is None else np.asarray(leaf) for leaf in rows.leaves_of(params)]
        self.gate: Any = [None if leaf is None else wide(leaf) for leaf in router.leaves_of(params)]
        self.x = wide(x)
        self.dy = None if cotangent is None else wide(cotangent)
        self.contents = contents_of(x) if cotangent is not None and kernels else None

    def score(self, t: int) -> router.Scores:
        return router.scores(np, self.problem, self.noise, self.gate, self.x[t])

    def experts(self, ids: np.ndarray, w: np.ndarray, var_w: np.ndarray) -> Gradients:
        problem, noise = self.problem, self.noise
        out = Gradients(problem, noise, self.params, backward=self.dy is not None, kernels=self.kernels)
        for e in range(problem.E):
            visits = np.argwhere(ids == e)
            if not len(visits):
                continue
            expert = rows.Expert.of(
                *(None if leaf is None else wide(leaf[e]) for leaf in self.leaves),
                operands=noise.operands,
                tokens=self.x,
            )
            same = None
            if self.dy is not None:
                same = repeats(self.contents, visits[:, 0], w[visits[:, 0], visits[:, 1]], self.dy[visits[:, 0]])
            for i, (t, k) in enumerate(visits):
                f = rows.forward(np, problem, noise, expert, self.x[t], w[t, k], var_w[t, k])
                out.y.add(t, f.weighted, f.var_weighted, f.lumps)
                out.kinks += int(f.hidden.kinks)
                if self.dy is None:
                    continue
                here = None if same is None else same.row(i)
                b = rows.backward(
                    np, problem, noise, expert, self.x[t], w[t, k], var_w[t, k], self.dy[t], f, repeats=here
                )
                out.add_expert(e, self.x[t], self.dy[t], b, here)
                out.x.add(t, b.dx, b.var_dx, b.lumps["x"])
                out.dweight[t, k], out.var_dweight[t, k] = b.dweight, b.var_dweight
        return out

    def layer(
        self, ids: np.ndarray, real: np.ndarray, segment_ids: Any, loss_cotangents: tuple[float, float, float]
    ) -> dict[str, Judged]:
        problem, noise = self.problem, self.noise
        scored = {int(t): self.score(int(t)) for t in np.nonzero(real)[0]}
        w, var_w = np.zeros(ids.shape), np.zeros(ids.shape)
        for t, s in scored.items():
            at = router.weights(np, problem, s, _chosen(problem, ids[t]))
            w[t] = np.where(ids[t] >= 0, at.weights[ids[t]], 0.0)
            var_w[t] = np.where(ids[t] >= 0, at.var[ids[t]], 0.0)
        out = self.experts(ids, w, var_w)
        out.y.part(noise)
        if problem.experts.shared_F:
            self._shared(out, real)
        counts, sizes, segment = segments_of(problem, ids, real, segment_ids)
        losses = judge_losses(problem, scored, counts, sizes, segment)
        if self.dy is not None:
            dprobs, dz = loss_slopes(problem, counts, sizes, segment, loss_cotangents)
            self._router(out, scored, ids, dprobs, dz)
        judged = out.judged(_counts(problem, ids), tokens=len(scored))
        return {"weights": Judged(w, np.sqrt(var_w), 0, independent(np, var_w.sum(-1))), **losses, **judged}

    def _shared(self, out: Gradients, real: np.ndarray) -> None:
        problem, noise = self.problem, self.noise
        expert = rows.Expert.of(wide(self.params.need("shared_wi")), wide(self.params.need("shared_wo")))
        tokens = np.nonzero(real)[0]
        same = None if self.dy is None else repeats(self.contents, tokens, np.ones(len(tokens)), self.dy[tokens])
        for i, t in enumerate(tokens):
            f = rows.forward(np, problem, noise, expert, self.x[t], None, None, shared=True)
            out.y.add(t, f.weighted, f.var_weighted, f.lumps)
            if self.dy is not None:
                here = None if same is None else same.row(i)
                b = rows.backward(
                    np, problem, noise, expert, self.x[t], None, None, self.dy[t], f, shared=True, repeats=here
                )
                out.x.add(t, b.dx, b.var_dx, b.lumps["x"])
                out.add_shared(self.x[t], self.dy[t], b, here)
                out.kinks_shared += int(f.hidden.kinks)

    def _router(self, out: Gradients, scored: dict[int, Any], ids: np.ndarray, dprobs: np.ndarray, dz: float) -> None:
        problem, noise = self.problem, self.noise
        out.x.part(noise)
        for t, s in scored.items():
            valid = ids[t] >= 0
            dw, var_dw = np.zeros(problem.E), np.zeros(problem.E)
            dw[ids[t][valid]], var_dw[ids[t][valid]] = out.dweight[t][valid], out.var_dweight[t][valid]
            dlogits, var = router.logits_backward(
                np, problem, noise, s, _chosen(problem, ids[t]), dw, var_dw, dprobs[t], dz
            )
            out.x.add(t, *router.input_backward(noise, self.gate[0], dlogits, var))
            out.add_gate(self.x[t], dlogits, var)


def _chosen(problem: Problem, ids: np.ndarray) -> np.ndarray:
    row = np.zeros(problem.E)
    row[ids[ids >= 0]] = 1.0
    return row


def _counts(problem: Problem, ids: np.ndarray) -> np.ndarray:
    return np.bincount(ids[ids >= 0], minlength=problem.E)
