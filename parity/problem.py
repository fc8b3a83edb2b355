"""The contract's nouns: what a layer is asked to compute, and what it is given and gives back.

Axis letters, everywhere:

| letter | meaning                       | letter | meaning                       |
|--------|-------------------------------|--------|-------------------------------|
| T      | tokens                        | D      | model width                   |
| K      | experts per token (top-k)     | F      | expert width                  |
| E      | experts (e: local experts)    | W      | expert-parallel ranks         |
| R      | routed rows, at most T*K      | P      | padded rows                   |

K never means a contraction length. Everything in a `Problem` is static and hashable; raggedness is data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jaxtyping import Array, Float, Int

CONTRACT = 1
"""Version of the meaning of everything in this file; every record carries it."""

DTYPES = ("bfloat16", "float16", "float32")
PRECISIONS = ("highest", "tf32")
SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "relu2")
RECIPES = ("none", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4")


class InvalidInput(ValueError):
    """The caller's mistake, in one line that names the value and what would be accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How scores become a choice of experts and their weights; the weights are always float32."""

    score: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    """Turns logits into scores; sqrtsoftplus is sqrt(log(1 + exp(logit)))."""
    softmax_order: Literal["before", "after"] = "before"
    """Softmax over all E logits before the choice, or over the chosen K after it (then logits are what is ranked)."""
    normalize: bool = False
    """Divide the chosen weights by (their sum + norm_eps)."""
    norm_eps: float = 0.0
    groups: int = 1
    """Experts form this many equal, contiguous groups; 1 means no groups."""
    group_topk: int = 1
    """Groups that stay eligible; experts of the others are ranked at -inf."""
    group_score_topk: int = 1
    """How many best (biased) scores of a group are summed to make the group's score."""
    scaling: float = 1.0
    """Multiplies every weight, whether or not they were normalised."""
    selection_bias: bool = False
    """`Params.expert_bias` is added to the scores for ranking (groups too), and never enters a weight."""
    gate_bias: bool = False
    """`Params.gate_bias` is added to the logits."""
    logits_dtype: Literal["float32", "activation"] = "float32"
    """float32: operands are widened before the product. activation: the product is rounded to x's dtype, then widened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp:
    """gpt-oss's clamped SwiGLU: g = min(gate, limit), u = clip(up, -limit, limit), h = g * sigmoid(alpha*g) * (u + offset)."""

    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """What one expert computes: h = act(gate) * up (gated) or act(pre), y = h @ wo."""

    gated: bool = True
    """wi is [E, D, 2F], gate half first, then up half; otherwise [E, D, F]."""
    activation: Literal["silu", "gelu_tanh", "gelu_erf", "relu2"] = "silu"
    clamp: Clamp | None = None
    """Needs gated=True and activation="silu"."""
    wi_bias: bool = False
    wo_bias: bool = False
    """An expert's output is h @ wo + wo_bias, and the routing weight multiplies all of it, in both placements."""
    shared_F: int = 0
    """Width of a shared expert that every token visits with weight 1 (same activation, no bias); 0 for none."""
    weight_placement: Literal["late", "early"] = "late"
    """Weight the expert's output (late) or its h before wo (early): equal in exact arithmetic, other roundings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices as a named grid; tokens are split over every axis but the replicated ones, experts over `ep_axis`."""

    axes: tuple[tuple[str, int], ...]
    ep_axis: str
    replicated: tuple[str, ...] = ()

    @property
    def ep(self) -> int:
        """Number of expert-parallel ranks."""
        return dict(self.axes)[self.ep_axis]

    @property
    def devices(self) -> int:
        """Number of devices in the grid."""
        n = 1
        for _, size in self.axes:
            n *= size
        return n


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One dropless MoE layer at one static size: all that a compiler may specialise on."""

    T: int
    K: int
    E: int
    D: int
    F: int
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Storage dtype of x, y, the kernels and biases (expert_bias is always float32). Accumulators are float32."""
    precision: Literal["highest", "tf32"] = "highest"
    """Of float32 products; tf32 is judged with its own unit roundoff."""
    router: Router = Router()
    experts: Experts = Experts()
    recipe: str = "none"
    """Quantisation of the expert GEMMs' operands."""
    capacity_factor: float | None = None
    """None is dropless; otherwise an expert holds ceil(capacity_factor * T * K / E) rows."""
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def routed_rows(self) -> int:
        """T*K, the largest possible R."""
        return self.T * self.K

    def padded_rows(self, align: int = 1) -> int:
        """The smallest static P that holds every routing when each group starts at a multiple of `align`."""
        busy = min(self.E, self.routed_rows)
        rows = self.routed_rows + busy * (align - 1)
        return max(rows // align * align, align)

    @property
    def wi_columns(self) -> int:
        """2F when gated, else F."""
        return 2 * self.F if self.experts.gated else self.F

    def replace(self, **changes: Any) -> Problem:
        """A copy with other values; `router_*`/`experts_*` keywords reach into those groups."""
        own: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {"router": {}, "experts": {}}
        for key, value in changes.items():
            head, _, tail = key.partition("_")
            if head in nested and tail and key not in {f.name for f in dataclasses.fields(self)}:
                nested[head][tail] = value
            else:
                own[key] = value
        for head, values in nested.items():
            if values:
                own[head] = dataclasses.replace(own.get(head, getattr(self, head)), **values)
        return dataclasses.replace(self, **own)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a record."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Problem:
        """Inverse of `to_json`."""
        v = dict(values)
        v["router"] = Router(**v["router"])
        experts = dict(v["experts"])
        experts["clamp"] = Clamp(**experts["clamp"]) if experts["clamp"] else None
        v["experts"] = Experts(**experts)
        if v.get("mesh"):
            mesh = dict(v["mesh"])
            mesh["axes"] = tuple((str(n), int(s)) for n, s in mesh["axes"])
            mesh["replicated"] = tuple(mesh["replicated"])
            v["mesh"] = Mesh(**mesh)
        return cls(**v)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """A layer's parameters; absent ones are None. All in `Problem.dtype` but expert_bias, which is float32."""

    gate_kernel: Float[Array, "D E"]
    wi: Float[Array, "E D I"]
    """I is 2F when gated: gate half, then up half."""
    wo: Float[Array, "E F D"]
    gate_bias: Float[Array, " E"] | None = None
    """Enters the logits."""
    expert_bias: Float[Array, " E"] | None = None
    """Steers selection only; its gradient is exactly zero."""
    wi_bias: Float[Array, "E I"] | None = None
    wo_bias: Float[Array, "E D"] | None = None
    shared_wi: Float[Array, "D S"] | None = None
    """S is 2*shared_F when gated."""
    shared_wo: Float[Array, "G D"] | None = None

    def replace(self, **changes: Any) -> Params:
        """A copy with other leaves."""
        return dataclasses.replace(self, **changes)

    def need(self, name: str) -> Array:
        """The leaf called `name`; raises InvalidInput when it is absent."""
        leaf = getattr(self, name)
        if leaf is None:
            raise InvalidInput(
                f"params.{name} is None; the problem asks for it: accepted: an array, or a problem without it"
            )
        return leaf

    def named(self) -> dict[str, Array]:
        """The leaves that are present, by name."""
        return {f.name: leaf for f in dataclasses.fields(self) if (leaf := getattr(self, f.name)) is not None}


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token visits, with which weight.

    Ids of one token are distinct; -1 is no expert: it adds exactly 0 and its weight is ignored. The order of a
    token's slots carries no meaning. A token whose slots are all -1 may hold anything in x, NaN included.
    """

    topk_idx: Int[Array, "T K"]
    topk_weights: Float[Array, "T K"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Losses:
    """Auxiliary losses without coefficients, float32 scalars; T = 0 (or every token masked) gives 0.

    With c_e the real tokens' counts and P_te the probabilities (sigmoid and sqrtsoftplus scores divided by their sum):
    balance = E / (K T^2) * sum_e c_e * sum_t P_te; sequence = mean over segments of the same; z = mean_t logsumexp(logits_t)^2.
    """

    balance: Float[Array, ""]
    sequence: Float[Array, ""]
    z: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Output:
    """What `layer` returns; a layer that cannot report its routing, counts or losses leaves them None."""

    y: Float[Array, "T D"]
    losses: Losses | None = None
    routing: Routing | None = None
    group_sizes: Int[Array, " E"] | None = None


def _check(p: Problem) -> None:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise InvalidInput(message)

    def one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
        need(value in accepted, f"{name} is {value!r}; accepted: {', '.join(accepted)}")

    need(p.T >= 0, f"T is {p.T}; accepted: 0 or more tokens")
    for axis in "EDF":
        need(getattr(p, axis) >= 1, f"{axis} is {getattr(p, axis)}; accepted: 1 or more")
    need(1 <= p.K <= p.E, f"top-k is {p.K}; accepted: 1 to the number of experts, {p.E}")
    one_of("dtype", p.dtype, DTYPES)
    one_of("precision", p.precision, PRECISIONS)
    one_of("recipe", p.recipe, RECIPES)
    r = p.router
    one_of("score", r.score, SCORES)
    one_of("softmax_order", r.softmax_order, ("before", "after"))
    one_of("logits_dtype", r.logits_dtype, ("float32", "activation"))
    need(
        r.softmax_order == "before" or r.score == "softmax",
        f"softmax_order is 'after' with score {r.score!r}; accepted: score 'softmax'",
    )
    need(
        r.groups >= 1 and p.E % r.groups == 0,
        f"{p.E} experts do not divide into {r.groups} groups; accepted: a divisor of {p.E}",
    )
    need(
        1 <= r.group_topk <= r.groups,
        f"group_topk is {r.group_topk}; accepted: 1 to the number of groups, {r.groups}",
    )
    size = p.E // r.groups
    need(
        r.groups == 1 or p.K <= r.group_topk * size,
        f"top-k is {p.K} but {r.group_topk} groups of {size} experts stay; accepted: up to {r.group_topk * size}",
    )
    need(
        1 <= r.group_score_topk <= size,
        f"group_score_topk is {r.group_score_topk}; accepted: 1 to the group's size, {size}",
    )
    x = p.experts
    one_of("activation", x.activation, ACTIVATIONS)
    one_of("weight_placement", x.weight_placement, ("late", "early"))
    need(x.shared_F >= 0, f"shared_F is {x.shared_F}; accepted: 0 (none) or more")
    need(
        x.clamp is None or (x.gated and x.activation == "silu"),
        f"clamp with gated={x.gated}, activation {x.activation!r}; accepted: gated silu",
    )
    need(
        p.capacity_factor is None or p.capacity_factor > 0,
        f"capacity_factor is {p.capacity_factor}; accepted: None (dropless) or above 0",
    )
    if p.mesh is not None:
        names = [n for n, _ in p.mesh.axes]
        need(
            p.mesh.ep_axis in names,
            f"ep_axis is {p.mesh.ep_axis!r}; accepted: one of the mesh axes {', '.join(names)}",
        )
        need(
            p.E % p.mesh.ep == 0,
            f"{p.E} experts do not divide over {p.mesh.ep} ranks; accepted: a number of ranks that divides {p.E}",
        )
