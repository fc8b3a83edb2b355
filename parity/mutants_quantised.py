"""Mutants of class I: quantised experts with one wrong place in how scales are taken, kept or read.

Each is a fresh copy of a recipe's module with one function replaced, around otherwise honest experts, and supports the
one recipe in which its fault shows.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp

from .interface import Implementation, Support
from .mutant import Mutant, reference
from .problem import Problem

Patch = Callable[[Any], None]


def quantised(law: str, recipe: str, side: str = "reference") -> Callable[[Patch], Mutant]:
    """Makes a Mutant of a function that patches a copy of that side's `recipes`; its name and docstring are the mutant's."""

    def make(patch: Patch) -> Mutant:
        name = patch.__name__.replace("_", "-")
        summary = " ".join((patch.__doc__ or "").split())
        # No stage is named as changed: beyond their own law these run under no other problem's recipe.
        return Mutant(name, "I", law, summary, lambda: _built(name, patch, recipe, side), ordinary=False)

    return make


@quantised("exact-quantised", "fp8-current")
def kernel_scale_of_the_next_expert(recipes: Any) -> None:
    """Each expert's kernel is read with the scale of the expert after it."""
    fp8 = recipes.fp8

    def represent_kernels(recipe, kernels, axis):
        made = [fp8.quantize(k, 0) for k in kernels.astype(jnp.float32)]
        return jnp.stack([fp8.dequantize(v, made[(e + 1) % len(made)][1], 0) for e, (v, _) in enumerate(made)])

    recipes.represent_kernels = represent_kernels


@quantised("exact-quantised", "mxfp8", "xla")
def kernel_scales_one_expert_late(recipes: Any) -> None:
    """The table of E8M0 bytes is read one expert late, so that expert e is scaled as expert e - 1."""
    honest = recipes.represent_kernels

    def represent_kernels(recipe, kernels, axis):
        scale = _block_scales(kernels, axis)
        return honest(recipe, kernels, axis) * (jnp.roll(scale, 1, axis=0) / scale)

    recipes.represent_kernels = represent_kernels


