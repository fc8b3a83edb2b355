"""The oracle at full width: float64 jnp on whatever device holds the arrays, one expert's rows at a time.

The formulas of a row are those of `oracle` (`oracle_rows`, `oracle_router`); what differs is all that can go wrong at
scale: rows are gathered by expert, in blocks of a few static sizes, and added back by index. A test holds it equal to
`oracle`, and `spot_check` does so on samples of a real case. Kernel gradients need 16 bytes an element with their gauge,
60 GB for one tensor of a large layer, so `stream_experts` hands them over expert by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..parity.interface import Implementation, Judged
from ..parity.problem import Losses, Output, Params, Problem, Routing
from . import oracle_blocks as blocks
from . import oracle_router as router
from . import oracle_rows as rows
from .oracle_repeats import contents_of, repeats
from .oracle_routes import RouteView
from .oracle_totals import PER_EXPERT, independent, loss_slopes, segments_of

BLOCKS = (32, 256, 2048)
"""Row counts that compile: an expert's rows are taken in the largest, the rest in the smallest that holds it."""

Piece = tuple[str, int | None, Judged]
"""(tensor, expert or None for the whole tensor, judged); arrays are float64 and lie on the device."""


def judge_experts(
    problem: Problem, params: Params, x: Any, routing: Routing, cotangent: Any | None = None
) -> dict[str, Judged]:
    """As `oracle.judge_experts`, on the device; everything comes to the host at the end."""
    return _collect(problem, stream_experts(problem, params, x, routing, cotangent))


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
    """As `oracle.judge_layer`, on the device; everything comes to the host at the end."""
    pieces = stream_layer(
        problem, params, x, topk_idx, cotangent, mask=mask, segment_ids=segment_ids, loss_cotangents=loss_cotangents
    )
    return _collect(problem, pieces)


def stream_experts(
    problem: Problem, params: Params, x: Any, routing: Routing, cotangent: Any | None = None
) -> Iterator[Piece]:
    """The routed experts' tensors: kernels and biases one expert at a time, then y, x and topk_weights whole."""

    def pieces() -> Iterator[Piece]:
        run = _Run(problem, params, jnp.asarray(x), cotangent)
        w = jnp.asarray(routing.topk_weights).astype(jnp.float64)
        yield from run.experts(np.asarray(routing.topk_idx), w, jnp.zeros_like(w))
        yield from run.tokens(layer=False)

    return _wide(pieces())


