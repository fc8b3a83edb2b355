"""Strategies draw what they promise, reach what faults need, and shrink to what a reader can use."""

import os
import subprocess
import sys
from random import Random

import hypothesis
import numpy as np
import pytest
from dropless.parity import strategies
from dropless.parity.patterns import TILES
from dropless.parity.problem import Problem
from dropless.parity.spec import parse_case
from dropless.parity.strategies import (
    balanced,
    case_specs,
    cases,
    counted,
    expert_sets,
    group_sizes,
    holed,
    no_folder,
    quiet_settings,
    routings,
    runs,
    seeds,
    token_lists,
)
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument, NoSuchExample

SHAPES = [(32, 2, 8), (24, 1, 1), (24, 3, 3), (24, 16, 60), (6, 257, 257), (1, 8, 128), (0, 2, 8)]
T, K, E = 32, 2, 8


def minimal(strategy, condition=lambda value: True, *, examples=2000):
    """The value that the strategy shrinks to under a condition."""
    with no_folder():
        settings = quiet_settings(max_examples=examples)
        return hypothesis.find(strategy, condition, settings=settings, random=Random(0))


def find_any(strategy, condition, *, examples=2000):
    """Some value that meets the condition; raises NoSuchExample when none is drawn."""
    with no_folder():
        settings = quiet_settings(max_examples=examples, shrink=False)
        return hypothesis.find(strategy, condition, settings=settings, random=Random(0))


def assert_all_examples(strategy, predicate, *, examples=25):
    """No drawn value breaks the predicate."""

    @quiet_settings(max_examples=examples)
    @hypothesis.given(strategy)
    def check(value):
        assert predicate(value), value

    with no_folder():
        check()


def drawn(strategy, examples):
    """Values as they are drawn, without a search for any."""
    values = []

    @quiet_settings(max_examples=examples)
    @hypothesis.given(strategy)
    def keep(value):
        values.append(value)

    with no_folder():
        keep()
    return values


def load(ids):
    return np.bincount(ids[ids >= 0], minlength=E)


def is_routing(ids, T, K, E, no_expert):
    real = [[e for e in row if e >= 0] for row in ids.tolist()]
    low = -1 if no_expert else 0
    return (
        ids.dtype == np.int32
        and ids.shape == (T, K)
        and (ids.size == 0 or (ids.min() >= low and ids.max() < E))
        and all(len(set(row)) == len(row) for row in real)
    )


