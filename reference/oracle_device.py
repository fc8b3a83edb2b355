"""The oracle at full width: float64 jnp on whatever device holds the arrays, one expert's rows at a time.

The formulas of a row are those of `oracle` (`oracle_rows`, `oracle_router`); what differs is all that can go wrong at
scale: rows are gathered by expert, in blocks of a few static sizes, and added back by index. A test holds it equal to
`oracle`, and `spot_check` does so on samples of a real case. Kernel gradients need 16 bytes an element with their gauge,
60 GB for one tensor of a large layer, so `stream_experts` hands them over expert by expert.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..parity.interface import Implementation, Judged
from ..parity.problem import Losses, Output, Params, Problem, Routing
from . import oracle_router as router
from . import oracle_rows as rows
from .oracle_gauge import Noise
from .oracle_routes import RouteView
from .oracle_totals import loss_slopes, segments_of, token_gauge

BLOCKS = (32, 256, 2048)
"""Row counts that compile: an expert's rows are taken in the largest, the rest in the smallest that holds it."""

PER_EXPERT = ("wi", "wo", "wi_bias", "wo_bias")

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


class Sums(NamedTuple):
    """What a [T, D] result adds up: see `oracle_totals.TokenSum`."""

    value: Any
    var: Any
    squares: Any
    lump: Any
    lump2: Any
    n: Any


class _Run:
    """One evaluation. Block functions are jitted once for a problem and block size; sums are donated between them."""

    def __init__(self, problem: Problem, params: Params, x: Any, cotangent: Any | None):
        self.problem, self.params, self.x = problem, params, x
        self.dy = None if cotangent is None else jnp.asarray(cotangent)
        self.y, self.dx = _zeros(problem), (None if cotangent is None else _zeros(problem))
        shape = (problem.T, problem.K)
        self.dweight = jnp.zeros(shape, jnp.float64), jnp.zeros(shape, jnp.float64)
        self.kinks = self.kinks_shared = 0

    def scores(self) -> router.Scores:
        return _scores(self.problem)(*router.leaves_of(self.params), self.x)

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
        expert = (p.shared_wi[None], p.shared_wo[None], None, None)
        sums, self.kinks_shared = self._blocks(0, expert, token, np.zeros_like(token), None, None, shared=True)
        if sums is not None:
            yield from self._close(("shared_wi", "shared_wo"), None, sums, len(token), self.kinks_shared)

    def tokens(self, *, layer: bool) -> Iterator[Piece]:
        """y, and with a cotangent dx (and the routed experts' dweight)."""
        p = self.problem
        kinks = self.kinks + self.kinks_shared
        for name, label, sums in (("y", "y", self.y), ("x", "dx", self.dx)):
            if sums is not None:
                gauge, dof = _token_gauge(p, label)(sums)
                yield name, None, Judged(sums.value, gauge, kinks if name == "x" else 0, dof)
        if self.dy is not None and not layer:
            value, var = self.dweight
            yield "topk_weights", None, Judged(value, jnp.sqrt(var))

    def layer(self, ids: np.ndarray, real: np.ndarray, segment_ids: Any, cotangents: Any) -> Iterator[Piece]:
        p, q = self.problem, self.params
        scores = self.scores()
        w, var_w = _weights(p)(scores, jnp.asarray(ids))
        yield "weights", None, Judged(w, jnp.sqrt(var_w))
        counts, sizes, segment = segments_of(p, ids, real, segment_ids)
        for name, only in (("balance", (1.0, 0.0, 0.0)), ("sequence", (0.0, 1.0, 0.0)), ("z", (0.0, 0.0, 1.0))):
            dprobs, dz = loss_slopes(p, counts, sizes, segment, only)
            value, var = _loss(p, name)(scores, jnp.asarray(real), jnp.asarray(dprobs), dz)
            yield name, None, Judged(value, jnp.sqrt(var))
        yield from self.experts(ids, w, var_w)
        self.y = _part(p)(self.y)
        if p.experts.shared_F:
            yield from self.shared(real)
        if self.dy is not None:
            dprobs, dz = loss_slopes(p, counts, sizes, segment, cotangents)
            step = _router_backward(p)
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
        sums = None if self.dy is None else _expert_zeros(p, shared)
        done, kinks = 0, 0
        while done < len(token):
            size = next((b for b in BLOCKS if b >= len(token) - done), BLOCKS[-1])
            n = min(size, len(token) - done)
            # Padding points beyond the last token: gathers clip, scatters drop.
            t = np.full(size, p.T, np.int32)
            t[:n] = token[done : done + n]
            k = np.zeros(size, np.int32)
            k[:n] = slot[done : done + n]
            step = _block(p, shared, self.dy is not None)
            moving = (self.y, self.dx, self.dweight, sums)
            moving, found = step(moving, expert, e, self.x, self.dy, t, k, w, var_w)
            self.y, self.dx, self.dweight, sums = moving
            kinks += int(found)
            done += n
        return sums, kinks

    def _close(self, names: tuple[str, ...], e: int | None, sums: Any, n: int, kinks: int) -> Iterator[Piece]:
        for name, parts in zip(names, sums, strict=False):
            if getattr(self.params, name) is not None:
                gauge = _close(self.problem, not name.endswith("bias"))(parts, n)
                yield name, e, Judged(parts[0], gauge, kinks if name.endswith(("wi", "wi_bias")) else 0)


