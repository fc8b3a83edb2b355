"""Runs one law on one implementation: draws routings, shrinks a failing one, and says what came out.

Shapes are static and few; raggedness is drawn by Hypothesis as data, so a shape compiles once. Pinned routings, each a
public fault's trigger, come first. A failure is run again from its text before it is reported: what does not fail twice
is `not repeatable`. Settings are objects and no database is kept, so nothing is left in a user's project.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from . import law_tools, running
from .compare import Finding
from .interface import Implementation, Support, Unsupported
from .law import FEATURES, Law
from .problem import InvalidInput, Problem
from .profiles import FEW
from .running import TargetRaised, WrongKind, blaming_target
from .spec import CaseSpec, forget_cases, freeze

Status = Literal["agree", "disagree", "not repeatable", "cannot run", "expected-different", "known", "alarm"]
BAD = ("disagree", "not repeatable", "alarm")
"""Statuses that make the exit code 1."""

MOST_SLOTS = 512
"""Routings with more slots are reported by pattern and seed, not as ids."""

SHRINKS = 400
"""Runs after the first failure; the smallest failing routing so far is then reported."""


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


@dataclass
class _Search:
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


class _Enough(BaseException):
    """Ends a search from inside Hypothesis; a BaseException, so that it is not taken for a failing example."""


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
    search = _Search(law, implementation, announce)
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
            _try(search, spec)
            if search.failing:
                break
        # What raises or returns the wrong kind on a pinned routing does so whatever the routing is.
        shrink = settings.shrink and not (search.failing and search.failing[1].check in ("ran", "dtype", "shape"))
        if law.scope == "drawn":
            examples = settings.max_examples if few is None else min(few, settings.max_examples)
            for spec in () if search.failing else drawn(problem, settings.seed, examples, no_expert):
                _try(search, spec)
                if search.failing:
                    break
            if search.failing and shrink:
                _shrink(search, problem, settings, examples)
        if search.failing and shrink:
            _simplify(search, settings)
        if search.failing:
            break
    for problem in large if not search.failing else ():
        if not law.unmet(implementation, problem, settings.features) and not _declines(implementation, problem):
            _try(search, CaseSpec(problem, settings.seed, pattern="zipf"))
    return _conclude(search, time.perf_counter() - start)


def run_case(law: Law, implementation: Implementation, spec: CaseSpec, features: Sequence[str] = FEATURES) -> Verdict:
    """The verdict of one law on one case, as `--case` asks for it."""
    start = time.perf_counter()
    implementation = guarded(implementation)
    search = _Search(law, implementation, lambda spec: None)
    reason = law.unmet(implementation, spec.problem, features) or _declines(implementation, spec.problem)
    if reason:
        return Verdict(law.name, law.stage, "cannot run", reason)
    _try(search, spec)
    return _conclude(search, time.perf_counter() - start)


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


def forget_shape() -> None:
    """Drops what is kept while all laws run on one shape: results, the oracle's answers, cases and executables."""
    running.forget_results()
    running.forget_executables()
    law_tools.forget_views()
    forget_cases()


def guarded(implementation: Implementation) -> Implementation:
    """The implementation with stages whose exceptions are told from this suite's own, and a `supports` that has none."""
    stages = {name: _guarded(fn) for name, fn in implementation.stages.items()}

    def supports(problem: Problem) -> Support:
        try:
            return implementation.supports(problem)
        except Exception as error:
            return Support(False, f"supports {_short(error)}")

    return dataclasses.replace(implementation, stages=stages, supports=supports)


@functools.lru_cache(maxsize=1024)
def _guarded(fn: Callable[..., Any]) -> Callable[..., Any]:
    # One wrapper a function: executables and results are kept by the function's identity.
    if hasattr(fn, "_dropless_guarded"):
        return fn

    @functools.wraps(fn, updated=())  # JAX's messages name the target's function
    def run(*args: Any, **kwargs: Any) -> Any:
        with blaming_target():
            return fn(*args, **kwargs)

    run._dropless_guarded = True  # type: ignore[attr-defined]
    return run


def pinned(problem: Problem, seed: int) -> list[CaseSpec]:
    """Routings that a public fault needs, where the shape can hold them: the first is ordinary."""
    specs = []
    for pattern in ("zipf", "all_to_one", "alternating_empty", "one_row_each", "tile_plus_1"):
        spec = CaseSpec(problem, seed, pattern=pattern)
        try:
            spec.build()
        except InvalidInput:  # the pattern does not fit this shape
            continue
        specs.append(spec)
    return specs


