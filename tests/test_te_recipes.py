"""Low-precision experts of `te` without a GPU: the laws of quantised experts, around a stand-in for TE's grouped calls.

The stand-in keeps to what TE's V1 calls do, flaws included: sizes that do not fill the buffer, or that eight-bit operands
cannot be read at, give NaN everywhere (TE ends the process); scales of empty groups are left out, and the kernels behind
such a group are then read with the scale of the one before. MXFP8's V2 calls read nothing beyond the groups.
"""

import dataclasses
import enum
import sys
import types
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.optimized.te import fp8, grouped_gemm, mxfp8, recipes, support
from dropless.optimized.te.support import Facts
from dropless.parity import running
from dropless.parity.compare import same_bits
from dropless.parity.inputs import make_case
from dropless.parity.interface import Support
from dropless.parity.judge import experts_findings
from dropless.parity.law import NEEDS
from dropless.parity.laws import laws_named
from dropless.parity.laws_quantised import LAWS
from dropless.parity.problem import Problem
from dropless.reference import fp8 as reference_fp8
from dropless.reference import mxfp8 as reference_mxfp8

HOPPER = Facts(
    platform="gpu", device="H200", devices=1, capability=9.0, installed=True, te=(2, 20, 2), cublas=(13, 10, 0)
)
BLACKWELL = dataclasses.replace(HOPPER, device="B200", capability=10.0)
SMALL = Problem(T=73, K=2, E=8, D=64, F=64, dtype="bfloat16", recipe="fp8-current")

Usage = enum.Enum("Usage", "LHS LHS_TRANS RHS RHS_TRANS")
Mode = enum.Enum("Mode", "CURRENT_TENSOR_SCALING MXFP8_1D_SCALING")
Both = enum.Enum("Both", "ROWWISE_COLWISE")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass
class Tensor:
    """What TE hands from its quantiser to its product; `turned` holds the contraction last."""

    data: jax.Array
    scale: jax.Array
    sizes: jax.Array | None
    dtype: object
    mode: Mode
    turned: bool = False

    def tree_flatten(self):
        return (self.data, self.scale, self.sizes), (self.dtype, self.mode, self.turned)

    @classmethod
    def tree_unflatten(cls, fixed, leaves):
        return cls(*leaves, *fixed)

    def get_tensor(self, usage):
        column = usage in (Usage.LHS_TRANS, Usage.RHS)
        if self.mode is Mode.MXFP8_1D_SCALING:
            assert isinstance(self.data, tuple)
            return dataclasses.replace(self, data=self.data[column], scale=self.scale[column], turned=column)
        return dataclasses.replace(self, data=self.data.swapaxes(-1, -2) if column else self.data, turned=column)


def bind(x, scale, sizes, *, out_dtype, scaling_mode, q_layout, flatten_axis, scale_dtype):
    """TE's V1 quantiser for tensor scaling: (rows, columns, the scales of busy groups one after the other)."""
    assert scaling_mode == Mode.CURRENT_TENSOR_SCALING.value and q_layout is Both.ROWWISE_COLWISE
    assert flatten_axis == -1 and scale_dtype is jnp.float32
    assert scale.dtype == jnp.float32 and sizes.dtype == jnp.int32
    E = sizes.shape[0]
    of_row = jnp.repeat(scale, sizes, total_repeat_length=x.shape[0]).reshape(-1, *[1] * (x.ndim - 1))
    largest = float(jnp.finfo(out_dtype).max)
    values = jnp.clip(x.astype(jnp.float32) * of_row, -largest, largest).astype(out_dtype)
    busy = jnp.where(sizes > 0, jnp.cumsum(sizes > 0) - 1, E)
    inverse = jnp.full(E, jnp.nan).at[busy].set(1 / scale, mode="drop")
    inverse = jnp.where(sizes.sum() == x.shape[0], inverse, jnp.nan)
    return values, values, inverse, inverse, jnp.zeros(E)


