"""The guard: quiet on noise, loud on a slower stage or a changed answer, clear about machines that differ."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
from dropless.parity import InvalidInput, Problem, cli_guard, guard, records, remeasure
from dropless.parity.records import FindingRecord, ResultRecord, TimingRecord

WHATS = ("permute forward", "grouped_gemm forward", "experts forward", "experts forward+backward")
SECONDS = (0.001, 0.007, 0.01, 0.04)
PROCESS = guard.RUN_NOISE
"""Standard deviation of the shift that a whole process gives a ratio."""


def run(
    seed: int,
    *,
    noise: float = 0.05,
    process: dict[str, float] = PROCESS,
    slower: dict[str, float] | None = None,
    rounds: int = 20,
) -> records.CaseRecord:
    """A process as a noisy machine gives it: slow rounds meet every call, and each call has its own spread and shift."""
    rng = np.random.default_rng(seed)
    case = records.new_case("case", Problem(T=4, K=2, E=4, D=8, F=8))
    case.pattern = "zipf"
    moments = np.exp(rng.gamma(1.0, 0.3, rounds))
    for name, speed in (("loop_and_pad", 1.0), ("blocked", 0.2)):
        timings = []
        for what, seconds in zip(WHATS, SECONDS, strict=True):
            steady = seconds * speed * ((slower or {}).get(what, 1.0) if name == "blocked" else 1.0)
            timing = TimingRecord(what=what, compile_s=1.0, wall_s=[])
            for clock, samples in (("time", timing.wall_s), ("cpu", timing.cpu_s)):
                shift = rng.normal(0, process[clock] / math.sqrt(2))  # a ratio has two of them
                samples += (steady * moments * np.exp(shift + rng.normal(0, noise, rounds))).tolist()
            timings.append(timing)
        case.results.append(
            ResultRecord(
                implementation=name,
                verdict="agree",
                findings=[FindingRecord(tensor="y", ok=True, percent=30.0)],
                timings=timings,
            )
        )
    return case


@pytest.mark.parametrize("rounds", [5, 8, 30])
def test_the_error_of_a_middle_is_the_spread_of_middles_and_deaf_to_a_few_slow_rounds(rounds):
    rng = np.random.default_rng(rounds)
    quiet = rng.normal(0.0, 0.05, (1000, rounds))
    errors = np.array([guard.middle_error(x) for x in quiet])
    spread = np.std([guard.middle(x) for x in quiet])
    widened = math.sqrt((rounds - 1) / (rounds - 3))
    assert 0.95 < np.sqrt(np.mean(errors**2)) / (spread * widened) < 1.1
    slow = quiet.copy()
    slow[:, : rounds // 8] += 3.0
    disturbed = np.mean([guard.middle_error(x) for x in slow])
    assert disturbed < 1.6 * errors.mean()
    assert rounds < 8 or np.std(slow, axis=1).mean() > 10 * np.std(quiet, axis=1).mean()
    assert guard.middle_error(quiet[0, :1]) == 0.0


@pytest.fixture
def measured(monkeypatch):
    """What the guard asked for, once `runs` are set: the fresh processes' measurements, in order."""

    class Machine:
        runs: list[records.CaseRecord]

        def __init__(self):
            self.asked: list[remeasure.Ask] = []

        def measure(self, case, ask, folder):
            self.asked.append(ask)
            return self.runs[len(self.asked) - 1]

    machine = Machine()
    monkeypatch.setattr(cli_guard, "measure_fresh", machine.measure)
    return machine


def alarms(machine, before: records.CaseRecord, *fresh: records.CaseRecord) -> list[guard.Shift]:
    """A whole guard's decision on one case."""
    machine.asked, machine.runs = [], list(fresh)
    return [s for s in cli_guard.guard_case(before, 0, Path())[1] if s.alarm]


def fresh(seed: int, **changes) -> list[records.CaseRecord]:
    """As many processes as a guard can ask for."""
    return [run(1_000 * seed + i, **changes) for i in range(guard.MEASUREMENTS)]


def test_noise_raises_no_alarm(measured):
    assert sum(bool(alarms(measured, run(seed), *fresh(seed + 1))) for seed in range(100)) <= 1


def test_a_slower_stage_is_caught_and_named(measured):
    slower = {"grouped_gemm forward": 1.25}
    caught = [alarms(measured, run(seed), *fresh(seed + 1, slower=slower)) for seed in range(50)]
    assert sum(any(s.what == "grouped_gemm forward" for s in found) for found in caught) >= 45
    assert sum({s.what for s in found} <= set(slower) for found in caught) >= 49


