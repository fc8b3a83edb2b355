"""One case of a record, measured again: without a GPU in a process of its own, so that memory is laid out anew each time.

Where arrays and code lie in memory can make a call a tenth slower for as long as the process lives. Measurements that share
a process share that shift and cannot vouch for each other; measurements of several processes can.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from . import options as o
from .problem import InvalidInput, Problem
from .records import CaseRecord, Record, read, write
from .registry import BASELINE

ROUNDS = 30
"""Most repetitions of a quick call: the time is better spent on the slow ones, which are what is judged."""

REFUSED = 3
"""Exit code of a measuring process whose answer is the text of an InvalidInput."""


@dataclass(frozen=True)
class Ask:
    """What to measure of a record's only case."""

    seed: int
    budget_s: float
    """Of timing."""
    calls: tuple[tuple[str, str], ...] = ()
    """(implementation, call) to time beside the baseline's; empty: all that the case timed."""


def measure_fresh(case: CaseRecord, ask: Ask, folder: Path) -> CaseRecord:
    """`measure_again` in a new process, or in this one on a GPU, which a second process could not share.

    `folder` holds what passes between the two processes, and what was compiled: later processes load that instead of
    compiling again. Raises InvalidInput as `measure_again` does, and RuntimeError when the process dies.
    """
    if jax.default_backend() != "cpu":
        return measure_again(case, ask)
    question, answer = folder / "question.json", folder / "answer.json"
    write(question, dataclasses.replace(_empty(), cases=[case]))
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", __name__, str(question), str(answer), json.dumps(dataclasses.asdict(ask))]
    # What the measured layers print goes to stderr, so that the guard's own output stays clean.
    code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode
    if code == REFUSED:
        raise InvalidInput(answer.read_text(encoding="utf-8"))
    if code:
        raise RuntimeError(f"{case.label}: the measuring process ended with code {code}")
    return read(answer).cases[0]


def measure_again(case: CaseRecord, ask: Ask) -> CaseRecord:
    """The same problem and pattern with inputs of another seed, judged and timed now.

    A layer is its stages and its experts, which are timed: it is left out where they are there, since to compile it again
    would double the guard's time. Raises InvalidInput when an implementation cannot be found any more.
    """
    from .inputs import make_case
    from .measure import Options, run_case
    from .workload import VARIANTS, same_params

    problem = Problem.from_json(case.problem)
    names = [r.implementation for r in case.results if r.timings]
    timed = dict.fromkeys(t.what for r in case.results for t in r.timings)
    whats = tuple(w for w in timed if not w.startswith("layer")) or tuple(timed)
    if ask.calls:
        names = [BASELINE, *dict.fromkeys(name for name, _ in ask.calls)]
        whats = tuple(dict.fromkeys(what for _, what in ask.calls))
    made = [
        make_case(problem, seed=ask.seed + v, pattern=case.pattern, exponent=case.exponent) for v in range(VARIANTS)
    ]
    fresh = run_case(
        same_params(made),
        o.implementations(names),
        Options(whats=whats, layer=False, budget_s=ask.budget_s, most=ROUNDS),
    )
    fresh.label, fresh.pattern, fresh.exponent, fresh.source = case.label, case.pattern, case.exponent, case.source
    return fresh


def keep_compiled(folder: Path) -> None:
    """Lets later processes load what this one compiles."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _empty() -> Record:
    return Record(kind="guard", created="", version="", source_hash="")


def main(arguments: Sequence[str]) -> int:
    """Measures the case of the record in the first file, writes a record with the answer to the second; the third is an `Ask`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's, which ends this process too
    question, answer = map(Path, arguments[:2])
    given = json.loads(arguments[2])
    ask = Ask(given["seed"], given["budget_s"], tuple((name, what) for name, what in given["calls"]))
    case = read(question).cases[0]
    keep_compiled(question.parent / "compiled")
    try:
        mesh = Problem.from_json(case.problem).mesh
        o.start_devices(mesh.devices if mesh is not None else None)
        fresh = measure_again(case, ask)
    except InvalidInput as error:
        answer.write_text(str(error), encoding="utf-8")
        return REFUSED
    write(answer, dataclasses.replace(_empty(), cases=[fresh]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