@functools.lru_cache(maxsize=64)
def _block(problem: Problem, shared: bool, backward: bool) -> Any:
    noise = Noise(problem)

    def outer(parts, a, b, var_b, valid):
        a, b = jnp.where(valid, a, 0.0), jnp.where(valid, b, 0.0)
        var_b = jnp.where(valid, var_b, 0.0)
        value, var, squares = parts
        return value + a.T @ b, var + (a * a).T @ var_b, squares + (a * a).T @ (b * b)

    def column(parts, b, var_b, valid):
        terms = (b, var_b, b * b)
        return tuple(p + jnp.where(valid, t, 0.0).sum(0) for p, t in zip(parts, terms, strict=True))

    def step(moving, expert, e, x, dy, t, k, w, var_w):
        y, dx, (dweight, var_dweight), sums = moving
        expert = rows.Expert.of(*(None if leaf is None else leaf[e].astype(jnp.float64) for leaf in expert))
        valid = (t < problem.T)[:, None]
        at = jnp.minimum(t, problem.T - 1)
        xs = x[at].astype(jnp.float64)
        wt, vt = (None, None) if shared else (w[at, k], var_w[at, k])
        f = rows.forward(jnp, problem, noise, expert, xs, wt, vt, shared)
        y = _add(y, t, f.weighted, f.var_weighted, f.lumps)
        kinks = jnp.where(valid[:, 0], f.hidden.kinks, 0).sum()
        if not backward:
            return (y, dx, (dweight, var_dweight), sums), kinks
        ds = dy[at].astype(jnp.float64)
        b = rows.backward(jnp, problem, noise, expert, xs, wt, vt, ds, f, shared)
        if not shared:
            dweight = dweight.at[t, k].set(b.dweight, mode="drop")
            var_dweight = var_dweight.at[t, k].set(b.var_dweight, mode="drop")
        dx = _add(dx, t, b.dx, b.var_dx, b.lumps)
        wi, wo, wi_bias, wo_bias = sums
        wi = outer(wi, xs, b.dpre, b.var_dpre, valid)
        wo = tuple(v.T for v in outer(tuple(v.T for v in wo), ds, b.weighted_h, b.var_weighted_h, valid))
        floor = jnp.where(valid, b.var_floor, 0.0).sum(0)
        wo = wo[0], wo[1] + floor[:, None], wo[2]
        if problem.experts.wi_bias and not shared:
            wi_bias = column(wi_bias, b.dpre, b.var_dpre, valid)
        if problem.experts.wo_bias and not shared:
            wo_bias = column(wo_bias, b.dbias, b.var_dbias, valid)
        return (y, dx, (dweight, var_dweight), (wi, wo, wi_bias, wo_bias)), kinks

    return jax.jit(step, donate_argnums=0)


@functools.lru_cache(maxsize=64)
def _scores(problem: Problem) -> Any:
    noise = Noise(problem)

    def run(*leaves):
        leaves = [None if leaf is None else leaf.astype(jnp.float64) for leaf in leaves]
        return router.scores(jnp, problem, noise, *leaves)

    return jax.jit(run)


