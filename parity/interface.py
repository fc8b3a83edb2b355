"""What an implementation is: a few stages, and an honest answer to "can you do this problem?".

An implementation offers only what it changes; `registry.complete` composes the rest from the baseline.

| stage                      | signature                                                                                   | compared |
|----------------------------|---------------------------------------------------------------------------------------------|----------|
| `route`                    | (problem, params, x) -> Routing                                                             | set, then gauge |
| `permute`                  | (problem, x, routing, *, align=1) -> (rows [P,D], group_sizes [E], row_of_slot [T,K])       | bits |
| `unpermute`                | (problem, rows, routing, row_of_slot) -> y [T,D]: weighted (late) or plain sum (early)      | bits, gauge |
| `grouped_gemm`             | (rows [P,A], kernels [E,A,B], group_sizes) -> rows [P,B]                                    | gauge |
| `ep_dispatch`              | (problem, x [W,T/W,D], routing) -> (rows [W,P,D], group_sizes [W,e], state)                 | bits |
| `ep_combine`               | (problem, rows, state) -> y [W,T/W,D]                                                       | bits |
| `quantize`, `dequantize`   | (x, axis, group_sizes=None) -> (values, scales), and back                                   | bits |
| `experts`                  | (problem, params, x, routing) -> y [T,D]: routed experts only, at a fixed routing           | gauge |
| `layer`                    | (problem, params, x, *, mask=None, segment_ids=None) -> Output                              | routes, then replay |
| `update_bias`              | (expert_bias, group_sizes, rate) -> expert_bias                                             | bits |

`permute` keeps tokens in order inside an expert; `group_sizes` are real counts; group e starts at the sum of the
earlier counts, each rounded up to a multiple of `align`; `row_of_slot` is -1 for no expert; rows that hold no token are
undefined and must not matter. `grouped_gemm` takes contiguous blocks from row 0 (pass rounded-up sizes for aligned
rows) and leaves rows beyond the blocks undefined. A masked token is routed nowhere and its row of y is exactly 0, shared
expert included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from .problem import InvalidInput, Problem

STAGES = (
    "route",
    "permute",
    "unpermute",
    "grouped_gemm",
    "ep_dispatch",
    "ep_combine",
    "quantize",
    "dequantize",
    "experts",
    "layer",
    "update_bias",
)
"""Every stage name, in the order in which a token meets them."""

TRAITS = ("deterministic", "host-sync", "eager", "opaque", "drops", "numpy")
"""What a suite must know beyond `supports`.

deterministic: repeated calls are bit-equal. host-sync: group sizes are copied to the host (exempt from the
no-copy and one-executable laws). eager: cannot be traced by `jit`. opaque: `layer` reports no routing. drops: not
dropless, on purpose. numpy: works on NumPy arrays and offers `experts_vjp` for gradients, if any.
"""


class Support(NamedTuple):
    """Whether something can run here; `reason` names the number that failed, and is empty when ok."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class Unsupported(Exception):
    """Raised by a stage that declines a problem; the message is `Support.reason`. A suite reports a skip."""


class Judged(NamedTuple):
    """One tensor as the oracle sees it: its exact value, and the rounding error that an honest layer can show there.

    Arrays are float64, NumPy's or, from the device oracle, JAX's.
    `gauge` is a root sum of squares of (unit roundoff x sensitivity), elementwise and float64, 0 where the value must
    be exact. `kinks` counts elements whose gauge had to include a jump at a clamp or kink. `dof` [B] splits the
    tensor into B blocks along its first axis (tokens, experts, or one whole) and says how many independent errors each
    has, for the row bar; None where there is none.
    """

    value: Any
    gauge: Any
    kinks: int = 0
    dof: Any = None


def always(problem: Problem) -> Support:
    """Supports every problem."""
    return Support(True)


def on_device(problem: Problem) -> str:
    """Copies no group size to the host."""
    return ""


def anywhere() -> Support:
    """Is available on every machine."""
    return Support(True)


@dataclass(frozen=True)
class Implementation:
    """A named set of stages. Build one per file; a user's function or object becomes one through `registry.wrap`."""

    name: str
    stages: Mapping[str, Callable[..., Any]]
    """Stage name -> callable; also, optionally, `experts_vjp` (problem, params, x, routing, dy) -> {name: gradient}."""
    supports: Callable[[Problem], Support] = always
    """Whether this problem can run, on a machine where `available` is ok; a plain bool is taken for a Support."""
    available: Callable[[], Support] = anywhere
    """Whether this machine can run it at all."""
    host_sync: Callable[[Problem], str] = on_device
    """Why this problem copies group sizes to the host, where only some problems do; the trait says it of all."""
    traits: frozenset[str] = frozenset()
    summary: str = ""
    composed: frozenset[str] = field(default=frozenset())
    """Stages that `registry.complete` filled in from the baseline."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", MappingProxyType(dict(self.stages)))
        object.__setattr__(self, "supports", _saying_support(self.supports, f"{self.name}'s supports"))
        object.__setattr__(self, "available", _saying_support(self.available, f"{self.name}'s available"))
        if unknown := set(self.stages) - set(STAGES) - {"experts_vjp"}:
            raise InvalidInput(f"{self.name} offers {sorted(unknown)}; accepted: {', '.join(STAGES)}, experts_vjp")
        if unknown := self.traits - set(TRAITS):
            raise InvalidInput(f"{self.name} claims {sorted(unknown)}; accepted: {', '.join(TRAITS)}")

    def offers(self, stage: str) -> bool:
        """Whether the stage is there, own or composed."""
        return stage in self.stages

    def stage(self, name: str) -> Callable[..., Any]:
        """The stage's function; raises Unsupported when it is not offered."""
        if name not in self.stages:
            raise Unsupported(f"{self.name} offers no {name}; it offers {', '.join(self.stages)}")
        return self.stages[name]

    def can_run(self, problem: Problem) -> Support:
        """`available` and `supports` in one answer."""
        here = self.available()
        return self.supports(problem) if here else here


def _saying_support(fn: Callable[..., Any], what: str) -> Callable[..., Support]:
    """`fn` with a bool made a Support; what is neither is a no that says so."""
    if fn is always or fn is anywhere or hasattr(fn, "_says_support"):
        return fn

    @functools.wraps(fn, updated=())
    def says(*args: Any) -> Support:
        answer = fn(*args)
        if isinstance(answer, Support):
            return answer
        if isinstance(answer, bool) or type(answer).__name__ in ("bool", "bool_"):  # NumPy's own bool included
            return Support(bool(answer), "" if answer else f"{what} says no")
        return Support(False, f"{what} returned a {type(answer).__name__}; accepted: a bool or dropless.parity.Support")

    says._says_support = True  # type: ignore[attr-defined]
    return says
