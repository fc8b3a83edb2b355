"""The one record of a run: what was asked, on what machine, what agreed, and (only then) how fast it was.

`compare`, `bench`, `check`, `guard` and the pytest-benchmark driver all write this. The dataclasses are the schema. A
field is added with a default, so a record of an older schema stays readable; any change raises SCHEMA, so an
older reader says that a record is newer instead of guessing. `digest` is a checksum over everything else: it shows a
record that was cut or edited, not one that was forged.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .device import environment
from .problem import CONTRACT, InvalidInput, Problem
from .schema import decode, encode

SCHEMA = 1
"""Version of the dataclasses below."""

Kind = Literal["compare", "bench", "check", "guard", "ladder", "mutants"]
Verdict = Literal["agree", "disagree", "not repeatable", "cannot run", "expected-different", "known", "alarm"]

TIMED_VERDICTS = ("agree", "expected-different")
"""Verdicts that a timing may stand beside."""


@dataclass(kw_only=True)
class FindingRecord:
    """One judged tensor, or one law's verdict when `law` is given."""

    tensor: str
    stage: str = ""
    ok: bool
    check: str = "values"
    """The check that decided: ran, dtype, shape, finite, values or bits."""
    percent: float | None = None
    """Largest error as a percentage of its bar; None where bits were compared or nothing could be measured."""
    message: str = ""
    kinks: int = 0
    """Elements whose gauge had to include a jump at a clamp or kink."""
    law: str | None = None
    verdict: Verdict | None = None
    """A law's verdict."""
    reproduce: str = ""
    """The command line that shows the failure again."""
    routing: str = ""
    """The shrunk failing routing, as a literal."""
    histogram: list[int] = field(default_factory=list)
    """Elements by |error| / gauge, in steps of a quarter; the last bin holds everything beyond."""


@dataclass(kw_only=True)
class TimingRecord:
    """Repeated measurements of one jitted call."""

    what: str
    """The stage, then `forward` or `forward+backward`."""
    compile_s: float
    """First call's tracing and compilation."""
    wall_s: list[float]
    """Every repetition: dispatch until the last output is ready."""
    cpu_s: list[float] = field(default_factory=list)
    """Every repetition's processor time, all threads together, without a GPU: other programs hardly touch it."""
    device_s: list[float] = field(default_factory=list)
    """Every repetition's time on the device, where it can be read apart from the host's; empty on CPU."""
    device_timer: str = ""
    """How device_s was read."""
    useful_flops: float = 0.0
    """Multiply-adds of real rows, times two."""
    bytes_moved: float = 0.0
    """Operands and results that must cross memory once."""
    temp_bytes: int | None = None
    """The executable's own temporaries (XLA's figure)."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries together (XLA's figure)."""
    compiles: int = 1
    """Executables built over all repetitions."""

    @property
    def samples(self) -> list[float]:
        """Device times where there are any, else wall times."""
        return self.device_s or self.wall_s

    @property
    def median(self) -> float:
        """Median of `samples`, seconds."""
        return quantile(self.samples, 0.5)

    @property
    def p10(self) -> float:
        """Tenth percentile of `samples`."""
        return quantile(self.samples, 0.1)

    @property
    def p90(self) -> float:
        """Ninetieth percentile of `samples`."""
        return quantile(self.samples, 0.9)

    @property
    def flops_per_s(self) -> float:
        """Useful FLOP/s at the median."""
        return self.useful_flops / self.median if self.median > 0 else 0.0


@dataclass(kw_only=True)
class ResultRecord:
    """What one implementation did on one case."""

    implementation: str
    verdict: Verdict
    reason: str = ""
    """Why it cannot run, or the first disagreement."""
    own_stages: list[str] = field(default_factory=list)
    """Stages that are its own; the others are the baseline's."""
    findings: list[FindingRecord] = field(default_factory=list)
    after: list[FindingRecord] = field(default_factory=list)
    """Findings on the very outputs that were timed."""
    timings: list[TimingRecord] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    def timing(self, what: str) -> TimingRecord | None:
        """The timing of that name, or None."""
        return next((t for t in self.timings if t.what == what), None)


@dataclass(kw_only=True)
class CaseRecord:
    """One problem at one family of routings, and every implementation's result on it."""

    label: str
    problem: dict[str, Any]
    pattern: str = ""
    """Named pattern of loads; empty for a text or a trace, which cannot be drawn again."""
    exponent: float = 1.0
    """Of the zipf pattern."""
    source: str = ""
    """Where the routing came from, in words."""
    rows: int = 0
    """Routed rows R of the judged routing."""
    group_sizes: list[int] = field(default_factory=list)
    near_ties: int | None = None
    results: list[ResultRecord] = field(default_factory=list)
    bounds: list[TimingRecord] = field(default_factory=list)
    """Upper bounds: one dense GEMM of the same FLOPs, equal groups, grouped GEMMs alone."""
    traffic: dict[str, Any] = field(default_factory=dict)
    """What one dispatch of this routing moves between ranks (`Traffic.to_json`); empty on one device."""

    def result(self, name: str) -> ResultRecord | None:
        """That implementation's result, or None."""
        return next((r for r in self.results if r.implementation == name), None)