def create(*, data, scale_inv, colwise_data, scaling_mode, dq_dtype, first_dims, original_shape, data_layout, **_):
    assert data_layout == "NT" and data.shape == original_shape
    return Tensor(data, scale_inv, first_dims, dq_dtype, scaling_mode)


def grouped_quantize(x, quantizer, sizes=None):
    """Without a quantiser a label; with one MXFP8 in both directions, where TE's device-side kernel accepts the sizes."""
    if quantizer is None:
        return Tensor(x, jnp.ones(x.shape[0] if sizes is None else sizes.shape[0]), sizes, x.dtype, None)
    assert x.shape[-1] % 128 == 0 and x.shape[-2] % 128 == 0
    if sizes is None:
        split = [jax.vmap(lambda k, axis=axis: _mx(k, axis, None))(x) for axis in (1, 0)]
    else:
        fits = (sizes % 128 == 0).all() & (sizes.sum() <= x.shape[0])
        x = jnp.where((jnp.arange(x.shape[0]) < sizes.sum())[:, None] & fits, x, jnp.nan)
        split = [_mx(x, axis, sizes if axis == 0 else None) for axis in (1, 0)]
    ones = jnp.ones(x.shape[0] if sizes is None else sizes.shape[0])
    return Tensor((split[0], split[1].swapaxes(-1, -2)), (ones, ones), sizes, x.dtype, quantizer)


def _mx(x, axis, sizes):
    return reference_mxfp8.dequantize(*reference_mxfp8.quantize(x, axis, sizes), axis, sizes)


def product(lhs, rhs, contracting_dims):
    """TE's grouped product; under a mode both operands come with the contraction innermost."""
    sizes, eight = lhs.sizes, lhs.data.dtype.itemsize == 1
    assert not eight or lhs.data.dtype != jnp.float8_e5m2 or rhs.data.dtype != jnp.float8_e5m2
    a, b = lhs.data.astype(jnp.float32), rhs.data.astype(jnp.float32)
    a, b = (a.T if lhs.turned else a), (b.swapaxes(-1, -2) if rhs.turned else b)  # as they were before they were turned
    scale = lhs.scale * rhs.scale
    if eight:
        behind = jnp.cumsum(sizes > 0) - (sizes > 0).astype(jnp.int32)
        scale = jnp.where((sizes % 16 == 0).all(), (lhs.scale * rhs.scale)[behind], jnp.nan)
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(a.shape[0]), side="right")
    inside = (group < sizes.shape[0])[:, None]
    member = (group[:, None] == jnp.arange(sizes.shape[0])).astype(jnp.float32)
    a = jnp.where(inside, a, 0)
    if contracting_dims[0] == (0,):
        out = jnp.einsum("pe,pa,pb->eab", member, a, jnp.where(inside, b, 0), precision="highest")
        out = out * scale[:, None, None]
        nothing = jnp.nan if lhs.mode is Mode.MXFP8_1D_SCALING else 0.0
        return jnp.where((sizes > 0)[:, None, None], out, nothing).astype(lhs.dtype)
    letters = "pe,pa,eab->pb" if contracting_dims[1] == (1,) else "pe,pa,eba->pb"
    out = jnp.einsum(letters, member, a, b, precision="highest")
    out = out * jnp.where(inside, scale[jnp.minimum(group, sizes.shape[0] - 1)][:, None], jnp.nan)
    return out.astype(lhs.dtype)


def choose(ranked, topk, **_):
    """TE's router where only its choice is asked for."""
    chosen = (jax.nn.one_hot(jax.lax.top_k(ranked, topk)[1], ranked.shape[1]) > 0).any(axis=1)
    return jnp.where(chosen, ranked, 0.0), chosen


