"""The oracle against finite differences, against answers worked out by hand, and against its device twin."""

import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity import complete, get, running
from dropless.parity.inputs import make_case
from dropless.parity.judge import judge_pieces
from dropless.parity.problem import Clamp, Experts, Params, Problem, Router, Routing
from dropless.parity.tolerances import ELEMENT_BAR, unit_roundoff
from dropless.reference import oracle, oracle_device
from dropless.reference.oracle_spot import spot_check

GROUPED = Router(
    score="sigmoid",
    normalize=True,
    norm_eps=0.125,
    groups=2,
    group_topk=1,
    group_score_topk=2,
    scaling=2.5,
    selection_bias=True,
    gate_bias=True,
)
LAYERS = {
    "silu, softmax": (Router(), Experts()),
    "clamp, biases, sigmoid in groups": (
        GROUPED,
        Experts(clamp=Clamp(limit=0.6), wi_bias=True, wo_bias=True, shared_F=3),
    ),
    "gelu_tanh, normalised softmax with eps": (
        Router(normalize=True, norm_eps=0.25, gate_bias=True),
        Experts(activation="gelu_tanh", wo_bias=True),
    ),
    "gelu_erf, softmax after": (Router(softmax_order="after"), Experts(activation="gelu_erf", gated=False, shared_F=2)),
    "relu2, sqrtsoftplus": (
        Router(score="sqrtsoftplus", logits_dtype="activation"),
        Experts(activation="relu2", gated=False, wi_bias=True, weight_placement="early"),
    ),
    "silu, normalised sqrtsoftplus": (Router(score="sqrtsoftplus", normalize=True), Experts(gated=False)),
    "relu2, sigmoid": (Router(score="sigmoid", scaling=0.5), Experts(activation="relu2", weight_placement="early")),
}


SMALL = Problem(T=60, K=2, E=5, D=12, F=20, dtype="bfloat16", experts=Experts(wi_bias=True, wo_bias=True))
"""One shape for all that only routing and values tell apart: its device steps compile once."""

SHRINK = np.finfo(float).eps / 2 / unit_roundoff("float32")
"""float64 is one more honest way of computing a layer, whose gauge is smaller by the ratio of the roundoffs."""


@pytest.fixture(autouse=True)
def one_block_size(monkeypatch):
    monkeypatch.setattr(oracle_device, "BLOCKS", (48,))


def wide(params: Params) -> Params:
    return params.replace(**{name: oracle.wide(leaf) for name, leaf in params.named().items()})


def slope(f, leaf: np.ndarray, direction: np.ndarray) -> tuple[float, float]:
    """The derivative of f along a direction by central differences, extrapolated, and a bound of its error."""
    h = np.finfo(float).eps ** (1 / 4)
    coarse, fine = ((f(leaf + s * direction) - f(leaf - s * direction)) / (2 * s) for s in (h, h / 2))
    rounding = np.finfo(float).eps * (abs(f(leaf)) + 1) / h
    return (4 * fine - coarse) / 3, abs(fine - coarse) + ELEMENT_BAR * rounding


@pytest.mark.parametrize("name", LAYERS)
def test_every_gradient_of_a_layer_is_the_slope_of_its_value(name):
    router, experts = LAYERS[name]
    problem = Problem(T=5, K=2, E=4, D=6, F=3, dtype="float32", router=router, experts=experts)
    case = make_case(problem, seed=3)
    params, x, dy = wide(case.params), oracle.wide(case.x), oracle.wide(case.cotangent)
    ids = np.array([[0, 1], [1, 0], [3, 2], [2, 3], [1, 0]])
    mask, segments = np.array([True, True, True, False, True]), np.array([7, 7, 2, 2, 2])
    cotangents = (1.5, -2.0, 0.75)

    def judged(params, x, dy=None):
        return oracle.judge_layer(
            problem, params, x, ids, dy, mask=mask, segment_ids=segments, loss_cotangents=cotangents
        )

    def objective(params, x):
        j = judged(params, x)
        losses = sum(c * float(j[n].value) for c, n in zip(cotangents, ("balance", "sequence", "z"), strict=True))
        return float((dy * j["y"].value).sum()) + losses

    grads = judged(params, x, dy)
    leaves = {**params.named(), "x": x}
    assert set(leaves) <= set(grads)
    rng = np.random.default_rng(0)
    for leaf_name, leaf in leaves.items():

        def along(value, leaf_name=leaf_name):
            return objective(params, value) if leaf_name == "x" else objective(params.replace(**{leaf_name: value}), x)

        for _ in range(2):
            direction = rng.standard_normal(leaf.shape)
            want, error = slope(along, leaf, direction)
            assert abs((grads[leaf_name].value * direction).sum() - want) <= error, leaf_name