def stream_layer(
    problem: Problem,
    params: Params,
    x: Any,
    topk_idx: Any,
    cotangent: Any | None = None,
    *,
    mask: Any | None = None,
    segment_ids: Any | None = None,
    loss_cotangents: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Iterator[Piece]:
    """A live layer's tensors, replayed at the ids it chose; the order is that of `stream_experts`, then the router's."""
    ids = np.array(topk_idx)
    real = np.ones(problem.T, bool) if mask is None else np.asarray(mask)
    ids[~real] = -1

    def pieces() -> Iterator[Piece]:
        # A masked token may hold NaN, which would reach the gate's gradient as 0 * NaN.
        run = _Run(problem, params, jnp.where(jnp.asarray(real)[:, None], jnp.asarray(x), 0), cotangent)
        yield from run.layer(ids, real, segment_ids, loss_cotangents)

    return _wide(pieces())


def judge_route(problem: Problem, params: Params, x: Any) -> RouteView:
    """As `oracle.judge_route`: float64 logits, scores and bounds of the whole batch."""
    with jax.enable_x64(True):
        scores = _Run(problem, params, jnp.asarray(x), None).scores()
    return RouteView.of(problem, router.Scores(*(np.asarray(leaf) for leaf in scores)))


def route(problem: Problem, params: Params, x: Any) -> Routing:
    """Values only: the exact choice, lower index winning ties, and its weights."""
    view = judge_route(problem, params, x)
    ids = view.best()
    return Routing(jnp.asarray(ids), jnp.asarray(view.weights(ids).value.astype(np.float32)))


def experts(problem: Problem, params: Params, x: Any, routing: Routing) -> Any:
    """Values only, rounded once to the storage dtype."""
    return jnp.asarray(judge_experts(problem, params, x, routing)["y"].value.astype(problem.dtype))


def experts_vjp(problem: Problem, params: Params, x: Any, routing: Routing, dy: Any) -> dict[str, Any]:
    """Gradients by name, rounded once."""
    judged = judge_experts(problem, params, x, routing, dy)
    judged.pop("y")
    return {
        name: jnp.asarray(j.value.astype("float32" if name == "topk_weights" else problem.dtype))
        for name, j in judged.items()
    }


def layer(problem: Problem, params: Params, x: Any, *, mask: Any = None, segment_ids: Any = None) -> Output:
    """Values only: route, experts, shared expert and losses."""
    ids = np.array(route(problem, params, x).topk_idx)
    if mask is not None:
        ids[~np.asarray(mask)] = -1
    j = judge_layer(problem, params, x, ids, mask=mask, segment_ids=segment_ids)
    single = {name: jnp.asarray(j[name].value.astype(np.float32)) for name in ("weights", "balance", "sequence", "z")}
    return Output(
        y=jnp.asarray(j["y"].value.astype(problem.dtype)),
        losses=Losses(single["balance"], single["sequence"], single["z"]),
        routing=Routing(jnp.asarray(ids), single["weights"]),
        group_sizes=jnp.asarray(np.bincount(ids[ids >= 0], minlength=problem.E).astype(np.int32)),
    )


IMPLEMENTATION = Implementation(
    name="oracle_device",
    stages={"route": route, "experts": experts, "layer": layer, "experts_vjp": experts_vjp},
    traits=frozenset({"deterministic", "numpy"}),
    summary="float64 jnp, one expert at a time: the judge at full width",
)


class _Run:
    """One evaluation; its sums are donated from one block to the next."""

    def __init__(self, problem: Problem, params: Params, x: Any, cotangent: Any | None):
        self.problem, self.params, self.x = problem, params, x
        self.dy = None if cotangent is None else jnp.asarray(cotangent)
        self.y, self.dx = blocks.no_tokens(problem), (None if cotangent is None else blocks.no_tokens(problem))
        shape = (problem.T, problem.K)
        self.dweight = jnp.zeros(shape, jnp.float64), jnp.zeros(shape, jnp.float64)
        self.contents = None if cotangent is None else contents_of(x)
        self.kinks = self.kinks_shared = 0

    def scores(self) -> router.Scores:
        return blocks.batch_scores(self.problem)(router.leaves_of(self.params), self.x)

    def experts(self, ids: np.ndarray, w: Any, var_w: Any) -> Iterator[Piece]:
        """Every expert's kernels and biases; y, dx and dweight fill up on the way."""
        leaves = rows.leaves_of(self.params)
        for e in range(self.problem.E):
            token, slot = np.nonzero(ids == e)
            sums, kinks = self._blocks(e, leaves, token, slot, w, var_w, shared=False)
            self.kinks += kinks
            if sums is not None:
                yield from self._close(PER_EXPERT, e, sums, len(token), kinks)

    def shared(self, real: np.ndarray) -> Iterator[Piece]:
        """The shared expert: all real tokens, weight 1."""
        p = self.params
        token = np.nonzero(real)[0]
        expert = (p.need("shared_wi")[None], p.need("shared_wo")[None], None, None)
        sums, self.kinks_shared = self._blocks(0, expert, token, np.zeros_like(token), None, None, shared=True)
        if sums is not None:
            yield from self._close(("shared_wi", "shared_wo"), None, sums, len(token), self.kinks_shared)

    def tokens(self, *, layer: bool) -> Iterator[Piece]:
        """y, and with a cotangent dx (and the routed experts' dweight)."""
        p = self.problem
        kinks = self.kinks + self.kinks_shared
        for name, label, sums in (("y", "y", self.y), ("x", "dx", self.dx)):
            if sums is not None:
                gauge, dof = blocks.close_tokens(p, label)(sums)
                yield name, None, Judged(sums.value, gauge, kinks if name == "x" else 0, dof)
        if self.dy is not None and not layer:
            value, var = self.dweight
            yield "topk_weights", None, Judged(value, jnp.sqrt(var), 0, independent(jnp, var))

    def layer(self, ids: np.ndarray, real: np.ndarray, segment_ids: Any, cotangents: Any) -> Iterator[Piece]:
        p, q = self.problem, self.params
        scores = self.scores()
        w, var_w = blocks.weights_at(p)(scores, jnp.asarray(ids))
        yield "weights", None, Judged(w, jnp.sqrt(var_w), 0, independent(jnp, var_w.sum(-1)))
        counts, sizes, segment = segments_of(p, ids, real, segment_ids)
        for name, only in (("balance", (1.0, 0.0, 0.0)), ("sequence", (0.0, 1.0, 0.0)), ("z", (0.0, 0.0, 1.0))):
            dprobs, dz = loss_slopes(p, counts, sizes, segment, only)
            value, var = blocks.loss(p, name)(scores, jnp.asarray(real), jnp.asarray(dprobs), dz)
            yield name, None, Judged(value, jnp.sqrt(var))
        yield from self.experts(ids, w, var_w)
        self.y = blocks.part(p)(self.y)
        if p.experts.shared_F:
            yield from self.shared(real)
        if self.dy is not None:
            dprobs, dz = loss_slopes(p, counts, sizes, segment, cotangents)
            step = blocks.router_backward(p)
            args = (
                q.gate_kernel,
                self.x,
                scores,
                jnp.asarray(ids),
                jnp.asarray(real),
                *self.dweight,
                jnp.asarray(dprobs),
                dz,
            )
            self.dx, kernel, bias = step(self.dx, *args)
            yield from self._close(("gate_kernel", "gate_bias"), None, (kernel, bias), int(real.sum()), 0)
            if q.expert_bias is not None:
                zero = jnp.zeros(p.E, jnp.float64)
                yield "expert_bias", None, Judged(zero, zero)
        yield from self.tokens(layer=True)

    def _blocks(
        self, e: int, expert: Any, token: np.ndarray, slot: np.ndarray, w: Any, var_w: Any, *, shared: bool
    ) -> tuple[Any, int]:
        p = self.problem
        sums = None if self.dy is None else blocks.no_rows(p, shared)
        same = None
        if self.contents is not None and self.dy is not None:
            ones = jnp.ones(len(token), jnp.float64)
            weights = ones if shared else w[token, slot]
            same = repeats(self.contents, token, weights, self.dy[token].astype(jnp.float64))
        done, kinks = 0, 0
        while done < len(token):
            size = next((b for b in BLOCKS if b >= len(token) - done), BLOCKS[-1])
            n = min(size, len(token) - done)
            t = np.full(size, p.T, np.int32)
            t[:n] = token[done : done + n]
            k = np.zeros(size, np.int32)
            k[:n] = slot[done : done + n]
            step = blocks.block(p, shared, self.dy is not None)
            moving = (self.y, self.dx, self.dweight, sums)
            copies = None if same is None else same.block(done, n, size)
            moving, found = step(moving, expert, e, self.x, self.dy, t, k, w, var_w, copies)
            self.y, self.dx, self.dweight, sums = moving
            kinks += int(found)
            done += n
        return sums, kinks

    def _close(self, names: tuple[str, ...], e: int | None, sums: Any, n: int, kinks: int) -> Iterator[Piece]:
        for name, parts in zip(names, sums, strict=False):
            if getattr(self.params, name) is not None:
                gauge, dof = blocks.close_kernel(self.problem, not name.endswith("bias"))(parts, n)
                yield name, e, Judged(parts[0], gauge, kinks if name.endswith(("wi", "wi_bias")) else 0, dof)


def _wide(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The same pieces, computed with 64-bit types that are off again whenever the caller has its turn."""
    while True:
        with jax.enable_x64(True):
            try:
                piece = next(pieces)
            except StopIteration:
                return
        yield piece


def _collect(problem: Problem, pieces: Iterator[Piece]) -> dict[str, Judged]:
    whole: dict[str, Judged] = {}
    parts: dict[str, list[Judged]] = {}
    for name, e, j in pieces:
        dof = None if j.dof is None else np.asarray(j.dof)
        host = Judged(np.asarray(j.value), np.asarray(j.gauge), int(j.kinks), dof)
        if e is None:
            whole[name] = host
        else:
            parts.setdefault(name, []).append(host)
    for name, each in parts.items():
        value, gauge = (np.stack([getattr(j, field) for j in each]) for field in ("value", "gauge"))
        whole[name] = Judged(value, gauge, sum(j.kinks for j in each), np.concatenate([j.dof for j in each]))  # type: ignore[arg-type]
    return whole
