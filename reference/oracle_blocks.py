"""The device oracle's compiled steps: one block of an expert's rows, the router of a whole batch, and the closing of sums.

Each is jitted once for a problem (and block size). Rows that pad a block point beyond the last token: gathers clip them,
scatters drop them, and sums over rows select them away, since 0 * NaN is NaN.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..parity.problem import Problem
from . import oracle_router as router
from . import oracle_rows as rows
from .oracle_gauge import Noise
from .oracle_totals import kernel_gauge, token_gauge


class Sums(NamedTuple):
    """What a [T, D] result adds up: see `oracle_totals.TokenSum`."""

    value: Any
    var: Any
    squares: Any
    lump: Any
    lump2: Any
    n: Any


@functools.lru_cache(maxsize=64)
def block(problem: Problem, shared: bool, backward: bool) -> Any:
    """(sums, one expert, a block of its tokens and slots) -> (sums with that block added, kinks); the sums are donated."""
    noise = Noise(problem)

    def outer(parts, a, b, var_b, lumps, valid):
        a, b, var_b = (jnp.where(valid, v, 0.0) for v in (a, b, var_b))
        terms = (a.T @ b, (a * a).T @ var_b, (a * a).T @ (b * b), *_lumped(lumps, valid))
        return tuple(p + t for p, t in zip(parts, terms, strict=True))

    def column(parts, b, var_b, lumps, valid):
        terms = (jnp.where(valid, v, 0.0).sum(0) for v in (b, var_b, b * b))
        return tuple(p + t for p, t in zip(parts, (*terms, *_lumped(lumps, valid)), strict=True))

    def step(moving, expert, e, x, dy, t, k, w, var_w, repeats=None):
        y, dx, (dweight, var_dweight), sums = moving
        expert = rows.Expert.of(
            *(None if leaf is None else leaf[e].astype(jnp.float64) for leaf in expert),
            operands=None if shared else noise.operands,
            tokens=x.astype(jnp.float64) if noise.operands.per_tensor else None,
        )
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
        b = rows.backward(jnp, problem, noise, expert, xs, wt, vt, ds, f, shared, repeats)
        if not shared:
            dweight = dweight.at[t, k].set(b.dweight, mode="drop")
            var_dweight = var_dweight.at[t, k].set(b.var_dweight, mode="drop")
        dx = _add(dx, t, b.dx, b.var_dx, b.lumps["x"])
        wi, wo, wi_bias, wo_bias = sums
        wi = outer(wi, xs, b.dpre, b.var_dpre_operand, b.lumps["wi"], valid)
        if b.var_dpre_floor is not None:
            wi = (wi[0], wi[1] + jnp.where(valid, b.var_dpre_floor, 0.0).sum(0), *wi[2:])
        floor = jnp.where(valid, b.var_floor, 0.0).sum(0)[:, None]
        turned = outer(_turned(wo), ds, b.weighted_h, b.var_weighted_h, b.lumps["wo"], valid)
        wo = _turned(turned)
        if repeats is not None:
            floor = floor + jnp.where(valid, b.var_common_h, 0.0).T @ repeats.dy**2
        wo = (wo[0], wo[1] + floor, *wo[2:])
        if problem.experts.wi_bias and not shared:
            wi_bias = column(wi_bias, b.dpre, b.var_dpre, b.lumps["wi_bias"], valid)
        if problem.experts.wo_bias and not shared:
            wo_bias = column(wo_bias, b.dbias, b.var_dbias, b.lumps["wo_bias"], valid)
        return (y, dx, (dweight, var_dweight), (wi, wo, wi_bias, wo_bias)), kinks

    return jax.jit(step, donate_argnums=0)


@functools.lru_cache(maxsize=64)
def batch_scores(problem: Problem) -> Any:
    """(router leaves, x) -> Scores of every token."""
    noise = Noise(problem)

    def run(leaves, x):
        wide = tuple(None if leaf is None else leaf.astype(jnp.float64) for leaf in leaves)
        return router.scores(jnp, problem, noise, wide, x.astype(jnp.float64))

    return jax.jit(run)


@functools.lru_cache(maxsize=64)
def weights_at(problem: Problem) -> Any:
    """(scores, ids) -> weights [T, K] and their variance, 0 at -1."""

    def run(scores, ids):
        at = router.weights(jnp, problem, scores, _chosen(problem, ids))
        return tuple(jnp.where(ids >= 0, jnp.take_along_axis(a, jnp.maximum(ids, 0), -1), 0.0) for a in at)

    return jax.jit(run)


@functools.lru_cache(maxsize=64)
def loss(problem: Problem, name: str) -> Any:
    """(scores, real, slopes) -> a loss and its variance over the real tokens."""

    def run(scores, real, dprobs, dz):
        value, var = router.loss_terms(jnp, problem, scores, name, dprobs, dz)
        return router.loss_total(
            problem, jnp.where(real, value, 0.0).sum(), jnp.where(real, var, 0.0).sum(), real.sum()
        )

    return jax.jit(run)


@functools.lru_cache(maxsize=64)
def router_backward(problem: Problem) -> Any:
    """(sums of dx, router inputs, dweight) -> (dx with the share that comes through the logits, gate_kernel, gate_bias)."""
    noise = Noise(problem)

    def run(dx, gate_kernel, x, scores, ids, real, dweight, var_dweight, dprobs, dz):
        real = real[:, None]
        onto = jax.nn.one_hot(ids, problem.E, dtype=jnp.float64)
        dw, var_dw = (jnp.einsum("tk,tke->te", a, onto) for a in (dweight, var_dweight))
        dlogits, var = router.logits_backward(jnp, problem, noise, scores, onto.sum(1), dw, var_dw, dprobs, dz)
        dlogits, var = jnp.where(real, dlogits, 0.0), jnp.where(real, var, 0.0)
        value, var_x, lumps = router.input_backward(noise, gate_kernel.astype(jnp.float64), dlogits, var)
        terms = (value, var_x, value * value, lumps.total[:, None], lumps.squares[:, None], 1.0)
        dx = Sums(*(s + jnp.where(real, v, 0.0) for s, v in zip(_with_part(noise, dx), terms, strict=True)))
        wide = x.astype(jnp.float64)
        lumps = router.gate_lumps(wide, var)
        kernel = wide.T @ dlogits, (wide * wide).T @ var, (wide * wide).T @ (dlogits * dlogits), *_lumped(lumps, real)
        none = jnp.zeros(1)
        return dx, kernel, (dlogits.sum(0), var.sum(0), (dlogits * dlogits).sum(0), none, none)

    return jax.jit(run, donate_argnums=0)


@functools.lru_cache(maxsize=64)
def close_tokens(problem: Problem, label: str) -> Any:
    """sums -> (gauge, independent errors) of y or dx; `label` names its last rounding."""
    noise = Noise(problem)
    return jax.jit(lambda sums: token_gauge(jnp, noise, label, *sums))


@functools.lru_cache(maxsize=64)
def part(problem: Problem) -> Any:
    """sums -> sums rounded once more, before another stage is added to them."""
    noise = Noise(problem)
    return jax.jit(lambda sums: _with_part(noise, sums), donate_argnums=0)


@functools.lru_cache(maxsize=64)
def close_kernel(problem: Problem, products: bool) -> Any:
    """(parts, tokens) -> (gauge, independent errors) of one parameter's gradient."""
    noise = Noise(problem)

    def run(parts, n):
        n = jnp.asarray(n, jnp.float64)
        return kernel_gauge(jnp, noise, parts, n, products=products)

    return jax.jit(run)


