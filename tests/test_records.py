"""Records: what is written is read back, and what is cut, edited, newer or impossible is refused in one line."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from dropless.parity import InvalidInput, Problem, records
from dropless.parity.records import FindingRecord, ResultRecord, TimingRecord


@pytest.fixture
def record() -> records.Record:
    made = records.new_record("compare", seed=3, command={"preset": "mixtral-8x7b"})
    case = records.new_case("a case", Problem(T=4, K=2, E=4, D=8, F=8))
    case.rows, case.group_sizes = 8, [4, 2, 2, 0]
    case.results.append(
        ResultRecord(
            implementation="blocked",
            verdict="agree",
            findings=[FindingRecord(tensor="y", ok=True, percent=31.5, histogram=[3, 1, 0])],
            after=[FindingRecord(tensor="y", ok=True, percent=30.0)],
            timings=[TimingRecord(what="experts forward", compile_s=0.5, wall_s=[0.1, 0.3, 0.2], useful_flops=2e9)],
        )
    )
    case.results.append(
        ResultRecord(implementation="te", verdict="cannot run", reason="compute capability None, needs 9.0")
    )
    made.cases.append(case)
    return made


def test_what_is_written_is_read_back(record, tmp_path):
    path = records.write(tmp_path / "r.json", record)
    read = records.read(path)
    assert read.digest
    read.digest = ""
    assert read == record
    json.loads(path.read_text())  # standard JSON: no NaN literal


def test_statistics_of_raw_repetitions(record):
    timing = record.cases[0].results[0].timings[0]
    assert timing.median == 0.2
    assert timing.p10 == pytest.approx(0.12)
    assert timing.flops_per_s == pytest.approx(1e10)
    timing.device_s = [0.05]
    assert timing.median == 0.05


def test_not_finite_numbers_survive(record, tmp_path):
    record.cases[0].results[0].findings[0].percent = float("inf")
    read = records.read(records.write(tmp_path / "r.json", record))
    assert read.cases[0].results[0].findings[0].percent == float("inf")


def test_a_record_never_names_the_host(record):
    # As a word: a host may be called "vm", which "llvm" holds.
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", json.dumps(records.encode(record)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s[: len(s) // 2], "not whole JSON"),
        (lambda s: s.replace('"agree"', '"disagree"'), "does not match its own digest"),
        (lambda s: s.replace('"schema": 1', '"schema": 99'), "schema 99; accepted: up to 1"),
        (lambda s: "[]", "no schema number"),
        (lambda s: "", "not whole JSON"),
    ],
    ids=["cut", "edited", "newer", "other JSON", "empty"],
)
def test_files_that_are_refused(record, tmp_path, change, message):
    path = records.write(tmp_path / "r.json", record)
    path.write_text(change(path.read_text()))
    with pytest.raises(InvalidInput, match=message):
        records.read(path)


def resealed(record: records.Record) -> str:
    """The record as someone would write it who also repairs the digest."""
    body = records.encode(record)
    body["digest"] = records._digest(body)
    return json.dumps(body)


def fail(r: records.Record) -> None:
    r.cases[0].results[0].findings[0].ok = False


def disagree(r: records.Record) -> None:
    r.cases[0].results[0].verdict = "disagree"


def fail_after(r: records.Record) -> None:
    r.cases[0].results[0].after[0].ok = False


def no_findings(r: records.Record) -> None:
    r.cases[0].results[0].findings.clear()


def no_reason(r: records.Record) -> None:
    r.cases[0].results[1].reason = ""


def no_time(r: records.Record) -> None:
    r.cases[0].results[0].timings[0].wall_s = [0.0]


@pytest.mark.parametrize("change", [fail, disagree, fail_after, no_findings, no_reason, no_time])
def test_impossible_states_are_neither_written_nor_read(record, tmp_path, change):
    change(record)
    with pytest.raises(InvalidInput, match="accepted:"):
        records.write(tmp_path / "r.json", record)
    assert not list(tmp_path.iterdir())
    with pytest.raises(InvalidInput, match="accepted:"):
        records.loads(resealed(record))


def test_a_wrong_field_is_named(record):
    body = records.encode(record)
    body["cases"][0]["results"][0]["timings"][0]["wall_s"] = "fast"
    with pytest.raises(InvalidInput, match=r"cases\[0\].results\[0\].timings\[0\].wall_s is 'fast'; accepted: a list"):
        records.loads(json.dumps(body | {"digest": records._digest(body)}))
    body = records.encode(record) | {"speed": 3}
    with pytest.raises(InvalidInput, match="unknown field 'speed'"):
        records.loads(json.dumps(body | {"digest": records._digest(body)}))


def test_fields_that_an_older_record_lacks_take_their_defaults(record):
    body = records.encode(record)
    del body["extra"], body["cases"][0]["exponent"]
    assert records.loads(json.dumps(body | {"digest": records._digest(body)})).cases[0].exponent == 1.0


def test_a_failed_write_leaves_the_old_file_alone(record, tmp_path, monkeypatch):
    path = records.write(tmp_path / "r.json", record)
    before = path.read_bytes()

    def no_replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "replace", no_replace)
    with pytest.raises(InvalidInput, match="No space left"):
        records.write(path, record)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_source_hash_sees_text_and_names_but_not_place_or_line_endings(tmp_path):
    root = Path(records.__file__).resolve().parent.parent
    for name in ("one", "two"):
        for folder in ("parity", "reference", "optimized"):
            shutil.copytree(root / folder, tmp_path / name / folder, ignore=shutil.ignore_patterns("__pycache__"))
    two = tmp_path / "two" / "parity" / "problem.py"
    two.write_bytes(two.read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "two" / "parity" / "notes.txt").write_text("not source")
    first = records.hash_tree(tmp_path / "one")
    assert first == records.hash_tree(tmp_path / "two")
    two.write_bytes(two.read_bytes() + b"x = 1\r\n")
    assert first != records.hash_tree(tmp_path / "two")


def test_every_recorded_result_is_whole():
    folder = Path(__file__).parent / "benchmarks" / "recorded"
    package = Path(records.__file__).parent / "data"
    for path in [*folder.rglob("*.json"), *package.glob("ladder-*.json")]:
        records.read(path)
