"""What a mutant is: a deliberately wrong layer that is right on ordinary routing, and the law that must kill it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .interface import Implementation


@dataclass(frozen=True)
class Mutant:
    """One fault, in one place."""

    name: str
    fault: str
    """The class of public faults that it belongs to, as a letter: see README.md."""
    law: str
    """The law that must kill it."""
    summary: str
    """What it does wrong, and when."""
    build: Callable[[], Implementation]
    stages: frozenset[str] = frozenset()
    """What is patched, and `experts` when it is composed of what is patched."""
    raises: bool = False
    """Whether the fault shows as an exception, and not as a wrong value."""
    ordinary: bool = True
    """Whether it is right on balanced routing with experts in ascending order; a comparator's mutant is wrong everywhere."""


def mutant(
    fault: str, law: str, stages: str, *, raises: bool = False, ordinary: bool = True
) -> Callable[[Callable[[], Any]], Mutant]:
    """Makes a Mutant of a function that returns all stages, some patched; its name and docstring are the mutant's."""

    def make(build: Callable[[], Any]) -> Mutant:
        name = build.__name__.replace("_", "-")
        summary = " ".join((build.__doc__ or "").split())
        return Mutant(
            name, fault, law, summary, lambda: _built(name, build()), frozenset(stages.split()), raises, ordinary
        )

    return make


def patched(**stages: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The baseline's stages with some replaced, and `experts` and `layer` composed anew where that changes them."""
    own = {name: reference(module).__dict__[name] for name, module in _HOMES.items()} | stages
    if stages.keys() & {"permute", "unpermute", "grouped_gemm"}:
        build = reference("experts").experts_of
        own["experts"] = build(permute=own["permute"], grouped_gemm=own["grouped_gemm"], unpermute=own["unpermute"])
        own.update({name: fn for name, fn in stages.items() if name == "experts"})
    if "layer" not in stages:
        own["layer"] = reference("layer").layer_of(route=own["route"], experts=own["experts"])
    return own


def reference(module: str) -> ModuleType:
    """A module of the reference folder, imported when it is needed."""
    return importlib.import_module(f"dropless.reference.{module}")


def _built(name: str, stages: dict[str, Any]) -> Implementation:
    supports = reference("loop_and_pad").IMPLEMENTATION.supports
    return Implementation(name=name, stages=stages, supports=supports, traits=frozenset({"deterministic"}))


_HOMES = {
    "route": "routing",
    "permute": "permute",
    "unpermute": "permute",
    "grouped_gemm": "grouped_gemm",
    "experts": "experts",
    "layer": "layer",
    "update_bias": "routing",
}