def _with_part(noise: Noise, sums: Sums) -> Sums:
    return sums._replace(var=sums.var + jnp.where(sums.n > 0, noise.rounded("part", sums.value), 0.0))


def _lumped(lumps: Any, valid: Any) -> tuple[Any, Any]:
    return tuple(jnp.where(valid[:, 0], part, 0.0).sum()[None] for part in lumps)  # type: ignore[return-value]


def _turned(parts: Any) -> Any:
    return (*(v.T for v in parts[:3]), *parts[3:])


def _add(sums: Sums, t: Any, value: Any, var: Any, lumps: Any) -> Sums:
    terms = (value, var, value * value, lumps.total[:, None], lumps.squares[:, None], jnp.ones((len(t), 1)))
    return Sums(*(s.at[t].add(v, mode="drop") for s, v in zip(sums, terms, strict=True)))


def _chosen(problem: Problem, ids: Any) -> Any:
    return jax.nn.one_hot(ids, problem.E, dtype=jnp.float64).sum(1)


def no_tokens(problem: Problem) -> Sums:
    """Empty sums of a [T, D] result."""
    widths = (problem.D, problem.D, problem.D, 1, 1, 1)
    return Sums(*(jnp.zeros((problem.T, width), jnp.float64) for width in widths))


def no_rows(problem: Problem, shared: bool) -> Any:
    """Empty sums of an expert's wi, wo, wi_bias, wo_bias: value, variance, squares, lumps and their squares."""
    width = problem.experts.shared_F if shared else problem.F
    columns = 2 * width if problem.experts.gated else width
    shapes = ((problem.D, columns), (width, problem.D), (columns,), (problem.D,))
    return tuple(tuple(jnp.zeros(s, jnp.float64) for s in (shape, shape, shape, (1,), (1,))) for shape in shapes)
