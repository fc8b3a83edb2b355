"""The optimized layer on one GPU: Transformer Engine's router and device-side grouped GEMM, everything else fused by XLA."""

from __future__ import annotations

from ...parity.interface import Implementation, Support
from .experts import experts
from .grouped_gemm import grouped_gemm
from .layer import layer
from .permute import permute, unpermute
from .routing import route
from .support import facts, machine, single_device


def available() -> Support:
    """Whether this machine has what `te` needs; the reason names the number that failed."""
    return machine(facts())


IMPLEMENTATION = Implementation(
    name="te",
    stages={
        "route": route,
        "permute": permute,
        "unpermute": unpermute,
        "grouped_gemm": grouped_gemm,
        "experts": experts,
        "layer": layer,
    },
    supports=single_device,
    available=available,
    traits=frozenset({"deterministic"}),
    summary="Transformer Engine router, dispatch, grouped GEMM, combine",
)
"""`te` in the registry."""
