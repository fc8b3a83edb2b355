"""One law on one implementation, case by case: what it found, and the simplest case that failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from .compare import Finding
from .guarded import short
from .interface import Implementation, Unsupported
from .law import Law
from .running import TargetRaised, WrongKind
from .spec import CaseSpec


@dataclass
class Search:
    """What a run has seen so far."""

    law: Law
    implementation: Implementation
    announce: Callable[[CaseSpec], None]
    examples: int = 0
    judged: int = 0
    percent: float | None = None
    failing: tuple[CaseSpec, Finding] | None = None
    runs_since: int = 0
    declined: list[str] = field(default_factory=list)


def attempt(search: Search, spec: CaseSpec) -> None:
    """Runs one example and keeps it when it is the simplest that failed."""
    search.announce(spec)
    search.examples += 1
    finding = first_failure(search, spec)
    if finding is None:
        return
    if search.failing is None or spec.complexity <= search.failing[0].complexity:
        search.failing = (spec, finding)


def first_failure(search: Search, spec: CaseSpec) -> Finding | None:
    """What the law finds wrong with a case, if anything."""
    return next((f for f in findings_of(search, spec) if not f.ok), None)


def findings_of(search: Search, spec: CaseSpec) -> list[Finding]:
    """Every finding of the law on a case; an exception of the target is one, a decline is noted and gives none."""
    try:
        findings = search.law.check(search.implementation, spec.build())
    except WrongKind as wrong:
        findings = [wrong.finding]
    except Unsupported as declined:
        search.declined.append(str(declined))
        return []
    except TargetRaised as raised:
        findings = [Finding(tensor="", check="ran", ok=False, message=short(raised.error))]
    except jax.errors.JaxRuntimeError as error:  # raised when a result of its compiled code is first read
        findings = [Finding(tensor="", check="ran", ok=False, message=short(error))]
    search.judged += bool(findings)
    for finding in findings:
        if search.law.judged_by == "gauge" and finding.measured is not None:
            search.percent = max(search.percent or 0.0, 100 * finding.measured)
    return findings
