"""Hypothesis strategies for ragged routings at one static size: shapes come from pytest, raggedness from here.

A strategy draws values for a fixed problem, so that an implementation compiles once and every example is data. Three
descriptions of a routing shrink to readable ones, each where another does not: runs of (experts, count) reach heavy
loads, token lists reach single tokens, balanced loads reach the even case. Holes and counts around a kernel's tile come
beside them. Numbers are drawn as a seed: floats do not help to shrink a routing.

The only module of `parity` that imports Hypothesis at its top. It registers no profile; `quiet_settings` makes a settings
object without a database, and `no_folder` keeps Hypothesis from leaving one in the user's project.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import hypothesis
import hypothesis.configuration
import numpy as np
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from .inputs import Case, make_case, make_weights
from .patterns import TILES
from .problem import Problem, Routing
from .spec import CaseSpec, freeze

NO_EXPERT = -1


def quiet_settings(*, max_examples: int = 20, shrink: bool = True) -> hypothesis.settings:
    """Settings that repeat themselves, have no deadline (compilation is slow) and leave no database behind."""
    if max_examples < 1:
        raise InvalidArgument(f"max_examples is {max_examples}; accepted: 1 or more")
    return hypothesis.settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        print_blob=False,
        phases=(Phase.explicit, Phase.generate, Phase.shrink) if shrink else (Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )


@contextlib.contextmanager
def no_folder() -> Iterator[None]:
    """Inside, Hypothesis writes to a folder that is removed at the end: without a database it still caches constants."""
    found = hypothesis.configuration.storage_directory(intent_to_write=False)
    home = getattr(found, "home_directory", None)
    before = Path(str(found)) if home is None else home  # older releases give the path itself
    with tempfile.TemporaryDirectory() as folder:
        hypothesis.configuration.set_hypothesis_home_dir(folder)
        try:
            yield
        finally:
            hypothesis.configuration.set_hypothesis_home_dir(before)


def seeds(*, max_seed: int = 2**32 - 1) -> st.SearchStrategy[int]:
    """Seeds for `make_case`, from 0 to `max_seed`. Shrinks towards 0."""
    if max_seed < 0:
        raise InvalidArgument(f"max_seed is {max_seed}; accepted: 0 or more")
    return st.integers(0, max_seed)


def group_sizes(*, experts: int, max_rows: int) -> st.SearchStrategy[np.ndarray]:
    """Int32 [experts], rows of each, at most `max_rows` in all; often at a tile's edge. Shrinks towards all zeros.

    Sizes that would exceed `max_rows` together are cut, the later ones first.
    """
    if experts < 1 or max_rows < 0:
        raise InvalidArgument(f"experts {experts}, max_rows {max_rows}; accepted: 1 or more, 0 or more")
    return st.lists(_counts(max_rows), min_size=experts, max_size=experts).map(lambda n: _cut(n, max_rows))


def expert_sets(*, E: int, K: int, min_size: int | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    """Ascending sets of distinct experts, K or from `min_size` to K of them. Shrinks towards experts 0, 1, 2, ...

    Large sets are neighbours that may wrap around, or scattered by a seed: drawing hundreds of distinct numbers one by
    one neither ends nor shrinks.
    """
    if not 1 <= K <= E:
        raise InvalidArgument(f"K is {K}; accepted: 1 to E, {E}")
    least = K if min_size is None else min_size
    if not 0 <= least <= K:
        raise InvalidArgument(f"min_size is {min_size}; accepted: 0 to K, {K}")
    if K <= 4 and 2 * K <= E:
        few = st.lists(st.integers(0, E - 1), min_size=least, max_size=K, unique=True)
        return few.map(lambda chosen: tuple(sorted(chosen)))
    size, first = st.integers(least, K).map(lambda n: least + K - n), st.integers(0, E - 1)
    neighbours = st.builds(lambda n, e: tuple(sorted((e + i) % E for i in range(n))), size, first)
    return neighbours | st.builds(_scattered, st.just(E), size, st.integers(0, 2**16))


def routings(*, T: int, K: int, E: int, no_expert: bool = False) -> st.SearchStrategy[np.ndarray]:
    """Ids int32 [T, K], distinct within a token; with `no_expert` slots and whole tokens may be -1.

    Shrinks towards no routed token (`no_expert`) or every token at experts 0 to K-1; a condition on the load shrinks to
    few experts with just enough rows.
    """
    if T < 0 or not 1 <= K <= E:
        raise InvalidArgument(f"T {T}, K {K}, E {E}; accepted: T 0 or more, K 1 to E")
    kinds = [runs(T=T, K=K, E=E, no_expert=no_expert), token_lists(T=T, K=K, E=E, no_expert=no_expert)]
    kinds.append(balanced(T=T, K=K, E=E, no_expert=no_expert))
    if K < E:
        kinds.append(holed(T=T, K=K, E=E, no_expert=no_expert))
        kinds.append(counted(T=T, K=K, E=E, no_expert=no_expert))
    return st.one_of(kinds)


def runs(*, T: int, K: int, E: int, no_expert: bool = False) -> st.SearchStrategy[np.ndarray]:
    """Runs of tokens that share their experts; tokens beyond the runs go nowhere (`no_expert`) or to experts 0 to K-1.

    Shrinks towards no run, then one short run at low experts.
    """
    sets = expert_sets(E=E, K=K, min_size=1 if no_expert else K)
    pairs = st.lists(st.tuples(sets, st.integers(1, max(T, 1))), max_size=4)
    rest = () if no_expert else tuple(range(K))

    def ids(drawn: list[tuple[tuple[int, ...], int]]) -> np.ndarray:
        tokens = [chosen for chosen, count in drawn for _ in range(count)][:T]
        return _stack(tokens + [rest] * (T - len(tokens)), K)

    return pairs.map(ids)


def token_lists(*, T: int, K: int, E: int, no_expert: bool = False) -> st.SearchStrategy[np.ndarray]:
    """One set of experts per token, for some first tokens; the others go nowhere (`no_expert`) or to experts 0 to K-1.

    Shrinks towards no token, then single tokens at low experts.
    """
    sets = expert_sets(E=E, K=K, min_size=0 if no_expert else K)
    rest = () if no_expert else tuple(range(K))
    return st.lists(sets, max_size=T).map(lambda tokens: _stack(tokens + [rest] * (T - len(tokens)), K))


def balanced(*, T: int, K: int, E: int, no_expert: bool = False) -> st.SearchStrategy[np.ndarray]:
    """Loads that differ by one row at most, from any first expert on; with `no_expert` over some first tokens only.

    Shrinks towards all T tokens, from expert 0 on.
    """
    real = st.integers(0, T).map(lambda n: T - n) if no_expert else st.just(T)

    def ids(tokens: int, first: int) -> np.ndarray:
        made = np.full((T, K), NO_EXPERT, np.int32)
        made[:tokens] = (first + np.arange(tokens * K).reshape(tokens, K)) % E
        return made

    return st.builds(ids, real, st.integers(0, E - 1))


def holed(*, T: int, K: int, E: int, no_expert: bool = False) -> st.SearchStrategy[np.ndarray]:
    """Even loads around idle experts: the first, the last, both, one, two neighbours, or all but K.

    Needs K below E; holes that would leave fewer than K experts are not drawn. With `no_expert` over some first tokens
    only. Shrinks towards no token (`no_expert`), and expert 0 idle.
    """
    if K >= E:
        raise InvalidArgument(f"K is {K} of {E} experts; accepted: fewer, since a hole needs an expert to spare")
    inner = st.integers(0, E - 1)
    holes = [st.just({0}), st.just({E - 1}), inner.map(lambda e: {e})]
    if E - K >= 2:
        holes += [st.just({0, E - 1}), st.integers(0, E - 2).map(lambda e: {e, e + 1})]
        holes.append(inner.map(lambda e: set(range(E)) - {(e + i) % E for i in range(K)}))

    def ids(idle: set[int], tokens: int) -> np.ndarray:
        busy = np.array(sorted(set(range(E)) - idle), np.int32)
        made = np.full((T, K), NO_EXPERT, np.int32)
        made[:tokens] = busy[np.arange(tokens * K).reshape(tokens, K) % len(busy)]
        return made

    return st.builds(ids, st.one_of(holes), st.integers(0, T) if no_expert else st.just(T))


def counted(*, T: int, K: int, E: int, no_expert: bool = False) -> st.SearchStrategy[np.ndarray]:
    """Loads drawn first, often 0, 1 or next to a tile of 8 to 128 rows, then dealt to the tokens.

    Slots that are left over go nowhere (`no_expert`) or to the last experts that have room. Shrinks towards nothing
    routed, or all of it at the last experts.
    """
    most = st.lists(_counts(T), min_size=min(E, 16), max_size=min(E, 16))

    def ids(counts: list[int]) -> np.ndarray:
        loads = np.zeros(E, np.int64)
        loads[: len(counts)] = _cut(counts, T * K)
        left = T * K - int(loads.sum())
        if no_expert:
            return _dealt(np.append(loads, left), T, K, E)
        for expert in reversed(range(E)):
            more = min(left, T - int(loads[expert]))
            loads[expert] += more
            left -= more
        return _dealt(loads, T, K, E)

    return most.map(ids)


def case_specs(problem: Problem, *, no_expert: bool = False) -> st.SearchStrategy[CaseSpec]:
    """A routing and a seed for one problem, as a literal that can be printed. Shrinks as `routings` and `seeds` do."""
    ids = routings(T=problem.T, K=problem.K, E=problem.E, no_expert=no_expert)
    return st.builds(lambda seed, topk_idx: CaseSpec(problem, seed, freeze(topk_idx)), _few_seeds(), ids)


def cases(
    problem: Problem, *, no_expert: bool = False, zero_weights: bool = False, nan_rows: bool = False
) -> st.SearchStrategy[Case]:
    """Cases of one problem. `zero_weights` sets some weights to exactly 0, `nan_rows` fills some rows of x with NaN.

    Shrinks towards the least routing, seed 0, no zero weight and no NaN row.
    """
    ids = routings(T=problem.T, K=problem.K, E=problem.E, no_expert=no_expert)
    zeros = _places(problem.T * problem.K if zero_weights else 0)
    rows = _places(problem.T if nan_rows else 0)

    def case(seed: int, topk_idx: np.ndarray, zero: Iterable[int], bad: Iterable[int]) -> Case:
        weights = make_weights(problem, topk_idx, seed)
        weights.reshape(-1)[list(zero)] = 0
        made = make_case(problem, seed=seed, routing=Routing(topk_idx, weights))  # pyright: ignore[reportArgumentType]
        return made.replace(x=made.x.at[np.array(sorted(bad), int)].set(np.nan)) if bad else made

    return st.builds(case, _few_seeds(), ids, zeros, rows)


def _few_seeds() -> st.SearchStrategy[int]:
    # Parameters are made anew for each seed, and kept: a few dozen serve as well as four billion.
    return seeds(max_seed=31)


def _places(n: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(0, n - 1), max_size=min(n, 4)) if n else st.just(set())


def _counts(most: int) -> st.SearchStrategy[int]:
    edges = {0, 1} | {size + d for tile in TILES for size in (tile, 2 * tile) for d in (-1, 0, 1, 3)}
    return st.integers(0, most) | st.sampled_from(sorted(n for n in edges if n <= most))


def _cut(counts: Sequence[int], most: int) -> np.ndarray:
    ends = np.minimum(np.cumsum(counts), most)
    return np.diff(ends, prepend=0).astype(np.int32)


def _scattered(E: int, n: int, seed: int) -> tuple[int, ...]:
    return tuple(sorted(np.random.Generator(np.random.Philox(seed)).permutation(E)[:n].tolist()))


def _stack(tokens: Sequence[Sequence[int]], K: int) -> np.ndarray:
    made = np.full((len(tokens), K), NO_EXPERT, np.int32)
    for row, chosen in zip(made, tokens, strict=True):
        row[: len(chosen)] = chosen
    return made


def _dealt(loads: np.ndarray, T: int, K: int, E: int) -> np.ndarray:
    """Expert after expert, token after token: an expert of at most T rows meets no token twice. Number E is no expert."""
    ids = np.repeat(np.arange(len(loads)), loads).astype(np.int32).reshape(K, T).T
    return np.where(ids == E, NO_EXPERT, ids).astype(np.int32)