@pytest.fixture(scope="module", autouse=True)
def te():
    """One stand-in for all tests of this file, so that they share its executables, and none of either afterwards."""
    quantize, tex, inner = (types.ModuleType(n) for n in ("quantize", "cpp_extensions", "quantization"))
    quantize.ScalingMode, quantize.QuantizeLayout, quantize.TensorUsage = Mode, Both, Usage
    quantize.ScaledTensorFactory = types.SimpleNamespace(create=create)
    quantize.QuantizerFactory = types.SimpleNamespace(create=lambda n, mode, dtype, layout, n_groups: mode)
    inner.GroupedQuantizePrimitive = types.SimpleNamespace(outer_primitive=types.SimpleNamespace(bind=bind))
    tex.grouped_gemm, tex.grouped_quantize, tex.quantization = product, grouped_quantize, inner
    top, router = types.ModuleType("transformer_engine.jax"), types.ModuleType("router")
    router.fused_topk_with_score_function = choose
    top.quantize, top.cpp_extensions = quantize, tex
    caches = (fp8._te, mxfp8._te, recipes._te, grouped_gemm._te)
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, module in (
            ("", types.ModuleType("transformer_engine")),
            (".jax", top),
            (".jax.quantize", quantize),
            (".jax.cpp_extensions", tex),
            (".jax.cpp_extensions.quantization", inner),
            (".jax.router", router),
        ):
            monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
        for cached in caches:
            cached.cache_clear()
        monkeypatch.setattr(grouped_gemm, "_device_side", lambda dtype: Support(True))
        yield
    for cached in caches:
        cached.cache_clear()
    running.forget_executables()
    running.forget_results()


def _on(here):
    from dropless.optimized.te.te import IMPLEMENTATION

    return dataclasses.replace(
        IMPLEMENTATION, available=lambda: Support(True), supports=lambda p: support.single_device(p, here)
    )


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_the_laws_of_quantised_experts_hold_on_hopper(law):
    findings = law.check(_on(HOPPER), make_case(SMALL))
    assert findings or law.name == "quantised-columns"
    assert [f.message for f in findings if not f.ok] == []


CHANGES = {
    "plain": {},
    "early": {"experts_weight_placement": "early", "experts_wi_bias": True, "experts_wo_bias": True},
    "ungated": {
        "experts_gated": False,
        "experts_activation": "relu2",
        "experts_wi_bias": True,
        "experts_wo_bias": True,
    },
    "one expert": {"E": 1, "K": 1},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("recipe", "here", "width"), [("fp8-current", HOPPER, 32), ("mxfp8", BLACKWELL, 128)])
def test_y_and_every_gradient_are_within_the_recipes_gauge(recipe, here, width, changes):
    problem = SMALL.replace(T=24, D=width, F=width, recipe=recipe, **changes)
    ids = np.array(make_case(problem, pattern="zipf").routing.topk_idx)
    ids[::5] = -1
    case = make_case(problem, routing=ids)
    assert [f.message for f in experts_findings(_on(here), case) if not f.ok] == []


def test_idle_experts_and_batches_without_tokens():
    """One busy expert of eight, so that seven have nothing but padding; then no token at all."""
    problem = SMALL.replace(T=17, K=1)
    case = make_case(problem, routing=np.full((17, 1), 5, np.int32))
    assert [f.message for f in experts_findings(_on(HOPPER), case) if not f.ok] == []
    got = running.experts(_on(HOPPER), case)
    idle = np.delete(np.arange(8), 5)
    assert not got["wi"][idle].any() and not got["wo"][idle].any()
    empty = make_case(problem.replace(T=0))
    assert running.experts(_on(HOPPER), empty)["y"].shape == (0, 64)


