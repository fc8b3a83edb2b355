"""The router against twenty lines of NumPy, switch by switch, and the routings that broke other routers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity.compare import judge, same_bits
from dropless.parity.interface import Judged
from dropless.parity.problem import InvalidInput, Params, Problem, Router
from dropless.parity.tolerances import SUMMATION, TRANSCENDENTAL, unit_roundoff
from dropless.reference import routing
from dropless.reference.routing import update_bias

route = jax.jit(routing.route, static_argnums=0)

E, K, T = 12, 3, 16
LOGITS = np.random.default_rng(7).normal(size=(T, E)).astype(np.float32) * np.float32(2)
GATE_BIAS = np.random.default_rng(8).normal(size=E).astype(np.float32)
EXPERT_BIAS = np.random.default_rng(9).normal(size=E).astype(np.float32)

SWITCHES = {
    "softmax": {},
    "after": {"softmax_order": "after"},
    "sigmoid": {"score": "sigmoid"},
    "sqrtsoftplus": {"score": "sqrtsoftplus"},
    "normalize": {"score": "sigmoid", "normalize": True},
    "norm_eps": {"score": "sigmoid", "normalize": True, "norm_eps": 0.25},
    "scaling": {"scaling": 2.5},
    "gate_bias": {"gate_bias": True},
    "selection_bias": {"selection_bias": True},
    "biased_after": {"softmax_order": "after", "selection_bias": True},
    "groups": {"groups": 4, "group_topk": 2},
    "group_score_topk": {"groups": 4, "group_topk": 2, "group_score_topk": 2},
    "deepseek": {
        "score": "sigmoid", "normalize": True, "norm_eps": 1e-20, "groups": 4, "group_topk": 2, "group_score_topk": 2,
        "scaling": 2.5, "selection_bias": True,
    },
}  # fmt: skip


def plain_router(z, bias, k, r):
    """One token in float64: its chosen experts and their weights."""
    s = {
        "softmax": np.exp(z - z.max()) / np.exp(z - z.max()).sum(),
        "sigmoid": 1 / (1 + np.exp(-z)),
        "sqrtsoftplus": np.sqrt(np.log1p(np.exp(z))),
    }[r.score]
    if r.softmax_order == "after":
        s = z
    ranked = s + (bias if r.selection_bias else 0)
    size = len(z) // r.groups
    best = [np.sort(ranked[g * size : (g + 1) * size])[::-1][: r.group_score_topk].sum() for g in range(r.groups)]
    kept = sorted(range(r.groups), key=lambda g: (-best[g], g))[: r.group_topk]
    allowed = [e for e in range(len(z)) if e // size in kept]
    idx = sorted(allowed, key=lambda e: (-ranked[e], e))[:k]
    w = s[idx]
    if r.softmax_order == "after":
        w = np.exp(w - w.max()) / np.exp(w - w.max()).sum()
    if r.normalize:
        w = w / (w.sum() + r.norm_eps)
    return idx, w * r.scaling


def routed(logits, router, *, k=K, expert_bias=None, gate_bias=None, dtype="float32"):
    """The reference's routing of given logits: tokens are unit vectors, so the product is exact."""
    logits = np.asarray(logits, np.float32)
    tokens, experts = logits.shape
    problem = Problem(T=tokens, K=k, E=experts, D=tokens, F=1, dtype=dtype, router=router)
    return route(problem, params_of(logits, expert_bias, gate_bias, dtype), jnp.eye(tokens, dtype=dtype))


def params_of(logits, expert_bias=None, gate_bias=None, dtype="float32"):
    experts = logits.shape[1]
    return Params(
        gate_kernel=jnp.asarray(logits, dtype),
        wi=jnp.zeros((experts, logits.shape[0], 2), dtype),
        wo=jnp.zeros((experts, 1, logits.shape[0]), dtype),
        expert_bias=None if expert_bias is None else jnp.asarray(expert_bias, jnp.float32),
        gate_bias=None if gate_bias is None else jnp.asarray(gate_bias, dtype),
    )


def slope_of(function, **kwargs):
    return jax.jit(jax.grad(function, **kwargs))


def all_switches(name, **changes):
    return routed(LOGITS, Router(**(SWITCHES[name] | changes)), expert_bias=EXPERT_BIAS, gate_bias=GATE_BIAS)


@pytest.mark.parametrize("name", SWITCHES)
def test_route_agrees_with_the_plain_router(name):
    router = Router(**SWITCHES[name])
    got = all_switches(name)
    z = LOGITS.astype(np.float64) + (GATE_BIAS if router.gate_bias else 0)
    idx, w = zip(*(plain_router(row, EXPERT_BIAS.astype(np.float64), K, router) for row in z), strict=True)
    assert np.asarray(got.topk_idx).tolist() == [list(map(int, i)) for i in idx]
    weights = np.array(w)
    finding = judge("weights", got.topk_weights, Judged(weights, SUMMATION * TRANSCENDENTAL * weights), dtype="float32")
    assert finding.ok, finding.message


