"""The law of index width: no index is narrower than what it counts. Read off the traced program, so no large array is made."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import running
from .compare import Finding
from .inputs import Case
from .interface import Implementation
from .law import Law, law
from .law_tools import expect
from .problem import Params, Problem, Routing

TOKENS, SLOTS, WIDTH = 65_536, 8, 8_192
"""T*K*D is 2^32: rows still count in int32, offsets of elements do not."""

Range = tuple[int, int]


@law(
    "index-width", stage="experts", judged_by="bits", faults="D", needs={"jit", "device sizes", "no mesh"}, scope="once"
)
def index_width(implementation: Implementation, case: Case) -> list[Finding]:
    """At 2^32 routed elements no integer product or sum overflows its dtype, and no index is narrower than its axis."""
    problem = case.problem.replace(
        T=TOKENS, K=SLOTS, E=SLOTS, D=WIDTH, F=8, router_groups=1, router_group_topk=1, router_group_score_topk=1
    )
    if not implementation.supports(problem):
        return []
    P = problem.padded_rows()
    x, rows = _of((TOKENS, WIDTH), problem.dtype), _of((P, WIDTH), problem.dtype)
    routing = Routing(_of((TOKENS, SLOTS), jnp.int32), _of((TOKENS, SLOTS), jnp.float32))
    places = _of((TOKENS, SLOTS), jnp.int32)
    # Integers come in as ids, or as row_of_slot in the last place.
    inputs = {
        "experts": (_shapes(problem, case.params), x, routing),
        "permute": (x, routing),
        "unpermute": (rows, routing, places),
    }
    faults: dict[str, None] = {}
    for stage, args in inputs.items():
        if not implementation.offers(stage):
            continue
        with running.blaming_target():
            closed = jax.make_jaxpr(functools.partial(implementation.stage(stage), problem))(*args)
        integers = [var for var in closed.jaxpr.invars if _is_integer(var.aval)]
        known: dict[Any, Range] = dict.fromkeys(integers, (-1, problem.E - 1))
        if stage == "unpermute":
            known[integers[-1]] = (-1, P - 1)
        faults |= dict.fromkeys(f"{stage}: {fault}" for fault in _faults(closed.jaxpr, known))
    return [expect("index", not faults, "; ".join(list(faults)[:3]))]


def _faults(jaxpr: Any, known: dict[Any, Range]) -> Iterator[str]:
    """Walks a program with the ranges of its integers; what has no known range is taken to fit."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _INDEXED:
            yield from _narrow_index(eqn, name, known)
        for out in eqn.outvars:
            if not _is_integer(out.aval):
                continue
            reach = _range(eqn, name, known)
            if reach is None:
                continue
            top, bottom = np.iinfo(out.aval.dtype).max, np.iinfo(out.aval.dtype).min
            if reach[1] > top or reach[0] < bottom:
                yield f"{name} reaches {max(reach, key=abs)}, beyond {out.aval.dtype}"
                reach = (max(reach[0], bottom), min(reach[1], top))
            known[out] = reach
        for inner in _inner(eqn):
            given = dict(known)
            if len(inner.invars) == len(eqn.invars) and name not in ("scan", "while"):
                given |= {i: known[o] for i, o in zip(inner.invars, eqn.invars, strict=True) if _has(known, o)}
            yield from _faults(inner, given)
            if len(inner.outvars) == len(eqn.outvars) and name not in ("scan", "while", "cond"):
                known |= {o: given[i] for o, i in zip(eqn.outvars, inner.outvars, strict=True) if _has(given, i)}


def _narrow_index(eqn: Any, name: str, known: dict[Any, Range]) -> Iterator[str]:
    operand, index = eqn.invars[0].aval, _INDEXED[name]
    axes = _indexed_axes(eqn, name, operand)
    for var in eqn.invars[index:]:
        if _is_integer(var.aval):
            for axis in axes:
                if operand.shape[axis] - 1 > np.iinfo(var.aval.dtype).max:
                    yield f"{name} indexes an axis of {operand.shape[axis]} with {var.aval.dtype}"
        if not name.startswith("dynamic"):
            break


def _indexed_axes(eqn: Any, name: str, operand: Any) -> tuple[int, ...]:
    numbers = eqn.params.get("dimension_numbers")
    if name == "gather":
        return tuple(numbers.start_index_map)
    if name.startswith("scatter"):
        return tuple(numbers.scatter_dims_to_operand_dims)
    return tuple(range(len(operand.shape)))


def _range(eqn: Any, name: str, known: dict[Any, Range]) -> Range | None:
    """The values that an integer result can take, or None when that is not known."""
    if name == "iota":
        return 0, max(eqn.outvars[0].aval.shape[eqn.params["dimension"]] - 1, 0)
    ranges = [_of_operand(v, known) for v in eqn.invars]
    if name in ("select_n", "concatenate", "pad"):
        chosen = ranges[1:] if name == "select_n" else ranges
        found = [r for r in chosen if r is not None]
        return (min(r[0] for r in found), max(r[1] for r in found)) if len(found) == len(chosen) else None
    if any(r is None for r in ranges[:2]) or not ranges:
        return None
    a = ranges[0]
    assert a is not None
    if name in _SHAPES:
        return a
    if name == "convert_element_type":
        return a if _is_integer(eqn.invars[0].aval) else None
    if len(ranges) < 2 or ranges[1] is None:
        return None
    b = ranges[1]
    if name == "mul":
        ends = [p * q for p in a for q in b]
        return min(ends), max(ends)
    if name == "add":
        return a[0] + b[0], a[1] + b[1]
    if name == "sub":
        return a[0] - b[1], a[1] - b[0]
    if name == "max":
        return max(a[0], b[0]), max(a[1], b[1])
    if name == "min":
        return min(a[0], b[0]), min(a[1], b[1])
    return None


def _of_operand(var: Any, known: dict[Any, Range]) -> Range | None:
    if hasattr(var, "val"):
        return (int(np.min(var.val)), int(np.max(var.val))) if _is_integer(var.aval) and np.size(var.val) else None
    return known.get(var)


def _has(known: dict[Any, Range], var: Any) -> bool:
    return not hasattr(var, "val") and var in known


def _inner(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                yield one.jaxpr
            elif hasattr(one, "eqns"):
                yield one


def _is_integer(aval: Any) -> bool:
    return hasattr(aval, "dtype") and np.issubdtype(aval.dtype, np.integer)


def _shapes(problem: Problem, params: Params) -> Params:
    p = problem
    sizes = {
        "gate_kernel": (p.D, p.E),
        "wi": (p.E, p.D, p.wi_columns),
        "wo": (p.E, p.F, p.D),
        "gate_bias": (p.E,),
        "expert_bias": (p.E,),
        "wi_bias": (p.E, p.wi_columns),
        "wo_bias": (p.E, p.D),
        "shared_wi": (p.D, (2 if p.experts.gated else 1) * p.experts.shared_F),
        "shared_wo": (p.experts.shared_F, p.D),
    }
    return params.replace(**{name: _of(sizes[name], leaf.dtype) for name, leaf in params.named().items()})


def _of(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


_INDEXED = {
    "gather": 1,
    "scatter": 1,
    "scatter-add": 1,
    "scatter_add": 1,
    "dynamic_slice": 1,
    "dynamic_update_slice": 2,
}
_SHAPES = {
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "slice",
    "transpose",
    "rev",
    "copy",
    "stop_gradient",
    "optimization_barrier",
    "expand_dims",
    "sort",
    "reduce_max",
    "reduce_min",
    "dynamic_slice",
    "gather",
}

LAWS: tuple[Law, ...] = (index_width,)
