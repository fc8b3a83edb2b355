"""A process of its own for the code under test: when it hangs or dies it is replaced, and the suite goes on.

The parent sends a law's name and hears which case runs; silence beyond the time-out is a hang. What the target prints
goes to stderr, so that a suite's own output stays clean.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import Pipe as _Pipe

from .compare import Finding
from .job import Job
from .laws import laws_named
from .problem import InvalidInput
from .verdict import Verdict

START_S = 300.0
"""Longest start: imports, and the target's own."""

MOST_HANGS = 2
"""A stage that hung this often is not called again: each further law would cost another time-out."""


@dataclass(frozen=True)
class Ready:
    """What a started worker says about its target."""

    name: str
    stages: tuple[str, ...]
    notes: tuple[str, ...]
    undecided: bool
    parts: int
    """Of a law: see `Bench.run`."""


class Worker:
    """Judges laws in another process; `start` raises what `load` raises, also for a target whose import hangs or dies."""

    def __init__(self, job: Job, timeout_s: float):
        self.job, self.timeout_s = dataclasses.replace(job, sys_path=(os.getcwd(), *sys.path)), timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection | None = None
        self.hangs: dict[str, int] = {}
        self.parts = 1
        """In how many parts a law can be judged, once the worker has started."""

    def start(self) -> Ready:
        """Starts the process and loads the target in it."""
        self.pipe, theirs = _Pipe()
        command = [sys.executable, "-m", f"{__package__}.serve", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2)
        theirs.close()
        self.pipe.send(self.job)
        kind, *values = self._hear(max(START_S, self.timeout_s))
        if kind == "ready":
            self.parts = values[0].parts
            return values[0]
        self.close()
        if kind == "refused":
            raise values[0]
        raise InvalidInput(f"{self.job.target} does not import: the process {_ended(kind, values)}")

    def probe(self) -> list[str]:
        """Lets a bare function show what it handles, keeps every process to that, and returns the notes on it."""
        if self.process is None:
            self.start()
        self._send("probe")
        kind, *values = self._hear(self.timeout_s)
        if kind == "probed":
            words, notes, self.parts = values
            self.job = dataclasses.replace(self.job, handles=words)
            return notes
        self.close()
        self.job = dataclasses.replace(self.job, handles=(f"no slots of -1: the process {_ended(kind, values)}",))
        return list(self.start().notes)

    def judge(self, name: str, part: int | None = None) -> Verdict:
        """The verdict of one law, or of one part of it; a hang or a death is one too, and the next gets a new process."""
        law = laws_named([name])[0]
        if self.hangs.get(law.stage, 0) >= MOST_HANGS:
            return Verdict(
                name, law.stage, "cannot run", f"{law.stage} hung {MOST_HANGS} times; it is not called again"
            )
        if self.process is None:
            self.start()
        self._send((name, part))
        case = ""
        while True:
            kind, *values = self._hear(self.timeout_s)
            if kind == "case":
                case = values[0]
            elif kind == "verdict":
                return values[0]
            elif kind == "bug":
                return Verdict(name, law.stage, "alarm", f"dropless itself failed: {values[0]}", case=case)
            else:
                self.close()
                if kind == "hung":
                    self.hangs[law.stage] = self.hangs.get(law.stage, 0) + 1
                finding = Finding(tensor="", check="ran", ok=False, message=f"the process {_ended(kind, values)}")
                return Verdict(name, law.stage, "disagree", finding=finding, case=case)

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        if self.pipe is not None:
            self.pipe.close()
        self.process = self.pipe = None

    def _send(self, message: object) -> None:
        assert self.pipe is not None
        try:
            self.pipe.send(message)
        except OSError:  # it died between two laws: _hear says so
            return

    def _hear(self, timeout_s: float) -> tuple:
        assert self.pipe is not None and self.process is not None
        try:
            if not self.pipe.poll(timeout_s):
                return "hung", timeout_s
            return self.pipe.recv()
        except (EOFError, OSError):
            return "died", self.process.wait()


def _ended(kind: str, values: list) -> str:
    if kind == "hung":
        return f"hung: no answer for {values[0]:g} s"
    code = values[0]
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"