@functools.lru_cache(maxsize=64)
def drawn(problem: Problem, seed: int, examples: int, no_expert: bool) -> tuple[CaseSpec, ...]:
    """The routings that Hypothesis draws at a shape. What it draws does not depend on what holds, so all laws share them."""
    specs: list[CaseSpec] = []
    _generate(problem, seed, examples, no_expert, specs.append, shrink=False)
    return tuple(specs)


def _shrink(search: _Search, problem: Problem, settings: Settings, examples: int) -> None:
    """Lets Hypothesis draw the same routings once more, and shrink what fails."""
    from hypothesis.errors import Flaky, FlakyFailure

    def holds(spec: CaseSpec) -> None:
        _try(search, spec)
        assert search.failing is not None
        search.runs_since += 1
        if search.runs_since > SHRINKS:
            raise _Enough
        if search.failing[0] == spec:
            raise AssertionError(search.failing[1].message)

    # The search keeps the smallest failing case itself, and runs it again before it reports it.
    with contextlib.suppress(_Enough, AssertionError, FlakyFailure, Flaky):
        _generate(problem, settings.seed, examples, "no-expert" in settings.features, holds, shrink=True)


def _generate(
    problem: Problem, seed: int, examples: int, no_expert: bool, use: Callable[[CaseSpec], None], *, shrink: bool
) -> None:
    import hypothesis
    from hypothesis import HealthCheck, Phase

    from .strategies import case_specs, no_folder

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples,
        phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        print_blob=False,
        report_multiple_bugs=False,
    )
    @hypothesis.given(case_specs(problem, no_expert=no_expert))
    def run(spec: CaseSpec) -> None:
        use(spec)

    with no_folder():
        run()


def _simplify(search: _Search, settings: Settings) -> None:
    """Makes the failing routing plainer token by token: nowhere or at the first experts, else fewer and lower ids."""
    assert search.failing is not None
    spec, runs = search.failing[0], 0
    if spec.problem.routed_rows > MOST_SLOTS:
        return
    if spec.topk_idx is None:
        # The ids that the pattern draws: the same case, in a form that can be made plainer.
        spec = dataclasses.replace(spec, topk_idx=freeze(np.asarray(spec.build().routing.topk_idx)), pattern=None)
        search.failing = (spec, search.failing[1])
    K, no_expert = spec.problem.K, "no-expert" in settings.features
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
        finding = _first_failure(search, plainer)
        if finding is not None:
            search.failing = (plainer, finding)
        return finding is not None

    for token in range(spec.problem.T):
        if fails(token, rest):
            continue
        for k in range(K):
            row = (search.failing[0].topk_idx or ())[token]
            any(fails(token, (*row[:k], e, *row[k + 1 :])) for e in range(-1 if no_expert else 0, row[k]))


def _try(search: _Search, spec: CaseSpec) -> None:
    """Runs one example and keeps it when it is the simplest that failed."""
    search.announce(spec)
    search.examples += 1
    finding = _first_failure(search, spec)
    if finding is None:
        return
    if search.failing is None or spec.complexity <= search.failing[0].complexity:
        search.failing = (spec, finding)


def _first_failure(search: _Search, spec: CaseSpec) -> Finding | None:
    return next((f for f in _findings(search, spec) if not f.ok), None)


def _findings(search: _Search, spec: CaseSpec) -> list[Finding]:
    try:
        findings = search.law.check(search.implementation, spec.build())
    except WrongKind as wrong:
        findings = [wrong.finding]
    except Unsupported as declined:
        search.declined.append(str(declined))
        return []
    except TargetRaised as raised:
        findings = [Finding(tensor="", check="ran", ok=False, message=_short(raised.error))]
    except jax.errors.JaxRuntimeError as error:  # raised when a result of its compiled code is first read
        findings = [Finding(tensor="", check="ran", ok=False, message=_short(error))]
    search.judged += bool(findings)
    for finding in findings:
        if search.law.judged_by == "gauge" and finding.measured is not None:
            search.percent = max(search.percent or 0.0, 100 * finding.measured)
    return findings


def _conclude(search: _Search, seconds: float) -> Verdict:
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
    again = _findings(search, spec)
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


def _short(error: BaseException) -> str:
    """An exception in one line, with the last line of the target's own code that it passed through."""
    ours = str(Path(__file__).parent)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/site-packages/" not in f.filename and not f.filename.startswith(ours)
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}{where}: {text[:300]}"


def failures(verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """The verdicts that make a run fail."""
    return (v for v in verdicts if v.status in BAD)
