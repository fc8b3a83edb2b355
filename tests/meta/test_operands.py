"""Quantised operands in the gauge: the table is true of every code, and both oracles agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity.inputs import make_case
from dropless.parity.operands import ELEMENT_ROUNDOFF, QUANTISED, operand
from dropless.parity.problem import RECIPES, Problem
from dropless.parity.tolerances import bar_table
from dropless.reference import oracle, oracle_device, recipes
from dropless.reference.formats import FORMATS

SMALL = Problem(T=6, K=2, E=3, D=20, F=9)
# As in test_recipes: code of plain LLVM rounds twice on the way to e2m1.
AS_USED = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None


def test_the_table_names_every_recipe_and_every_line_reaches_the_bars():
    assert {line.name for line in QUANTISED} == set(RECIPES) - {"none"}
    names = {bar.name for bar in bar_table()}
    assert all(f"operand: {line.name}, kernel" in names for line in QUANTISED)
    assert operand("none", "forward", "kernel") is None
    assert operand("nvfp4", "d_rows", "gradient") is None and operand("nvfp4", "d_kernel", "activation") is None


@pytest.mark.parametrize("element", FORMATS)
def test_unit_roundoffs_are_those_of_the_formats(element):
    assert ELEMENT_ROUNDOFF[element] == 2.0 ** -(FORMATS[element].mantissa + 1)


@pytest.mark.parametrize("recipe", [line.name for line in QUANTISED])
def test_no_operand_errs_by_more_than_its_line_says(recipe):
    """Rows of one magnitude and kernels, at 40 scales: |error| <= u |a| + floor, element by element."""
    rng = np.random.default_rng(5)
    block = next(line.block for line in QUANTISED if line.name == recipe)
    for product, role, axis in (("forward", "activation", 1), ("d_rows", "gradient", 1), ("forward", "kernel", 1)):
        found = operand(recipe, product, role)
        if found is None:
            continue
        # A tile of 128 x 128 spans many rows, so kernels under fp8-block have one magnitude.
        flat = block is None or (role == "kernel" and block == 128)
        x = rng.standard_normal((40, 160)) * (1.0 if flat else np.exp2(np.linspace(-20, 20, 40))[:, None])
        x = jnp.asarray(x, jnp.float32)
        if role == "kernel":
            x = x.T[None]
            run = jax.jit(lambda x: recipes.represent_kernels(recipe, x, 1), compiler_options=AS_USED)
            got = run(x)[0].T
            x = x[0].T
        else:
            sizes = jnp.asarray([40])
            run = jax.jit(recipes.represent, static_argnums=(0, 2, 3), compiler_options=AS_USED)
            got = run(recipe, x, axis, role, sizes)
        x64, got = np.asarray(x).astype(np.float64), np.asarray(got).astype(np.float64)
        # nvfp4 and fp8-current scale whole tensors, so rows far below the largest are outside the table.
        near = abs(x64).max(axis=1) > abs(x64).max() * 2.0**-4 if block in (0, 16) else np.ones(40, bool)
        amax = 1.0 if found.block is None else abs(x64).max()
        if found.block:
            amax = np.repeat(abs(x64).reshape(40, -1, min(found.block, 32)).max(-1), min(found.block, 32), 1)
            amax = amax if found.block <= 32 else abs(x64).max() if flat else abs(x64).max(1, keepdims=True)
        assert (abs(got - x64) <= found.u * abs(x64) + found.floor * amax)[near].all(), (product, role)


@pytest.mark.parametrize("recipe", ["fp8-delayed", "nvfp4"])
def test_both_oracles_have_the_same_value_and_the_same_gauge(recipe):
    case = make_case(SMALL.replace(recipe=recipe), seed=3)
    args = (case.problem, case.params, case.x, case.routing, case.cotangent)
    exact = oracle.judge_experts(SMALL, *args[1:])
    one, two = oracle.judge_experts(*args), oracle_device.judge_experts(*args)
    for name, j in one.items():
        other = two[name]
        scale = np.finfo(float).eps * 1e3
        assert (j.value == exact[name].value).all(), name
        assert (abs(j.gauge - np.asarray(other.gauge)) <= scale * abs(j.gauge)).all(), name
        assert (j.gauge >= exact[name].gauge).all() and (j.gauge > exact[name].gauge).any(), name
