"""Cases: the same bits everywhere, of order one, with nothing equal by accident; margins and ties as promised."""

import zlib

import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity.adapters import check_params
from dropless.parity.choice import choose, within_groups
from dropless.parity.covering import tiny_problems
from dropless.parity.draws import normals
from dropless.parity.inputs import make_case, make_params, make_weights, make_x, margin_inputs
from dropless.parity.patterns import PATTERNS, routing_ids
from dropless.parity.problem import DTYPES, SCORES, Clamp, Experts, InvalidInput, Problem, Router, Routing

SMALL = Problem(T=24, K=2, E=8, D=33, F=32)
FULL = Problem(
    T=37,
    K=3,
    E=12,
    D=33,
    F=20,
    dtype="bfloat16",
    router=Router(
        score="sigmoid", selection_bias=True, gate_bias=True, groups=4, group_topk=2, group_score_topk=2, scaling=2.5
    ),
    experts=Experts(clamp=Clamp(), wi_bias=True, wo_bias=True, shared_F=8),
)


def bits(*arrays):
    return zlib.crc32(b"".join(np.asarray(a).tobytes() for a in arrays))


def chosen(problem, params, x):
    return np.sort(choose(problem, params, x), axis=1)


def test_a_seed_gives_these_bits():
    case = make_case(FULL, seed=7, pattern=None)
    params = case.params.named().values()
    assert bits(*params) == PARAMS_BITS
    assert bits(case.x, case.cotangent, case.routing.topk_weights, case.routing.topk_idx) == CASE_BITS
    made = margin_inputs(FULL, np.asarray(case.routing.topk_idx), seed=7, params=case.params)
    assert bits(made.x, made.gate_kernel) == MARGIN_BITS
    assert bits(*(routing_ids(name, 512, 8, 128, seed=7) for name in PATTERNS)) == IDS_BITS


PARAMS_BITS, CASE_BITS, MARGIN_BITS, IDS_BITS = 3166716699, 175305378, 3097717987, 1950302253


def test_seeds_differ_and_a_shape_does_not_disturb_other_tensors():
    assert not np.array_equal(make_x(SMALL, 0), make_x(SMALL, 1))
    wider = make_params(SMALL.replace(F=64))
    assert np.array_equal(make_params(SMALL).gate_kernel, wider.gate_kernel)


@pytest.mark.parametrize("problem", [*tiny_problems(), FULL], ids=str)
def test_params_are_what_the_problem_asks_for(problem):
    params = make_params(problem)
    check_params(problem, params)
    for name, leaf in params.named().items():
        if "bias" in name:
            assert (np.asarray(leaf).astype(np.float64) != 0).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["silu", "gelu_tanh", "relu2", "clamp", "ungated"])
def test_an_expert_gives_values_of_order_one(dtype, form):
    activation = form if form in ("gelu_tanh", "relu2") else "silu"
    experts = Experts(
        activation=activation, clamp=Clamp() if form == "clamp" else None, gated=form not in ("ungated", "relu2")
    )
    problem = Problem(T=256, K=1, E=1, D=96, F=160, dtype=dtype, experts=experts)
    params = make_params(problem)
    x, wi, wo = (np.asarray(a).astype(np.float64) for a in (make_x(problem), params.wi[0], params.wo[0]))
    pre = x @ wi
    g, u = (pre[:, :160], pre[:, 160:]) if experts.gated else (pre, 1.0)
    if form == "clamp":
        limit = experts.clamp.limit
        beyond = (g > limit) | (np.abs(u) > limit)
        assert beyond.mean() > 0.05
        g, u = np.minimum(g, limit), np.clip(u, -limit, limit) + 1
    act = {
        "silu": lambda v: v / (1 + np.exp(-(1.702 if form == "clamp" else 1) * v)),
        "gelu_tanh": lambda v: 0.5 * v * (1 + np.tanh(np.sqrt(2 / np.pi) * (v + 0.044715 * v**3))),
        "relu2": lambda v: np.maximum(v, 0) ** 2,
    }[activation]
    y = (act(g) * u) @ wo
    assert 0.8 < np.sqrt((y**2).mean()) < 1.25


