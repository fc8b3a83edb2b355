"""`compare`: do the implementations agree here, and how fast are they? The main job; needs no arguments."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jax
import numpy as np
import typer

from . import launch
from . import options as o
from .problem import InvalidInput
from .records import Record, new_record, write
from .tables import print_record
from .terminal import out, progress

if TYPE_CHECKING:
    from .workload import Workload


ROUNDS = 10
"""Timed repetitions of each call when several processes must agree on their number."""


def compare(
    preset: o.PRESET = None,
    full: o.FULL = False,
    tokens: o.TOKENS = None,
    experts: o.EXPERTS = None,
    topk: o.TOPK = None,
    width: o.WIDTH = None,
    expert_width: o.EXPERT_WIDTH = None,
    groups: o.GROUPS = None,
    skew: o.SKEW = None,
    exponent: o.EXPONENT = 1.0,
    text: o.TEXT = None,
    trace: o.TRACE = None,
    save_trace: Annotated[Path | None, typer.Option(help="Write the compared routing here, for --trace.")] = None,
    x: o.X = None,
    dtype: o.DTYPE = None,
    precision: o.PRECISIONS = "highest",
    sensitivity: Annotated[
        bool, typer.Option(help="With a list of precisions: what quantising each operand alone costs.")
    ] = False,
    ep: o.EP = None,
    ranks_per_node: o.RANKS_PER_NODE = None,
    coordinator: o.COORDINATOR = None,
    processes: o.PROCESSES = None,
    process: o.PROCESS = None,
    limit: o.LIMIT = launch.LIMIT,
    impl: o.IMPL = None,
    grad: Annotated[bool, typer.Option(help="Compare and time gradients too.")] = True,
    timing: Annotated[bool, typer.Option(help="Time what agreed.")] = True,
    seed: o.SEED = 0,
    out_: o.OUT = None,
) -> int:
    """Compares every implementation that can run here with the oracle, then times those that agree.

    Without arguments: the routing shape of a real model, shrunk to this machine, with skewed (zipf) loads.
    """
    from .measure import Options, run_case
    from .workload import Request, build

    asked = {k: v for k, v in locals().items() if k in o.RECORDED and v not in (None, [], ())}
    from . import precisions

    names = precisions.several(precision)
    if sensitivity and not names:
        raise InvalidInput(f"--sensitivity is given with --precision {precision}; accepted: a list that names a recipe")
    if names and (out_ or ep):
        raise InvalidInput(f"--precision {precision} is given with --out or --ep; accepted: one device, and no record")
    target = o.record_path(out_, "dropless")  # with a list of precisions nothing is written there
    o.check_writable(save_trace)
    with launch.joined(coordinator, processes, process, limit) as several:
        o.start_devices(ep, (processes or ep or 1) if several else 1)
        # What a process decides by its own clock would differ between them, and one of them would wait for ever.
        alike: dict[str, Any] = {"rounds": ROUNDS, "step_limit_s": math.inf} if several else {}
        workload = build(
            Request(
                preset=preset,
                full=full,
                tokens=tokens,
                experts=experts,
                topk=topk,
                width=width,
                expert_width=expert_width,
                groups=groups,
                skew=skew,
                exponent=exponent,
                text=text or [],
                trace=trace,
                x=x,
                dtype=dtype,
                precision="highest" if names else precision,
                ep=ep,
                seed=seed,
            )
        )
        if names:
            # Emulation costs a compilation for each, so the usual run is of one implementation.
            chosen = o.implementations(impl or ["blocked"])
            within = precisions.compare_precisions(
                workload.cases[0], names, chosen, timed=timing, sensitivity=sensitivity
            )
            return 0 if within else 1
        moved = _traffic(workload, ep, ranks_per_node)
        implementations = o.implementations(impl, ep)
        if workload.nan_rows and grad:
            out().print("x holds NaN: gradients are left out, since NaN reaches every gradient.", style="yellow")
            grad = False
        record = new_record("compare", seed=seed, command=_plain(asked))
        with progress(3 * len(implementations) + 1, "oracle") as step:
            case = run_case(
                workload.cases,
                implementations,
                Options(grad=grad, layer=workload.layer, timing=timing, step=step, **alike),
            )
        case.label, case.source = workload.label, workload.source
        if not text and trace is None and x is None:
            case.pattern, case.exponent = skew or "zipf", exponent
        case.traffic = moved
        record.cases.append(case)
        if save_trace is not None and jax.process_index() == 0:
            from .trace import write_trace

            write_trace(save_trace, workload.cases[0].routing)
        path = write(target, record) if jax.process_index() == 0 else target
        print_record(record)
        out().print(f"Record: {path}", highlight=False, soft_wrap=True)
        return 1 if record.disagreements else _ran_something(record)


def _ran_something(record: Record) -> int:
    """0, or InvalidInput (exit 2) when nothing that was asked for can run here."""
    results = [r for c in record.cases for r in c.results]
    if results and all(r.verdict == "cannot run" for r in results):
        raise InvalidInput(f"nothing that was asked for can run here: {results[0].implementation}: {results[0].reason}")
    return 0


def _traffic(workload: Workload, ep: int | None, ranks_per_node: int | None) -> dict[str, Any]:
    """What one dispatch of the judged routing moves between --ep ranks; empty without."""
    if ep is None:
        if ranks_per_node is not None:
            raise InvalidInput(f"--ranks-per-node is {ranks_per_node} without --ep; accepted: both or neither")
        return {}
    from .traffic import traffic

    return traffic(workload.problem, np.asarray(workload.cases[0].routing.topk_idx), ep, ranks_per_node).to_json()


def _plain(asked: dict[str, Any]) -> dict[str, Any]:
    def plain(v: Any) -> Any:
        if isinstance(v, Path):
            return v.name  # the folder says nothing about the run
        return [plain(i) for i in v] if isinstance(v, list) else v

    return {k: plain(v) for k, v in asked.items()}
