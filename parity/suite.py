"""Runs one law on one implementation: draws routings, shrinks a failing one, and says what came out.

Shapes are static and few; raggedness is drawn by Hypothesis as data, so a shape compiles once. Pinned routings, each a
public fault's trigger, come first. A failure is run again from its text before it is reported: what does not fail twice
is `not repeatable`. Settings are objects and no database is kept, so nothing is left in a user's project.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import law_tools, running
from .guarded import guarded
from .interface import Implementation
from .law import FEATURES, Law
from .problem import Problem
from .profiles import FEW
from .routings import drawn, pinned
from .search import Search, attempt, findings_of
from .shrink import shrink, simplify
from .spec import CaseSpec, forget_cases
from .verdict import Status, Verdict


@dataclass(frozen=True)
class Settings:
    """How hard to look."""

    seed: int = 0
    max_examples: int = 10
    shrink: bool = True
    covering: tuple[Problem, ...] = ()
    """Shapes that are there to cover switches and sizes: each gets `few` pinned and `few` drawn routings."""
    few: int = FEW
    features: tuple[str, ...] = FEATURES


def run_law(
    law: Law,
    implementation: Implementation,
    shapes: Sequence[Problem],
    settings: Settings,
    announce: Callable[[CaseSpec], None] = lambda spec: None,
    *,
    large: Sequence[Problem] = (),
) -> Verdict:
    """The verdict of one law over the shapes where it applies; `announce` hears each case before it runs.

    The `large` problems run once each, on one pattern.
    """
    start = time.perf_counter()
    implementation = guarded(implementation)
    search = Search(law, implementation, announce)
    fitting: list[Problem] = []
    no_expert = "no-expert" in settings.features
    for problem in shapes:
        reason = law.unmet(implementation, problem, settings.features) or _declines(implementation, problem)
        if reason:
            search.declined.append(reason)
        else:
            fitting.append(problem)
    if law.scope == "once":
        fitting = fitting[:1]
    for problem in fitting:
        few = settings.few if problem in settings.covering else None
        for spec in pinned(problem, settings.seed)[: 1 if law.scope != "drawn" else few]:
            attempt(search, spec)
            if search.failing:
                break
        # What raises or returns the wrong kind on a pinned routing does so whatever the routing is.
        smaller = settings.shrink and not (search.failing and search.failing[1].check in ("ran", "dtype", "shape"))
        if law.scope == "drawn":
            examples = settings.max_examples if few is None else min(few, settings.max_examples)
            for spec in () if search.failing else drawn(problem, settings.seed, examples, no_expert):
                attempt(search, spec)
                if search.failing:
                    break
            if search.failing and smaller:
                shrink(search, problem, settings.seed, examples, no_expert=no_expert)
        if search.failing and smaller:
            simplify(search, no_expert=no_expert)
        if search.failing:
            break
    for problem in large if not search.failing else ():
        if not law.unmet(implementation, problem, settings.features) and not _declines(implementation, problem):
            attempt(search, CaseSpec(problem, settings.seed, pattern="zipf"))
    return _conclude(search, time.perf_counter() - start)


def run_case(law: Law, implementation: Implementation, spec: CaseSpec, features: Sequence[str] = FEATURES) -> Verdict:
    """The verdict of one law on one case, as `--case` asks for it."""
    start = time.perf_counter()
    implementation = guarded(implementation)
    search = Search(law, implementation, lambda spec: None)
    reason = law.unmet(implementation, spec.problem, features) or _declines(implementation, spec.problem)
    if reason:
        return Verdict(law.name, law.stage, "cannot run", reason)
    attempt(search, spec)
    return _conclude(search, time.perf_counter() - start)


def forget_shape() -> None:
    """Drops what is kept while all laws run on one shape: results, the oracle's answers, cases and executables."""
    running.forget_results()
    running.forget_executables()
    law_tools.forget_views()
    forget_cases()


def _conclude(search: Search, seconds: float) -> Verdict:
    law = search.law

    def verdict(status: Status, **more: object) -> Verdict:
        return Verdict(
            law.name,
            law.stage,
            status,
            examples=search.examples,
            percent=search.percent,
            seconds=seconds,
            **more,  # type: ignore[arg-type]
        )

    if search.failing is None:
        if search.judged:
            return verdict("agree")
        reasons = list(dict.fromkeys(search.declined))
        return verdict("cannot run", reason="; ".join(reasons[:2]) or "this shape leaves nothing to judge")
    spec, finding = search.failing
    running.forget_results()
    search.percent = None if finding.measured is None else search.percent
    again = findings_of(search, spec)
    if all(f.ok for f in again):
        second = next((f for f in again if f.tensor == finding.tensor), None)
        reason = "the same case passed the next time"
        return verdict("not repeatable", finding=finding, second=second, case=spec.literal(), reason=reason)
    if "drops" in search.implementation.traits:
        return verdict("expected-different", finding=finding, case=spec.literal(), reason="drops on purpose")
    return verdict("disagree", finding=finding, case=spec.literal())


def _declines(implementation: Implementation, problem: Problem) -> str:
    support = implementation.can_run(problem)
    return "" if support else support.reason or "declines this problem"