@pytest.mark.parametrize("K", [1, 2, 8, 17, 257])
def test_weights_of_a_token_differ_and_are_zero_without_an_expert(K):
    problem = Problem(T=50, K=K, E=K, D=4, F=4)
    ids = routing_ids("balanced", 50, K, K).copy()
    ids[::3, 0] = -1
    weights = make_weights(problem, ids)
    assert weights.dtype == np.float32
    assert (weights[ids < 0] == 0).all() and (weights[ids >= 0] > 0).all()
    ranked = np.sort(weights[1], axis=0)
    assert K == 1 or np.diff(ranked).min() > 0


def test_draws_are_normal_and_rounded_once():
    values = normals(0, "a", (1000, 1000), 1.0, "bfloat16")
    wide = values.astype(np.float64)
    assert abs(wide.mean()) < 5e-3 and abs(wide.std() - 1) < 5e-3
    assert np.array_equal(values, normals(0, "a", (1000, 1000), 1.0, "float32").astype(values.dtype))


def test_a_case_holds_what_was_given():
    ids = routing_ids("all_to_one", SMALL.T, SMALL.K, SMALL.E)
    mask = np.arange(SMALL.T) < 20
    x = np.ones((SMALL.T, SMALL.D), np.float32)
    case = make_case(SMALL, routing=ids, x=x, mask=mask, segment_ids=np.arange(SMALL.T) // 8)
    got = np.asarray(case.routing.topk_idx)
    assert np.array_equal(got[:20], ids[:20]) and (got[20:] == -1).all()
    assert (np.asarray(case.routing.topk_weights)[20:] == 0).all()
    assert np.array_equal(case.x, x) and np.array_equal(case.mask, mask)
    weights = np.full(ids.shape, 0.5, np.float32)
    given = make_case(SMALL, routing=Routing(jnp.asarray(ids), jnp.asarray(weights)))
    assert np.array_equal(given.routing.topk_weights, weights) and given.label == "given"


@pytest.mark.parametrize("T", [0, 1])
def test_few_tokens(T):
    for live in (False, True):
        case = make_case(SMALL.replace(T=T), live=live)
        assert case.x.shape == (T, 33) and case.routing.topk_idx.shape == (T, 2)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"pattern": "nope"}, "skew is 'nope'"),
        ({"routing": np.zeros((24, 2), np.int32)}, "token 0 names expert 0 twice"),
        ({"routing": np.tile([0, 8], (24, 1))}, "names expert 8; accepted: -1 to 7"),
        ({"routing": np.tile([0, 1], (23, 1))}, r"accepted: T, K = \(24, 2\)"),
        ({"x": np.zeros((24, 32))}, r"x has shape \(24, 32\)"),
        ({"mask": np.ones(23, bool)}, "mask has shape"),
        ({"segment_ids": np.ones(23, int)}, "segment_ids has shape"),
        ({"seed": -1}, "seed is -1"),
        ({"x": np.zeros((24, 33)), "live": True}, "together with x"),
    ],
)
def test_errors_name_the_value(kwargs, message):
    with pytest.raises(InvalidInput, match=message):
        make_case(SMALL, **kwargs)


def test_exact_ties_are_exact_and_the_lower_expert_wins():
    problem = SMALL.replace(K=3, router_gate_bias=True, router_selection_bias=True)
    case = make_case(problem, pattern="ties")
    for leaf in (case.params.gate_kernel, case.params.gate_bias, case.params.expert_bias):
        assert np.array_equal(leaf[..., 0::2], leaf[..., 1::2])
    ids = chosen(problem, case.params, case.x)
    assert all(e % 2 == 0 or e - 1 in row for row in ids.tolist() for e in row)


def test_nan_and_infinity_keep_ids_distinct():
    x = make_x(SMALL).copy()
    x[3], x[4] = np.nan, np.inf
    ids = np.asarray(make_case(SMALL, x=x, pattern=None).routing.topk_idx)
    clean = np.asarray(make_case(SMALL, pattern=None).routing.topk_idx)
    assert all(len(set(row)) == 2 for row in ids.tolist()) and ids.min() >= 0 and ids.max() < 8
    rest = np.delete(np.arange(SMALL.T), [3, 4])
    assert np.array_equal(ids[rest], clean[rest])


