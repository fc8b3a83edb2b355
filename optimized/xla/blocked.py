"""The optimized layer without a GPU: sort, then one block-sparse pass a product, with its own gradient.

Routing, losses and the shared expert are the baseline's; `registry.complete` composes the layer. Quantised
operands are emulated (see recipes.py). Out of scope: more than one device (see xla_ep).
"""

from __future__ import annotations

from ...parity.interface import Implementation
from .experts import experts
from .grouped_gemm import grouped_gemm
from .permute import permute, unpermute

IMPLEMENTATION = Implementation(
    name="blocked",
    stages={"permute": permute, "unpermute": unpermute, "grouped_gemm": grouped_gemm, "experts": experts},
    traits=frozenset({"deterministic"}),
    summary="sort, then block-sparse passes whose cost follows the real rows",
)
