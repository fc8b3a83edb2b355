"""The reference layers against a token loop in integers, bit for bit, and the rows that must not matter."""

import doctest
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity import registry
from dropless.parity.compare import same_bits
from dropless.parity.inputs import make_case
from dropless.parity.judge import layer_findings
from dropless.parity.problem import Experts, Params, Problem, Router, Routing
from dropless.reference import capacity, dense, layer, loop_and_pad, loop_host
from dropless.reference.experts import experts, experts_of
from dropless.reference.grouped_gemm import grouped_gemm
from dropless.reference.permute import permute, unpermute

T, K, E, D, F = 6, 2, 4, 3, 2
IDS = np.array([[2, 0], [0, 2], [-1, 2], [2, 0], [-1, -1], [0, -1]], np.int32)
"""Experts 1 and 3 are idle, token 4 goes nowhere, and two tokens have one expert only."""
ROOMY = Problem(
    T=T, K=K, E=E, D=D, F=F, capacity_factor=float(E),
    experts=Experts(activation="relu2", wi_bias=True, wo_bias=True),
)  # fmt: skip
LAYERS = {
    "experts": experts,
    "loop_and_pad": loop_and_pad.experts,
    "capacity": capacity.experts,
    "loop_host": loop_host.experts,
}


def integers(problem, seed=0):
    """A case whose every product and sum is a small multiple of a power of two: exact in float32, in any order."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.integers(-3, 4, size=shape), jnp.float32)

    params = Params(
        gate_kernel=draw(D, E),
        wi=draw(E, D, problem.wi_columns),
        wo=draw(E, F, D),
        wi_bias=draw(E, problem.wi_columns),
        wo_bias=draw(E, D),
    )
    weights = jnp.asarray(rng.permutation(T * K).reshape(T, K) + 1, jnp.float32) / 4
    return params, draw(T, D), Routing(jnp.asarray(IDS), weights), draw(T, D)


def token_loop(problem, params, x, routing, dy):
    """y and its gradients in float64, one slot at a time, by the chain rule written out."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in params.named().items()}
    x, dy, w = (np.asarray(a, np.float64) for a in (x, dy, routing.topk_weights))
    d = {name: np.zeros_like(a) for name, a in (p | {"y": x, "x": x, "topk_weights": w}).items()}
    for t, k in np.ndindex(*w.shape):
        e = int(routing.topk_idx[t, k])
        if e < 0:
            continue
        pre = x[t] @ p["wi"][e] + p["wi_bias"][e]
        gate, up = (pre[:F], pre[F:]) if problem.experts.gated else (pre, np.ones(F))
        h = np.maximum(gate, 0) ** 2 * up
        out = h @ p["wo"][e] + p["wo_bias"][e]
        dh = w[t, k] * dy[t] @ p["wo"][e].T
        dpre = 2 * np.maximum(gate, 0) * up * dh
        if problem.experts.gated:
            dpre = np.concatenate([dpre, np.maximum(gate, 0) ** 2 * dh])
        d["y"][t] += w[t, k] * out
        d["x"][t] += dpre @ p["wi"][e].T
        d["topk_weights"][t, k] = dy[t] @ out
        d["wi"][e] += np.outer(x[t], dpre)
        d["wi_bias"][e] += dpre
        d["wo"][e] += np.outer(h, w[t, k] * dy[t])
        d["wo_bias"][e] += w[t, k] * dy[t]
    del d["gate_kernel"]
    return d


def values_and_gradients(stage, problem, params, x, routing, dy):
    def experts_at(params, x, weights):
        return stage(problem, params, x, Routing(routing.topk_idx, weights))

    y, back = jax.vjp(experts_at, params, x, routing.topk_weights)
    d_params, dx, dw = back(dy)
    return {"y": y, "x": dx, "topk_weights": dw} | {n: a for n, a in d_params.named().items() if n != "gate_kernel"}


compiled = jax.jit(values_and_gradients, static_argnums=(0, 1))


