"""The contract, and everything about comparing: problems, inputs, gauges, laws, records."""

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
