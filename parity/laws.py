"""Every law, in the order in which a suite runs them: where rows go, what is computed, what must not matter, and how."""

from __future__ import annotations

from collections.abc import Iterable

from . import (
    laws_ep,
    laws_exchange,
    laws_execution,
    laws_inert,
    laws_layer,
    laws_losses,
    laws_metamorphic,
    laws_quantised,
    laws_route,
    laws_structure,
    laws_values,
    laws_width,
)
from .law import FEATURES, NEEDS, Law, law
from .problem import InvalidInput

LAWS: tuple[Law, ...] = (
    *laws_structure.LAWS,
    *laws_values.LAWS,
    *laws_inert.LAWS,
    *laws_metamorphic.LAWS,
    *laws_execution.LAWS,
    *laws_width.LAWS,
    *laws_quantised.LAWS,
    *laws_route.LAWS,
    *laws_layer.LAWS,
    *laws_losses.LAWS,
    *laws_exchange.LAWS,
    *laws_ep.LAWS,
)
"""All laws; names are unique."""


def laws_named(names: Iterable[str]) -> tuple[Law, ...]:
    """The laws of these names, in suite order; none named means all. Raises InvalidInput for an unknown name."""
    wanted = list(names)
    known = {one.name: one for one in LAWS}
    for name in wanted:
        if name not in known:
            raise InvalidInput(f"no law is called {name!r}; accepted: {', '.join(known)}")
    return tuple(one for one in LAWS if not wanted or one.name in wanted)


__all__ = ["FEATURES", "LAWS", "NEEDS", "Law", "law", "laws_named"]