@pytest.mark.parametrize("score", [*SCORES, "after"])
@pytest.mark.parametrize(
    "T, K, E, D, dtype, biased",
    [
        (32, 2, 8, 33, "bfloat16", True),
        (32, 2, 8, 33, "float16", False),
        (24, 17, 128, 192, "bfloat16", True),
        (24, 8, 257, 33, "float32", True),
        (12, 60, 60, 96, "float16", True),
    ],
)
def test_margin_inputs_realise_the_wanted_experts(score, T, K, E, D, dtype, biased):
    router = Router(
        score="softmax" if score == "after" else score,
        softmax_order="after" if score == "after" else "before",
        gate_bias=biased,
        selection_bias=biased,
        logits_dtype="activation",
    )
    problem = Problem(T=T, K=K, E=E, D=D, F=1, dtype=dtype, router=router)
    case = make_case(problem, pattern="zipf", live=True)
    wanted = np.sort(np.asarray(case.routing.topk_idx), axis=1)
    assert np.array_equal(chosen(problem, case.params, case.x), wanted)
    made = margin_inputs(problem, wanted)
    assert made.margin > 1
    # Not by a margin of the exact values alone: noise as large as bfloat16's own rounding changes nothing.
    noise = np.random.default_rng(0).uniform(-1, 1, made.x.shape) * 2.0**-9
    moved = (made.x.astype(np.float64) * (1 + noise)).astype(np.float32)
    assert np.array_equal(chosen(problem, made.params(case.params), moved), wanted)


def test_margin_inputs_hold_with_groups():
    wanted = np.array([[0, 1, 3], [3, 4, 5], [9, 10, 2], [6, 7, 8], [11, 0, 1]], np.int32)
    problem = FULL.replace(T=5)
    made = margin_inputs(problem, wanted)
    assert np.array_equal(chosen(problem, made.params(make_params(problem)), made.x), np.sort(wanted, axis=1))
    few = np.array([[0, 1, 2]] * 5)  # one group where two stay: any other group may stay, and must lose
    made = margin_inputs(problem, few)
    assert np.array_equal(chosen(problem, made.params(make_params(problem)), made.x), few)


@pytest.mark.parametrize(
    "ids, changes, message",
    [
        ([[0, 1, -1]] * 5, {}, "reaches from -1"),
        ([[0, 1, 1]] * 5, {}, "twice for one token"),
        ([[0, 3, 6]] * 5, {}, "experts of 3 groups; accepted: up to group_topk, 2"),
        ([[0, 1]] * 5, {}, "topk_idx has shape"),
        ([[i, i + 1, i + 2] for i in (0, 1, 3, 6, 9)], {"D": 4}, "D is 4 for 12 experts and 5 distinct sets"),
    ],
)
def test_margin_inputs_decline_clearly(ids, changes, message):
    with pytest.raises(InvalidInput, match=message):
        margin_inputs(FULL.replace(T=5, **changes), np.array(ids))


def test_variants_share_the_first_ones_parameters():
    problem = Problem(T=48, K=2, E=16, D=33, F=8, dtype="bfloat16", router=Router(gate_bias=True))
    first = make_case(problem, seed=0, live=True)
    second = make_case(problem, seed=1, live=True, params=first.params)
    assert second.params is first.params and not np.array_equal(first.x, second.x)
    for case in (first, second):
        wanted = np.sort(np.asarray(case.routing.topk_idx), axis=1)
        assert np.array_equal(chosen(problem, case.params, case.x), wanted)
    with pytest.raises(InvalidInput, match=r"D is 8 for 16 experts and .* distinct sets; accepted: D at least 16"):
        margin_inputs(problem.replace(D=8), wanted, params=make_params(problem.replace(D=8)), keep_kernel=True)


def test_ids_are_brought_within_the_groups_and_keep_their_skew():
    problem = FULL.replace(T=500)
    ids = routing_ids("zipf", 500, 3, 12)
    moved = within_groups(problem, ids)
    assert (np.array([len(set(row // 3)) for row in moved]) <= 2).all()
    assert all(len(set(row)) == 3 for row in moved.tolist())
    fits = np.array([len(set(row // 3)) <= 2 for row in ids])
    assert 0 < fits.sum() < 500
    assert np.array_equal(np.sort(moved[fits], axis=1), np.sort(ids[fits], axis=1))
    before, after = (np.bincount(a.ravel(), minlength=12) for a in (ids, moved))
    assert before.argmax() == after.argmax() and np.ptp(after) >= np.ptp(before)
    assert within_groups(SMALL, ids) is ids


def test_margin_inputs_decline_a_bias_that_no_score_can_beat():
    params = make_params(FULL)
    params = params.replace(expert_bias=params.expert_bias.at[11].set(5.0))
    with pytest.raises(InvalidInput, match="a smaller expert_bias"):
        margin_inputs(FULL.replace(T=1), np.array([[0, 1, 3]]), params=params)
