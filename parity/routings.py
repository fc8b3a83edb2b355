"""Which routings a law meets at a shape: pinned ones, each a public fault's trigger, then drawn ones."""

from __future__ import annotations

import functools
from collections.abc import Callable

from .problem import InvalidInput, Problem
from .spec import CaseSpec


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
    generate(problem, seed, examples, no_expert, specs.append, shrink=False)
    return tuple(specs)


def generate(
    problem: Problem, seed: int, examples: int, no_expert: bool, use: Callable[[CaseSpec], None], *, shrink: bool
) -> None:
    """Hands each routing that Hypothesis draws to `use`, which raises where one fails; nothing is left on disk."""
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
