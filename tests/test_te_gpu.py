"""Transformer Engine on one GPU: public faults as pinned cases, and what no law can ask inside one process.

The first group calls TE itself. Each states the smallest case of a fault that `te` works around; a test that fails here
says that the fault is gone and the guard in optimized/te can go too.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.optimized.te import fp8, rows, te
from dropless.optimized.te import grouped_gemm as gg
from dropless.parity.compare import same_bits
from dropless.parity.inputs import make_case
from dropless.parity.judge import experts_findings
from dropless.parity.problem import Params, Problem, Router, Routing

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _as_transformer_engine_expects():
    # TE mixes dtypes as JAX allows by default; the strict rule of these tests is for this package's own code.
    with jax.numpy_dtype_promotion("standard"):
        yield


def _normal(seed, shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _fused(*args, **kwargs):
    from transformer_engine.jax.router import fused_topk_with_score_function

    return fused_topk_with_score_function(*args, **kwargs)


class TestUpstream:
    """Faults of Transformer Engine 2.20.2, each at its smallest."""

    def test_a_nan_row_is_given_one_expert_k_times(self):
        _, chosen = _fused(jnp.full((1, 8), jnp.nan, jnp.float32), topk=4, use_pre_softmax=True)
        assert int(chosen.sum()) == 1

    def test_weights_under_a_selection_bias_lose_the_small_scores(self):
        """Its weights are (score + bias) - bias: sigmoid(-6) keeps three digits beside a bias of 8."""
        z, bias = _normal(1, (64, 16)) - 6, jnp.full((16,), 8.0, jnp.float32)
        steered, _ = _fused(z, topk=4, score_function="sigmoid", expert_bias=bias)
        free, _ = _fused(z, topk=4, score_function="sigmoid")
        off = jnp.abs(steered - free) / jnp.where(free > 0, free, 1.0)
        assert float(off.max()) > 1000 * np.finfo(np.float32).eps

    def test_an_exact_tie_is_not_the_lower_index(self):
        z = jnp.zeros((1, 64)).at[0, jnp.array([8, 16, 40])].set(1.0)
        _, chosen = _fused(z, topk=1)
        assert np.flatnonzero(np.asarray(chosen)[0]).tolist() == [16]

    def test_a_slot_of_weight_zero_is_dispatched_as_padding(self):
        from transformer_engine.jax.permutation import token_dispatch

        chosen = jnp.zeros((2, 2), bool).at[:, 0].set(True)
        x = jnp.ones((2, 64), jnp.bfloat16)
        weights = jnp.asarray([[0.0, 0.0], [0.5, 0.0]], jnp.float32)
        dispatched, *_ = token_dispatch(x, chosen, 2, probs=weights)
        assert not np.asarray(dispatched[0], np.float32).any()

    def test_the_plain_dispatch_counts_no_expert_as_expert_zero(self):
        from transformer_engine.jax.permutation import pure_jax_token_dispatch

        ids = jnp.asarray([[0, -1], [-1, 1], [1, 0], [-1, -1]])
        *_, sizes = pure_jax_token_dispatch(jnp.ones((4, 8), jnp.bfloat16), ids, 3, 2)
        assert np.asarray(sizes).tolist() == [6, 2, 0]

    def test_the_kernels_behind_an_idle_expert_get_the_scale_before_theirs(self):
        """FP8 with current scaling: expert 2's kernel is four times the identity, and comes out as expert 1's two."""
        sizes = jnp.asarray([16, 0, 16], jnp.int32)
        x = jnp.ones((32, 16), jnp.bfloat16)
        kernels = jnp.eye(16, dtype=jnp.bfloat16) * jnp.asarray([1, 2, 4], jnp.bfloat16)[:, None, None]
        out = _eight_bit_product(x, kernels, sizes)
        assert np.asarray(out[:16], np.float32).tolist() == np.ones((16, 16)).tolist()
        assert np.asarray(out[16:], np.float32).tolist() == np.full((16, 16), 2.0).tolist()

    def test_one_nan_sets_the_scale_of_its_whole_group_to_one(self):
        """FP8 with current scaling: beside a NaN, 1000 saturates at 448 with scale 1."""
        x = jnp.full((32, 16), 1000.0, jnp.bfloat16).at[0, 0].set(jnp.nan)
        found = _grouped_quantize(x, jnp.asarray([16, 16], jnp.int32), jnp.float8_e4m3fn).rowwise_tensor
        assert np.asarray(found.scale_inv)[0] == 1.0
        assert np.asarray(found.data.astype(jnp.float32))[1] == 448.0
        assert abs(np.asarray(found.scale_inv)[1] * 448 - 1000) < 1e-3

    def test_an_amax_below_1e_minus_36_has_an_infinite_scale(self):
        """FP8 with current scaling: 2^-125 of amax, and the zero beside it becomes NaN."""
        x = jnp.full((16, 16), 2.0**-125, jnp.bfloat16).at[0, 0].set(0.0)
        found = _grouped_quantize(x, jnp.asarray([16], jnp.int32), jnp.float8_e4m3fn).rowwise_tensor
        assert np.asarray(found.scale_inv)[0] == 0.0
        assert np.isnan(np.asarray(found.data.astype(jnp.float32))[0])

    def test_a_group_of_17_rows_has_no_weight_gradient_in_fp8(self):
        from transformer_engine.jax.quantize import TensorUsage

        sizes = jnp.asarray([17, 15], jnp.int32)
        x = _grouped_quantize(_normal(0, (32, 16), "bfloat16"), sizes, jnp.float8_e4m3fn)
        d = _grouped_quantize(_normal(1, (32, 16), "bfloat16"), sizes, jnp.float8_e5m2)
        with pytest.raises(jax.errors.JaxRuntimeError):
            _product(x.get_tensor(TensorUsage.LHS_TRANS), d.get_tensor(TensorUsage.RHS), ((0,), (0,)))


def _grouped_quantize(x, sizes, dtype):
    """TE's public call with current scaling; without sizes the first axis is the groups'."""
    from transformer_engine.jax import cpp_extensions as tex
    from transformer_engine.jax.quantize import QuantizeLayout, QuantizerFactory, ScalingMode

    groups = x.shape[0] if sizes is None else sizes.shape[0]
    mode, both = ScalingMode.CURRENT_TENSOR_SCALING, QuantizeLayout.ROWWISE_COLWISE
    quantizer = QuantizerFactory.create(1, mode, dtype, both, n_groups=groups)
    return jax.jit(lambda x: tex.grouped_quantize(x, quantizer, sizes))(x)


def _product(lhs, rhs, contracting):
    from transformer_engine.jax import cpp_extensions as tex

    return jax.block_until_ready(jax.jit(lambda a, b: tex.grouped_gemm(a, b, contracting_dims=contracting))(lhs, rhs))


def _eight_bit_product(x, kernels, sizes):
    from transformer_engine.jax.quantize import TensorUsage

    lhs = _grouped_quantize(x, sizes, jnp.float8_e4m3fn).get_tensor(TensorUsage.LHS)
    rhs = _grouped_quantize(kernels, None, jnp.float8_e4m3fn).get_tensor(TensorUsage.RHS)
    return _product(lhs, rhs, ((1,), (1,)))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_scales_taken_here_give_the_bits_of_transformer_engines_own_call(element):
    """Where TE's scales are right: random groups, one of them zeros, one with its amax at a power of two."""
    x = _normal(0, (96, 64), "bfloat16").at[:16].set(0).at[20, 3].set(8.0)
    sizes = jnp.asarray([16, 32, 48], jnp.int32)
    ours = jax.jit(lambda x: fp8.quantize_both(x, sizes, element=element))(x)
    theirs = _grouped_quantize(x, sizes, fp8.ELEMENTS[element][0])
    for side in ("rowwise_tensor", "colwise_tensor"):
        for part in ("data", "scale_inv"):
            got, want = (np.asarray(getattr(getattr(t, side), part)) for t in (ours, theirs))
            finding = same_bits(f"{side} {part}", got, want)
            assert finding.ok, finding.message


