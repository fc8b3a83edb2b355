"""The Triton kernels of `te` in Pallas's interpreter, held to their twins in plain JAX; no GPU needed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.optimized.te import hidden, kernels, rows
from dropless.parity.compare import same_bits
from dropless.parity.problem import Clamp, Experts

# One program a call: op by op, each of a function's many small steps would be compiled alone.
plan = jax.jit(rows.plan, static_argnames=("experts", "align"))
spread = jax.jit(kernels.spread, static_argnames=("rows", "interpret"))
plain_spread = jax.jit(rows.spread, static_argnames="rows")
sum_rows = jax.jit(kernels.sum_rows, static_argnames="interpret")
plain_sum_rows = jax.jit(rows.sum_rows)
one_pass = jax.jit(kernels.hidden, static_argnames=("act", "parts", "interpret"))
plain_pass = jax.jit(hidden.hidden, static_argnames="experts")
one_pass_gradient = jax.jit(kernels.hidden_gradient, static_argnames=("act", "parts", "interpret"))
plain_pass_gradient = jax.jit(hidden.hidden_gradient, static_argnames="experts")
select = jax.jit(kernels.select, static_argnames=("K", "interpret"))
place = jax.jit(rows.place, static_argnums=3)


def _normal(seed, shape, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _slots(T, K, E, seed=0, nowhere=True):
    ids = np.argsort(np.random.default_rng(seed).random((T, E)), axis=1)[:, :K].astype(np.int32)
    if nowhere:
        ids[::3, K - 1] = -1
        ids[1:2] = -1
    return jnp.asarray(ids)


def _same(name, got, want):
    finding = same_bits(name, np.asarray(got), np.asarray(want))
    assert finding.ok, finding.message


@pytest.mark.parametrize(("T", "K", "E", "align"), [(37, 3, 6, 1), (300, 2, 5, 8), (1, 4, 4, 128)])
def test_rows_are_placed_by_expert_then_token(T, K, E, align):
    """The plan against a sort: counts, order inside an expert, aligned starts, and -1 for no expert."""
    ids = _slots(T, K, E)
    found = plan(ids, E, align=align)
    flat = np.asarray(ids).reshape(-1)
    sizes = np.bincount(flat[flat >= 0], minlength=E)
    _same("group_sizes", found.group_sizes, sizes.astype(np.int32))
    start = np.concatenate([[0], np.cumsum(-(-sizes // align) * align)])
    want = np.full(T * K, -1, np.int32)
    for e in range(E):
        slots = np.flatnonzero(flat == e)
        want[slots] = start[e] + np.arange(len(slots))
    _same("row_of_slot", found.row_of_slot, want.reshape(T, K))


@pytest.mark.parametrize("D", [256, 40])
def test_spreading_writes_each_token_to_its_rows(D):
    T, K, E = 19, 3, 5
    at = plan(_slots(T, K, E), E).row_of_slot
    x, w = _normal(0, (T, D)), _normal(1, (T, K), "float32")
    got, w_got = spread(x, at, T * K, w, interpret=True)
    want, w_want = plain_spread(x, at, T * K, w)
    held = np.asarray(at)[np.asarray(at) >= 0]
    _same("rows", np.asarray(got)[held], np.asarray(want)[held])
    _same("weights", np.asarray(w_got)[held], np.asarray(w_want)[held])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_summing_reads_no_row_that_holds_no_token(weighted, biased):
    """Rows without a token hold NaN and a weight without an expert is NaN: neither may show."""
    T, K, E, D = 19, 3, 5, 96
    at = plan(_slots(T, K, E), E).row_of_slot
    held = np.asarray(at)[np.asarray(at) >= 0]
    values = np.full((T * K, D), np.nan, np.float32)
    values[held] = np.random.default_rng(2).integers(-8, 8, (len(held), D))
    w = jnp.where(at >= 0, 2.0 ** (np.arange(K) - 1), jnp.nan).astype(jnp.float32) if weighted else None
    bias = jnp.asarray(np.random.default_rng(3).integers(-4, 4, (T, D)), jnp.float32) if biased else None
    got = sum_rows(jnp.asarray(values, "bfloat16"), at, w, bias=bias, interpret=True)
    want = plain_sum_rows(jnp.asarray(values, "bfloat16"), at, w, bias=bias)
    assert np.isfinite(np.asarray(got, np.float32)).all()
    _same("y", got, want)


CASES = [
    Experts(),
    Experts(activation="gelu_tanh", wi_bias=True),
    Experts(activation="relu2", gated=False),
    Experts(activation="silu", gated=False, wi_bias=True),
    Experts(clamp=Clamp(), wi_bias=True),
]


@pytest.mark.parametrize("experts", CASES, ids=lambda e: f"{e.activation}-{e.gated}-{e.wi_bias}")
@pytest.mark.parametrize("F", [24])
def test_one_pass_between_the_products_is_the_plain_one(experts, F):
    """Forward, and the backward's three results; within the rounding of a fused multiply-add, so compared after bf16."""
    P, E, parts = 11, 4, 2 if experts.gated else 1
    pre, d = _normal(0, (P, parts * F)) * 2, _normal(1, (P, F))
    w = jnp.asarray(np.random.default_rng(2).uniform(0.1, 1, P), jnp.float32)
    bias = _normal(3, (E, parts * F)) if experts.wi_bias else None
    expert = jnp.arange(P, dtype=jnp.int32) % E if experts.wi_bias else None
    act = partial(hidden.act, experts)
    got = one_pass(act, parts, pre, w, bias, expert, interpret=True)
    _near(got, plain_pass(experts, pre, w, bias, expert))
    got = one_pass_gradient(act, parts, pre, d, w, bias, expert, interpret=True)
    for one, other in zip(got, plain_pass_gradient(experts, pre, d, w, bias, expert), strict=True):
        _near(one, other)


