"""What `blocked` promises beyond the laws that every implementation is held to: memory, one executable, inert rows, exact zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.optimized.xla import blocked, ragged_dot, visit
from dropless.optimized.xla.grouped_gemm import grouped_gemm
from dropless.optimized.xla.permute import permute
from dropless.parity.compare import judge, same_bits
from dropless.parity.inputs import make_case
from dropless.parity.judge import dtype_of, experts_findings
from dropless.parity.patterns import routing_ids
from dropless.parity.problem import Experts, Problem, Routing
from dropless.reference import oracle
from dropless.reference.permute import permute as reference_permute

SMALL = Problem(T=24, K=3, E=40, D=8, F=6, experts=Experts(wi_bias=True, wo_bias=True))
"""More experts than a token batch can keep busy under skew."""

TEMPORARIES, ROWS_PER_EXPERT = 4, 16
"""Times (R + E * ROWS_PER_EXPERT)(D + 2F) elements: backward's rows of x, dy, d_pre, h and d_x, and room for gathers."""


@functools.cache
def step(problem):
    """The experts' y and gradients, jitted: one executable for every routing."""

    def run(params, x, topk_weights, topk_idx, dy):
        def experts(params, x, topk_weights):
            return blocked.experts(problem, params, x, Routing(topk_idx, topk_weights))

        y, vjp = jax.vjp(experts, params, x, topk_weights)
        d_params, d_x, d_weights = vjp(dy)
        return {"y": y, "x": d_x, "topk_weights": d_weights, **d_params.named()}

    return jax.jit(run)


def arguments(case):
    return case.params, case.x, case.routing.topk_weights, case.routing.topk_idx, case.cotangent


def run(case):
    return {name: np.asarray(a) for name, a in step(case.problem)(*arguments(case)).items()}


@pytest.mark.parametrize(
    "problem",
    [
        Problem(T=600, K=1, E=3, D=8, F=6),
        SMALL.replace(
            dtype="float16", experts_weight_placement="early", experts_gated=False, experts_activation="relu2"
        ),
    ],
    ids=["several blocks an expert", "float16 early"],
)
def test_experts_and_every_gradient_agree_with_the_oracle(problem):
    findings = experts_findings(blocked.IMPLEMENTATION, make_case(problem, pattern="zipf"))
    assert {f.tensor for f in findings} >= {"y", "x", "topk_weights", "wi", "wo"}
    assert all(f.ok for f in findings), [f.message for f in findings if not f.ok]


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_permute_is_the_reference_bit_for_bit(dtype, align):
    problem = SMALL.replace(dtype=dtype)
    case = make_case(problem, pattern="zipf", exponent=2.0)
    ids = case.routing.topk_idx.at[3].set(-1).at[5, 1].set(-1)
    x = case.x.at[3].set(jnp.nan)
    routing = Routing(ids, case.routing.topk_weights)
    rows, group_sizes, row_of_slot = permute(problem, x, routing, align=align)
    want, want_sizes, want_row = reference_permute(problem, x, routing, align=align)
    held = np.asarray(want_row)[np.asarray(want_row) >= 0]
    assert rows.shape == want.shape and held.size == SMALL.routed_rows - 4
    for name, a, b in (
        ("group_sizes", group_sizes, want_sizes),
        ("row_of_slot", row_of_slot, want_row),
        ("rows", rows[held], want[held]),
    ):
        assert (finding := same_bits(name, a, b)).ok, finding.message


def test_every_real_row_is_visited_once_and_no_other():
    rows, experts = 700, 9
    sizes = visit.block_sizes(rows, rows)
    assert sizes[-1] == visit.LARGEST < rows

    @jax.jit
    def visits(group_sizes):
        def block(_, b, seen):
            own = b.own[:, 0].astype(jnp.int32)
            return b.write(seen, b.read(seen) + own), own.sum()

        def leave(e, total, seen):
            return seen.at[rows + e].add(total)

        return visit.visit(
            group_sizes,
            sizes,
            rows,
            block,
            jnp.zeros(rows + experts, jnp.int32),
            enter=lambda e: None,
            leave=leave,
            largest_group=rows,
        )

    for groups in (
        [0, 1, 15, 16, 17, 255, 256, 0, 31],
        [0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 700, 0, 0, 0, 0, 0],
        [257, 0, 0, 0, 130, 0, 0, 0, 313],
    ):
        got = np.asarray(visits(jnp.array(groups, jnp.int32)))
        want = np.concatenate([np.arange(rows) < sum(groups), groups]).astype(np.int32)
        assert (finding := same_bits("visits", got, want)).ok, (groups, finding.message)