def run(stage, *case):
    """y and its gradients by name, compiled unless the layer reads its routing on the host."""
    return (values_and_gradients if stage is loop_host.experts else compiled)(stage, *case)


def assert_bits(got, want):
    """Equal but for the sign of zero, which no sum promises."""
    assert set(got) == set(want)
    for name, a in want.items():
        finding = same_bits(name, np.asarray(got[name]) + 0, np.asarray(a, np.asarray(got[name]).dtype) + 0)
        assert finding.ok, finding.message


@pytest.mark.parametrize(("gated", "placement"), [(True, "late"), (True, "early"), (False, "late")])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_the_token_loop_bit_for_bit(name, gated, placement):
    problem = ROOMY.replace(experts_gated=gated, experts_weight_placement=placement)
    case = integers(problem)
    assert_bits(run(LAYERS[name], problem, *case), token_loop(problem, *case))


@pytest.mark.parametrize("name", LAYERS)
def test_a_token_that_goes_nowhere_may_hold_anything(name):
    params, x, routing, dy = integers(ROOMY)
    want = token_loop(ROOMY, params, x, routing, dy)
    for bad in (np.nan, np.inf, 1e30):
        weights = jnp.where(routing.topk_idx < 0, bad, routing.topk_weights)
        got = run(LAYERS[name], ROOMY, params, x.at[4].set(bad), Routing(routing.topk_idx, weights), dy)
        assert_bits(got, want)


@pytest.mark.parametrize("name", LAYERS)
def test_a_bad_token_that_is_routed_stays_in_its_row(name):
    params, x, routing, dy = integers(ROOMY)
    plain = run(LAYERS[name], ROOMY, params, x, routing, dy)["y"]
    got = run(LAYERS[name], ROOMY, params, x.at[1].set(np.nan), routing, dy)["y"]
    assert bool(jnp.isnan(got[1]).all())
    others = np.array([0, 2, 3, 4, 5])
    assert same_bits("y", got[others], plain[others]).ok


@pytest.mark.parametrize("garbage", [np.nan, 1e30])
@pytest.mark.parametrize("placement", ["late", "early"])
def test_what_stages_leave_in_rows_without_a_token_does_not_matter(garbage, placement):
    """A permutation and a product that dirty those rows, forward and backward, compose to the same layer."""

    def dirty(rows, real):
        @jax.custom_vjp
        def spoil(rows, real):
            return jnp.where((jnp.arange(rows.shape[0]) < real)[:, None], rows, garbage)

        spoil.defvjp(lambda rows, real: (spoil(rows, real), real), lambda real, d: (spoil(d, real), None))
        return spoil(rows, real)

    def dirty_permute(problem, x, routing, *, align=1):
        rows, group_sizes, row_of_slot = permute(problem, x, routing, align=align)
        return dirty(rows, group_sizes.sum()), group_sizes, row_of_slot

    def dirty_gemm(rows, kernels, group_sizes):
        real = group_sizes.sum()
        return dirty(grouped_gemm(dirty(rows, real), kernels, group_sizes), real)

    stage = experts_of(permute=dirty_permute, grouped_gemm=dirty_gemm, unpermute=unpermute)
    problem = ROOMY.replace(experts_weight_placement=placement)
    case = integers(problem)
    assert_bits(run(stage, problem, *case), token_loop(problem, *case))


