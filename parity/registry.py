"""Finds implementations by name without importing them: built-in, from entry points, or `package.module:attribute`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

from .interface import STAGES, Implementation, always, anywhere
from .problem import InvalidInput

ENTRY_POINTS = "dropless.implementations"
BASELINE = "loop_and_pad"


class Entry(NamedTuple):
    """A registry line: where the implementation lives, and what it is, readable without importing it."""

    target: str
    folder: str
    runs_on: str
    summary: str


BUILTIN: dict[str, Entry] = {
    "oracle": Entry(
        "dropless.reference.oracle:IMPLEMENTATION",
        "reference",
        "CPU",
        "float64 NumPy, one token at a time, own backward",
    ),
    "oracle_device": Entry(
        "dropless.reference.oracle_device:IMPLEMENTATION",
        "reference",
        "any",
        "float64 jnp, one expert at a time: the judge at full width",
    ),
    "loop_host": Entry(
        "dropless.reference.loop_host:IMPLEMENTATION",
        "reference",
        "any",
        "per-expert loop on counts copied to the host; recompiles",
    ),
    "loop_and_pad": Entry(
        "dropless.reference.loop_and_pad:IMPLEMENTATION",
        "reference",
        "any",
        "the baseline: every expert padded to the worst case, static shapes",
    ),
    "capacity": Entry(
        "dropless.reference.capacity:IMPLEMENTATION", "reference", "any", "drops overflow and reports it: the contrast"
    ),
    "ragged_dot": Entry(
        "dropless.optimized.xla.ragged_dot:IMPLEMENTATION", "optimized/xla", "any", "sort, then jax.lax.ragged_dot"
    ),
    "blocked": Entry(
        "dropless.optimized.xla.blocked:IMPLEMENTATION",
        "optimized/xla",
        "any",
        "sort, align to blocks, one block-sparse pass: the default without a GPU",
    ),
    "xla_ep": Entry(
        "dropless.optimized.xla.xla_ep:IMPLEMENTATION",
        "optimized/xla",
        ">= 2 devices",
        "expert parallelism under shard_map",
    ),
    "te": Entry(
        "dropless.optimized.te.te:IMPLEMENTATION",
        "optimized/te",
        "one GPU, SM90+",
        "Transformer Engine router and grouped GEMM, in bfloat16, FP8 and MXFP8",
    ),
    "te_ep": Entry(
        "dropless.optimized.te.te_ep:IMPLEMENTATION",
        "optimized/te",
        ">= 2 GPUs, SM90+",
        "NCCL EP around TE grouped GEMM: the default on GPUs",
    ),
    "te_block": Entry(
        "dropless.optimized.te.te_block:IMPLEMENTATION",
        "optimized/te",
        ">= 2 GPUs, SM90+",
        "TE's own fused moe(): the peer to beat",
    ),
}


class NotALayer(InvalidInput):
    """The target was found, and is nothing that can be judged."""


def names() -> list[str]:
    """Every registered name: built-in ones first, then entry points; imports nothing."""
    return [
        *BUILTIN,
        *sorted(e.name for e in importlib.metadata.entry_points(group=ENTRY_POINTS) if e.name not in BUILTIN),
    ]


def get(name: str) -> Implementation:
    """The implementation called `name`, or the object at `package.module:attribute`.

    Raises InvalidInput when there is no such name, when the target does not import, and NotALayer when it is no layer.
    """
    if name in BUILTIN:
        return _load(BUILTIN[name].target)
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        if point.name == name:
            return dataclasses.replace(wrap(_loaded(point), name=name), name=name)
    if ":" in name:
        return wrap(_resolve(name), name=name)
    raise InvalidInput(
        f"no implementation is called {name!r}; accepted: {', '.join(names())}, or package.module:attribute"
    )


def wrap(target: Any, *, name: str) -> Implementation:
    """Makes an implementation of what a user has: an Implementation, a bare `experts` function, or an object with stages.

    An object may also carry `supports`, `available`, `traits` and `experts_vjp`.
    """
    if isinstance(target, Implementation):
        return target
    if isinstance(target, type):  # its methods would take the problem for `self`
        raise NotALayer(f"{name} is the class {target.__name__}; accepted: an instance of it, or a function")
    offered = {s: getattr(target, s) for s in (*STAGES, "experts_vjp") if callable(getattr(target, s, None))}
    if offered.keys() - {"experts_vjp"}:
        return Implementation(
            name=name,
            stages=offered,
            supports=getattr(target, "supports", always),
            available=getattr(target, "available", anywhere),
            traits=frozenset(getattr(target, "traits", ())),
        )
    if callable(target):
        return Implementation(name=name, stages={"experts": target}, traits=frozenset(getattr(target, "traits", ())))
    raise NotALayer(
        f"{name} is a {type(target).__name__}; accepted: a function experts(problem, params, x, routing), or an object with one of {', '.join(STAGES)}"
    )


def complete(implementation: Implementation) -> Implementation:
    """The same implementation with the missing stages composed from the baseline's.

    A grouped GEMM or permutation of its own enters a composed `experts`; a router or experts of its own enter a
    composed `layer`. An implementation that offers only `layer` gets no `experts`: there is nothing to judge it by.
    """
    base = get(BASELINE)
    if implementation.name == BASELINE:
        return implementation
    own = dict(implementation.stages)
    stages: dict[str, Callable[..., Any]] = dict(own)
    opaque = set(own) <= {"layer"}
    if not opaque:
        for stage in ("route", "permute", "unpermute", "grouped_gemm", "update_bias"):
            stages.setdefault(stage, base.stage(stage))
        if "experts" not in own:
            build = importlib.import_module("dropless.reference.experts").experts_of
            stages["experts"] = build(
                permute=stages["permute"], grouped_gemm=stages["grouped_gemm"], unpermute=stages["unpermute"]
            )
        if "layer" not in own:
            build = importlib.import_module("dropless.reference.layer").layer_of
            stages["layer"] = build(route=stages["route"], experts=stages["experts"])
    return dataclasses.replace(implementation, stages=stages, composed=frozenset(stages) - frozenset(own))


def _load(target: str) -> Implementation:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _loaded(point: importlib.metadata.EntryPoint) -> Any:
    try:
        return point.load()
    except InvalidInput as error:
        raise InvalidInput(f"{point.name} ({point.value}): {error}") from error
    except Exception as error:  # another distribution's module can fail in any way
        raise InvalidInput(f"{point.name} ({point.value}) does not import: {type(error).__name__}: {error}") from error


def _resolve(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except InvalidInput as error:
        raise InvalidInput(f"{target}: {error}") from error
    except Exception as error:  # a user's module can fail in any way; the message names which
        raise InvalidInput(f"{target} does not import: {type(error).__name__}: {error}") from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InvalidInput(
                f"{module_name} has no attribute {attribute!r}; accepted: one of {', '.join(n for n in vars(module) if not n.startswith('_'))}"
            )
        found = getattr(found, part)
    return found