@quantised("quantised-finite", "mxfp8")
def last_partial_block_reads_scale_padding(recipes: Any) -> None:
    """Rows of an expert's last block read the scale one past the last block in use: padding, whose byte is NaN."""
    mxfp8 = _copy_of(recipes.mxfp8)
    honest = mxfp8.dequantize

    def dequantize(values, scales, axis, group_sizes=None):
        if group_sizes is None:
            return honest(values, scales, axis)
        used = jnp.sum(-(-group_sizes // mxfp8.BLOCK))
        last = jnp.expand_dims(jnp.arange(scales.shape[axis]) == used - 1, 1 - axis)
        return honest(values, jnp.where(last, jnp.uint8(mxfp8.NAN_SCALE), scales), axis, group_sizes)

    mxfp8.dequantize = dequantize
    recipes.mxfp8 = mxfp8


@quantised("quantised-finite", "fp8-block")
def padding_scales_multiplied_by_zero(recipes: Any) -> None:
    """Rows beyond the groups are dequantised with their padding scale and then multiplied by 0, and 0 times NaN is NaN."""
    fp8 = _copy_of(recipes.fp8)
    honest = fp8.dequantize_blocks

    def dequantize_blocks(values, scales, axis, group_sizes=None):
        return honest(values, scales, axis, group_sizes) + 0.0 * jnp.take(scales, jnp.asarray([-1]), axis=axis)

    fp8.dequantize_blocks = dequantize_blocks
    recipes.fp8 = fp8


@quantised("quantised-boundaries", "mxfp8")
def block_across_a_boundary(recipes: Any) -> None:
    """Column-wise blocks count from row 0 of the buffer, so one block holds the rows of two experts."""
    honest = recipes.represent

    def represent(recipe, rows, axis, role, group_sizes):
        return honest(recipe, rows, axis, role, jnp.sum(group_sizes)[None] if axis == 0 else group_sizes)

    recipes.represent = represent


@quantised("quantised-boundaries", "fp8-current", "xla")
def one_scale_for_all_experts(recipes: Any) -> None:
    """All experts' rows share one scale, which the largest of them sets."""
    honest = recipes.represent

    def represent(recipe, rows, axis, role, group_sizes):
        return honest(recipe, rows, axis, role, jnp.sum(group_sizes)[None])

    recipes.represent = represent


@quantised("quantised-finite", "fp8-current")
def zero_amax_divides(recipes: Any) -> None:
    """largest / amax is taken of an amax of 0 too: the scale is infinite, and 0 times it is NaN."""
    fp8 = _copy_of(recipes.fp8)
    fp8.encode_of = lambda amax, element: jnp.float32(element.largest) / amax
    recipes.fp8 = fp8


@quantised("quantised-finite", "mxfp8", "xla")
def zero_block_divides_by_its_scale(recipes: Any) -> None:
    """An all-zero block has scale 0 instead of one that is never used."""
    honest = recipes._mx_scale
    recipes._mx_scale = lambda amax, element: jnp.where(amax > 0, honest(amax, element), 0.0)


@quantised("quantised-finite", "fp8-delayed")
def cast_without_saturation(recipes: Any) -> None:
    """Values beyond the largest number are cast as they are: e4m3 has no infinity, so they become NaN."""
    fp8 = _copy_of(recipes.fp8)
    fp8.cast = lambda x, element: x.astype(element.dtype)
    recipes.fp8 = fp8


@quantised("quantised-finite", "mxfp8", "xla")
def scale_rounded_down_without_saturation(recipes: Any) -> None:
    """The exponent is rounded down as in the OCP rule, but the values that this leaves beyond the range are not clipped."""
    honest = recipes._mx_scale

    def through(x, encode, element):
        cast = (x * encode).astype(recipes._DTYPE[element]).astype(jnp.float32)
        return cast * (1.0 / encode)

    recipes._mx_scale = lambda amax, element: 0.5 * honest(amax, element)
    recipes._through = through


@quantised("exact-quantised", "mxfp8")
def kernel_scales_transposed(recipes: Any) -> None:
    """A square kernel is read with the transposed block scales of the copy that was quantised along its other axis."""
    mxfp8 = recipes.mxfp8

    def represent_kernels(recipe, kernels, axis):
        values, own = mxfp8.quantize(kernels, axis)
        other = mxfp8.quantize(kernels, 3 - axis)[1].swapaxes(1, 2)
        return mxfp8.dequantize(values, other if other.shape == own.shape else own, axis)

    recipes.represent_kernels = represent_kernels


@quantised("exact-quantised", "nvfp4", "xla")
def block_scales_of_the_neighbouring_column(recipes: Any) -> None:
    """Four-bit values are multiplied by the block scale of the column before their own."""

    honest = recipes._two_scales

    def two_scales(blocks, amax):
        own, before = jnp.maximum(amax, 1e-30), jnp.maximum(jnp.roll(amax, 1, axis=-1), 1e-30)
        return honest(blocks, amax) * (before / own)

    recipes._two_scales = two_scales


@quantised("exact-quantised", "fp8-current")
def one_experts_scale_doubled(recipes: Any) -> None:
    """Expert 3's kernel is read with a scale of twice its own."""
    _scaled(recipes, "represent_kernels", lambda k: jnp.where(jnp.arange(k.shape[0]) == 3, 2.0, 1.0)[:, None, None])


@quantised("exact-quantised", "mxfp8", "xla")
def one_experts_byte_too_small(recipes: Any) -> None:
    """The E8M0 bytes of the last expert are one too small, as when a byte is taken before it was rounded up."""
    _scaled(
        recipes,
        "represent_kernels",
        lambda k: jnp.where(jnp.arange(k.shape[0]) == k.shape[0] - 1, 0.5, 1.0)[:, None, None],
    )


@quantised("quantised-columns", "mxfp8")
def column_copy_along_the_wrong_axis(recipes: Any) -> None:
    """The copy that feeds the weight gradient is quantised along the columns, like the other one."""
    _row_wise(recipes, ("activation", "gradient"))


@quantised("quantised-columns", "mxfp8", "xla")
def activations_have_one_copy(recipes: Any) -> None:
    """Activations keep only their row-wise copy, which the weight gradient reads too."""
    _row_wise(recipes, ("activation",))


@quantised("quantised-columns", "fp8-block", "xla")
def gradients_have_one_copy(recipes: Any) -> None:
    """Gradients keep only their row-wise copy, which the weight gradient reads too."""
    _row_wise(recipes, ("gradient",))


MUTANTS: tuple[Mutant, ...] = tuple(m for m in list(globals().values()) if isinstance(m, Mutant))


def _scaled(recipes: Any, name: str, factor: Callable[[Any], Any]) -> None:
    honest = getattr(recipes, name)
    setattr(recipes, name, lambda recipe, kernels, axis: honest(recipe, kernels, axis) * factor(kernels))


def _row_wise(recipes: Any, roles: tuple[str, ...]) -> None:
    honest = recipes.represent

    def represent(recipe, rows, axis, role, group_sizes):
        return honest(recipe, rows, 1 if role in roles else axis, role, group_sizes)

    recipes.represent = represent


def _block_scales(kernels: Any, axis: int) -> Any:
    """The power of two of each element's block of 32 along `axis`, 1 for a block of zeros."""
    turned = jnp.abs(kernels.astype(jnp.float32)).swapaxes(axis, 2)
    E, B, n = turned.shape
    amax = turned.reshape(E, B, n // 32, 32).max(axis=3)
    scale = jnp.where(amax > 0, jnp.exp2(jnp.floor(jnp.log2(jnp.maximum(amax, 1e-30)))), 1.0)
    return jnp.repeat(scale, 32, axis=2).swapaxes(axis, 2)


def _built(name: str, patch: Patch, recipe: str, side: str) -> Implementation:
    folder = "reference" if side == "reference" else "optimized.xla"
    recipes = _copy_of(importlib.import_module(f"dropless.{folder}.recipes"))
    patch(recipes)
    stages = dict(reference("loop_and_pad").IMPLEMENTATION.stages)
    permutation = reference("permute")
    stages["experts"] = reference("experts").experts_of(
        permute=permutation.permute,
        grouped_gemm=recipes.grouped_gemm_of(recipe, _dense_gemm),
        unpermute=permutation.unpermute,
    )

    def supports(problem: Problem) -> Support:
        return Support(problem.recipe in ("none", recipe), f"recipe is {problem.recipe!r}; this mutant has {recipe!r}")

    return Implementation(name=name, stages=stages, supports=supports, traits=frozenset({"deterministic"}))


def _dense_gemm(rows: Any, kernels: Any, group_sizes: Any) -> Any:
    """A grouped product as one dense one over rows spread out by expert: the quickest to compile at these sizes."""
    ends = jnp.cumsum(group_sizes)
    i = jnp.arange(rows.shape[0])[:, None]
    own = (i >= ends - group_sizes) & (i < ends)
    spread = jnp.where(own[:, :, None], rows[:, None, :], 0)
    return jnp.einsum("pea,eab->pb", spread, kernels, precision="highest", preferred_element_type=jnp.float32)


def _copy_of(module: ModuleType) -> Any:
    """A second module from the same file: what is replaced in it stays honest everywhere else."""
    spec = importlib.util.find_spec(module.__name__)
    if spec is None or spec.loader is None:
        raise ImportError(f"{module.__name__} has no source to copy")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy
