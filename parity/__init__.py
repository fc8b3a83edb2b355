"""The contract, and everything about comparing: problems, inputs, gauges, laws, records.

Names are imported when they are first used: the pytest plugin lies in this package, and a project that never asks for it
must not pay for importing JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .interface import STAGES, Implementation, Judged, Support, Unsupported
    from .problem import CONTRACT, Clamp, Experts, InvalidInput, Losses, Mesh, Output, Params, Problem, Router, Routing
    from .registry import complete, get, names

__all__ = [
    "CONTRACT",
    "STAGES",
    "Clamp",
    "Experts",
    "Implementation",
    "InvalidInput",
    "Judged",
    "Losses",
    "Mesh",
    "Output",
    "Params",
    "Problem",
    "Router",
    "Routing",
    "Support",
    "Unsupported",
    "complete",
    "get",
    "names",
]

_HOME = {
    **dict.fromkeys(("STAGES", "Implementation", "Judged", "Support", "Unsupported"), "interface"),
    **dict.fromkeys(("complete", "get", "names"), "registry"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME.get(name, 'problem')}", __name__), name)


def __dir__() -> list[str]:
    return __all__