@pytest.mark.parametrize(
    "ids", [[5] * 17, [0, 7] * 40, list(range(8)) * 3 + [7] * 40], ids=["one busy", "ends", "ragged"]
)
def test_fp8_experts_beside_idle_ones_and_ragged_groups(ids):
    """No group size a multiple of 16 but by chance: y and every gradient within the recipe's gauge."""
    problem = Problem(T=len(ids), K=1, E=8, D=64, F=48, dtype="bfloat16", recipe="fp8-current")
    case = make_case(problem, routing=np.asarray(ids, np.int32)[:, None])
    assert [f.message for f in experts_findings(te.IMPLEMENTATION, case) if not f.ok] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_router_kernel_has_finite_gradients_in_every_dtype(dtype):
    z = _normal(3, (32, 16), dtype)
    g = jax.grad(lambda z: (_fused(z, topk=2, use_pre_softmax=True)[0].astype(jnp.float32) * jnp.arange(16.0)).sum())(z)
    assert g.dtype == z.dtype
    assert np.isfinite(np.asarray(g, np.float32)).all()


@pytest.mark.parametrize(("E", "K"), [(1, 1), (3, 2), (7, 7), (128, 8), (257, 16), (512, 9), (1024, 17), (2304, 36)])
def test_choices_are_the_best_ones_at_every_size(E, K):
    """Around both switches of TE's top-k and the limit of the layer's own kernel."""
    problem = Problem(T=33, K=K, E=E, D=64, F=64, dtype="bfloat16", router=Router(logits_dtype="float32"))
    x, gate = _normal(0, (33, 64), "bfloat16"), _normal(1, (64, E), "bfloat16") / 8
    wi, wo = jnp.zeros((E, 64, 128), jnp.bfloat16), jnp.zeros((E, 64, 64), jnp.bfloat16)
    given = Params(gate_kernel=gate, wi=wi, wo=wo)
    exact = np.asarray(x, np.float64) @ np.asarray(gate, np.float64)
    ranks = np.sort(exact, axis=1)[:, ::-1]
    clear = np.ones(33, bool) if K == E else ranks[:, K - 1] - ranks[:, K] > 1e-4
    want = np.sort(np.argsort(-exact, axis=1, kind="stable")[:, :K], axis=1)
    for routing in (
        jax.jit(lambda p, x: te.route(problem, p, x))(given, x),
        jax.jit(lambda p, x: te.layer(problem, p, x).routing)(given, x),
    ):
        got = np.sort(np.asarray(routing.topk_idx), axis=1)
        assert clear.any()
        assert (got[clear] == want[clear]).all()


