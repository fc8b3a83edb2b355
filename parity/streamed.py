"""Judging layers too large for a whole gauge on the host: the oracle hands tensors over expert by expert."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .compare import Finding, judge
from .inputs import Case
from .judge import dtype_of
from .problem import Problem

LARGE = 50_000_000
"""Kernel elements above which value and gauge, 16 bytes each, are not kept whole."""


def is_large(problem: Problem) -> bool:
    """Whether a whole answer of the oracle would not fit comfortably."""
    return problem.E * problem.D * (problem.wi_columns + problem.F) > LARGE


def streamed_experts(case: Case, got: Mapping[str, Any]) -> list[Finding]:
    """y and gradients of `experts` against `oracle_device`, one expert's kernels at a time."""
    module = importlib.import_module("..reference.oracle_device", __package__)
    cotangent = case.cotangent if len(got) > 1 else None
    return streamed(case, got, module.stream_experts(case.problem, case.params, case.x, case.routing, cotangent))


def streamed(case: Case, got: Mapping[str, Any], pieces: Iterator[tuple[str, int | None, Any]]) -> list[Finding]:
    """Judges pieces as they come; an expert's pieces are merged into one finding, its worst."""
    found: dict[str, Finding] = {}
    for name, expert, judged in pieces:
        if name not in got:
            continue
        mine = got[name] if expert is None else got[name][expert]
        judged = type(judged)(*(np.asarray(v) if i < 2 else v for i, v in enumerate(judged)))
        finding = judge(name, np.asarray(mine), judged, dtype=dtype_of(case.problem, name))
        if expert is not None:
            finding = finding.replace(expert=expert, index=None if finding.index is None else (expert, *finding.index))
        found[name] = _worse(found[name], finding) if name in found else finding
    return list(found.values())


def _worse(a: Finding, b: Finding) -> Finding:
    """The worse of two findings of one tensor, with both histograms and kinks."""
    order = (not b.ok, b.measured or 0.0) > (not a.ok, a.measured or 0.0)
    bins = tuple(x + y for x, y in zip(a.histogram, b.histogram, strict=True)) if a.histogram and b.histogram else ()
    return (b if order else a).replace(histogram=bins or a.histogram or b.histogram, kinks=a.kinks + b.kinks)
