"""The optimized layer without a GPU: sort, then one block-sparse pass each way, with its own gradient.

Routing, losses and the shared expert are the baseline's; `registry.complete` composes the layer. Out of scope: quantised operands
and more than one device (see xla_ep).
"""

from __future__ import annotations

from ...parity.interface import Implementation, Support
from ...parity.problem import Problem
from .experts import experts
from .grouped_gemm import grouped_gemm
from .permute import permute, unpermute


def supports(problem: Problem) -> Support:
    """Everything but quantised operands and dropped rows."""
    if problem.recipe != "none":
        return Support(False, f"recipe is {problem.recipe!r}; computes 'none' only")
    return Support(True)


IMPLEMENTATION = Implementation(
    name="blocked",
    stages={"permute": permute, "unpermute": unpermute, "grouped_gemm": grouped_gemm, "experts": experts},
    supports=supports,
    traits=frozenset({"deterministic"}),
    summary="sort, then one block-sparse pass whose cost follows the real rows",
)