def test_the_gradient_of_the_routing_weights_is_the_slope_of_the_value():
    problem = Problem(T=4, K=3, E=5, D=4, F=3, experts=Experts(wo_bias=True, weight_placement="early"))
    case = make_case(problem, seed=1)
    dy, w = oracle.wide(case.cotangent), oracle.wide(case.routing.topk_weights)
    ids = np.array(case.routing.topk_idx)
    ids[2] = -1

    def objective(w):
        y = oracle.judge_experts(problem, case.params, case.x, Routing(ids, w))["y"].value
        return float((dy * y).sum())

    grads = oracle.judge_experts(problem, case.params, case.x, Routing(ids, w), dy)
    direction = np.random.default_rng(0).standard_normal(w.shape)
    want, error = slope(objective, w, direction)
    assert abs((grads["topk_weights"].value * direction).sum() - want) <= error
    assert not grads["topk_weights"].value[2].any() and not grads["topk_weights"].gauge[2].any()


def test_one_token_by_hand():
    """w * wo * relu(wi * x)^2 with x 2, wi 3, wo 5, w 1/2, dy 7."""
    problem = Problem(T=1, K=1, E=1, D=1, F=1, experts=Experts(activation="relu2", gated=False))
    params = Params(gate_kernel=np.ones((1, 1)), wi=np.full((1, 1, 1), 3.0), wo=np.full((1, 1, 1), 5.0))
    routing = Routing(np.zeros((1, 1), np.int32), np.full((1, 1), 0.5))
    got = oracle.judge_experts(problem, params, np.full((1, 1), 2.0), routing, np.full((1, 1), 7.0))
    assert {name: float(j.value.squeeze()) for name, j in got.items()} == {
        "y": 90.0,
        "topk_weights": 7 * 180.0,
        "wo": 7 * 0.5 * 36.0,
        "wi": 7 * 0.5 * 5 * 2 * 6 * 2.0,
        "x": 7 * 0.5 * 5 * 2 * 6 * 3.0,
    }


def test_clamped_experts_by_hand():
    """Gate 8 beyond its limit 7 and up -9 beyond -7: the value stands still, and so do both gradients."""
    problem = Problem(T=1, K=1, E=1, D=1, F=1, experts=Experts(clamp=Clamp(alpha=0.0)))
    params = Params(gate_kernel=np.ones((1, 1)), wi=np.array([[[8.0, -9.0]]]), wo=np.ones((1, 1, 1)))
    routing = Routing(np.zeros((1, 1), np.int32), np.ones((1, 1)))
    got = oracle.judge_experts(problem, params, np.ones((1, 1)), routing, np.ones((1, 1)))
    assert float(got["y"].value.squeeze()) == 7 * 0.5 * (-7 + 1)
    assert not got["wi"].value.any() and got["wi"].kinks == 0


@pytest.mark.parametrize("judge", (oracle, oracle_device), ids=("oracle", "oracle_device"))
def test_nan_idle_experts_and_empty_slots_stay_where_they_are(judge):
    case = make_case(SMALL, seed=0)
    x = np.array(case.x)
    x[1, 2] = np.nan
    ids = np.tile(np.array([[0, -1]], np.int32), (SMALL.T, 1))
    ids[1:3] = [[1, 2], [-1, -1]]
    got = judge.judge_experts(
        SMALL, case.params, x, Routing(ids, np.asarray(case.routing.topk_weights)), case.cotangent
    )
    y = got["y"].value
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all() and not y[2].any()
    assert not got["y"].gauge[2].any() and not got["x"].gauge[2].any()
    for name in ("wi", "wo", "wi_bias", "wo_bias"):
        assert not got[name].value[3:].any() and not got[name].gauge[3:].any()
        assert np.isfinite(got[name].value[0]).all()
    assert np.isnan(got["wi"].value[1]).any() and np.isnan(got["x"].value[1]).all()


