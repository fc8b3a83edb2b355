"""Every mutant: proof that the laws can fail. Each is shipped, so that a suite of one's own can be tested with them."""

from __future__ import annotations

from collections.abc import Iterable

from . import mutants_chain, mutants_choice, mutants_ep, mutants_quantised, mutants_rows
from .mutant import Mutant, mutant
from .problem import InvalidInput

MUTANTS: tuple[Mutant, ...] = (
    *mutants_rows.MUTANTS,
    *mutants_choice.MUTANTS,
    *mutants_chain.MUTANTS,
    *mutants_ep.MUTANTS,
    *mutants_quantised.MUTANTS,
)
"""All mutants, by class of fault; names are unique."""


def mutants_named(names: Iterable[str]) -> tuple[Mutant, ...]:
    """The mutants of these names; none named means all. Raises InvalidInput for an unknown name."""
    wanted = list(names)
    known = [m.name for m in MUTANTS]
    for name in wanted:
        if name not in known:
            raise InvalidInput(f"no mutant is called {name!r}; accepted: {', '.join(known)}")
    return tuple(m for m in MUTANTS if not wanted or m.name in wanted)


__all__ = ["MUTANTS", "Mutant", "mutant", "mutants_named"]
