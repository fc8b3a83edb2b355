"""Named routing shapes: which experts the tokens of a batch visit, from even load to one hot expert.

`routing_ids` draws the ids of one shape; `ids_from_counts` draws ids for any wanted load. Pure NumPy, so a routing is
the same bits everywhere. A token's ids are distinct, so no expert can hold more than T rows: a shape that cannot be
delivered at the given T, K, E declines with InvalidInput and says what would be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from .problem import InvalidInput

TILES = (128, 64, 32, 16, 8)
"""Row tiles of grouped GEMM kernels, largest first."""


def routing_ids(
    name: str,
    T: int,
    K: int,
    E: int,
    seed: int = 0,
    exponent: float = 1.0,
    tile: int | None = None,
) -> Int[np.ndarray, "T K"]:
    """The ids of one routing of shape `name`: int32, distinct within each token, none is -1.

    `exponent` is read by zipf only, `tile` by the tile shapes only (None: the largest of `TILES` that fits). The same
    arguments give the same bits. Raises InvalidInput for an unknown name, and when the shape cannot be delivered.
    """
    if name not in PATTERNS:
        raise InvalidInput(f"skew is {name!r}; accepted: {', '.join(PATTERNS)}")
    if not 1 <= K <= E:
        raise InvalidInput(f"top-k is {K}; accepted: 1 to the number of experts, {E}")
    if T < 0:
        raise InvalidInput(f"T is {T}; accepted: 0 or more tokens")
    rng = _rng(seed, name)
    if T == 0:
        return np.zeros((0, K), np.int32)
    return PATTERNS[name](rng, T, K, E, exponent=exponent, tile=tile)


def ids_from_counts(
    counts: Sequence[int] | Int[np.ndarray, " E"], T: int, K: int, seed: int = 0
) -> Int[np.ndarray, "T K"]:
    """Ids in which expert e holds exactly `counts[e]` rows: any load from 0 to T each, T*K in all, can be delivered.

    Expert after expert is dealt to the tokens in turn, so an expert meets a token twice only beyond T rows. Tokens and
    slots are then shuffled.
    """
    return _deal(_rng(seed, "counts"), np.asarray(counts, np.int64), T, K)


def _rng(seed: int, name: str) -> np.random.Generator:
    words = np.frombuffer(name.encode().ljust(16, b"\0")[:16], "<u4")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *words.tolist()])))


def _deal(rng: np.random.Generator, counts: np.ndarray, T: int, K: int) -> np.ndarray:
    if counts.size and (counts.min() < 0 or counts.max() > T):
        raise InvalidInput(f"group sizes reach from {counts.min()} to {counts.max()}; accepted: 0 to T, {T}")
    if counts.sum() != T * K:
        raise InvalidInput(f"group sizes sum to {counts.sum()}; accepted: T*K, {T * K}")
    # Dealing in a random order of experts varies which experts share a token.
    order = rng.permutation(len(counts))
    stream = np.repeat(order, counts[order]).astype(np.int32)
    ids = stream.reshape(K, T).T
    return rng.permuted(rng.permutation(ids, axis=0), axis=1)


def _balanced(rng: np.random.Generator, T: int, K: int, E: int, **_: object) -> np.ndarray:
    return _deal(rng, _even(rng, T * K, E), T, K)


def _zipf(rng: np.random.Generator, T: int, K: int, E: int, *, exponent: float, **_: object) -> np.ndarray:
    if not (np.isfinite(exponent) and exponent >= 0):
        raise InvalidInput(f"zipf exponent is {exponent}; accepted: a finite number, 0 (uniform) or more")
    log_p = -exponent * np.log(np.arange(1, E + 1))
    log_p = log_p[rng.permutation(E)]
    # The K largest of log p + Gumbel noise are K draws without replacement with probabilities p.
    keys = log_p + rng.gumbel(size=(T, E))
    ids = np.argpartition(-keys, K - 1, axis=1)[:, :K] if K < E else np.tile(np.arange(E), (T, 1))
    return rng.permuted(ids.astype(np.int32), axis=1)


def _one_hot(rng: np.random.Generator, T: int, K: int, E: int, **_: object) -> np.ndarray:
    hot = int(rng.integers(E))
    counts = np.zeros(E, np.int64)
    counts[hot] = T if K == E else -(-3 * T // 4)
    others = np.flatnonzero(np.arange(E) != hot)
    counts[others] = _even(rng, T * K - int(counts[hot]), E - 1)
    return _deal(rng, counts, T, K)


def _half_idle(rng: np.random.Generator, T: int, K: int, E: int, **_: object) -> np.ndarray:
    busy = (E + 1) // 2
    _need_idle("half_idle", K, E, busy)
    counts = np.zeros(E, np.int64)
    counts[rng.permutation(E)[:busy]] = _even(rng, T * K, busy)
    return _deal(rng, counts, T, K)


def _alternating_empty(rng: np.random.Generator, T: int, K: int, E: int, **_: object) -> np.ndarray:
    busy = (E + 1) // 2
    _need_idle("alternating_empty", K, E, busy)
    counts = np.zeros(E, np.int64)
    counts[::2] = _even(rng, T * K, busy)
    return _deal(rng, counts, T, K)


def _tile_edge(offset: int) -> Callable[..., np.ndarray]:
    def draw(rng: np.random.Generator, T: int, K: int, E: int, *, tile: int | None, **_: object) -> np.ndarray:
        if tile is not None and tile < 2:
            raise InvalidInput(f"tile is {tile}; accepted: 2 or more rows")
        for size in TILES if tile is None else (tile,):
            counts = _edge_counts(T, K, E, size, offset)
            if counts is not None:
                return _deal(rng, counts[rng.permutation(E)], T, K)
        wanted = f"a multiple of {tile or min(TILES)} rows {offset:+d}"
        raise InvalidInput(
            f"{T} tokens, top-k {K}, {E} experts leave no expert with {wanted}; accepted: more tokens or a smaller top-k"
        )

    return draw


def _edge_counts(T: int, K: int, E: int, tile: int, offset: int) -> np.ndarray | None:
    """Every busy expert but one holds a multiple of tile, plus offset; the last holds what is left. None: cannot be."""
    rows, edge = T * K, tile + offset
    counts = np.zeros(E, np.int64)
    if E == 1 or K == E:
        counts[:] = T
        return counts if T >= edge and (T - offset) % tile == 0 else None
    busy = min(E - 1, rows // edge)
    if edge > T or busy < min(2, E - 1):
        return None
    counts[:busy] = edge
    room = (T - edge) // tile
    # Rows beyond the last expert's fair share go, in whole tiles, to the experts on the edge.
    extra = max(0, -(-(rows - busy * edge - rows // E) // tile))
    extra = min(extra, room * busy, (rows - busy * edge) // tile)
    counts[:busy] += tile * (extra // busy)
    counts[: extra % busy] += tile
    counts[busy] = rows - counts.sum()
    return counts if 0 <= counts[busy] <= T else None


def _one_row_each(rng: np.random.Generator, T: int, K: int, E: int, **_: object) -> np.ndarray:
    counts = np.zeros(E, np.int64)
    order = rng.permutation(E)
    if T * K <= E:
        counts[order[: T * K]] = 1
    elif K < E:
        counts[order[K:]] = 1
        counts[order[:K]] = _even(rng, T * K - (E - K), K)
    else:
        raise InvalidInput(
            f"one_row_each has {E} experts for {T} tokens of top-k {K}; accepted: {K + 1} experts or more"
        )
    return _deal(rng, counts, T, K)


def _all_to_one(rng: np.random.Generator, T: int, K: int, E: int, **_: object) -> np.ndarray:
    chosen = rng.permutation(E)[:K].astype(np.int32)
    return rng.permuted(np.tile(chosen, (T, 1)), axis=1)


def _ties(rng: np.random.Generator, T: int, K: int, E: int, **_: object) -> np.ndarray:
    pairs = (E + 1) // 2
    order = np.argsort(rng.random((T, pairs)), axis=1)
    ranked = np.stack([2 * order, 2 * order + 1], axis=-1).reshape(T, 2 * pairs)
    # With an odd E the last pair has one member; the partner that does not exist is pushed behind every expert.
    exists = np.argsort(ranked >= E, axis=1, kind="stable")
    ranked = np.take_along_axis(ranked, exists, axis=1)
    return ranked[:, :K].astype(np.int32)


def _need_idle(name: str, K: int, E: int, busy: int) -> None:
    if E < 2 or busy < K:
        raise InvalidInput(
            f"{name} keeps {busy} of {E} experts busy, with top-k {K}; accepted: 2 experts or more and top-k up to {busy}"
        )


def _even(rng: np.random.Generator, rows: int, experts: int) -> np.ndarray:
    """`rows` over `experts` as evenly as integers allow, the surplus at random places."""
    if experts == 0:
        return np.zeros(0, np.int64)
    counts = np.full(experts, rows // experts, np.int64)
    counts[rng.permutation(experts)[: rows % experts]] += 1
    return counts


PATTERNS: dict[str, Callable[..., np.ndarray]] = {
    "balanced": _balanced,
    "zipf": _zipf,
    "one_hot": _one_hot,
    "half_idle": _half_idle,
    "alternating_empty": _alternating_empty,
    "tile_minus_1": _tile_edge(-1),
    "tile": _tile_edge(0),
    "tile_plus_1": _tile_edge(+1),
    "one_row_each": _one_row_each,
    "all_to_one": _all_to_one,
    "ties": _ties,
}
"""Name -> shape.

balanced: loads differ by at most one row. zipf: an expert's chance is 1/rank**exponent, ranks at random. one_hot: one
expert serves three quarters of the tokens, the others share the rest evenly. half_idle: half of the experts, at random,
are idle. alternating_empty: every odd expert is idle. tile_minus_1, tile, tile_plus_1: every busy expert but one holds a
multiple of a kernel's row tile, minus or plus one. one_row_each: one row per expert; rows beyond that go to K experts.
all_to_one: every token visits the same K experts. ties: experts 2j and 2j+1 have equal scores and the lower one wins.
"""