@pytest.mark.parametrize(
    ("name", "base"),
    [(n, "softmax") for n in SWITCHES if n != "softmax"]
    + [("norm_eps", "normalize"), ("group_score_topk", "groups"), ("biased_after", "after")],
)
def test_each_switch_changes_something(name, base):
    got, plain = all_switches(name), all_switches(base)
    same = [np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True)]
    assert not all(same)


@pytest.mark.parametrize(
    "switch", [{"normalize": True}, {"scaling": 2.5}, {"normalize": True, "norm_eps": 0.25}, {"softmax_order": "after"}]
)
def test_what_acts_on_weights_leaves_the_choice_alone(switch):
    assert np.array_equal(all_switches("softmax", **switch).topk_idx, all_switches("softmax").topk_idx)


@pytest.mark.parametrize("switch", [{"selection_bias": True}, {"groups": 4, "group_topk": 2}])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_what_steers_the_choice_leaves_an_experts_weight_alone(score, switch):
    """Every chosen expert has the weight, bit for bit, that it has when all experts are chosen."""
    everything = routed(LOGITS, Router(score=score), k=E)
    of_expert = np.zeros((T, E), np.float32)
    np.put_along_axis(of_expert, np.asarray(everything.topk_idx), np.asarray(everything.topk_weights), axis=1)
    got = all_switches("softmax", score=score, **switch)
    want = np.take_along_axis(of_expert, np.asarray(got.topk_idx), axis=1)
    assert same_bits("weights", got.topk_weights, want).ok


@pytest.mark.parametrize("name", ["groups", "group_score_topk", "deepseek"])
def test_every_chosen_expert_lies_in_few_groups(name):
    group = np.asarray(all_switches(name).topk_idx) // (E // 4)
    assert all(len(set(row)) <= 2 for row in group)


def test_ties_go_to_the_lower_index():
    logits = [[1, 1, 1, 0, 0, 0, 0, 0], [0, 1, 0, 1, 0, 1, 0, 1], [-0.0, 0.0, -0.0, 0.0, -1, -1, -1, -1]]
    first = routed(logits, Router(softmax_order="after"), k=2)
    assert first.topk_idx.tolist() == [[0, 1], [1, 3], [0, 1]]
    for _ in range(20):
        again = routed(logits, Router(softmax_order="after"), k=2)
        assert all(
            same_bits("routing", a, b).ok for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(first), strict=True)
        )


def test_tied_groups_go_to_the_lower_index():
    logits = [[0, 1, 2, 1, 2, 0, 2, 2]]
    got = routed(logits, Router(softmax_order="after", groups=4, group_topk=2, group_score_topk=1), k=3)
    assert got.topk_idx.tolist() == [[2, 4, 3]]  # groups 1, 2 and 3 tie at 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "router", [Router(), Router(score="sigmoid", groups=4, group_topk=2, group_score_topk=2)], ids=["softmax", "groups"]
)
def test_a_bad_row_keeps_distinct_ids_and_touches_no_other(router, bad):
    problem = Problem(T=4, K=4, E=8, D=5, F=1, router=router)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 5)).astype(np.float32)
    params = params_of(rng.normal(size=(5, 8)))
    plain = route(problem, params, jnp.asarray(x))
    x[2] = bad
    got = route(problem, params, jnp.asarray(x))
    for row in got.topk_idx.tolist():
        assert len(set(row)) == 4 and all(0 <= e < 8 for e in row)
    others = np.array([0, 1, 3])
    assert same_bits("topk_idx", got.topk_idx[others], plain.topk_idx[others]).ok
    assert same_bits("weights", got.topk_weights[others], plain.topk_weights[others]).ok


@pytest.mark.parametrize("tokens", [1, 8, 9, 33])
def test_logits_are_not_rounded_unless_asked(tokens):
    """1 + 1/512 is 1 in bfloat16: then a bias of 1/8192 on the other expert decides."""
    gate = jnp.array([[1, 1], [2.0**-9, 0]], jnp.bfloat16)
    params = params_of(np.asarray(gate, np.float32), expert_bias=[0, 2.0**-13], dtype="bfloat16")
    x = jnp.ones((tokens, 2), jnp.bfloat16)
    for logits_dtype, winner in (("float32", 0), ("activation", 1)):
        router = Router(softmax_order="after", selection_bias=True, logits_dtype=logits_dtype)
        problem = Problem(T=tokens, K=1, E=2, D=2, F=1, dtype="bfloat16", router=router)
        got = route(problem, params, x)
        assert got.topk_idx.tolist() == [[winner]] * tokens