@pytest.mark.parametrize("sizes", [(5, 0, 1, 130), (0, 0, 0, 7), (3, 0, 0, 0), (0, 0, 0, 0), (1,) * 32])
def test_an_empty_group_leaves_its_neighbours_right(sizes):
    """Small integers, so that every product is exact; rows beyond the groups hold NaN."""
    P, n, A, B = sum(sizes) + 9, sum(sizes), 64, 96
    random = np.random.default_rng(0)
    left, right = (random.integers(-2, 3, (P, w)).astype(np.float32) for w in (A, B))
    kernels = random.integers(-2, 3, (len(sizes), A, B)).astype(np.float32)
    want = np.zeros((len(sizes), A, B), np.float32)
    out = np.zeros((n, B), np.float32)
    start = 0
    for e, size in enumerate(sizes):
        block = slice(start, start + size)
        want[e], out[block], start = left[block].T @ right[block], left[block] @ kernels[e], start + size
    left[n:] = right[n:] = np.nan
    args = [jnp.asarray(a, jnp.bfloat16) for a in (left, kernels, right)]
    got_out, got = jax.jit(lambda a, k, b, s: (gg.product(a, k, s), gg.kernel_gradient(a, b, s)))(
        *args, jnp.asarray(sizes, jnp.int32)
    )
    for name, one, other in (("out", got_out[:n], out), ("gradient", got, want)):
        finding = same_bits(name, np.asarray(one), np.asarray(jnp.asarray(other, jnp.bfloat16)))
        assert finding.ok, finding.message


