"""A small set of problems in which every pair of settings that can meet does meet.

Most faults of a layer need one setting, or two together: an odd width with bfloat16, groups with a selection bias. Trying
all combinations is out of reach; a pairwise covering array tries all pairs in a few dozen problems. Every feasible K
meets every E exactly. Elsewhere E = 1, 2, 3, 8 count as one level, and so do K = 15, 16, 17: with five widths, all pairs
of the single values would take at least 48 problems, and these kinds of faults do not tell the members apart.

The search is seeded, so the problems are the same everywhere, and a failing one can be named by its index.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from .problem import Clamp, Experts, Problem, Router

FACTORS: dict[str, tuple[Any, ...]] = {
    "E": (1, 2, 3, 8, 60, 128, 160, 257),
    "K": (1, 2, 8, 15, 16, 17, "E"),
    "D": (33, 96, 160, 192, 320),
    "F": (33, 96, 160, 192, 320),
    "groups": ("none", "one of two", "two of four"),
    "activation": ("silu", "gelu_tanh", "gelu_erf", "relu2"),
    "form": ("gated", "ungated", "clamp"),
    "dtype": ("bfloat16", "float16", "float32"),
    "score": ("softmax", "softmax after", "sigmoid", "sqrtsoftplus"),
    "normalize": (False, True),
    "router_bias": ("none", "gate", "selection", "both"),
    "scaling": (1.0, 2.5),
    "logits_dtype": ("float32", "activation"),
    "expert_bias": ("none", "wi", "wo", "both"),
    "placement": ("late", "early"),
    "shared": (False, True),
}
"""Setting -> its levels. K "E" is top-k of all experts."""

MOST = 40
"""Problems in the array."""

Level = tuple[str, Any]
Pair = tuple[Level, Level]


def covering_problems() -> tuple[Problem, ...]:
    """The covering array as problems; index i means the same problem as long as this file does not change."""
    return tuple(to_problem(row) for row in covering_rows())


def tiny_problems() -> tuple[Problem, ...]:
    """Five small, unlike problems for quick runs; together they have every dtype, score, placement and form."""
    return tuple(to_problem(_PLAIN | row) for row in _TINY)


@functools.cache
def covering_rows() -> tuple[Mapping[str, Any], ...]:
    """The array: each row gives every factor a level, and every pair of `feasible_pairs` is in some row."""
    rng = random.Random(0)
    rows = [_PLAIN | {"E": E, "K": K} for E, K in _sizes()]
    # A level met by four sizes only cannot meet five widths: K = 8 of 8 experts counts as all of them.
    rows += [_PLAIN | {"E": E, "K": K} for E, K in ((60, 8), (160, 8), (8, 2))]
    counts = dict.fromkeys(feasible_pairs(), 0)
    for row in rows:
        for pair in _pairs(row):
            counts[pair] += 1
    missing = sum(n == 0 for n in counts.values())
    free = [name for name in FACTORS if name not in ("E", "K")]
    while missing:
        row, name = rows[rng.randrange(len(rows))], free[rng.randrange(len(free))]
        level = FACTORS[name][rng.randrange(len(FACTORS[name]))]
        changed = row | {name: level}
        if level == row[name] or not _valid(changed):
            continue
        lost, won = _pairs_with(row, name), _pairs_with(changed, name)
        change = sum(counts[p] == 1 for p in lost) - sum(counts[p] == 0 for p in won)
        # A move that loses nothing is taken; one that loses a pair only now and then, to leave a dead end.
        if change <= 0 or (change == 1 and rng.random() < 0.002):
            for pair in lost:
                counts[pair] -= 1
            for pair in won:
                counts[pair] += 1
            row[name] = level
            missing += change
    return tuple(rows)


@functools.cache
def feasible_pairs() -> tuple[Pair, ...]:
    """Every pair of levels of two factors, but E with K, that some valid, affordable problem contains."""
    found: dict[Pair, None] = {}
    sizes: tuple[str, ...] = ("E", "K", "D", "F", "groups")
    others = [name for name in FACTORS if name not in sizes]
    for levels in itertools.product(*(FACTORS[name] for name in sizes)):
        row: dict[str, Any] = dict(zip(sizes, levels, strict=True))
        if _valid(_PLAIN | row):
            found.update(dict.fromkeys(_pairs(row)))
    # The other settings and the sizes do not constrain each other.
    seen = dict.fromkeys(level for pair in found for level in pair)
    for name in others:
        found.update(dict.fromkeys((a, (name, level)) for a in seen for level in FACTORS[name]))
    for a, b in itertools.combinations(others, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            if _valid(_PLAIN | {a: x, b: y}):
                found[((a, x), (b, y))] = None
    return tuple(found)


def to_problem(row: Mapping[str, Any]) -> Problem:
    """The problem that a row of levels stands for; raises InvalidInput when it stands for none."""
    E = row["E"]
    K = E if row["K"] == "E" else row["K"]
    groups, group_topk = _GROUPS[row["groups"]]
    score, _, after = row["score"].partition(" ")
    return Problem(
        T=_tokens(K),
        K=K,
        E=E,
        D=row["D"],
        F=row["F"],
        dtype=row["dtype"],
        router=Router(
            score=score,
            softmax_order="after" if after else "before",
            normalize=row["normalize"],
            norm_eps=1e-20 if row["normalize"] else 0.0,
            groups=groups,
            group_topk=group_topk,
            group_score_topk=2 if groups > 1 else 1,
            scaling=row["scaling"],
            selection_bias=row["router_bias"] in ("selection", "both"),
            gate_bias=row["router_bias"] in ("gate", "both"),
            logits_dtype=row["logits_dtype"],
        ),
        experts=Experts(
            gated=row["form"] != "ungated",
            activation=row["activation"],
            clamp=Clamp() if row["form"] == "clamp" else None,
            wi_bias=row["expert_bias"] in ("wi", "both"),
            wo_bias=row["expert_bias"] in ("wo", "both"),
            shared_F=33 if row["shared"] else 0,
            weight_placement=row["placement"],
        ),
    )


_GROUPS = {"none": (1, 1), "one of two": (2, 1), "two of four": (4, 2)}

_PLAIN: dict[str, Any] = {name: levels[0] for name, levels in FACTORS.items()}

_TINY: tuple[dict[str, Any], ...] = (
    {"E": 8, "K": 2, "dtype": "float32", "normalize": True},
    {"E": 3, "K": "E", "form": "clamp", "score": "softmax after", "router_bias": "gate", "expert_bias": "both"},
    {"E": 8, "K": 2, "dtype": "float32", "score": "sigmoid", "router_bias": "selection", "groups": "two of four"}
    | {"normalize": True, "scaling": 2.5, "shared": True, "activation": "gelu_tanh"},
    {"E": 60, "K": 8, "D": 96, "placement": "early", "logits_dtype": "activation", "activation": "gelu_erf"},
    {"E": 2, "K": 1, "F": 96, "dtype": "float16", "form": "ungated", "activation": "relu2", "score": "sqrtsoftplus"}
    | {"expert_bias": "both"},
)


def _sizes() -> list[tuple[int, int | str]]:
    """Every top-k of every number of experts, once."""
    return [(E, K) for E in FACTORS["E"] for K in FACTORS["K"] if K == "E" or K < E]


def _tokens(K: int) -> int:
    """Few tokens keep running cheap, and leave experts idle; fewer still when each visits hundreds of experts."""
    return 24 if K <= 17 else 3


def _valid(row: Mapping[str, Any]) -> bool:
    E, D, F = row["E"], row["D"], row["F"]
    K = E if row["K"] == "E" else row["K"]
    groups, group_topk = _GROUPS[row["groups"]]
    grouped = groups == 1 or (E % groups == 0 and E >= 2 * groups and K <= group_topk * E // groups)
    clamped = row["form"] != "clamp" or row["activation"] == "silu"
    # Kernels up to 12 M numbers, and routed rows that take the per-token oracle a second or two.
    affordable = 3 * E * D * F <= 12e6 and _tokens(K) * K * D * F <= 20e6
    return K <= E and grouped and clamped and affordable


def _pairs(row: Mapping[str, Any]) -> Iterator[Pair]:
    # E with K is not searched: the rows begin with every size.
    for a, b in itertools.combinations(row, 2):
        if (a, b) != ("E", "K"):
            yield (a, _merged(row, a)), (b, _merged(row, b))


def _pairs_with(row: Mapping[str, Any], name: str) -> list[Pair]:
    """The pairs of a row that `name`, which is not E or K, is part of."""
    mine = (name, row[name])
    place = _PLACE[name]
    return [
        ((other, _merged(row, other)), mine) if _PLACE[other] < place else (mine, (other, _merged(row, other)))
        for other in FACTORS
        if other != name
    ]


_PLACE = {name: i for i, name in enumerate(FACTORS)}


def _merged(row: Mapping[str, Any], name: str) -> Any:
    if name == "E":
        return "1 to 8" if row["E"] <= 8 else row["E"]
    if name == "K":
        K = "E" if row["K"] == row["E"] else row["K"]
        return "15 to 17" if K in (15, 16, 17) else K
    return row[name]