@pytest.mark.parametrize("judge", (oracle, oracle_device), ids=("oracle", "oracle_device"))
def test_no_tokens(judge):
    problem = Problem(T=0, K=1, E=2, D=4, F=3)
    case = make_case(problem)
    ids = np.zeros((0, 1), np.int32)
    got = judge.judge_layer(problem, case.params, case.x, ids, case.cotangent, loss_cotangents=(1.0, 1.0, 1.0))
    assert got["y"].value.shape == (0, 4)
    for name in ("wi", "wo", "gate_kernel", "balance", "sequence", "z"):
        assert not got[name].value.any() and not got[name].gauge.any()
    assert judge.judge_route(problem, case.params, case.x).admissible(ids).ok.shape == (0,)


def test_losses_by_hand():
    """Balance is 1 when counts and probabilities are even, and E/K when all goes to the same K experts."""
    problem = Problem(T=4, K=1, E=4, D=4, F=1)
    params = Params(gate_kernel=np.zeros((4, 4)), wi=np.zeros((4, 4, 2)), wo=np.zeros((4, 1, 4)))
    even = oracle.judge_layer(problem, params, np.ones((4, 4)), np.arange(4)[:, None])
    assert (float(even["balance"].value), float(even["sequence"].value)) == (1.0, 1.0)
    assert abs(float(even["z"].value) - np.log(4) ** 2) <= even["z"].gauge
    certain = params.replace(gate_kernel=np.outer(np.ones(4), np.array([1e3, 0, 0, 0])))
    collapsed = oracle.judge_layer(problem, certain, np.ones((4, 4)), np.zeros((4, 1), int))
    assert float(collapsed["balance"].value) == 4.0
    # Two segments, each on one expert of its own: balanced as a batch, collapsed inside each segment.
    split = params.replace(gate_kernel=np.diag(np.full(4, 1e3)))
    x = np.eye(4)[[0, 0, 1, 1]]
    ids, segments = np.array([[0], [0], [1], [1]]), np.array([5, 5, 9, 9])
    halves = oracle.judge_layer(problem, split, x, ids, segment_ids=segments)
    assert (float(halves["balance"].value), float(halves["sequence"].value)) == (2.0, 4.0)


def test_choices_by_hand():
    """Ties go to the lower index; groups are ranked by the sum of their best; a bias steers but weighs nothing."""
    router = Router(score="sigmoid", groups=2, group_topk=1, group_score_topk=2, selection_bias=True)
    problem = Problem(T=2, K=2, E=6, D=1, F=1, router=router)
    logits = np.array([[4.0, -4.0, -4.0, 1.0, 1.0, 1.0]])
    params = Params(gate_kernel=logits, wi=np.zeros((6, 1, 2)), wo=np.zeros((6, 1, 1)), expert_bias=np.zeros(6))
    got = oracle.route(problem, params, np.ones((2, 1)))
    assert got.topk_idx.tolist() == [[3, 4], [3, 4]]
    steered = oracle.route(problem, params.replace(expert_bias=np.array([9.0, 0, 0, 0, 0, 0])), np.ones((2, 1)))
    assert sorted(steered.topk_idx[0].tolist()) == [0, 1]
    assert float(steered.topk_weights[0, 0]) == np.float32(1 / (1 + np.exp(-4.0)))


def test_only_near_ties_excuse_another_choice():
    problem = Problem(T=3, K=1, E=3, D=1, F=1)
    params = Params(gate_kernel=np.array([[0.0, 0.0, 1.0]]), wi=np.zeros((3, 1, 2)), wo=np.zeros((3, 1, 1)))
    view = oracle.judge_route(problem, params, np.array([[1.0], [-1.0], [np.nan]]))
    verdict = view.admissible(np.array([[2], [1], [0]]))
    assert verdict.ok.all()
    assert verdict.near_tie.tolist() == [False, True, False] and verdict.tie.tolist() == [False, True, False]
    assert verdict.differs.tolist() == [False, True, False]
    assert not view.admissible(np.array([[1], [2], [3]])).ok.any()
    assert view.admissible(np.array([[-1], [0], [0]]), mask=np.array([False, True, True])).ok.all()
    twice = problem.replace(K=2, T=1)
    assert not oracle.judge_route(twice, params, np.ones((1, 1))).admissible(np.array([[1, 1]])).ok.any()


