"""Routings that ranks meet and one device does not, and rows that say where they came from.

A routing here is ids [T, K] with the tokens in order on W ranks. Each family is a public fault's trigger.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Float, Int

from .draws import NUMPY_DTYPES
from .placement import token_ranks
from .problem import Problem

MOST_RANKS = 4
"""Ranks that a law takes where the problem names no mesh: enough for a transposed size matrix to differ."""


def usual_ranks(problem: Problem) -> int:
    """The ranks of the problem's mesh; without one as many as divide the experts, up to the devices here and 4."""
    if problem.mesh is not None:
        return token_ranks(problem.mesh)
    most = min(jax.device_count(), MOST_RANKS, problem.E)
    return max(n for n in range(1, most + 1) if problem.E % n == 0)


def rank_routings(problem: Problem, ranks: int, seed: int = 0) -> dict[str, Int[np.ndarray, "T K"]]:
    """Name -> ids, each for the problem's T, which `ranks` must divide."""
    rng = np.random.default_rng(seed)
    ep = ranks if problem.mesh is None else problem.mesh.ep
    shape = _Shape(problem.T, problem.K, problem.E, ranks, ep)
    return {name: make(shape, rng).astype(np.int32) for name, make in FAMILIES.items()}


class _Shape:
    def __init__(self, T: int, K: int, E: int, ranks: int, ep: int):
        self.T, self.K, self.E, self.ranks, self.ep = T, K, E, ranks, ep
        self.local, self.t = E // ep, T // ranks

    def place(self) -> np.ndarray:
        """Each token's rank on its expert axis."""
        return np.arange(self.T) // self.t % self.ep


def _among(rng: np.random.Generator, s: _Shape, allowed: np.ndarray) -> np.ndarray:
    """K distinct experts of allowed[t] for each token; -1 where there are fewer."""
    score = np.where(allowed, rng.random(allowed.shape), -1.0)
    order = np.argsort(-score, axis=1)[:, : s.K]
    return np.where(np.take_along_axis(score, order, 1) >= 0, order, -1)


def _experts_of(s: _Shape, rank: np.ndarray) -> np.ndarray:
    return np.arange(s.E) // s.local == rank[:, None]


def _random(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    return _among(rng, s, np.ones((s.T, s.E), bool))


def _one_rank(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """All tokens to the last rank: one full column of the size matrix, the rest idle."""
    return _among(rng, s, _experts_of(s, np.full(s.T, s.ep - 1)))


def _idle_rank(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """Nothing to rank 0."""
    return _among(rng, s, ~_experts_of(s, np.zeros(s.T, int)) | (s.ep == 1))


def _silent_rank(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """Rank 0 has no tokens of its own but receives."""
    ids = _random(s, rng)
    ids[s.place() == 0] = -1
    return ids


def _full_row(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """Only rank 0 sends, and to every expert in turn: one full row of the size matrix among zeros."""
    ids = (np.arange(s.T)[:, None] * s.K + np.arange(s.K)) % s.E
    ids[s.place() != 0] = -1
    return ids


def _never_local(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """No token stays on its rank."""
    return _among(rng, s, ~_experts_of(s, s.place()) | (s.ep == 1))


def _only_local(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """Every token stays on its rank: a diagonal size matrix."""
    return _among(rng, s, _experts_of(s, s.place()))


def _uneven(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """Ranks with different numbers of real tokens (0, 1, 2, ... up to all), each padded with slots of -1."""
    ids = _random(s, rng)
    real = (np.arange(s.ranks) * 3 + (s.ranks == 1)) % (s.t + 1)
    ids[np.arange(s.T) % s.t >= real[np.arange(s.T) // s.t]] = -1
    return ids


def _nearly_identical(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """A few random rows; all others name the same experts."""
    ids = np.tile(rng.permutation(s.E)[: s.K], (s.T, 1))
    few = rng.permutation(s.T)[: max(s.T // 8, 1)]
    ids[few] = _random(s, rng)[few]
    return ids


def _holes(s: _Shape, rng: np.random.Generator) -> np.ndarray:
    """Single slots of -1 among real ones."""
    ids = _random(s, rng)
    ids[rng.random(ids.shape) < 0.4] = -1
    return ids


FAMILIES: dict[str, Callable[[_Shape, np.random.Generator], np.ndarray]] = {
    "random": _random,
    "one rank": _one_rank,
    "idle rank": _idle_rank,
    "silent rank": _silent_rank,
    "full row": _full_row,
    "never local": _never_local,
    "only local": _only_local,
    "uneven": _uneven,
    "nearly identical": _nearly_identical,
    "holes": _holes,
}
"""Name -> (shape, random numbers) -> ids."""


def token_payload(T: int, D: int) -> Float[np.ndarray, "T D"] | None:
    """Rows of +1 and -1 that spell the token's number in binary: exact in every dtype, and different for every token.

    None when D columns cannot tell T tokens apart.
    """
    bits = max(int(T).bit_length(), 1)
    if bits > D:
        return None
    digits = (np.arange(1, T + 1)[:, None] >> np.arange(D).clip(max=62)[None]) & 1
    return (1 - 2 * digits * (np.arange(D) < bits)).astype(np.float64)


def tokens_of(rows: np.ndarray, T: int) -> Int[np.ndarray, " N"]:
    """The token that each row of a payload names; -1 for a row that spells none."""
    bits = max(int(T).bit_length(), 1)
    values = np.asarray(rows).astype(np.float64)
    spelled = (np.abs(values) == 1).all(1) & (values[:, bits:] == 1).all(1)
    number = ((values[:, :bits] < 0) * (1 << np.arange(bits))).sum(1) - 1
    return np.where(spelled & (number >= 0) & (number < T), number, -1)


def stored(problem: Problem, values: np.ndarray) -> np.ndarray:
    """Values in the problem's storage dtype."""
    return np.asarray(values).astype(NUMPY_DTYPES[problem.dtype])