@functools.lru_cache(maxsize=64)
def _weights(problem: Problem) -> Any:
    def run(scores, ids):
        at = router.weights(jnp, problem, scores, _chosen(problem, ids))
        return tuple(jnp.where(ids >= 0, jnp.take_along_axis(a, jnp.maximum(ids, 0), -1), 0.0) for a in at)

    return jax.jit(run)


@functools.lru_cache(maxsize=64)
def _loss(problem: Problem, name: str) -> Any:
    def run(scores, real, dprobs, dz):
        value, var = router.loss_terms(jnp, problem, scores, name, dprobs, dz)
        return router.loss_total(
            problem, jnp.where(real, value, 0.0).sum(), jnp.where(real, var, 0.0).sum(), real.sum()
        )

    return jax.jit(run)


@functools.lru_cache(maxsize=64)
def _router_backward(problem: Problem) -> Any:
    noise = Noise(problem)

    def run(dx, gate_kernel, x, scores, ids, real, dweight, var_dweight, dprobs, dz):
        real = real[:, None]
        onto = jax.nn.one_hot(ids, problem.E, dtype=jnp.float64)
        spread = [jnp.einsum("tk,tke->te", a, onto) for a in (dweight, var_dweight)]
        dlogits, var = router.logits_backward(jnp, problem, noise, scores, onto.sum(1), *spread, dprobs, dz)
        dlogits, var = jnp.where(real, dlogits, 0.0), jnp.where(real, var, 0.0)
        value, var_x, lumps = router.input_backward(noise, gate_kernel.astype(jnp.float64), dlogits, var)
        terms = (value, var_x, value * value, lumps.total[:, None], lumps.squares[:, None], 1.0)
        dx = Sums(*(s + jnp.where(real, v, 0.0) for s, v in zip(_with_part(noise, dx), terms, strict=True)))
        wide = x.astype(jnp.float64)
        kernel = wide.T @ dlogits, (wide * wide).T @ var, (wide * wide).T @ (dlogits * dlogits)
        return dx, kernel, (dlogits.sum(0), var.sum(0), (dlogits * dlogits).sum(0))

    return jax.jit(run, donate_argnums=0)


@functools.lru_cache(maxsize=64)
def _token_gauge(problem: Problem, label: str) -> Any:
    noise = Noise(problem)
    return jax.jit(lambda sums: token_gauge(jnp, noise, label, *sums))


@functools.lru_cache(maxsize=64)
def _part(problem: Problem) -> Any:
    noise = Noise(problem)
    return jax.jit(lambda sums: _with_part(noise, sums), donate_argnums=0)


@functools.lru_cache(maxsize=64)
def _close(problem: Problem, products: bool) -> Any:
    noise = Noise(problem)

    def run(parts, n):
        n = jnp.asarray(n, jnp.float64)
        return jnp.sqrt(jnp.where(n > 0, noise.parameter(jnp.maximum(n, 1.0), *parts, products=products), 0.0))

    return jax.jit(run)


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
        stacked = (np.stack([getattr(j, field) for j in each]) for field in ("value", "gauge"))
        whole[name] = Judged(*stacked, sum(j.kinks for j in each))
    return whole


def _with_part(noise: Noise, sums: Sums) -> Sums:
    return sums._replace(var=sums.var + jnp.where(sums.n > 0, noise.rounded("part", sums.value), 0.0))


def _add(sums: Sums, t: Any, value: Any, var: Any, lumps: Any) -> Sums:
    terms = (value, var, value * value, lumps.total[:, None], lumps.squares[:, None], jnp.ones((len(t), 1)))
    return Sums(*(s.at[t].add(v, mode="drop") for s, v in zip(sums, terms, strict=True)))


def _chosen(problem: Problem, ids: Any) -> Any:
    return jax.nn.one_hot(ids, problem.E, dtype=jnp.float64).sum(1)


def _zeros(problem: Problem) -> Sums:
    widths = (problem.D, problem.D, problem.D, 1, 1, 1)
    return Sums(*(jnp.zeros((problem.T, width), jnp.float64) for width in widths))


def _expert_zeros(problem: Problem, shared: bool) -> Any:
    width = problem.experts.shared_F if shared else problem.F
    columns = 2 * width if problem.experts.gated else width
    shapes = ((problem.D, columns), (width, problem.D), (columns,), (problem.D,))
    return tuple(tuple(jnp.zeros(s, jnp.float64) for _ in range(3)) for s in shapes)