def test_temporaries_follow_the_rows_and_not_tokens_times_experts():
    few = Problem(T=128, K=2, E=8, D=64, F=32)
    used = []
    for problem in (few, few.replace(E=128)):
        case = make_case(problem, pattern="zipf")
        memory = step(problem).lower(*arguments(case)).compile().memory_analysis()
        unit = (problem.routed_rows + problem.E * ROWS_PER_EXPERT) * (problem.D + 2 * problem.F) * 4
        assert 0 < memory.temp_size_in_bytes <= TEMPORARIES * unit
        used.append(memory.temp_size_in_bytes)
    padded_row = few.T * (few.D + 2 * few.F) * 4
    assert used[1] - used[0] < padded_row, "120 experts more cost less than one expert padded to T rows"


def test_one_executable_follows_fifty_routings():
    problem = SMALL
    case = make_case(problem, pattern="zipf")
    run(case)
    compiled = step(problem)._cache_size()
    for seed in range(50):
        ids = routing_ids("zipf", problem.T, problem.K, problem.E, seed, exponent=seed / 12)
        got = step(problem)(case.params, case.x, case.routing.topk_weights, jnp.asarray(ids), case.cotangent)
        if seed % 10 == 0:
            want = oracle.judge_experts(
                problem, case.params, case.x, Routing(jnp.asarray(ids), case.routing.topk_weights), case.cotangent
            )
            findings = [judge(n, got[n], want[n], dtype=dtype_of(problem, n)) for n in got if n in want]
            assert len(findings) == 7 and all(f.ok for f in findings), [f.message for f in findings]
    assert step(problem)._cache_size() == compiled


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_what_no_expert_was_asked_to_read_never_matters(poison):
    case = make_case(SMALL, pattern="zipf")
    ids = case.routing.topk_idx.at[7].set(-1).at[2, 0].set(-1)
    params, x, weights, _, dy = arguments(case)
    clean = step(SMALL)(params, x.at[7].set(0), jnp.where(ids < 0, 0, weights), ids, dy)
    dirty = step(SMALL)(params, x.at[7].set(poison), jnp.where(ids < 0, poison, weights), ids, dy)
    for name, want in clean.items():
        assert np.isfinite(np.asarray(want)).all()
        assert (finding := same_bits(name, dirty[name], want)).ok, finding.message
    assert not np.asarray(dirty["y"])[7].any() and not np.asarray(dirty["x"])[7].any()


@pytest.mark.parametrize("layer", [blocked, ragged_dot], ids=["blocked", "ragged_dot"])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_rows_beyond_the_groups_never_matter(layer, poison):
    rng = np.random.default_rng(0)
    rows, d = (jnp.asarray(rng.normal(size=(40, 4)), jnp.float32) for _ in range(2))
    kernels = jnp.asarray(rng.normal(size=(4, 4, 4)), jnp.float32)
    group_sizes = jnp.array([5, 0, 20, 3], jnp.int32)
    gemm = layer.IMPLEMENTATION.stages["grouped_gemm"]

    @jax.jit
    def both(rows, d):
        out, vjp = jax.vjp(lambda r, k: gemm(r, k, group_sizes), rows, kernels)
        return out[:28], *(a[:28] for a in vjp(d))

    clean, dirty = both(rows, d), both(rows.at[28:].set(poison), d.at[28:].set(poison))
    for name, a, b in zip(("out", "rows", "kernels"), dirty, clean, strict=True):
        assert (finding := same_bits(name, a, b)).ok, finding.message


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_idle_expert_has_gradients_of_exactly_zero(dtype):
    problem = SMALL.replace(dtype=dtype)
    case = make_case(problem, pattern="zipf", exponent=2.0)
    idle = np.setdiff1d(np.arange(problem.E), np.asarray(case.routing.topk_idx))
    assert 0 < idle.size < problem.E
    got = run(case)
    for name in ("wi", "wo", "wi_bias", "wo_bias"):
        zeros = np.zeros_like(got[name][idle])
        assert (finding := same_bits(name, got[name][idle], zeros)).ok, finding.message
        assert np.delete(got[name], idle, axis=0).any(axis=tuple(range(1, got[name].ndim))).all()


def test_grouped_gemm_is_exact_on_integers():
    rng = np.random.default_rng(1)
    rows, kernels, d = (jnp.asarray(rng.integers(-4, 5, size=s), jnp.float32) for s in ((30, 6), (3, 6, 5), (30, 5)))
    sizes = np.array([17, 0, 13])
    expert = np.repeat(np.arange(3), sizes)

    @jax.jit
    def both(rows, kernels, d):
        out, vjp = jax.vjp(lambda r, k: grouped_gemm(r, k, jnp.asarray(sizes, jnp.int32)), rows, kernels)
        return out, *vjp(d)

    out, d_rows, d_kernels = both(rows, kernels, d)
    r, k, c = (np.asarray(a) for a in (rows, kernels, d))
    for name, got, want in (
        ("out", out, np.einsum("pa,pab->pb", r, k[expert])),
        ("rows", d_rows, np.einsum("pb,pab->pa", c, k[expert])),
        ("kernels", d_kernels, np.stack([r[expert == e].T @ c[expert == e] for e in range(3)])),
    ):
        assert (finding := same_bits(name, got, want.astype(np.float32))).ok, finding.message