def test_a_slow_moment_cancels_in_the_ratio():
    still = {"time": 0.0, "cpu": 0.0}
    before, after = run(1, noise=0.0, process=still), run(2, noise=0.0, process=still)
    for shift in guard.shifts(before, after):
        assert math.isclose(shift.factor, 1.0), shift


def test_a_slow_process_is_measured_again_and_is_no_alarm(measured):
    calm = run(1)
    assert not alarms(measured, calm, run(2, slower={"experts forward": 1.3}), run(3), run(4))
    assert len(measured.asked) == guard.MEASUREMENTS
    assert measured.asked[0].calls == ()
    assert all(("blocked", "experts forward") in ask.calls for ask in measured.asked[1:])
    assert sum(ask.budget_s for ask in measured.asked) <= 20


def test_a_calm_case_is_measured_once(measured):
    assert not alarms(measured, run(1), run(1))
    assert len(measured.asked) == 1


def test_a_small_call_alarms_only_once_it_takes_a_part_of_the_layer(measured):
    what = "permute forward"  # a tenth of experts forward
    found = alarms(measured, run(1), *fresh(2, slower={what: 1.3}))
    assert what not in {s.what for s in found}
    found = alarms(measured, run(1), *fresh(2, slower={what: 3.0}))
    assert {s.what for s in found} == {what}


def test_processor_time_catches_what_a_busy_machine_hides_from_wall_time():
    before, *slow = run(1, noise=0.8), *(run(i, noise=0.8) for i in (2, 3, 4))
    for case in (before, *slow):
        for result in case.results:
            steady = 0.01 * (1.25 if case is not before and result.implementation == "blocked" else 1.0)
            for t in result.timings:
                t.cpu_s = [steady * (1 + 0.01 * (i % 3)) for i in range(len(t.wall_s))]
    found = guard.shifts(before, *slow)
    assert {s.clock for s in found if s.alarm} == {"cpu"}
    assert all(s.alarm for s in found if s.clock == "cpu")


def test_wall_time_catches_work_that_no_longer_runs_in_parallel():
    before, *slow = run(1), *(run(i, slower={"experts forward": 1.9}) for i in (2, 3, 4))
    for case in slow:
        for result in case.results:
            for old, t in zip(before.results[0].timings, result.timings, strict=True):
                t.cpu_s = [c * (0.2 if result.implementation == "blocked" else 1.0) for c in old.cpu_s]
    found = [s for s in guard.shifts(before, *slow) if s.alarm]
    assert {(s.what, s.clock) for s in found} == {("experts forward", "time")}


def test_faster_is_no_alarm(measured):
    assert not alarms(measured, run(1), *fresh(2, slower=dict.fromkeys(WHATS, 0.5)))


def test_one_measurement_alone_is_not_an_alarm():
    before, slow = run(1), run(2, slower={"experts forward": 2.0})
    assert any(s.suspicious for s in guard.shifts(before, slow))
    assert not any(s.alarm for s in guard.shifts(before, slow))
    assert any(s.alarm for s in guard.shifts(before, *[slow] * guard.MEASUREMENTS))


def test_a_case_is_measured_in_a_process_of_its_own(tmp_path):
    case = records.new_case("case", Problem(T=8, K=2, E=4, D=8, F=8))
    case.pattern = "balanced"
    for name in ("loop_and_pad", "blocked"):
        timing = TimingRecord(what="experts forward", compile_s=1.0, wall_s=[1.0])
        finding = FindingRecord(tensor="y", ok=True, percent=30.0)
        case.results.append(ResultRecord(implementation=name, verdict="agree", findings=[finding], timings=[timing]))
    again = remeasure.measure_fresh(case, remeasure.Ask(seed=3, budget_s=0.1), tmp_path)
    assert [r.verdict for r in again.results] == ["agree", "agree"]
    assert all(r.timing("experts forward") and r.after for r in again.results)
    assert (again.label, again.pattern) == ("case", "balanced")
    assert list((tmp_path / "compiled").iterdir()), "the next process would compile again"
    case.results[1].implementation = "no_such_layer"
    with pytest.raises(InvalidInput, match="no_such_layer"):
        remeasure.measure_fresh(case, remeasure.Ask(seed=3, budget_s=0.1), tmp_path)


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
    still = {"time": 0.0, "cpu": 0.0}
    slow = [run(i, noise=0.0, process=still, slower={"experts forward": 1.5}) for i in range(2, 2 + guard.MEASUREMENTS)]
    rows = guard.shifts(run(1, noise=0.0, process=still), *slow)
    hit = [s for s in rows if s.alarm]
    text = cli_guard.summary(rows, hit, [], ["versions.jax: 1 -> 2"])
    assert "slower or different" in text
    assert "blocked experts forward (time), 1.50 x" in text
    assert text.count("**alarm**") == len(hit) == 2
    assert "versions.jax: 1 -> 2" in text