@pytest.mark.parametrize("no_expert", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routings_are_always_routings(shape, no_expert):
    T, K, E = shape
    strategy = routings(T=T, K=K, E=E, no_expert=no_expert)
    assert_all_examples(strategy, lambda ids: is_routing(ids, T, K, E, no_expert))


@pytest.mark.parametrize("make", [runs, token_lists, balanced, holed, counted])
def test_each_kind_gives_routings(make):
    assert_all_examples(make(T=24, K=3, E=9, no_expert=True), lambda ids: is_routing(ids, 24, 3, 9, True))
    assert_all_examples(make(T=24, K=3, E=9), lambda ids: is_routing(ids, 24, 3, 9, False))


@pytest.mark.parametrize(
    "condition",
    [
        lambda n: n.max() == T and (n > 0).sum() == K,  # all to one set
        lambda n: n[0] == 0 and (n[1:] > 0).all(),  # a hole at the first expert
        lambda n: n[-1] == 0 and (n[:-1] > 0).all(),  # at the last
        lambda n: n[3] == n[4] == 0 and (n[[0, 1, 2, 5, 6, 7]] > 0).all(),  # at two neighbours
        lambda n: (n == n[0]).all(),  # all loads equal
        lambda n: (n > 0).all() and np.ptp(n) > 8,  # ragged, no hole
        lambda n: (n == 1).sum() >= 3,  # single rows
        *(lambda n, c=c: (n == c).any() for c in (7, 8, 9, 15, 16, 17, 31, 32)),  # counts around tiles
    ],
)
def test_routings_reach_what_faults_need(condition):
    find_any(routings(T=T, K=K, E=E), lambda ids: condition(load(ids)))


@pytest.mark.parametrize(
    "condition",
    [
        lambda ids: (ids < 0).all(),
        lambda ids: ((ids < 0).any(axis=1) & (ids >= 0).any(axis=1)).any(),  # one slot of a token
        lambda ids: (ids < 0).all(axis=1).any() and (ids >= 0).all(axis=1).any(),
    ],
)
def test_routings_reach_slots_without_an_expert(condition):
    find_any(routings(T=T, K=K, E=E, no_expert=True), condition)


def test_counts_around_every_tile_are_reached():
    seen = np.unique(drawn(group_sizes(experts=12, max_rows=1500), 300))
    assert not {tile + offset for tile in TILES for offset in (-1, 0, 1)} - set(seen.tolist())


def test_routings_shrink_to_what_was_promised():
    free, full = routings(T=T, K=K, E=E, no_expert=True), routings(T=T, K=K, E=E)
    assert (minimal(free) == -1).all()
    assert (minimal(full) == [0, 1]).all()
    heavy = load(minimal(free, lambda ids: load(ids).max() >= 17))
    assert heavy.max() == 17 and (heavy > 0).sum() <= K
    assert (load(minimal(full, lambda ids: np.ptp(load(ids)) == 0)) == T * K // E).all()


def test_each_kind_shrinks_as_documented():
    assert (minimal(runs(T=T, K=K, E=E, no_expert=True)) == -1).all()
    one = minimal(runs(T=T, K=K, E=E, no_expert=True), lambda ids: (ids >= 0).any())
    assert load(one).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    one = minimal(token_lists(T=T, K=K, E=E, no_expert=True), lambda ids: (ids == 5).any())
    assert load(one).sum() == 1
    assert (minimal(balanced(T=T, K=K, E=E, no_expert=True)) >= 0).all()
    assert (minimal(holed(T=T, K=K, E=E, no_expert=True)) == -1).all()
    assert load(minimal(holed(T=T, K=K, E=E)))[0] == 0
    assert (minimal(counted(T=T, K=K, E=E, no_expert=True)) == -1).all()
    assert load(minimal(counted(T=T, K=K, E=E))).tolist() == [0] * 6 + [T, T]


def test_group_sizes_shrink_to_zeros_and_fit():
    sizes = group_sizes(experts=6, max_rows=100)
    assert_all_examples(sizes, lambda n: n.shape == (6,) and n.min() >= 0 and n.sum() <= 100 and n.dtype == np.int32)
    assert (minimal(sizes) == 0).all()
    assert minimal(sizes, lambda n: n.sum() >= 17).sum() == 17


@pytest.mark.parametrize("E, K", [(8, 2), (8, 8), (257, 17), (257, 257), (1, 1)])
def test_expert_sets_are_sets(E, K):
    assert_all_examples(expert_sets(E=E, K=K), lambda s: len(set(s)) == K and 0 <= min(s) and max(s) < E)
    assert minimal(expert_sets(E=E, K=K)) == tuple(range(K))
    assert_all_examples(expert_sets(E=E, K=K, min_size=0), lambda s: len(set(s)) == len(s) <= K)
    find_any(expert_sets(E=E, K=K, min_size=0), lambda s: len(s) == 0)


def test_large_sets_need_not_be_neighbours():
    find_any(expert_sets(E=257, K=17), lambda s: max(np.diff(s)) > 2 and s[-1] - s[0] > 100)


PROBLEM = Problem(T=12, K=2, E=4, D=5, F=3)


def test_case_specs_print_and_read_back():
    assert_all_examples(case_specs(PROBLEM), lambda spec: parse_case(spec.literal()) == spec, examples=20)
    spec = minimal(case_specs(PROBLEM, no_expert=True))
    assert spec.seed == 0 and spec.topk_idx == ((-1, -1),) * 12


def test_cases_have_zero_weights_and_nan_rows_where_asked():
    def zero(case):
        return ((np.asarray(case.routing.topk_weights) == 0) & (np.asarray(case.routing.topk_idx) >= 0)).any()

    def nan(case):
        return np.isnan(np.asarray(case.x)).any()

    find_any(cases(PROBLEM, zero_weights=True), zero, examples=50)
    found = find_any(cases(PROBLEM, nan_rows=True), nan, examples=50)
    rows = np.isnan(np.asarray(found.x))
    assert (rows.all(axis=1) == rows.any(axis=1)).all()
    assert_all_examples(cases(PROBLEM), lambda case: not zero(case) and not nan(case), examples=20)
    least = minimal(cases(PROBLEM, no_expert=True, zero_weights=True, nan_rows=True), examples=50)
    assert least.seed == 0 and (np.asarray(least.routing.topk_idx) == -1).all() and not nan(least)


@pytest.mark.parametrize(
    "make",
    [
        lambda: seeds(max_seed=-1),
        lambda: group_sizes(experts=0, max_rows=5),
        lambda: group_sizes(experts=2, max_rows=-1),
        lambda: expert_sets(E=4, K=5),
        lambda: expert_sets(E=4, K=2, min_size=3),
        lambda: routings(T=-1, K=1, E=1),
        lambda: routings(T=1, K=0, E=1),
        lambda: holed(T=4, K=4, E=4),
        lambda: quiet_settings(max_examples=0),
    ],
)
def test_bad_bounds_are_named_at_once(make):
    with pytest.raises(InvalidArgument, match="accepted:"):
        make()


def test_bounds_are_keyword_only():
    for make in (
        seeds,
        group_sizes,
        expert_sets,
        routings,
        runs,
        token_lists,
        balanced,
        holed,
        counted,
        quiet_settings,
    ):
        with pytest.raises(TypeError):
            make(1)


def test_settings_leave_no_profile_and_no_folder(tmp_path):
    code = """
import hypothesis
from dropless.parity.strategies import no_folder, quiet_settings, routings
before = hypothesis.settings.default
@quiet_settings(max_examples=5)
@hypothesis.given(routings(T=8, K=2, E=4))
def draw(ids):
    pass
with no_folder():
    draw()
assert hypothesis.settings.default is before
assert quiet_settings().database is None and quiet_settings().deadline is None
assert hypothesis.configuration.storage_directory(intent_to_write=False).path.parent.samefile(".")
"""
    env = {k: v for k, v in os.environ.items() if k != "HYPOTHESIS_STORAGE_DIRECTORY"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_shrunk_value_comes_from_the_strategy_itself():
    """The helpers above see failures: a predicate that is false for some value must raise."""
    with pytest.raises(AssertionError):
        assert_all_examples(st.integers(0, 100), lambda n: n < 50)
    with pytest.raises(NoSuchExample):
        find_any(st.integers(0, 100), lambda n: n > 100, examples=50)
    assert strategies.NO_EXPERT == -1
