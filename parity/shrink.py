"""Makes a failing routing smaller and plainer: Hypothesis first, then token by token."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np

from .problem import Problem
from .routings import generate
from .search import Search, attempt, first_failure
from .spec import CaseSpec, freeze

MOST_SLOTS = 512
"""Routings with more slots are reported by pattern and seed, not as ids."""

SHRINKS = 400
"""Runs after the first failure; the smallest failing routing so far is then reported."""


class _Enough(BaseException):
    """Ends a search from inside Hypothesis; a BaseException, so that it is not taken for a failing example."""


def shrink(search: Search, problem: Problem, seed: int, examples: int, *, no_expert: bool) -> None:
    """Lets Hypothesis draw the same routings once more, and shrink what fails."""
    from hypothesis.errors import Flaky, FlakyFailure

    def holds(spec: CaseSpec) -> None:
        attempt(search, spec)
        assert search.failing is not None
        search.runs_since += 1
        if search.runs_since > SHRINKS:
            raise _Enough
        if search.failing[0] == spec:
            raise AssertionError(search.failing[1].message)

    # The search keeps the smallest failing case itself, and runs it again before it reports it.
    with contextlib.suppress(_Enough, AssertionError, FlakyFailure, Flaky):
        generate(problem, seed, examples, no_expert, holds, shrink=True)


def simplify(search: Search, *, no_expert: bool) -> None:
    """Makes the failing routing plainer token by token: nowhere or at the first experts, else fewer and lower ids."""
    assert search.failing is not None
    spec, runs = search.failing[0], 0
    if spec.problem.routed_rows > MOST_SLOTS:
        return
    if spec.topk_idx is None:
        # The ids that the pattern draws: the same case, in a form that can be made plainer.
        spec = dataclasses.replace(spec, topk_idx=freeze(np.asarray(spec.build().routing.topk_idx)), pattern=None)
        search.failing = (spec, search.failing[1])
    K = spec.problem.K
    rest = (-1,) * K if no_expert else tuple(range(K))

    def fails(token: int, row: tuple[int, ...]) -> bool:
        nonlocal runs
        assert search.failing is not None
        now = search.failing[0].topk_idx or ()
        real = [e for e in row if e >= 0]
        if row == now[token] or len(set(real)) < len(real) or runs == SHRINKS:
            return False
        runs += 1
        plainer = dataclasses.replace(spec, topk_idx=(*now[:token], row, *now[token + 1 :]))
        search.announce(plainer)
        finding = first_failure(search, plainer)
        if finding is not None:
            search.failing = (plainer, finding)
        return finding is not None

    for token in range(spec.problem.T):
        if fails(token, rest):
            continue
        for k in range(K):
            row = (search.failing[0].topk_idx or ())[token]
            any(fails(token, (*row[:k], e, *row[k + 1 :])) for e in range(-1 if no_expert else 0, row[k]))
