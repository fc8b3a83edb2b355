"""Findings as a record keeps them."""

from __future__ import annotations

from .compare import Finding
from .records import FindingRecord


def to_record(finding: Finding, stage: str) -> FindingRecord:
    """A Finding as it is stored: its size as a percentage of the bar."""
    return FindingRecord(
        tensor=finding.tensor,
        stage=stage,
        ok=bool(finding.ok),
        check=finding.check,
        percent=None if finding.measured is None else 100.0 * float(finding.measured),
        message="" if finding.ok else finding.message,
        kinks=int(finding.kinks or 0),
        histogram=list(finding.histogram),
    )