def test_groups_are_admissible_only_within_their_own_error():
    """Two groups tie, so either may stay, but never a mixture of both, and never a third that lies far behind."""
    router = Router(score="sigmoid", groups=3, group_topk=1, group_score_topk=1)
    problem = Problem(T=1, K=2, E=6, D=1, F=1, router=router)
    kernel = np.array([[2.0, 1.0, 2.0, 1.0, 0.0, 0.0]])
    params = Params(gate_kernel=kernel, wi=np.zeros((6, 1, 2)), wo=np.zeros((6, 1, 1)))
    view = oracle.judge_route(problem, params, np.ones((1, 1)))
    verdicts = {chosen: bool(view.admissible(np.array([chosen])).ok[0]) for chosen in ((0, 1), (2, 3), (0, 2), (4, 5))}
    assert verdicts == {(0, 1): True, (2, 3): True, (0, 2): False, (4, 5): False}


def test_copies_of_a_token_err_together():
    """h of n equal rows has one error, so with one dy a kernel's gradient errs n times as much as one row's, not sqrt(n) times."""
    n = 64
    case = make_case(SMALL.replace(T=n, E=1, K=1), seed=6, pattern="balanced")
    ids, w = np.zeros((n, 1), np.int32), np.full((n, 1), 0.5, np.float32)
    once = SMALL.replace(T=1, E=1, K=1)

    def gauges(problem, x, dy):
        judged = oracle.judge_experts(problem, case.params, x, Routing(ids[: len(x)], w[: len(x)]), dy)
        return {name: judged[name].gauge for name in ("wi", "wo", "wi_bias")}

    x, dy = np.repeat(np.asarray(case.x[:1]), n, 0), np.repeat(np.asarray(case.cotangent[:1]), n, 0)
    one, copies = gauges(once, x[:1], dy[:1]), gauges(case.problem, x, dy)
    apart = gauges(case.problem, np.asarray(case.x), dy)
    for name in ("wi", "wo", "wi_bias"):
        grown = np.median(copies[name][one[name] > 0] / one[name][one[name] > 0])
        alone = np.median(apart[name][one[name] > 0] / one[name][one[name] > 0])
        assert 0.4 * n < grown < 1.5 * n, (name, grown)
        assert alone < 0.75 * grown, (name, alone, grown)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8"])
def test_honest_quantised_layers_stay_within_the_gauge_on_copies(recipe):
    """512 equal rows share the errors of x and h as operands, and nearly those of the gradients."""
    problem = Problem(T=512, K=1, E=2, D=64, F=32, dtype="bfloat16", recipe=recipe)
    case = make_case(problem, seed=7, pattern="balanced")
    rng = np.random.default_rng(0)
    x = np.repeat(np.asarray(case.x[:1]), 512, 0)
    dy = (rng.standard_normal((1, 64)) + 0.3 * rng.standard_normal((512, 64))).astype(x.dtype)
    case = case.replace(x=jnp.asarray(x), cotangent=jnp.asarray(dy))
    got = running.experts(complete(get("loop_and_pad")), case)
    judged = oracle.judge_experts(problem, case.params, x, case.routing, dy)
    for name in ("wi", "wo"):
        error = abs(got[name].astype(np.float64) - judged[name].value)
        assert (error <= ELEMENT_BAR * judged[name].gauge).all(), name