def test_a_layer_routes_and_quantises():
    """The layer is its own experts at its own routing, and a masked token that holds NaN reaches nothing."""
    problem = SMALL.replace(T=24)
    case, te = make_case(problem), _on(HOPPER)
    mask = np.arange(24) % 4 != 0
    x = jnp.where(mask[:, None], case.x, jnp.nan)

    def total(params):
        out = te.stage("layer")(problem, params, x, mask=jnp.asarray(mask))
        return out.y.astype(jnp.float32).sum(), out

    grads, out = jax.jit(jax.grad(total, has_aux=True))(case.params)
    y = jax.jit(te.stage("experts"), static_argnums=0)(problem, case.params, case.x, out.routing)
    assert same_bits("y", np.asarray(out.y), np.asarray(y)).ok
    assert np.asarray(out.group_sizes).sum() == mask.sum() * problem.K
    for name, leaf in grads.named().items():
        assert np.isfinite(np.asarray(leaf, np.float32)).all(), name


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_scales_are_the_references(element):
    """Zeros, infinities, NaN, subnormals and powers of two, in groups of 16 rows: values and scales bit for bit."""
    x = np.random.default_rng(0).standard_normal((96, 32)).astype(np.float32)
    x[:16], x[20, 3], x[40, 5], x[48:64] = 0, np.inf, np.nan, 2.0**-140
    x[64:80] = np.clip(x[64:80], -1, 1)
    x[70, 0] = 2.0
    x = jnp.asarray(x, jnp.bfloat16)
    sizes = jnp.full(6, 16, jnp.int32)
    got = jax.jit(partial(fp8.quantize_both, element=element))(x, sizes)
    values, scales = jax.jit(partial(reference_fp8.quantize, element=element), static_argnums=1)(x, 0, sizes)
    for name, one, other in (("values", got.data, values), ("scales", got.scale, scales)):
        finding = same_bits(name, np.asarray(one), np.asarray(other))
        assert finding.ok, finding.message


@pytest.mark.parametrize(
    ("recipe", "here", "words"),
    [
        ("mxfp8", HOPPER, ("mxfp8", "9.0", "10.0")),
        ("fp8-current", dataclasses.replace(HOPPER, capability=8.9), ("8.9", "9.0")),
        ("mxfp8", Facts(), ("None", "10.0")),
        ("nvfp4", BLACKWELL, ("nvfp4", "fp8-current", "mxfp8")),
        ("fp8-block", HOPPER, ("fp8-block",)),
        ("mxfp8", BLACKWELL, ("D is 64", "128")),
    ],
)
def test_a_recipe_that_cannot_run_names_the_number(recipe, here, words):
    told = support.single_device(SMALL.replace(recipe=recipe), here)
    assert not told
    assert all(word in told.reason for word in words), told.reason


@pytest.mark.parametrize(
    ("recipe", "here"), [("fp8-current", HOPPER), ("fp8-current", BLACKWELL), ("mxfp8", BLACKWELL)]
)
def test_a_recipe_that_can_run(recipe, here):
    assert support.single_device(SMALL.replace(recipe=recipe, D=128, F=128), here) == (True, "")


def test_copies_to_the_host_are_labelled_by_problem():
    """fp8-current is exempt from the laws about sizes on the device, and nothing else is."""
    te, needs = _on(BLACKWELL), NEEDS["device sizes"]
    assert "host" in needs(te, SMALL, frozenset())
    assert needs(te, SMALL.replace(recipe="none"), frozenset()) == ""
    assert needs(te, SMALL.replace(recipe="mxfp8"), frozenset()) == ""
    assert laws_named(["one-executable"])[0].unmet(te, SMALL, frozenset())


def test_the_list_says_what_a_hopper_gpu_quantises(monkeypatch, capsys):
    from dropless.parity import cli_info

    monkeypatch.setattr(cli_info.registry, "names", lambda: ["te"])
    monkeypatch.setattr(cli_info.registry, "get", lambda name: _on(HOPPER))
    cli_info.list_()
    said = " ".join(capsys.readouterr().out.split())
    assert "te takes recipe fp8-current fp8-current copies group sizes to the host" in said
    assert "not mxfp8: recipe is 'mxfp8' and compute capability 9.0" in said
