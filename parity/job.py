"""What a worker is asked to judge, and how it finds the target: the part of `check` that runs beside the user's code."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from . import law_tools, registry, running
from .arrays import speaking
from .covering import covering_problems
from .inputs import make_case
from .interface import Implementation, Unsupported
from .judge import experts_findings
from .law import FEATURES, Law
from .law_tools import with_routing
from .laws import laws_named
from .problem import DTYPES, InvalidInput, Problem
from .profiles import LARGE, ONCE, check_words, covering_share, is_bare, plain_problems, profile
from .spec import CaseSpec, parse_case
from .suite import Settings, forget_shape, run_case, run_law
from .verdict import Verdict

VIRTUAL_DEVICES = 8
SHAPE_OF_OTHERS = "meets other shapes of the covering array"


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
    handles: tuple[str, ...] | None = None
    """What `Bench.probe` found of a bare function; None when it was not asked."""
    sys_path: tuple[str, ...] = ()


class NotCallable(Exception):
    """The target imports, but is nothing that can be called: the target's fault, where a wrong name is the caller's."""


@dataclass
class Bench:
    """A loaded target with the shapes and settings of its job."""

    job: Job
    implementation: Implementation
    bare: bool
    declared: bool
    """Whether a bare function says its dtypes."""
    shapes: tuple[Problem, ...]
    settings: Settings
    notes: list[str] = field(default_factory=list)
    _part: int = 0

    def undecided(self) -> bool:
        """Whether this is a bare function of which nobody has said what it handles."""
        return self.bare and self.job.handles is None

    def probe(self) -> tuple[str, ...]:
        """What a bare function handles beyond float32, as words for `handles`: dtypes that it returns, slots of -1.

        Only what was not asked for is probed; a word that begins with "no " says why something is left out.
        """
        words: list[str] = []
        problem = self.shapes[0]
        for shape in self.shapes[1:] if not (self.job.dtypes or self.declared) else ():
            try:
                running.experts(self.implementation, make_case(shape), grad=True)
            except Exception as error:  # whatever it does in another dtype is its own business
                words.append(f"no {shape.dtype}: {' '.join(str(error).split())[:200]}")
            else:
                words.append(shape.dtype)
        if "no-expert" not in self.job.wider:
            ids = np.array(make_case(problem, pattern="zipf").routing.topk_idx)
            ids[::3, -1] = -1
            case = make_case(problem, routing=ids)
            # Such a weight is ignored by contract: a layer that reads it does not know slots of -1.
            held = np.where(ids < 0, 3, case.routing.topk_weights)
            wrong = [
                f for f in experts_findings(self.implementation, with_routing(case, ids, held), grad=False) if not f.ok
            ]
            words.append(f"no slots of -1: {wrong[0].message or wrong[0].tensor}" if wrong else "no-expert")
        return tuple(words)

    def decide(self, words: tuple[str, ...]) -> None:
        """Keeps to what the probe found, and notes what is left out and why."""
        self.job = dataclasses.replace(self.job, handles=words)
        left_out = [w for w in words if w.startswith("no ")]
        self.shapes = tuple(p for p in self.shapes if not any(w.startswith(f"no {p.dtype}:") for w in left_out))
        if "no-expert" in words:
            self.settings = dataclasses.replace(self.settings, features=(*self.settings.features, "no-expert"))
        self.notes = noted(self.shapes, self.job)

    @property
    def parts(self) -> int:
        """In how many parts a law can be judged: one a shape."""
        return 1 if self.job.case else max(len(self.shapes), 1)

    def run(
        self, name: str, announce: Callable[[CaseSpec], None] = lambda spec: None, part: int | None = None
    ) -> Verdict:
        """The verdict of one law: on all shapes, or on those of one part.

        Shape by shape all laws find its executables, its cases and the oracle's answers made, and the next shape's part
        begins by dropping them: kernels of 257 experts for 40 shapes would not fit a machine. `merge_verdicts` of the
        parts says what the whole says.
        """
        law = laws_named([name])[0]
        if self.job.case:
            spec = parse_case(self.job.case)
            announce(spec)
            with compiling_for((spec.problem,)):
                return run_case(law, self.implementation, spec, self.settings.features)
        if part is not None and part != self._part:
            forget_shape()
            self._part = part
        many = tuple(LARGE.replace(dtype=p.dtype) for p in self.shapes[:1])
        large = many if law.large else profile(self.job.profile).once() if law.name in ONCE else ()
        if part:
            large = ()
        shapes = self.shapes if part is None else self.shapes[part : part + 1]
        if any(p in self.settings.covering for p in shapes):
            covering = set(self._share(law))
            shapes = tuple(p for p in shapes if p not in self.settings.covering or p in covering)
            if not shapes:
                return Verdict(law.name, law.stage, "cannot run", SHAPE_OF_OTHERS)
        with compiling_for(shapes):
            return run_law(law, self.implementation, shapes, self.settings, announce, large=large)

    def _share(self, law: Law) -> tuple[Problem, ...]:
        features = self.settings.features
        fitting = [p for p in self.settings.covering if not law.unmet(self.implementation, p, features)]
        return covering_share(law, [p for p in fitting if self.implementation.can_run(p)] or self.settings.covering)


@contextlib.contextmanager
def compiling_for(shapes: Sequence[Problem]) -> Iterator[None]:
    """Inside, covering shapes are compiled with less optimisation on a CPU, also when a failing case is run again.

    They are many, run a few times each, and judge what the tiny shapes judge at full optimisation.
    """
    quick = jax.default_backend() == "cpu" and shapes and set(shapes) <= set(covering_problems())
    before = dict(running.OPTIONS)
    running.OPTIONS.update(running.QUICK_COMPILE if quick else {})
    try:
        yield
    finally:
        running.OPTIONS.clear()
        running.OPTIONS.update(before)


def noted(shapes: Sequence[Problem], job: Job) -> list[str]:
    """What a bare function is judged on, and what is left out."""
    dtypes = ", ".join(dict.fromkeys(p.dtype for p in shapes))
    words = [*job.wider, *(["slots of -1"] if "no-expert" in (job.handles or ()) else [])]
    notes = [f"judged on gated SiLU in {dtypes}" + (f", with {', '.join(words)}" if words else ", without bias")]
    for word in job.handles or ():
        if word.startswith("no "):
            remedy = "--with no-expert" if word.startswith("no slots") else f"--dtypes {word[3:].partition(':')[0]}"
            notes.append(f"not judged on {word[3:]} ({remedy} demands it)")
    return notes


def load(job: Job, implementation: Implementation | None = None) -> Bench:
    """Finds the target, says what it is judged on, and makes it complete.

    Raises InvalidInput for a target that does not import and for options that make no sense, NotCallable for one that
    imports and is no layer, Unsupported when this machine cannot run it.
    """
    chosen, words = profile(job.profile), check_words(job.wider)
    for dtype in job.dtypes:
        if dtype not in DTYPES:
            raise InvalidInput(f"--dtypes is {dtype!r}; accepted: {', '.join(DTYPES)}")
    _start_devices(job)
    own = implementation or _find(job)
    try:
        here = own.available()
    except Exception as error:  # the user's own code
        raise Unsupported(f"its available() raised {type(error).__name__}: {error}") from error
    if not here:
        raise Unsupported(here.reason)
    own = speaking(own, job.arrays)
    if job.case:
        parse_case(job.case)
    bare = is_bare(own)
    if words and not bare:
        raise InvalidInput(
            f"--with is {','.join(words)!r} but {job.target} is no bare function: it says itself what it supports; "
            "accepted: --with for a function experts alone"
        )
    whole = own if "numpy" in own.traits else registry.complete(own)
    law_tools.use_oracle(chosen.oracle)
    declared = bare and bool(getattr(own.stages["experts"], "dtypes", ()))
    if bare:
        shapes = plain_problems(job.dtypes or _own_dtypes(own, job), words)
        features = tuple(w for w in FEATURES if w in words)
    else:
        shapes = tuple(p for p in chosen.problems() if not job.dtypes or p.dtype in job.dtypes)
        features = FEATURES
    covering = () if bare else tuple(p for p in chosen.covering() if not job.dtypes or p.dtype in job.dtypes)
    settings = Settings(
        job.seed,
        job.max_examples or chosen.max_examples,
        job.shrink,
        features=features,
        covering=covering,
    )
    shapes = (*shapes, *covering)
    if not shapes and not job.case:
        of = dict.fromkeys(p.dtype for p in chosen.problems())
        raise InvalidInput(
            f"--dtypes is {','.join(job.dtypes)!r}; accepted with profile {job.profile}: {', '.join(of)}"
        )
    bench = Bench(job, whole, bare, declared, shapes, settings)
    if bare:
        bench.decide(job.handles) if job.handles is not None else bench.notes.extend(noted(shapes, job))
    return bench


def _start_devices(job: Job) -> None:
    """Virtual CPU devices for a registered layer that spreads over ranks, if JAX has not started."""
    entry = registry.BUILTIN.get(job.target)
    if (
        entry is None
        or not entry.runs_on.startswith(">= 2")
        or "host_platform_device" in os.environ.get("XLA_FLAGS", "")
    ):
        return
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)


def _find(job: Job) -> Implementation:
    sys.path[:0] = [p for p in job.sys_path if p not in sys.path]
    try:
        return registry.get(job.target)
    except registry.NotALayer as error:
        raise NotCallable(str(error)) from None


def _own_dtypes(implementation: Implementation, job: Job) -> tuple[str, ...]:
    declared = getattr(implementation.stages["experts"], "dtypes", ())
    if declared:
        return tuple(jnp.dtype(d).name for d in declared)
    return ("float32",) if job.arrays == "numpy" else ("float32", "bfloat16")