@pytest.mark.parametrize("align", [1, 4])
def test_permute_places_every_row_once_and_unpermute_inverts_it(align):
    problem = Problem(T=T, K=K, E=E, D=D, F=F, experts=Experts(weight_placement="early"))
    x = jnp.arange(1.0, T + 1)[:, None] + jnp.arange(D) / 8  # a row says where it came from
    routing = Routing(jnp.asarray(IDS), jnp.ones((T, K)))
    rows, group_sizes, row_of_slot = jax.jit(lambda x, r: permute(problem, x, r, align=align))(x, routing)
    assert rows.shape == (problem.padded_rows(align), D)
    start = 0
    for e in range(E):
        tokens = [t for t in range(T) if e in IDS[t]]
        assert int(group_sizes[e]) == len(tokens)
        assert same_bits("rows", rows[start : start + len(tokens)], x[np.array(tokens, int)]).ok
        assert [int(row_of_slot[t, list(IDS[t]).index(e)]) for t in tokens] == list(range(start, start + len(tokens)))
        start += -(-len(tokens) // align) * align
    assert (np.asarray(row_of_slot) == -1).tolist() == (IDS < 0).tolist()
    back = unpermute(problem, rows, routing, row_of_slot)
    assert same_bits("y", back, x * (IDS >= 0).sum(1)[:, None].astype(np.float32)).ok


def test_group_products_use_their_own_kernel_and_nothing_beyond():
    rows = jnp.arange(10.0).reshape(5, 2).at[4].set(np.nan)
    kernels = jnp.stack([jnp.eye(2), 7 * jnp.eye(2), 2 * jnp.eye(2)])
    sizes = jnp.array([1, 0, 3], jnp.int32)
    out, back = jax.vjp(lambda r, k: grouped_gemm(r, k, sizes), rows, kernels)
    assert out[:4].tolist() == [[0, 1], [4, 6], [8, 10], [12, 14]]
    d_rows, d_kernels = back(jnp.ones((5, 2)).at[4].set(np.nan))
    assert d_rows[:4].tolist() == [[1, 1], [2, 2], [2, 2], [2, 2]]
    assert d_kernels.tolist() == [[[0, 0], [1, 1]], [[0, 0], [0, 0]], [[12, 12], [15, 15]]]


@pytest.mark.parametrize("name", LAYERS)
def test_no_token_gives_no_rows_and_zero_gradients(name):
    problem = ROOMY.replace(T=0)
    params, x, routing, dy = integers(ROOMY)
    none = Routing(routing.topk_idx[:0], routing.topk_weights[:0])
    got = run(LAYERS[name], problem, params, x[:0], none, dy[:0])
    assert got["y"].shape == got["x"].shape == (0, D)
    assert all(not np.asarray(got[leaf]).any() for leaf in ("wi", "wo", "wi_bias", "wo_bias"))


@pytest.mark.parametrize("name", ["loop_and_pad", "capacity"])
def test_fifty_routings_compile_once_and_are_followed(name):
    implementation = registry.complete(registry.get(name))
    problem = ROOMY.replace(capacity_factor=float(E))
    params, x, _, _ = integers(problem)
    stage = jax.jit(implementation.stage("experts"), static_argnums=0)
    rng = np.random.default_rng(0)
    for _ in range(50):
        ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
        routing = Routing(jnp.asarray(ids), jnp.ones((T, K)))
        want = token_loop(problem, params, x, routing, np.zeros((T, D)))["y"]
        assert same_bits("y", np.asarray(stage(problem, params, x, routing)) + 0, want.astype(np.float32) + 0).ok
    assert stage._cache_size() == 1


def test_capacity_drops_the_overflow_in_token_order():
    problem = Problem(T=4, K=1, E=2, D=1, F=1)
    routing = Routing(jnp.array([[0], [0], [0], [1]], jnp.int32), jnp.ones((4, 1)))
    assert capacity.rows_per_expert(problem) == 2
    lost = capacity.dropped(problem, routing)
    assert (int(lost.rows), int(lost.tokens), lost.by_expert.tolist()) == (1, 1, [1, 0])
    assert capacity.keep(problem, routing).topk_idx.tolist() == [[0], [0], [-1], [1]]


@pytest.mark.parametrize(("factor", "rows"), [(0.5, 2), (1.0, 3), (1.25, 4), (2.0, 6), (9.0, 6)])
def test_capacity_drops_exactly_what_it_reports(factor, rows):
    problem = ROOMY.replace(capacity_factor=factor)
    params, x, routing, dy = integers(problem)
    assert capacity.rows_per_expert(problem) == rows  # ceil(factor * 6 * 2 / 4), at most 6
    kept, lost = capacity.keep(problem, routing), capacity.dropped(problem, routing)
    gone = (np.asarray(kept.topk_idx) < 0) & (IDS >= 0)
    assert int(lost.rows) == gone.sum() == int(lost.by_expert.sum())
    assert int(lost.tokens) == gone.any(axis=1).sum()
    assert lost.by_expert.tolist() == np.bincount(IDS[gone], minlength=E).tolist()
    assert_bits(run(capacity.experts, problem, params, x, routing, dy), token_loop(problem, params, x, kept, dy))


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bfloat16") for name in LAYERS), ("loop_and_pad", "float16")])
def test_gradients_come_in_the_dtype_of_what_they_are_of(name, dtype):
    problem = ROOMY.replace(dtype=dtype)
    case = make_case(problem, routing=IDS)
    got = run(LAYERS[name], problem, case.params, case.x, case.routing, case.cotangent)
    assert {n: a.dtype.name for n, a in got.items()} == {n: "float32" if n == "topk_weights" else dtype for n in got}
    for leaf in ("wi", "wo", "wi_bias", "wo_bias"):
        busy = np.asarray(got[leaf]).astype(np.float32).reshape(E, -1).any(axis=1)
        assert busy.tolist() == [True, False, True, False]


def test_layers_of_a_masked_batch_give_zero_rows_and_no_counts():
    problem = ROOMY.replace(experts_shared_F=2)
    params, x, _, _ = integers(problem)
    params = params.replace(shared_wi=jnp.ones((D, 4)), shared_wo=jnp.ones((2, D)))
    mask = jnp.array([True, False, True, True, False, True])
    for stage in (layer.layer, loop_and_pad.layer):
        f = jax.jit(lambda x, stage=stage: stage(problem, params, x, mask=mask))
        clean, dirty = f(x), f(jnp.where(mask[:, None], x, np.nan))
        for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(dirty), strict=True):
            assert same_bits("output", a, b).ok
        assert dirty.y[~mask].tolist() == np.zeros((2, D)).tolist()
        assert int(dirty.group_sizes.sum()) == 4 * K
        assert (np.asarray(dirty.routing.topk_idx) < 0).all(axis=1).tolist() == (~mask).tolist()


