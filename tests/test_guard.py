"""The guard: quiet on noise, loud on a slower stage or a changed answer, clear about machines that differ."""

import copy
import math

import numpy as np
import pytest
from dropless.parity import InvalidInput, Problem, cli_guard, guard, records
from dropless.parity.records import FindingRecord, ResultRecord, TimingRecord

WHATS = ("permute forward", "grouped_gemm forward", "experts forward", "experts forward+backward")


def run(
    seed: int, *, noise: float = 0.05, slower: dict[str, float] | None = None, rounds: int = 40
) -> records.CaseRecord:
    """A measured case as a noisy machine gives it: slow rounds meet every call, and each call has its own spread."""
    rng = np.random.default_rng(seed)
    case = records.new_case("case", Problem(T=4, K=2, E=4, D=8, F=8))
    case.pattern = "zipf"
    moments = np.exp(rng.gamma(1.0, 0.3, rounds))
    for name, speed in (("loop_and_pad", 1.0), ("blocked", 0.2)):
        timings = []
        for i, what in enumerate(WHATS):
            factor = (slower or {}).get(what, 1.0) if name == "blocked" else 1.0
            times = 0.01 * (i + 1) * speed * factor * moments * np.exp(rng.normal(0, noise, rounds))
            timings.append(TimingRecord(what=what, compile_s=1.0, wall_s=times.tolist()))
        case.results.append(
            ResultRecord(
                implementation=name,
                verdict="agree",
                findings=[FindingRecord(tensor="y", ok=True, percent=30.0)],
                timings=timings,
            )
        )
    return case


def alarms(before: records.CaseRecord, seed: int, **changes) -> list[guard.Shift]:
    """A whole guard's decision: one measurement, and as many again as a suspicion asks for."""
    first = [s for s in guard.shifts(before, run(seed, **changes)) if s.suspicious]
    again = [
        s for i in range(guard.CONFIRMATIONS) for s in guard.shifts(before, run(seed + 10_000 * (i + 1), **changes))
    ]
    return [s for s in first if guard.confirmed(s, again)]


def test_noise_raises_no_alarm():
    assert sum(bool(alarms(run(seed), seed + 500)) for seed in range(200)) == 0


def test_a_slower_stage_is_caught_and_named():
    slower = {"grouped_gemm forward": 1.25}
    caught = [alarms(run(seed), seed + 500, slower=slower) for seed in range(100)]
    assert sum(any(s.what == "grouped_gemm forward" for s in found) for found in caught) >= 90
    assert all({s.what for s in found} <= set(slower) for found in caught)


def test_a_slow_moment_cancels_in_the_ratio():
    before, after = run(1, noise=0.0), run(2, noise=0.0)
    for shift in guard.shifts(before, after):
        assert math.isclose(shift.factor, 1.0), shift


def test_processor_time_catches_what_a_busy_machine_hides_from_wall_time():
    before, slow = run(1, noise=0.3), run(2, noise=0.3)
    for case, factor in ((before, 1.0), (slow, 1.25)):
        for result in case.results:
            for t in result.timings:
                steady = 0.01 * (factor if result.implementation == "blocked" else 1.0)
                t.cpu_s = [steady * (1 + 0.01 * (i % 3)) for i in range(len(t.wall_s))]
    found = guard.shifts(before, slow)
    assert {s.clock for s in found if s.suspicious} == {"cpu"}
    assert all(s.suspicious for s in found if s.clock == "cpu")


def test_faster_is_no_alarm():
    assert not alarms(run(1), 600, slower=dict.fromkeys(WHATS, 0.5))


def test_one_suspicion_alone_is_not_an_alarm():
    suspicious = guard.Shift("case", "blocked", "experts forward", "time", before=0.2, after=0.3, noise=0.01)
    calm = guard.Shift("case", "blocked", "experts forward", "time", before=0.2, after=0.2, noise=0.01)
    assert suspicious.suspicious and not calm.suspicious
    assert guard.confirmed(suspicious, [suspicious, suspicious])
    assert not guard.confirmed(suspicious, [suspicious, calm])
    assert not guard.confirmed(suspicious, [])


def test_a_changed_answer_is_named():
    before, after = run(1), run(2)
    after.results[1].verdict, after.results[1].reason, after.results[1].timings = "disagree", "experts y: ...", []
    assert guard.parity_changes(before, after) == ["case: blocked was 'agree', now 'disagree': experts y: ..."]
    assert guard.parity_changes(before, before) == []


def record_of(case: records.CaseRecord) -> records.Record:
    made = records.new_record("bench")
    made.cases.append(case)
    return made


def test_environment_changes_are_named():
    before = record_of(run(1))
    after = copy.deepcopy(before)
    assert guard.environment_changes(before, after) == []
    after.environment["versions"]["jax"] = "0.99.0"
    after.environment["flags"]["XLA_FLAGS"] = "--xla_x"
    jax_now = before.environment["versions"]["jax"]
    assert guard.environment_changes(before, after)[0] == f"versions.jax: {jax_now} -> 0.99.0"
    assert any("XLA_FLAGS" in line for line in guard.environment_changes(before, after))


def test_another_class_of_device_is_refused_unless_asked_for():
    before, now = record_of(run(1)), record_of(run(2))
    before.environment |= {"platform": "gpu", "device_kind": "NVIDIA H200", "device_count": 1}
    with pytest.raises(InvalidInput, match="from nvidia-h200-x1 and this is cpu-"):
        cli_guard.check_comparable(before, now, cross_device=False)
    cli_guard.check_comparable(before, now, cross_device=True)


def test_a_baseline_without_timings_is_refused():
    before, now = record_of(run(1)), record_of(run(2))
    for result in before.cases[0].results:
        result.timings = []
    with pytest.raises(InvalidInput, match="holds no timings"):
        cli_guard.check_comparable(before, now, cross_device=False)


def test_a_baseline_without_ratios_is_refused():
    before, now = record_of(run(1)), record_of(run(2))
    before.cases[0].results = before.cases[0].results[1:]
    with pytest.raises(InvalidInput, match="times blocked; accepted: loop_and_pad and one more"):
        cli_guard.check_comparable(before, now, cross_device=False)


def test_the_summary_is_a_table_that_names_alarms():
    before = run(1, noise=0.0)
    rows = guard.shifts(before, run(2, noise=0.0, slower={"experts forward": 1.5}))
    hit = [s for s in rows if s.suspicious]
    text = cli_guard.summary(rows, hit, [], ["versions.jax: 1 -> 2"])
    assert "slower or different" in text
    assert "blocked experts forward (time), 1.50 x" in text
    assert text.count("**alarm**") == 1
    assert "versions.jax: 1 -> 2" in text
