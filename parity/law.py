"""What a law is, and whether it applies: one property of a layer, stated in one sentence and checked on one case."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .compare import Finding
from .ep_cases import usual_ranks
from .inputs import Case
from .interface import Implementation
from .problem import RECIPES, Problem

FEATURES = ("no-expert", "empty", "layer")
"""What a problem does not show: slots of -1, batches without tokens, a layer around the experts. A suite is told which to judge."""

SINGLE = ("route", "permute", "unpermute", "grouped_gemm", "update_bias")
"""Stages that say nothing about a target when they are the baseline's."""

Check = Callable[[Implementation, Case], list[Finding]]


@dataclass(frozen=True)
class Law:
    """A property that every honest implementation has."""

    name: str
    statement: str
    """One sentence: the check's docstring."""
    judged_by: Literal["bits", "gauge"]
    stage: str
    """The stage that it exercises; a target that does not offer it is not judged by this law."""
    faults: str
    """The classes of public faults that it serves, as letters: see README.md."""
    needs: frozenset[str]
    """Keys of `NEEDS` that must hold for the law to say something about a case."""
    check: Check
    """(completed implementation, case) -> findings; the law holds when all are ok, and an empty list says nothing was judged."""
    scope: Literal["drawn", "shape", "once"] = "drawn"
    """drawn: many routings at every shape. shape: one routing a shape. once: one routing at the first shape that fits."""
    large: bool = False
    """Also runs once at thousands of tokens, where one lost row is hard to see; for laws with a closed form."""

    def unmet(self, implementation: Implementation, problem: Problem, features: Iterable[str] = FEATURES) -> str:
        """Why the law does not apply, naming the first need that does not hold; empty when it applies."""
        if not implementation.offers(self.stage):
            return f"offers no {self.stage}"
        if self.stage in SINGLE and self.stage in implementation.composed:
            return f"its {self.stage} is the baseline's"
        if self.stage == "layer" and "layer" in implementation.composed and "layer" not in features:
            return "a layer around its experts is not judged here"
        for need in sorted(self.needs):
            if reason := NEEDS[need](implementation, problem, frozenset(features)):
                return reason
        return ""


def law(
    name: str,
    *,
    stage: str,
    judged_by: Literal["bits", "gauge"],
    faults: str,
    needs: Iterable[str] = (),
    scope: Literal["drawn", "shape", "once"] = "drawn",
    large: bool = False,
) -> Callable[[Check], Law]:
    """Makes a Law of a check function; its docstring is the statement."""
    unknown = set(needs) - set(NEEDS)
    if unknown:
        raise ValueError(f"law {name} needs {sorted(unknown)}; accepted: {', '.join(NEEDS)}")

    def make(check: Check) -> Law:
        statement = " ".join((inspect.getdoc(check) or "").split())
        return Law(name, statement, judged_by, stage, faults, frozenset(needs), check, scope, large)

    return make


def _trait(trait: str, reason: str) -> Callable[..., str]:
    return lambda implementation, problem, features: reason if trait in implementation.traits else ""


def _device_sizes(implementation: Implementation, problem: Problem, features: frozenset[str]) -> str:
    copies = "host-sync" in implementation.traits or implementation.host_sync(problem)
    return "copies group sizes to the host" if copies else ""


def _claims(trait: str) -> Callable[..., str]:
    return lambda implementation, problem, features: "" if trait in implementation.traits else f"does not claim {trait}"


def _feature(name: str, words: str) -> Callable[..., str]:
    return lambda implementation, problem, features: "" if name in features else f"{words} are not judged here"


def _when(holds: Callable[[Problem], bool], reason: str) -> Callable[..., str]:
    return lambda implementation, problem, features: "" if holds(problem) else reason


def _gradients(implementation: Implementation, problem: Problem, features: frozenset[str]) -> str:
    if "numpy" in implementation.traits and "experts_vjp" not in implementation.stages:
        return "gradients are not judged: a NumPy layer without experts_vjp has none"
    return ""


def _own_layer(implementation: Implementation, problem: Problem, features: frozenset[str]) -> str:
    if {"route", "layer"} <= implementation.composed:
        return "its layer is the baseline's around its experts"
    return ""


def _recipe(implementation: Implementation, problem: Problem, features: frozenset[str]) -> str:
    able = (implementation.supports(problem.replace(recipe=r)) for r in RECIPES if r != "none")
    return "" if any(able) else "supports no recipe"


def _ranks(implementation: Implementation, problem: Problem, features: frozenset[str]) -> str:
    if not implementation.offers("ep_dispatch"):
        return "does not spread over ranks"
    return "" if usual_ranks(problem) >= 2 else "needs two expert-parallel ranks"


NEEDS: Mapping[str, Callable[[Implementation, Problem, frozenset[str]], str]] = {
    "gradients": _gradients,
    "jit": lambda i, p, f: "runs eagerly" if i.traits & {"eager", "numpy"} else "",
    "device sizes": _device_sizes,
    "deterministic": _claims("deterministic"),
    "dropless": _trait("drops", "drops on purpose"),
    "own layer": _own_layer,
    "reports routing": _trait("opaque", "does not report its routing"),
    "opaque": _claims("opaque"),
    "no-expert": _feature("no-expert", "slots of -1"),
    "empty": _feature("empty", "batches without tokens"),
    "T >= 2": _when(lambda p: p.T >= 2, "needs two tokens"),
    "T even": _when(lambda p: p.T >= 2 and p.T % 2 == 0, "needs an even number of tokens"),
    "E >= 2": _when(lambda p: p.E >= 2, "needs two experts"),
    "K >= 2": _when(lambda p: p.K >= 2, "needs two slots"),
    "K < E": _when(lambda p: p.K < p.E, "needs an expert that is not chosen"),
    "K = 1": _when(lambda p: p.K == 1, "needs top-1"),
    "K = E": _when(lambda p: p.K == p.E, "needs top-k equal to the number of experts"),
    "gated": _when(lambda p: p.experts.gated, "needs gated experts"),
    "no clamp": _when(lambda p: p.experts.clamp is None, "needs experts without a clamp"),
    "no biases": _when(lambda p: not (p.experts.wi_bias or p.experts.wo_bias), "needs experts without bias"),
    "wi bias": _when(lambda p: p.experts.wi_bias, "needs experts with input bias"),
    "no wo bias": _when(lambda p: not p.experts.wo_bias, "needs experts without output bias"),
    "wo bias": _when(lambda p: p.experts.wo_bias, "needs experts with output bias"),
    "8-bit exponent": _when(lambda p: p.dtype != "float16", "needs an exponent of 8 bits"),
    "late": _when(lambda p: p.experts.weight_placement == "late", "needs weights after the experts"),
    "unquantised": _when(lambda p: p.recipe == "none", "needs unquantised GEMMs"),
    "recipe": _recipe,
    "ranks": _ranks,
    "no mesh": _when(lambda p: p.mesh is None, "needs one device"),
    "selection bias": _when(lambda p: p.router.selection_bias, "needs a selection bias"),
    "groups": _when(lambda p: p.router.groups > p.router.group_topk, "needs groups that are excluded"),
    "one group": _when(lambda p: p.router.groups == 1, "needs a router without groups"),
    "softmax before": _when(
        lambda p: p.router.score == "softmax" and p.router.softmax_order == "before", "needs softmax over all experts"
    ),
    "float32 logits": _when(lambda p: p.router.logits_dtype == "float32", "needs float32 logits"),
}
"""Need -> (implementation, problem, features) -> reason why it does not hold, or ""."""
