"""What a law says about an implementation, and how verdicts on single shapes become one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .compare import Finding
from .law import Law

Status = Literal["agree", "disagree", "not repeatable", "cannot run", "expected-different", "known", "alarm"]
BAD = ("disagree", "not repeatable", "alarm")
"""Statuses that make the exit code 1."""


@dataclass(frozen=True)
class Verdict:
    """What one law said about one implementation."""

    law: str
    stage: str
    status: Status
    reason: str = ""
    """Why it did not run, or what a known failure is known from."""
    finding: Finding | None = None
    """The first thing that failed."""
    second: Finding | None = None
    """What the same case gave the next time, when that was something else."""
    case: str = ""
    """The failing case as a literal."""
    examples: int = 0
    percent: float | None = None
    """Largest error over all examples as a percentage of its bar, for laws judged by gauge."""
    seconds: float = 0.0


def merge_verdicts(parts: Sequence[Verdict]) -> Verdict:
    """One law's verdict over all shapes, from its verdicts on some of them: the first that is not agreement decides."""
    ran = [v for v in parts if v.status != "cannot run"]
    worst = next((v for v in ran if v.status != "agree"), ran[0] if ran else parts[0])
    percents = [v.percent for v in ran if v.percent is not None]
    percent = worst.percent if worst.status != "agree" else max(percents, default=None)
    reasons = dict.fromkeys(reason for v in parts for reason in v.reason.split("; "))
    return dataclasses.replace(
        worst,
        reason=worst.reason if ran else "; ".join(list(reasons)[:2]),
        examples=sum(v.examples for v in parts),
        percent=percent,
        seconds=sum(v.seconds for v in parts),
    )


def is_settled(law: Law, verdict: Verdict) -> bool:
    """Whether no further shape can change what a law says: it failed, or one routing is all that it wants."""
    return verdict.status not in ("agree", "cannot run") or (law.scope == "once" and verdict.status == "agree")