@pytest.mark.parametrize("name", ["loop_host", "loop_and_pad"])
def test_live_layers_agree_with_the_oracle(name):
    """The naive loop reads ids that a differentiated router made."""
    router = Router(score="sigmoid", normalize=True, groups=2, selection_bias=True)
    case = make_case(ROOMY.replace(router=router), mask=np.arange(T) != 3, segment_ids=np.arange(T) // 4)
    findings = layer_findings(registry.complete(registry.get(name)), case)
    assert {f.tensor for f in findings} >= {"y", "x", "gate_kernel", "wi", "wo", "balance", "sequence", "z"}
    assert not [f.message for f in findings if not f.ok]


def test_a_product_is_rounded_once():
    """1 + 2^-9 + 2^-9 is 1 + 2^-8 in float32, which bfloat16's 8 bits keep only if nothing was rounded before."""
    problem = Problem(T=1, K=1, E=1, D=1, F=1, dtype="bfloat16")
    a = jnp.array([[1.0, 2.0**-9, 2.0**-9, 2.0**-8]], jnp.bfloat16)
    assert dense.product(problem, a, jnp.ones((4, 1), jnp.bfloat16)).tolist() == [[1 + 2.0**-7]]
    assert dense.product(
        problem, a[:, :3], jnp.ones((3, 1), jnp.bfloat16), jnp.array([2.0**-8], jnp.bfloat16)
    ).tolist() == [[1 + 2.0**-7]]


def test_the_readme_example_prints_what_it_says():
    readme = Path(__file__).parents[1] / "reference" / "README.md"
    outcome = doctest.testfile(str(readme), module_relative=False)
    assert outcome.attempted > 0 and outcome.failed == 0
