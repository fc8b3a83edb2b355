"""Named routing shapes deliver the skew that they name, or decline."""

import numpy as np
import pytest
from dropless.parity.patterns import PATTERNS, TILES, ids_from_counts, routing_ids
from dropless.parity.problem import InvalidInput

SHAPES = [(32, 2, 8), (512, 8, 128), (5, 1, 1), (3, 17, 17), (40, 16, 60), (7, 2, 3), (1, 1, 257), (24, 257, 257)]


def loads(ids, E):
    return np.bincount(ids.ravel(), minlength=E)


@pytest.mark.parametrize("T, K, E", SHAPES)
@pytest.mark.parametrize("name", PATTERNS)
def test_ids_are_distinct_or_the_pattern_declines(name, T, K, E):
    try:
        ids = routing_ids(name, T, K, E, seed=1)
    except InvalidInput as declined:
        assert "accepted:" in str(declined)
        assert E == K or name.startswith("tile"), f"{name} declined {T, K, E}: {declined}"
        return
    assert ids.dtype == np.int32 and ids.shape == (T, K)
    assert ids.min() >= 0 and ids.max() < E
    assert all(len(set(row)) == K for row in ids.tolist())


@pytest.mark.parametrize("name", PATTERNS)
def test_no_token_has_no_ids(name):
    assert routing_ids(name, 0, 2, 8).shape == (0, 2)


def test_balanced_differs_by_one_row_at_most():
    for T, K, E in SHAPES:
        assert np.ptp(loads(routing_ids("balanced", T, K, E), E)) <= 1


def test_zipf_follows_its_exponent():
    T, E = 20_000, 16
    for exponent in (0.0, 0.5, 1.0, 2.0):
        counts = np.sort(loads(routing_ids("zipf", T, 1, E, seed=3, exponent=exponent), E))[::-1]
        p = np.arange(1, E + 1) ** -exponent
        p /= p.sum()
        sigma = np.sqrt(T * p * (1 - p))
        # Five standard deviations leave room for sorting, which moves experts of like chance past each other.
        assert (np.abs(counts - T * p) < 5 * sigma).all(), exponent


def test_zipf_of_several_experts_keeps_the_order_and_the_bound():
    ids = routing_ids("zipf", 4096, 8, 128, seed=0)
    counts = np.sort(loads(ids, 128))[::-1]
    assert counts[0] <= 4096 and counts[0] > 8 * counts[64] > 0


def test_one_hot_expert_serves_three_quarters_and_the_rest_is_even():
    counts = np.sort(loads(routing_ids("one_hot", 512, 2, 8), 8))
    assert counts[-1] == 384 and np.ptp(counts[:-1]) <= 1


@pytest.mark.parametrize("name", ["half_idle", "alternating_empty"])
def test_idle_patterns_leave_half_of_the_experts_idle(name):
    counts = loads(routing_ids(name, 512, 8, 127), 127)
    assert (counts == 0).sum() == 63
    assert np.ptp(counts[counts > 0]) <= 1
    if name == "alternating_empty":
        assert (counts[1::2] == 0).all()


@pytest.mark.parametrize("name, offset", [("tile_minus_1", -1), ("tile", 0), ("tile_plus_1", 1)])
@pytest.mark.parametrize("T, K, E", [(32, 2, 8), (512, 8, 128), (40, 16, 60), (8192, 8, 256), (640, 1, 4)])
def test_tile_patterns_put_all_but_one_busy_expert_at_the_edge(name, offset, T, K, E):
    counts = loads(routing_ids(name, T, K, E), E)
    busy = counts[counts > 0]
    assert any(((busy - offset) % tile == 0).sum() >= len(busy) - 1 for tile in TILES)
    assert len(busy) >= 2 and busy.max() <= T


def test_a_tile_can_be_named():
    counts = loads(routing_ids("tile_plus_1", 512, 2, 8, tile=24), 8)
    assert ((counts - 1) % 24 == 0).sum() >= 7
    with pytest.raises(InvalidInput, match="48 rows"):
        routing_ids("tile", 32, 2, 8, tile=48)


def test_one_row_each():
    assert sorted(loads(routing_ids("one_row_each", 4, 2, 8), 8)) == [1] * 8
    counts = loads(routing_ids("one_row_each", 64, 2, 8), 8)
    assert (counts == 1).sum() == 6
    assert loads(routing_ids("one_row_each", 3, 1, 8), 8).max() == 1


def test_all_to_one_gives_every_token_the_same_experts():
    ids = routing_ids("all_to_one", 64, 3, 8)
    assert len({tuple(sorted(row)) for row in ids.tolist()}) == 1


def test_ties_give_the_lower_of_each_pair_first():
    ids = routing_ids("ties", 64, 3, 7)
    for row in ids.tolist():
        for expert in row:
            assert expert % 2 == 0 or expert - 1 in row


def test_counts_are_delivered_exactly():
    counts = [5, 0, 7, 7, 1, 0, 0, 8]
    ids = ids_from_counts(counts, T=14, K=2)
    assert loads(ids, 8).tolist() == counts
    assert all(len(set(row)) == 2 for row in ids.tolist())
    with pytest.raises(InvalidInput, match="sum to 28"):
        ids_from_counts(counts, T=13, K=2)
    with pytest.raises(InvalidInput, match="0 to T, 4"):
        ids_from_counts([5, 3], T=4, K=2)


def test_seeds_repeat_and_differ():
    for name in PATTERNS:
        same = [routing_ids(name, 512, 2, 8, seed=5) for _ in range(2)]
        assert np.array_equal(*same)
    assert not np.array_equal(routing_ids("zipf", 512, 2, 8, seed=5), routing_ids("zipf", 512, 2, 8, seed=6))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: routing_ids("zopf", 8, 2, 8), "skew is 'zopf'; accepted: balanced, zipf"),
        (lambda: routing_ids("zipf", 8, 9, 8), "top-k is 9; accepted: 1 to the number of experts, 8"),
        (lambda: routing_ids("zipf", 8, 0, 8), "top-k is 0"),
        (lambda: routing_ids("zipf", 8, 2, 8, exponent=-1.0), "exponent is -1.0"),
        (lambda: routing_ids("zipf", 8, 2, 8, exponent=float("nan")), "exponent is nan"),
        (lambda: routing_ids("zipf", -1, 2, 8), "T is -1"),
        (lambda: routing_ids("half_idle", 8, 7, 8), "top-k up to 4"),
        (lambda: routing_ids("one_row_each", 8, 8, 8), "9 experts or more"),
    ],
)
def test_errors_name_the_value_and_what_is_accepted(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()