@pytest.mark.parametrize(
    ("name", "dtype", "copied"),
    [
        ("clamp, biases, sigmoid in groups", "bfloat16", 40),
        ("relu2, sqrtsoftplus", "float32", 0),
        ("relu2, sqrtsoftplus", "float32", 50),
    ],
)
def test_the_device_oracle_is_the_oracle(name, dtype, copied):
    router, experts = LAYERS[name]
    problem = Problem(T=50, K=2, E=4, D=12, F=5, dtype=dtype, router=router, experts=experts)
    case = make_case(problem, seed=2, pattern="zipf", exponent=2.0)
    if copied:
        t = np.arange(50)
        case = case.replace(x=case.x[np.where(t < copied, t % 9, t)])
    ids = np.array(oracle.route(problem, case.params, case.x).topk_idx)
    marks = {"mask": np.arange(50) % 7 != 3, "segment_ids": np.arange(50) // 20}
    pairs = [
        [
            judge.judge_experts(problem, case.params, case.x, case.routing, case.cotangent)
            for judge in (oracle, oracle_device)
        ],
        [
            judge.judge_layer(
                problem, case.params, case.x, ids, case.cotangent, loss_cotangents=(3.0, -2.0, 1.0), **marks
            )
            for judge in (oracle, oracle_device)
        ],
    ]
    terms = problem.T * problem.K * problem.D * np.finfo(float).eps
    for want, got in pairs:
        assert want.keys() == got.keys()
        for tensor, j in want.items():
            assert (abs(got[tensor].value - j.value) <= ELEMENT_BAR * SHRINK * j.gauge).all(), tensor
            assert (abs(got[tensor].gauge - j.gauge) <= terms * j.gauge).all(), tensor
            assert got[tensor].kinks == j.kinks
            if j.dof is not None:
                assert (abs(got[tensor].dof - j.dof) <= terms * j.dof).all()


def test_the_device_oracle_takes_rows_in_blocks_and_hands_out_pieces():
    """An expert's rows beyond one block are added up; pieces come expert by expert, with 64-bit types off again."""
    case = make_case(SMALL, seed=5, pattern="all_to_one")
    args = (SMALL, case.params, case.x, case.routing, case.cotangent)
    sizes = np.bincount(np.asarray(case.routing.topk_idx).ravel(), minlength=SMALL.E)
    assert sizes.max() > oracle_device.BLOCKS[-1]
    want = oracle.judge_experts(*args)
    order = []
    for name, expert, judged in oracle_device.stream_experts(*args):
        assert jnp.ones(1).dtype == jnp.float32
        order.append((name, expert))
        value, gauge = (a if expert is None else a[expert] for a in want[name][:2])
        assert (abs(np.asarray(judged.value) - value) <= ELEMENT_BAR * SHRINK * gauge).all()
    each = [(name, e) for e in range(SMALL.E) for name in ("wi", "wo", "wi_bias", "wo_bias")]
    assert order == [*each, ("y", None), ("x", None), ("topk_weights", None)]

    honest = {n: j.value.astype("float32" if n == "topk_weights" else SMALL.dtype) for n, j in want.items()}
    found = {f.tensor: f for f in judge_pieces(SMALL, honest, oracle_device.stream_experts(*args))}
    assert found.keys() == honest.keys() and all(f.ok for f in found.values())
    honest["wo"][1, 2, 3] += 1
    wrong = {f.tensor: f for f in judge_pieces(SMALL, honest, oracle_device.stream_experts(*args))}
    assert (wrong["wo"].ok, wrong["wo"].expert, wrong["wo"].index) == (False, 1, (1, 2, 3))


def test_spot_checks_hold_the_device_oracle_to_the_oracle():
    case = make_case(SMALL, seed=4, pattern="half_idle")
    args = (SMALL, case.params, case.x, case.routing, case.cotangent)
    found = spot_check(*args, tokens=8, columns=4)
    assert all(f.ok for f in found)
    assert {"y", "x", "topk_weights", "wi", "wo", "wi_bias", "wo_bias"} == {f.tensor for f in found}
    sizes = np.bincount(np.asarray(case.routing.topk_idx).ravel(), minlength=5)
    checked = {f.expert for f in found}
    assert int(sizes.argmax()) in checked and checked & set(np.flatnonzero(sizes == 0).tolist())

    def tampered(tensor, change):
        for name, e, judged in oracle_device.stream_experts(*args):
            value = change(np.asarray(judged.value)) if name == tensor else judged.value
            yield name, e, judged._replace(value=value)

    for tensor, change in (("wo", lambda v: v * 1.0000001), ("y", lambda v: np.roll(v, 1, axis=0))):
        failed = {f.tensor for f in spot_check(*args, tokens=8, columns=4, pieces=tampered(tensor, change)) if not f.ok}
        assert failed == {tensor}
