"""What a worker is asked to judge, and how it finds the target: the part of `check` that runs beside the user's code."""

from __future__ import annotations

import dataclasses
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from . import law_tools, registry
from .arrays import speaking
from .inputs import make_case
from .interface import Implementation, Unsupported
from .judge import experts_findings
from .law import FEATURES
from .laws import laws_named
from .problem import InvalidInput, Problem
from .profiles import LARGE, check_words, is_bare, plain_problems, profile
from .spec import CaseSpec, parse_case
from .suite import Settings, Verdict, run_case, run_law


@dataclass(frozen=True)
class Job:
    """Everything that decides a verdict; plain values, so that another process can be told."""

    target: str
    profile: str = "quick"
    seed: int = 0
    max_examples: int | None = None
    wider: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    arrays: str = "jax"
    case: str = ""
    shrink: bool = True
    no_expert: bool | None = None
    """Whether a bare function is judged on slots of -1; None asks `Bench.probe`."""
    sys_path: tuple[str, ...] = ()


class NotCallable(Exception):
    """The target imports, but is nothing that can be called: the target's fault, where a wrong name is the caller's."""


@dataclass
class Bench:
    """A loaded target with the shapes and settings of its job."""

    job: Job
    implementation: Implementation
    bare: bool
    shapes: tuple[Problem, ...]
    settings: Settings
    large: tuple[Problem, ...] = (LARGE,)
    notes: list[str] = field(default_factory=list)

    def undecided(self) -> bool:
        """Whether this is a bare function of which nobody has said if it handles slots of -1."""
        return self.bare and "no-expert" not in self.job.wider and self.job.no_expert is None

    def probe(self) -> str:
        """Why slots of -1 should not be judged: what the target did on finite ones; empty when it handled them."""
        problem = self.shapes[0]
        ids = np.array(make_case(problem, pattern="zipf").routing.topk_idx)
        ids[::3, -1] = -1
        try:
            findings = experts_findings(self.implementation, make_case(problem, routing=ids), grad=False)
        except Unsupported as declined:
            return str(declined)
        wrong = [f for f in findings if not f.ok]
        return (wrong[0].message or f"{wrong[0].tensor} is wrong") if wrong else ""

    def decide(self, reason: str) -> None:
        """Judges slots of -1 from here on, or notes why not."""
        if reason:
            self.notes.append(not_judged(reason))
        else:
            self.settings = dataclasses.replace(self.settings, features=(*self.settings.features, "no-expert"))

    def run(self, name: str, announce: Callable[[CaseSpec], None] = lambda spec: None) -> Verdict:
        """The verdict of one law."""
        law = laws_named([name])[0]
        if self.job.case:
            spec = parse_case(self.job.case)
            announce(spec)
            return run_case(law, self.implementation, spec, self.settings.features)
        return run_law(law, self.implementation, self.shapes, self.settings, announce, large=self.large)


def not_judged(reason: str) -> str:
    """The note on a bare function that does not handle slots of -1."""
    return f"slots of -1 are not judged ({reason}); --with no-expert demands them"


def load(job: Job, implementation: Implementation | None = None) -> Bench:
    """Finds the target, says what it is judged on, and makes it complete.

    Raises InvalidInput for a target that does not import and for options that make no sense, NotCallable for one that
    imports and is no layer, Unsupported when this machine cannot run it.
    """
    chosen, words = profile(job.profile), check_words(job.wider)
    own = implementation or _find(job)
    if not (here := own.available()):
        raise Unsupported(here.reason)
    own = speaking(own, job.arrays)
    if job.case:
        parse_case(job.case)
    bare = is_bare(own)
    whole = own if "numpy" in own.traits else registry.complete(own)
    law_tools.use_oracle(chosen.oracle)
    notes: list[str] = []
    if bare:
        dtypes = job.dtypes or _own_dtypes(own, job)
        shapes = plain_problems(dtypes, words)
        features = tuple(w for w in FEATURES if w in words or (w == "no-expert" and job.no_expert))
        notes.append(
            f"judged on gated SiLU without bias in {', '.join(dtypes)}"
            + (f", with {', '.join(words)}" if words else "")
        )
    else:
        shapes = tuple(p for p in chosen.problems() if not job.dtypes or p.dtype in job.dtypes)
        features = FEATURES
    settings = Settings(job.seed, job.max_examples or chosen.max_examples, job.shrink, features)
    return Bench(job, whole, bare, shapes, settings, notes=notes)


def _find(job: Job) -> Implementation:
    sys.path[:0] = [p for p in job.sys_path if p not in sys.path]
    try:
        return registry.get(job.target)
    except InvalidInput:
        if ":" in job.target and job.target not in registry.BUILTIN:
            try:
                found = pkgutil.resolve_name(job.target)
            except Exception:  # it does not import: the message of registry.get says why
                raise InvalidInput(_import_message(job.target)) from None
            raise NotCallable(
                f"{job.target} is a {type(found).__name__}; accepted: a function experts(problem, params, x, routing), "
                "or an object with stages"
            ) from None
        raise


def _import_message(target: str) -> str:
    try:
        registry.get(target)
    except InvalidInput as error:
        return str(error)
    return f"{target} does not import"


def _own_dtypes(implementation: Implementation, job: Job) -> tuple[str, ...]:
    declared = getattr(implementation.stages["experts"], "dtypes", ())
    if declared:
        return tuple(jnp.dtype(d).name for d in declared)
    return ("float32",) if job.arrays == "numpy" else ("float32", "bfloat16")
