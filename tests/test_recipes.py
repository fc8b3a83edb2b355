"""Recipes: two ways to the same bits, and the contract of the quantised grouped product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.optimized.xla import recipes as optimized
from dropless.optimized.xla.grouped_gemm import grouped_gemm as block_sparse
from dropless.parity.problem import RECIPES
from dropless.reference import recipes as reference
from dropless.reference.grouped_gemm import grouped_gemm as padded

SIZES = jnp.asarray([33, 0, 130, 1, 31], jnp.int32)
ROWS = 210
# Compiled as users' programs are: code of plain LLVM, as the conftest asks for, casts to e2m1 by way of float16 and so rounds
# twice. Later versions of JAX have no such code.
AS_USED = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None


def _operand(seed: int, *shape: int) -> jax.Array:
    """Magnitudes over many binades, a zero row, and a zero stretch that covers whole blocks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, (*shape[:-1], 1)))
    x[..., 5, :] = 0.0
    x[..., 40:80, :3] = 0.0
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_sides_represent_operands_by_the_same_bits(recipe):
    """Rows along both axes and in both roles, kernels along both axes; junk beyond the groups is 0."""
    rows = _operand(1, ROWS, 70).at[195:].set(jnp.nan)
    kernels = _operand(2, 3, 160, 96)

    def all_of(module):
        for axis in (0, 1):
            for role in ("activation", "gradient"):
                yield module.represent(recipe, rows, axis, role, SIZES)
            yield module.represent_kernels(recipe, kernels, axis + 1)

    want = jax.jit(lambda: list(all_of(reference)), compiler_options=AS_USED)()
    got = jax.jit(lambda: list(all_of(optimized)), compiler_options=AS_USED)()
    for a, b in zip(want, got, strict=True):
        assert a.dtype == jnp.float32
        assert (np.asarray(a) == np.asarray(b)).all()
    assert (np.asarray(want[0])[195:] == 0).all()


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "nvfp4"])
def test_a_representation_is_a_fixed_point(recipe):
    """Quantising what was already quantised changes nothing; NVFP4 alone moves, since its amax was rounded too."""
    kernels = _operand(3, 2, 160, 96)
    represent = jax.jit(lambda k: reference.represent_kernels(recipe, k, 1))
    once = represent(kernels)
    twice = represent(once)
    assert (np.asarray(once) == np.asarray(twice)).all()


@pytest.mark.parametrize(("side", "gemm"), [(reference, padded), (optimized, block_sparse)], ids=["reference", "xla"])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current"])
def test_idle_experts_get_no_gradient_and_undefined_rows_do_not_matter(recipe, side, gemm):
    rows, kernels, d = _operand(4, ROWS, 64), _operand(5, 5, 64, 96) / 8, _operand(6, ROWS, 96)

    @jax.jit
    def run(rows, d):
        y, vjp = jax.vjp(lambda r, k: side.grouped_gemm_of(recipe, gemm)(r, k, SIZES), rows, kernels)
        return y[:195], vjp(d)[0][:195], vjp(d)[1]

    clean = run(rows.at[195:].set(0), d.at[195:].set(0))
    assert (np.asarray(clean[2])[1] == 0).all()
    for poison in (jnp.nan, jnp.inf, 1e30):
        for a, b in zip(clean, run(rows.at[195:].set(poison), d.at[195:].set(poison)), strict=True):
            assert (np.asarray(a) == np.asarray(b)).all()