@dataclass(kw_only=True)
class Record:
    """A whole run."""

    schema: int = SCHEMA
    contract: int = CONTRACT
    kind: Kind
    created: str
    """UTC, ISO 8601."""
    version: str
    """Of dropless."""
    source_hash: str
    """Of the *.py files of parity, reference and optimized."""
    seed: int = 0
    command: dict[str, Any] = field(default_factory=dict)
    """The options that were asked for."""
    environment: dict[str, Any] = field(default_factory=dict)
    """See device.environment."""
    cases: list[CaseRecord] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    """What one kind of run adds (guard's statistics, the ladder's rungs, the kill matrix)."""
    digest: str = ""

    @property
    def disagreements(self) -> list[ResultRecord]:
        """Results whose verdict makes the exit code 1."""
        return [r for c in self.cases for r in c.results if r.verdict in ("disagree", "not repeatable", "alarm")]


def new_record(kind: Kind, *, seed: int = 0, command: dict[str, Any] | None = None) -> Record:
    """An empty record of this moment, machine and source."""
    now = datetime.datetime.now(datetime.UTC)
    return Record(
        kind=kind,
        created=now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        version=importlib.metadata.version("dropless"),
        source_hash=source_hash(),
        seed=seed,
        command=dict(command or {}),
        environment=environment(),
    )


def new_case(label: str, problem: Problem, *, source: str = "") -> CaseRecord:
    """An empty case."""
    return CaseRecord(label=label, problem=problem.to_json(), source=source)


def write(path: str | os.PathLike[str], record: Record) -> Path:
    """Validates and writes the record atomically; raises InvalidInput when the folder cannot be written."""
    return write_text(path, dumps(record))


def dumps(record: Record) -> str:
    """The validated record as JSON text with its digest."""
    validate(record)
    body = encode(record)
    body["digest"] = _digest(body)
    return json.dumps(body, indent=1) + "\n"


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes to a temporary name in the same folder, then replaces: a reader never sees half a file."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise InvalidInput(
            f"{target} cannot be written: {error.strerror}; accepted: a file in a writable folder"
        ) from None
    return target


def read(path: str | os.PathLike[str]) -> Record:
    """The validated record in a file; raises InvalidInput that says what is wrong with it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}; accepted: a record written by dropless") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is not text; accepted: a record written by dropless") from None
    return loads(text, str(path))


def loads(text: str, where: str = "record") -> Record:
    """The validated record in a string; `where` begins the error messages."""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"{where} is not whole JSON (line {error.lineno}: {error.msg}); accepted: a complete record"
        ) from None
    schema = body.get("schema") if isinstance(body, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise InvalidInput(f"{where} has no schema number; accepted: a record written by dropless")
    if schema > SCHEMA:
        raise InvalidInput(f"{where} has schema {schema}; accepted: up to {SCHEMA} (a newer dropless wrote it)")
    if body.get("digest") != _digest(body):
        raise InvalidInput(
            f"{where} does not match its own digest: it was edited or cut; accepted: an untouched record"
        )
    record = decode(Record, body, where)
    validate(record, where)
    return record


def validate(record: Record, where: str = "record") -> None:
    """Rejects illegal states; raises InvalidInput that names the field.

    A timing stands only beside a verdict of agree or expected-different, both before and after; a verdict of agree has
    no failed finding; cannot run has a reason and no findings.
    """
    for c, case in enumerate(record.cases):
        try:
            Problem.from_json(case.problem)
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"{where}.cases[{c}].problem is not a problem of this contract: {error}") from None
        for r in case.results:
            at = f"{where}.cases[{c}].{r.implementation}"
            failed = [f.tensor for f in (*r.findings, *r.after) if not f.ok and f.verdict not in ("known",)]
            if r.timings and r.verdict not in TIMED_VERDICTS:
                raise InvalidInput(
                    f"{at} has timings with verdict {r.verdict!r}; accepted: {', '.join(TIMED_VERDICTS)}"
                )
            if r.verdict == "agree" and failed:
                raise InvalidInput(f"{at} has verdict 'agree' though {failed[0]} failed; accepted: no failed finding")
            if r.verdict == "agree" and not r.findings:
                raise InvalidInput(f"{at} has verdict 'agree' without findings; accepted: one finding or more")
            if r.verdict == "cannot run" and (not r.reason or r.findings):
                raise InvalidInput(f"{at} has verdict 'cannot run'; accepted: with a reason and without findings")
            if r.timings and failed:
                raise InvalidInput(f"{at} has timings though {failed[0]} failed; accepted: no failed finding")
            for t in r.timings:
                if not t.wall_s or not all(s > 0 for s in (*t.wall_s, *t.device_s)):
                    raise InvalidInput(f"{at}.{t.what} has no positive times; accepted: seconds above 0")


@functools.cache
def source_hash() -> str:
    """SHA-256 over the *.py files of parity, reference and optimized: names and text, not place or line endings."""
    root = Path(__file__).resolve().parent.parent
    return hash_tree(root)


def hash_tree(root: Path) -> str:
    """`source_hash` of the three folders below `root`."""
    total = hashlib.sha256()
    for folder in ("optimized", "parity", "reference"):
        for path in sorted((root / folder).rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
            text = path.read_bytes().replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            total.update(path.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(text).digest())
    return total.hexdigest()


def quantile(samples: list[float], q: float) -> float:
    """Linear-interpolation quantile; nan for no samples."""
    if not samples:
        return float("nan")
    ordered = sorted(samples)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _digest(body: dict[str, Any]) -> str:
    rest = {k: v for k, v in body.items() if k != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
