"""The optimized layer on one GPU: Transformer Engine's router and device-side grouped GEMM, everything else fused by XLA."""

from __future__ import annotations

from ...parity.interface import Implementation, Support
from ...parity.problem import Problem
from .experts import experts
from .grouped_gemm import grouped_gemm
from .layer import layer
from .permute import permute, unpermute
from .routing import route
from .support import facts, host_sync, machine, single_device


def available() -> Support:
    """Whether this machine has what `te` needs; the reason names the number that failed."""
    return machine(facts())


def supports(problem: Problem) -> Support:
    """Whether this problem can run where `available` is ok; a recipe may ask for a newer GPU."""
    return single_device(problem, facts())


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
    supports=supports,
    available=available,
    host_sync=host_sync,
    traits=frozenset({"deterministic"}),
    summary="Transformer Engine router and grouped GEMM, in bfloat16, FP8 and MXFP8",
)
"""`te` in the registry."""