@pytest.mark.parametrize("filled", [0, 7, 11])
def test_one_pass_takes_the_filled_rows_alone(filled):
    """Beyond them inputs are NaN; the weight's gradient is 0 there, in the kernel and in its twin."""
    P, F, experts = 11, 24, Experts()
    beyond = np.arange(P)[:, None] >= filled
    pre, d = (jnp.where(beyond, jnp.nan, _normal(i, (P, n * F))).astype("bfloat16") for i, n in ((0, 2), (1, 1)))
    w, count = jnp.ones(P), jnp.asarray(filled)
    act = partial(hidden.act, experts)
    h = one_pass(act, 2, pre, w, filled=count, interpret=True)
    _near(h[:filled], plain_pass(experts, pre, w, filled=count)[:filled])
    got = one_pass_gradient(act, 2, pre, d, w, filled=count, interpret=True)
    want = plain_pass_gradient(experts, pre, d, w, filled=count)
    for one, other in zip(got, want, strict=True):
        _near(one[:filled], other[:filled])
    for dot in (got[2], want[2]):
        _same("gradient of w beyond", dot[filled:], np.zeros(P - filled, np.float32))


def _near(got, want):
    """Equal but for the last place of a bfloat16, which another order of float32 operations may turn."""
    got, want = (np.asarray(a).astype("bfloat16").astype(np.float64) for a in (got, want))
    last_place = (
        np.spacing(np.maximum(np.abs(want), np.abs(want).max(initial=0.0) * 2.0**-8).astype(np.float32)) * 2.0**16
    )
    assert (np.abs(got - want) <= last_place).all()


@pytest.mark.parametrize(("T", "E", "K"), [(150, 8, 2), (20, 128, 8), (5, 3, 3)])
def test_selecting_is_a_top_k_with_the_lower_index_on_ties(T, E, K):
    z = np.random.default_rng(0).standard_normal((T, E)).astype(np.float32)
    z[1], z[2, : E // 2] = 0.0, 1.0
    idx, rank, totals = select(jnp.asarray(z), K, interpret=True)
    _same("topk_idx", idx, jax.lax.top_k(jnp.asarray(z), K)[1].astype(jnp.int32))
    placed = place(idx, rank, totals, kernels.block_of(T, E))
    planned = plan(idx, E)
    _same("group_sizes", placed.group_sizes, planned.group_sizes)
    _same("row_of_slot", placed.row_of_slot, planned.row_of_slot)


def test_three_pieces_hold_a_float32():
    a = _normal(0, (5, 7), "float32")
    whole = rows.pieces(a, axis=1).astype(jnp.float32).reshape(5, rows.PIECES, 7).sum(axis=1)
    _same("sum of the pieces", whole, a)


def test_taking_and_laying_out_are_transposes():
    values, ids = _normal(0, (6, 9), "float32"), _slots(6, 4, 9, nowhere=False)
    d = _normal(1, (6, 4), "float32")
    taken, pull = jax.vjp(lambda v: rows.take(v, ids), values)
    _same("taken", taken, np.take_along_axis(np.asarray(values), np.asarray(ids), 1))
    want = np.zeros((6, 9), np.float32)
    np.put_along_axis(want, np.asarray(ids), np.asarray(d), 1)
    _same("gradient", pull(d)[0], want)


def test_chosen_columns_become_ids():
    ids = np.sort(np.asarray(_slots(20, 3, 11, nowhere=False)), axis=1)
    chosen = np.zeros((20, 11), bool)
    np.put_along_axis(chosen, ids, True, 1)
    _same("ids", rows.chosen_ids(jnp.asarray(chosen), 3), ids)
