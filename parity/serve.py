"""The worker's side of `check`: loads one target and judges the laws that it is asked for, until its parent is gone."""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection

from .interface import Unsupported
from .job import NotCallable, load
from .problem import InvalidInput
from .worker import Ready


def serve(pipe: Connection) -> None:
    """Answers (ready | refused), then for each (law's name, part or None) any number of (case) and one (verdict)."""
    job = pipe.recv()
    try:
        bench = load(job)
    except (InvalidInput, NotCallable, Unsupported) as error:
        pipe.send(("refused", error))
        return
    own = bench.implementation
    stages = tuple(s for s in own.stages if s not in own.composed)
    pipe.send(("ready", Ready(own.name, stages, tuple(bench.notes), bench.undecided(), bench.parts)))
    while True:
        try:
            asked = pipe.recv()
        except EOFError:  # the parent is gone
            return
        if asked == "probe":
            bench.decide(bench.probe())
            pipe.send(("probed", bench.job.handles, bench.notes, bench.parts))
            continue
        try:
            name, part = asked
            verdict = bench.run(name, lambda spec: pipe.send(("case", spec.literal())), part)
        except Exception as error:  # a fault of this suite, since a target's is a verdict: say so, and go on
            traceback.print_exc()
            pipe.send(("bug", f"{type(error).__name__}: {error}"))
        else:
            pipe.send(("verdict", verdict))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