def test_rows_beyond_2_to_the_31_elements_come_back():
    """32769 tokens x 8 slots x 8192 columns: every row holds its token's number, and eighths of it add up exactly."""
    T, D, K = 32769, 8192, 8
    problem = Problem(T=T, K=K, E=K, D=D, F=8, dtype="bfloat16")
    x = jnp.broadcast_to((jnp.arange(T) % 251).astype(jnp.bfloat16)[:, None], (T, D))
    ids = jnp.argsort(jax.random.uniform(jax.random.key(0), (T, K)), axis=1).astype(jnp.int32)

    @jax.jit
    def trip(x, routing):
        found, _, at = te.permute(problem, x, routing)
        return te.unpermute(problem, found, routing, at)

    y = trip(x, Routing(ids, jnp.full((T, K), 1 / 8, jnp.float32)))
    wrong = np.flatnonzero(np.asarray((y != x).any(axis=1)))
    assert not wrong.size, f"token {wrong[0]} of {wrong.size} wrong ones; element 2^31 lies in row {2**31 // D}"


COMMAND_BUFFERS = """
import hashlib, jax, jax.numpy as jnp, numpy as np
from dropless.optimized.te import te
from dropless.parity.inputs import make_case
from dropless.parity.problem import Problem, Routing
problem = Problem(T=256, K=2, E=8, D=256, F=128, dtype="bfloat16")
step = jax.jit(lambda p, x, i, w, dy: jax.vjp(lambda p, x, w: te.experts(problem, p, x, Routing(i, w)), p, x, w)[1](dy))
seen = []
for seed in (0, 1, 0, 1):
    c = make_case(problem, seed=seed, pattern="zipf")
    out = step(c.params, c.x, c.routing.topk_idx, c.routing.topk_weights, c.cotangent)
    seen.append(hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in jax.tree.leaves(out))).hexdigest())
assert step._cache_size() == 1, step._cache_size()
print(*seen)
"""


def test_command_buffers_follow_the_routing():
    """Two routings through one executable, with CUDA graphs on and off: the same bits each, and not each other's."""
    seen = []
    for kinds in ("", "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL"):
        flags = f"--xla_gpu_enable_command_buffer={kinds} --xla_gpu_graph_min_graph_size=1"
        env = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", COMMAND_BUFFERS],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        seen.append(done.stdout.split())
    off, on = seen
    assert off == on
    assert off[0] == off[2] and off[1] == off[3] and off[0] != off[1]


def test_the_kernels_agree_with_plain_jax_on_the_device():
    """Spreading and summing by the Triton kernels, bit for bit, with slots of -1 and NaN in rows without a token."""
    T, K, E, D = 515, 3, 9, 2880
    ids = np.argsort(np.random.default_rng(0).random((T, E)), axis=1)[:, :K].astype(np.int32)
    ids[::4, 2] = -1
    at = rows.plan(jnp.asarray(ids), E).row_of_slot
    held = np.asarray(at)[np.asarray(at) >= 0]
    x = _normal(0, (T, D), "bfloat16")
    got = np.asarray(rows.spread(x, at, T * K)[0])
    tokens, slots = np.nonzero(np.asarray(at) >= 0)
    finding = same_bits("rows", got[np.asarray(at)[tokens, slots]], np.asarray(x)[tokens])
    assert finding.ok, finding.message
    values = np.full((T * K, D), np.nan, np.float32)
    values[held] = np.random.default_rng(1).integers(-8, 8, (len(held), D))
    got = rows.sum_rows(jnp.asarray(values, jnp.bfloat16), at, jnp.full((T, K), 0.5, jnp.float32))
    want = np.where(np.asarray(at)[:, :, None] >= 0, values[np.maximum(np.asarray(at), 0)], 0).sum(axis=1) / 2
    finding = same_bits("y", np.asarray(got), np.asarray(jnp.asarray(want, jnp.bfloat16)))
    assert finding.ok, finding.message
