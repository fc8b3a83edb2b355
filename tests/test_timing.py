"""Timing: what is measured is what ran, on inputs that change, in rounds that alternate."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dropless.parity import InvalidInput, Problem, costs
from dropless.parity.timing import measure, prepare
from dropless.reference.capacity import rows_per_expert


def variants(n=3):
    return [(jnp.full((4,), float(i)),) for i in range(n)]


def test_every_call_gets_every_round_and_a_compile_time():
    calls = [prepare("double", lambda x: 2 * x, variants()), prepare("halve", lambda x: x / 2, variants())]
    measure(calls, rounds=6)
    for call in calls:
        assert len(call.wall_s) == 6
        assert min(call.wall_s) > 0
        assert call.compile_s > 0
        assert call.compiles == 1
        assert call.peak_bytes >= 32


@pytest.mark.parametrize("rounds", [1, 2, 3, 5, 6])
def test_last_outputs_are_those_of_variant_one(rounds):
    call = prepare("double", lambda x: 2 * x, variants())
    measure([call], rounds=rounds)
    variant, out = call.last
    assert variant == 1
    np.testing.assert_array_equal(out, np.full(4, 2.0, np.float32))


def test_repetitions_go_through_all_variants_and_rounds_alternate():
    seen = []

    def eager(name):
        return lambda x: seen.append((name, float(x[0]))) or x

    measure(
        [prepare("a", eager("a"), variants(), eager=True), prepare("b", eager("b"), variants(), eager=True)], rounds=4
    )
    timed = seen[-8:]
    assert {v for _, v in timed} == {0.0, 1.0, 2.0}
    assert [n for n, _ in timed] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_wall_time_covers_the_work():
    def slow(x):
        return jax.pure_callback(lambda v: (time.sleep(0.02), v)[1], jax.ShapeDtypeStruct((4,), jnp.float32), x)

    call = prepare("slow", slow, variants())
    measure([call], rounds=3)
    assert min(call.wall_s) >= 0.02


def test_a_slow_call_does_not_outlast_the_budget():
    calls = [
        prepare("slow", lambda x: (time.sleep(0.05), x)[1], variants(), eager=True),
        prepare("fast", lambda x: x, variants(), eager=True),
    ]
    measure(calls, budget_s=0.04, least=3, most=7)
    assert len(calls[0].wall_s) == 1
    assert len(calls[1].wall_s) == 7


def test_eager_calls_count_the_programs_they_build():
    call = prepare("shapes", lambda x: jnp.sum(x[: int(x[0]) + 1]), variants(), eager=True)
    measure([call], rounds=3)
    assert call.compiles >= 3


def test_nothing_to_time_is_an_error():
    with pytest.raises(InvalidInput, match="no inputs"):
        prepare("nothing", lambda x: x, [])


def test_useful_flops_count_real_rows_only():
    gated = Problem(T=8, K=2, E=4, D=16, F=32)
    assert costs.flops(gated, 10) == 6 * 10 * 16 * 32
    assert costs.flops(gated, 10, backward=True) == 3 * 6 * 10 * 16 * 32
    plain = gated.replace(experts_gated=False, experts_shared_F=8)
    assert costs.flops(plain, 10) == 4 * 10 * 16 * 32
    assert costs.flops(plain, 10, shared=True) == 4 * 8 * 16 * 8
    assert costs.cost(gated, "experts forward", 0).flops == 0


def test_padding_of_each_way_to_compute():
    problem = Problem(T=8, K=2, E=4, D=16, F=32)
    sizes = np.array([8, 5, 3, 0])
    assert costs.padded_rows(problem, "loop_and_pad", sizes) == 32
    assert costs.padded_rows(problem, "ragged_dot", sizes) == 64
    assert costs.padded_rows(problem, "capacity", sizes) == problem.E * rows_per_expert(problem)
    assert costs.padded_rows(problem, "capacity", sizes) == 16
    wide = Problem(T=64, K=2, E=4, D=16, F=32)
    rows = np.array([64, 40, 24, 0])
    assert rows.sum() <= costs.padded_rows(wide, "blocked", rows) <= 2 * rows.sum()  # a block is at least half full
    assert costs.padded_rows(problem, "te", sizes) == 16
    assert costs.imbalance(sizes) == 2.0
    assert costs.imbalance(np.zeros(4, int)) == 0.0