def test_a_single_weight_trains_the_router_only_before_the_choice():
    def slope(router):
        problem = Problem(T=T, K=1, E=E, D=T, F=1, router=router)
        x, params = jnp.eye(T), params_of(LOGITS)
        weighted = jnp.arange(1.0, T + 1)[:, None]
        grad = slope_of(lambda g: (route(problem, params.replace(gate_kernel=g), x).topk_weights * weighted).sum())
        return np.abs(np.asarray(grad(params.gate_kernel))).max()

    assert slope(Router()) > 0.1
    assert slope(Router(softmax_order="after")) == 0
    # w / w: its two terms cancel up to their rounding
    assert slope(Router(normalize=True)) <= T * unit_roundoff("float32")


@pytest.mark.parametrize(("normalize", "order"), list(itertools.product([False, True], ["before", "after"])))
def test_scaling_multiplies_whether_or_not_weights_are_normalised(normalize, order):
    def weights(scaling):
        return routed(LOGITS, Router(normalize=normalize, softmax_order=order, scaling=scaling)).topk_weights

    assert same_bits("weights", weights(4.0), weights(1.0) * 4).ok
    assert same_bits("weights", weights(2.5), weights(1.0) * 2.5).ok


def test_excluded_groups_rank_below_negative_scores():
    """With 0 instead of -inf the answer would be {4, 5, 6}."""
    scores = np.array([[0.9, 0.8, 0.1, 0.05, 0.7, 0.6, 0.2, 0.15]])
    router = Router(score="sigmoid", groups=2, group_topk=1, group_score_topk=2, selection_bias=True)
    got = routed(np.log(scores / (1 - scores)), router, k=3, expert_bias=np.full(8, -1.0))
    assert got.topk_idx.tolist() == [[0, 1, 2]]


def test_a_group_is_scored_by_as_many_experts_as_asked():
    logits = [[4, 0, 3, 2]]
    for best, group in ((1, 0), (2, 1)):
        router = Router(softmax_order="after", groups=2, group_topk=1, group_score_topk=best)
        assert routed(logits, router, k=1).topk_idx.tolist() == [[[0], [2]][group]]


def test_score_bias_and_scaling_each_act_once():
    """sigmoid(log 3) = 3/4, sigmoid(-log 3) = 1/4, sigmoid(0) = 1/2: a bias of 1 brings expert 1 in at its own 1/4."""
    logits = np.log([[3.0, 1 / 3, 1.0, 1.0]])
    plain = routed(logits, Router(score="sigmoid"), k=2)
    assert plain.topk_idx.tolist() == [[0, 2]]
    router = Router(score="sigmoid", selection_bias=True, scaling=2.0)
    steered = routed(logits, router, k=2, expert_bias=[0, 1, 0, 0])
    assert steered.topk_idx.tolist() == [[1, 0]]
    want = np.array([[0.5, 1.5]])
    assert judge("weights", steered.topk_weights, Judged(want, SUMMATION * TRANSCENDENTAL * want), dtype="float32").ok


def test_update_bias_moves_by_the_sign():
    bias = jnp.array([0.5, 0.5, 0.5, 0.5])
    assert update_bias(bias, jnp.array([64, 0, 0, 0]), 0.25).tolist() == [0.25, 0.75, 0.75, 0.75]
    assert update_bias(bias, jnp.array([16, 16, 16, 16]), 0.25).tolist() == bias.tolist()
    assert update_bias(bias, jnp.array([1, 0, 0, 0]), 0.25).tolist() == [0.25, 0.75, 0.75, 0.75]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("logits_dtype", ["float32", "activation"])
def test_gradients_are_finite_in_the_dtype_of_what_they_are_of(dtype, logits_dtype):
    router = Router(score="sigmoid", selection_bias=True, gate_bias=True, logits_dtype=logits_dtype)
    problem = Problem(T=T, K=K, E=E, D=T, F=1, dtype=dtype, router=router)
    params, x = params_of(LOGITS, EXPERT_BIAS, GATE_BIAS, dtype), jnp.eye(T, dtype=dtype)
    grads, dx = slope_of(lambda p, x: route(problem, p, x).topk_weights.sum(), argnums=(0, 1))(params, x)
    for name in ("gate_kernel", "gate_bias", "expert_bias"):
        got, leaf = getattr(grads, name), getattr(params, name)
        assert got.dtype == leaf.dtype and bool(jnp.isfinite(got).all())
        assert bool(jnp.any(got != 0)) == (name != "expert_bias")
    assert dx.dtype == x.dtype and bool(jnp.isfinite(dx).all())


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradients_stay_finite_far_out(score):
    """sqrt has an infinite slope at 0, and softplus underflows to it."""
    far = np.array([[-200.0, -90.0, -31.0, -29.0, 0.0, 90.0]], np.float32)
    problem = Problem(T=1, K=6, E=6, D=1, F=1, router=Router(score=score))
    params = params_of(far)
    grad = slope_of(lambda g: route(problem, params.replace(gate_kernel=g), jnp.ones((1, 1))).topk_weights.sum())
    assert np.isfinite(np.asarray(grad(params.gate_kernel))).all()


def test_a_missing_bias_is_named():
    with pytest.raises(InvalidInput, match="expert_bias"):
        routed(LOGITS, Router(selection_bias=True))
