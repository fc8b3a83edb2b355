"""`bench`: times stages, forward, and forward + backward over presets and skews; only what agrees is timed."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options as o
from .records import Record, new_record, write
from .tables import print_record
from .terminal import out, progress

PRESETS = ("mixtral-8x7b", "qwen3-30b-a3b")
SKEWS = ("zipf", "balanced")
STEP_LIMIT_S = 2.0
"""Slower steps are left to `compare`: ten repetitions of every stage would take minutes."""


def bench(
    presets: Annotated[
        list[str] | None, typer.Option("--preset", help=f"Repeatable. [default: {', '.join(PRESETS)}]")
    ] = None,
    skews: Annotated[list[str] | None, typer.Option("--skew", help="Repeatable. [default: zipf, balanced]")] = None,
    exponent: o.EXPONENT = 1.0,
    full: o.FULL = False,
    tokens: o.TOKENS = None,
    dtype: o.DTYPE = None,
    precision: o.PRECISION = "highest",
    ep: o.EP = None,
    impl: o.IMPL = None,
    call: Annotated[
        list[str] | None, typer.Option(help='Only these calls, such as "experts forward". Repeatable. [default: all]')
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds of timing for each case.", min=0.1)] = 20.0,
    seed: o.SEED = 0,
    out_: o.OUT = None,
) -> int:
    """Times every stage, forward, and forward + backward; refuses to time what does not agree, and says so."""
    asked = {k: v for k, v in locals().items() if k in o.RECORDED and v not in (None, [], ())}
    target = o.record_path(out_, "dropless-bench")
    o.start_devices(ep)
    record = new_record("bench", seed=seed, command=asked)
    requests = [{"preset": p, "skew": s, "exponent": exponent} for p in presets or PRESETS for s in skews or SKEWS]
    run_bench(
        record,
        requests,
        {"full": full, "tokens": tokens, "dtype": dtype, "precision": precision, "ep": ep, "seed": seed},
        impl=impl,
        calls=tuple(call or ()),
        budget_s=budget,
    )
    path = write(target, record)
    print_record(record)
    out().print(f"Record: {path}", highlight=False, soft_wrap=True)
    return 1 if record.disagreements else 0


def run_bench(
    record: Record,
    requests: list[dict],
    common: dict,
    *,
    impl: list[str] | None = None,
    calls: tuple[str, ...] = (),
    budget_s: float = 20.0,
    rounds: int | None = None,
) -> None:
    """Measures each request (preset, skew, exponent) and appends its case to the record."""
    from .measure import Options, run_case
    from .stages import WHATS, check_whats
    from .workload import Request, build

    whats = check_whats(calls) if calls else WHATS
    implementations = o.implementations(impl, common.get("ep"))
    # Every input is resolved before the first measurement: a misspelt last preset must not cost minutes.
    workloads = [build(Request(**common, **request)) for request in requests]
    with progress(len(requests) * (len(implementations) + 1), "bench") as step:
        for request, workload in zip(requests, workloads, strict=True):
            label = f"{workload.label}, {workload.source}"

            def say(text: str, advance: int = 1, label: str = label) -> None:
                step(f"{label}: {text}", advance)

            chosen = Options(
                whats=whats,
                layer=False,
                budget_s=budget_s,
                rounds=rounds,
                bounds=not calls,
                step=say,
                step_limit_s=STEP_LIMIT_S,
            )
            case = run_case(workload.cases, implementations, chosen)
            case.label, case.source = label, workload.source
            case.pattern, case.exponent = request["skew"], request["exponent"]
            record.cases.append(case)
