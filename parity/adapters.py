"""The usual layouts of MoE weights, to `Params` and back: nothing but reshaping, so a round trip is exact to the bit.

| layout        | first kernel                                         | second kernel        | router        |
|---------------|------------------------------------------------------|----------------------|---------------|
| `split`       | wi_0 (gate), wi_1 (up) [E, D, F]                     | wo [E, F, D]         | [D, E]        |
| `interleaved` | gate_up_proj [E, D, 2F], gate in the even columns    | down_proj [E, F, D]  | [E, D]        |
| `torch`       | gate_up_proj [E, 2F, D], gate rows first             | down_proj [E, D, F]  | [E, D]        |
| `per_expert`  | gate_proj, up_proj: E arrays [F, D] each             | down_proj: E [D, F]  | [E, D]        |

`split` is what Transformer Engine's and MaxText's JAX layers hold, `interleaved` gpt-oss, `torch` fused PyTorch
experts, `per_expert` one module of linear layers per expert. An expert without a gate has wi_1 or up_proj only. A wrong
layout raises where the shapes tell; interleaved and half-and-half columns have one shape, and only values tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from .problem import InvalidInput, Params, Problem

LAYOUTS = ("split", "interleaved", "torch", "per_expert")


def to_params(problem: Problem, layout: str, weights: Mapping[str, Any]) -> Params:
    """`Params` from weights held in `layout`; absent biases are None.

    Raises InvalidInput when a name is missing or unknown, and when a shape or dtype is not what the problem and the
    layout ask for; dtypes are never converted, since a rounding here would be blamed on the layer.
    """
    rules = _rules(problem, layout)
    known = {part.name for rule in rules for part in rule.parts}
    if unknown := sorted(set(weights) - known):
        raise InvalidInput(f"layout {layout} got {', '.join(unknown)}; accepted: {', '.join(sorted(known))}")
    leaves = {}
    for rule in rules:
        missing = [part.name for part in rule.parts if weights.get(part.name) is None]
        if missing:
            raise InvalidInput(
                f"layout {layout} lacks {', '.join(missing)}; accepted: all of {', '.join(sorted(known))}"
            )
        leaves[rule.leaf] = rule.join([_taken(rule, part, weights[part.name]) for part in rule.parts])
    return Params(**leaves)


def from_params(problem: Problem, layout: str, params: Params) -> dict[str, Any]:
    """The weights of `params` by their names in `layout`: arrays, or lists of E arrays for `per_expert`."""
    check_params(problem, params)
    weights: dict[str, Any] = {}
    for rule in _rules(problem, layout):
        pieces = rule.split(getattr(params, rule.leaf))
        for part, piece in zip(rule.parts, pieces, strict=True):
            weights[part.name] = list(piece) if part.listed else piece
    return weights


def check_params(problem: Problem, params: Params) -> None:
    """Raises InvalidInput unless the leaves that `problem` asks for, and no others, are there in shape and dtype."""
    want = leaf_shapes(problem)
    for name, leaf in params.named().items():
        if name not in want:
            raise InvalidInput(f"params.{name} is given but the problem has none; accepted: {', '.join(want)}")
        _agree(f"params.{name}", leaf, want[name], _dtype(problem, name))
    if missing := [name for name in want if getattr(params, name) is None]:
        raise InvalidInput(f"params.{missing[0]} is None; accepted: an array of shape {want[missing[0]]}")


def leaf_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """Name -> shape of each leaf of `Params` that a problem asks for."""
    p, r, e = problem, problem.router, problem.experts
    columns = p.wi_columns
    shapes = {
        "gate_kernel": (p.D, p.E),
        "gate_bias": (p.E,) if r.gate_bias else None,
        "expert_bias": (p.E,) if r.selection_bias else None,
        "wi": (p.E, p.D, columns),
        "wo": (p.E, p.F, p.D),
        "wi_bias": (p.E, columns) if e.wi_bias else None,
        "wo_bias": (p.E, p.D) if e.wo_bias else None,
        "shared_wi": (p.D, (2 if e.gated else 1) * e.shared_F) if e.shared_F else None,
        "shared_wo": (e.shared_F, p.D) if e.shared_F else None,
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}


class _Part(NamedTuple):
    name: str
    shape: tuple[int, ...]
    listed: bool = False


class _Rule(NamedTuple):
    """One leaf: the parts that a layout keeps it in, and both ways between them."""

    leaf: str
    parts: tuple[_Part, ...]
    join: Callable[[list[Array]], Array]
    split: Callable[[Array], Sequence[Array]]
    dtype: str


def _rules(problem: Problem, layout: str) -> list[_Rule]:
    if layout not in LAYOUTS:
        raise InvalidInput(f"layout is {layout!r}; accepted: {', '.join(LAYOUTS)}")
    return [_rule(problem, layout, leaf, shape) for leaf, shape in leaf_shapes(problem).items()]


def _rule(problem: Problem, layout: str, leaf: str, shape: tuple[int, ...]) -> _Rule:
    dtype = _dtype(problem, leaf)
    flat = layout == "split"
    listed = layout == "per_expert" and leaf in ("wi", "wo", "wi_bias", "wo_bias")
    # PyTorch's linear layers hold [out, in]; gpt-oss's expert kernels are the exception.
    turned = not flat and not leaf.endswith("bias") and not (layout == "interleaved" and leaf in ("wi", "wo"))
    if leaf in ("wi", "wi_bias", "shared_wi"):
        fused = layout in ("interleaved", "torch") and leaf != "shared_wi"
        names = _first_names(problem, leaf, flat, fused)
        if len(names) == 1 and fused and problem.experts.gated and layout == "interleaved":
            return _Rule(leaf, (_Part(names[0], shape),), lambda a: _halves(a[0]), lambda a: [_interleaved(a)], dtype)
        width = shape[-1] // len(names)
        part_shape = _turn_shape((*shape[:-1], width)) if turned else (*shape[:-1], width)
        parts = tuple(_Part(name, part_shape, listed) for name in names)

        def join(arrays: list[Array]) -> Array:
            return jnp.concatenate([_turn(a) if turned else a for a in arrays], axis=-1)

        def split(a: Array) -> Sequence[Array]:
            return [_turn(piece) if turned else piece for piece in jnp.split(a, len(names), axis=-1)]

        return _Rule(leaf, parts, join, split, dtype)
    part = _Part(leaf if flat else _TORCH_NAMES[leaf], _turn_shape(shape) if turned else shape, listed)
    return _Rule(leaf, (part,), lambda a: _turn(a[0]) if turned else a[0], lambda a: [_turn(a) if turned else a], dtype)


_TORCH_NAMES = {
    "gate_kernel": "router_weight",
    "gate_bias": "router_bias",
    "expert_bias": "e_score_correction_bias",
    "wo": "down_proj",
    "wo_bias": "down_proj_bias",
    "shared_wo": "shared_down_proj",
}


def _first_names(problem: Problem, leaf: str, flat: bool, fused: bool) -> tuple[str, ...]:
    """The names that a layout gives to the parts of wi, wi_bias or shared_wi: gate first, then up."""
    head, tail = ("shared_" if leaf == "shared_wi" else ""), ("_bias" if leaf == "wi_bias" else "")
    gate, up = ("wi_0", "wi_1") if flat else ("gate_proj", "up_proj")
    if not problem.experts.gated:
        return (f"{head}{up}{tail}",)
    return (f"{head}gate_up_proj{tail}",) if fused else (f"{head}{gate}{tail}", f"{head}{up}{tail}")


def _taken(rule: _Rule, part: _Part, given: Any) -> Array:
    if part.listed:
        if len(given) != part.shape[0]:
            raise InvalidInput(f"{part.name} holds {len(given)} arrays; accepted: one per expert, {part.shape[0]}")
        for i, one in enumerate(given):
            _agree(f"{part.name}[{i}]", jnp.asarray(one), part.shape[1:], rule.dtype)
        return jnp.stack([jnp.asarray(one) for one in given])
    array = jnp.asarray(given)
    _agree(part.name, array, part.shape, rule.dtype)
    return array


def _agree(name: str, array: Array, shape: tuple[int, ...], dtype: str) -> None:
    if array.shape != shape:
        raise InvalidInput(f"{name} has shape {array.shape}; accepted: {shape}")
    if array.dtype != jnp.dtype(dtype):
        raise InvalidInput(f"{name} is {array.dtype}; accepted: {dtype}")


def _dtype(problem: Problem, leaf: str) -> str:
    return "float32" if leaf == "expert_bias" else problem.dtype


def _turn(a: Array) -> Array:
    return jnp.swapaxes(a, -1, -2)


def _turn_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _halves(a: Array) -> Array:
    return jnp.concatenate([a[..., 0::2], a[..., 1::2]], axis=-1)


def _interleaved(a: Array) -> Array:
    gate, up = jnp.split(a, 2, axis=-1)
    return jnp.stack([gate, up], axis=-1).reshape(a.shape)
