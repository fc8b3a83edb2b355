"""What one process of record_ep_gpu.py does: the laws of one implementation, or one shape's exchange and layers.

A step is a generator: what comes before its `yield` prepares and judges, beside other processes; what comes after times,
alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from dropless.parity import costs, launch, records, registry
from dropless.parity.ep_cases import stored, token_payload
from dropless.parity.inputs import Case, make_case
from dropless.parity.law import Law
from dropless.parity.placement import expert_mesh
from dropless.parity.problem import Problem, Router, Routing
from dropless.parity.traffic import traffic
from ep_measure import by_rank, communication_share, host, layer_calls, peak_bytes, placed, timed
from record_ep_gpu import READY

RANKS = 2
SHAPES = {
    "4096-8": (4096, 3584, 8, 2),
    "7168-32": (7168, 2048, 32, 8),
    "2048-128": (2048, 768, 128, 8),
    "7168-256": (7168, 2048, 256, 8),
}
"""Name -> D, F, E, K. The last is DeepSeek-V3's, whose kernels do not fit: it is exchanged only."""
EXCHANGED = ("4096-8", "2048-128", "7168-256")
"""Shapes whose exchange is timed alone."""
LAYERS = ("4096-8", "2048-128", "7168-32")
TOKENS = 8192
"""A rank."""
SHARED_STATE = ("zero-weights", "repeatable", "dirty-memory", "layers-apart", "checkpoint", "scan")
"""Laws that are not about ranks, but whose state expert parallelism could share between calls."""

VALUES = ("value", "gradient-x", "gradient-topk_weights", "gradient-wi", "gradient-wo", "idle-gradients", "nowhere")
"""The other laws of xla_ep here: its local experts are `blocked`'s, which all laws judge on one device."""

LAW_LIMIT = 100.0
"""Seconds that a law may take; then its process says where it hangs, and ends."""

Step = Iterator[None]


def run(part: str, chosen: argparse.Namespace) -> None:
    """Prepares all steps, waits for a line on stdin, then times them; `out`/`part`.json is written after each."""
    launch.start_devices(RANKS)
    path = chosen.out / f"{part}.json"
    if part.startswith("laws-"):
        laws(path, part.partition("-")[2], chosen)
        return
    names = ("xla_ep",) if part.startswith("xla_ep-") else ("te_ep", "te_block")
    shape = part.removeprefix("xla_ep-")
    command = {"part": part, "ranks": RANKS, "names": list(names), "tiny": chosen.tiny}
    record = records.new_record("bench", command=command)
    steps: list[tuple[str, Step]] = []
    if shape in LAYERS:
        cases = _cases(shape, chosen)
        steps += [(skew, _layers(record, *pair, names)) for skew, pair in cases.items()]
    if shape in EXCHANGED:
        sizes = (16, 8) if chosen.tiny else (TOKENS, TOKENS // 2)
        steps += [
            (f"{names[0]} {t} tokens a rank", _moves(record, names[0], _problem(SHAPES[shape], t, chosen.tiny)))
            for t in sizes
        ]
    ready = [(name, step) for name, step in steps if _advance(record, path, name, step, "prepared")]
    print(READY, flush=True)
    sys.stdin.readline()
    for name, step in ready:
        _advance(record, path, name, step, "timed")


def _advance(record: records.Record, path: Path, name: str, step: Step, what: str) -> bool:
    """One step up to its `yield` or its end; False when it failed or had nothing to time."""
    try:
        more = next(step, "end") is None
    except Exception as error:  # one step's failure must not cost the others; it is in the record
        traceback.print_exc()
        record.extra.setdefault("failed", {})[name] = f"{type(error).__name__}: {str(error)[:400]}"
        more = False
    records.write(path, record)
    print(f"{name} {what}", flush=True)
    return more


def laws(path: Path, name: str, chosen: argparse.Namespace) -> None:
    """Every law that says something about this implementation on ranks, in bfloat16, against the oracle.

    Those of ranks and shared state come first. A law found under way in an earlier process's record ended that process.
    """
    from dropless.parity.laws import LAWS
    from dropless.parity.laws_ep import LAWS as OF_RANKS
    from dropless.parity.laws_exchange import LAWS as OF_EXCHANGE
    from dropless.parity.suite import Settings, run_law

    record = (
        records.read(path) if path.exists() else records.new_record("check", command={"laws": name, "ranks": RANKS})
    )
    found: list[dict[str, Any]] = record.extra.setdefault("laws", [])
    if under_way := record.extra.pop("under way", None):
        found.append({"implementation": name, "law": under_way, "status": "ended its process, or hung", "reason": ""})
    problem = _problem((16, 16, 8, 2) if chosen.tiny else (256, 128, 8, 2), 16, False)
    if not (able := registry.get(name).can_run(problem)):
        found.append({"implementation": name, "law": "", "status": "cannot run", "reason": able.reason})
        records.write(path, record)
        return
    if name != "xla_ep":
        from dropless.optimized.te.group import start

        start(problem.replace(T=4 * problem.T))  # some laws double the batch
    first: list[Law] = [*OF_EXCHANGE, *OF_RANKS, *(one for one in LAWS if one.name in SHARED_STATE)]
    done = {line["law"] for line in found}
    implementation = registry.complete(registry.get(name))
    rest = [one for one in LAWS if one not in first and (name != "xla_ep" or one.name in VALUES)]
    for law in [*first, *rest]:
        if law.name in done or law.unmet(implementation, problem):
            continue
        record.extra["under way"] = law.name
        records.write(path, record)
        line: dict[str, Any] = {"implementation": name, "law": law.name}
        faulthandler.dump_traceback_later(LAW_LIMIT, exit=True)
        try:
            verdict = run_law(law, implementation, [problem], Settings(max_examples=2, shrink=False))
            reason = verdict.reason or (verdict.finding.message if verdict.finding else "")
            line |= {"status": verdict.status, "percent": verdict.percent, "reason": reason, "seconds": verdict.seconds}
        except Exception as error:
            line |= {"status": "raised", "reason": f"{type(error).__name__}: {str(error)[:400]}"}
        finally:
            faulthandler.cancel_dump_traceback_later()
        found.append(line)
        del record.extra["under way"]
        if line["status"] != "agree":
            print(f"{law.name} {line['status']}: {str(line['reason'])[:300]}", flush=True)
    records.write(path, record)
    agree = sum(line["status"] == "agree" for line in found)
    print(f"{agree} of {len(found)} laws agree", flush=True)


def _moves(record: records.Record, name: str, problem: Problem) -> Step:
    """Dispatch and combine alone, and TE's two steps of a dispatch; a round trip of identity experts is judged first."""
    implementation = registry.get(name)
    t = problem.T // RANKS
    case = records.new_case(f"{name}: {t} tokens a rank", problem, source="uniform random experts")
    result = records.ResultRecord(implementation=name, verdict="cannot run")
    case.results.append(result)
    record.cases.append(case)
    if not (able := implementation.can_run(problem)):
        result.reason = able.reason
        return
    dispatch, combine = implementation.stage("ep_dispatch"), implementation.stage("ep_combine")
    scores = np.random.default_rng(1).random((problem.T, problem.E), np.float32)
    ids = np.argpartition(scores, problem.K, axis=1)[:, : problem.K].astype(np.int32)
    weights = np.exp2(-1.0 - (np.arange(problem.K) % 4) - np.zeros((problem.T, 1))).astype(np.float32)
    payload = token_payload(problem.T, problem.D)
    assert payload is not None
    split = by_rank(problem)
    x = split(stored(problem, payload).reshape(RANKS, t, problem.D))
    routing = Routing(split(ids), split(weights))

    def there_and_back(x: Any, routing: Any) -> Any:
        rows, _, state = dispatch(problem, x, routing)
        return combine(problem, rows, state)

    y = host(jax.jit(there_and_back)(x, routing)).reshape(problem.T, -1)
    want = stored(problem, payload * weights.sum(1, keepdims=True))
    same = np.array_equal(y, want)
    result.findings.append(records.FindingRecord(tensor="y", stage="ep_combine", ok=same, check="values"))
    result.verdict = "agree" if same else "disagree"
    if not same:
        result.reason = f"identity experts: {int((y != want).sum())} of {y.size} elements differ"
        return
    moved = traffic(problem, ids, RANKS)
    case.traffic = moved.to_json()
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "dispatch": (lambda x, r: dispatch(problem, x, r)[0], (x, routing)),
        "dispatch and combine": (there_and_back, (x, routing)),
    }
    if name == "te_ep":
        calls |= _te_calls(problem, x, routing)
    yield
    for what, (function, inputs) in calls.items():
        (one,) = timed(what, [(function, [inputs], 0.0)], moved=float(moved.sent.max()))
        result.timings.append(one.timing)
        result.notes[what] = {"kernels_us": one.kernels, "GB_per_s_once": moved.sent.max() / one.timing.median / 1e9}
        result.notes[what]["GB_per_s_raw"] = moved.sent_raw.max() / one.timing.median / 1e9
        print(_line(f"{name} {t} {what}", one), flush=True)
    result.notes["peak_bytes"] = peak_bytes()


def _te_calls(problem: Problem, x: Any, routing: Routing) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """TE's steps. A routing state stays in the program that makes it, so a step alone is what it adds to `prepare`."""
    from dropless.optimized.te.nccl_ep import combine, dispatch, prepare

    ids, weights = (a.reshape(*x.shape[:2], problem.K) for a in (routing.topk_idx, routing.topk_weights))

    def to_rows(ids: Any, x: Any, weights: Any) -> Any:
        return dispatch(problem, prepare(problem, ids)[2], ids, x, weights)[0]

    def to_tokens(ids: Any, rows: Any) -> Any:
        return combine(problem, prepare(problem, ids)[2], rows)

    rows = jax.jit(to_rows)(ids, x, weights)
    return {
        "prepare": (lambda ids: prepare(problem, ids), (ids,)),
        "prepare, dispatch": (to_rows, (ids, x, weights)),
        "prepare, combine": (to_tokens, (ids, rows)),
    }


def _cases(part: str, chosen: argparse.Namespace) -> dict[str, tuple[Case, Case]]:
    """A live case for each load, as drawn and placed on the ranks; all share the experts' kernels."""
    problem = _problem(SHAPES[part], 16 if chosen.tiny else TOKENS, chosen.tiny)
    found: dict[str, tuple[Case, Case]] = {}
    for skew in chosen.skews.split(","):
        drawn = make_case(problem, seed=1, pattern=skew, live=True)
        here = placed(drawn)
        if found:
            drawn, here = (
                c.replace(params=c.params.replace(wi=first.params.wi, wo=first.params.wo))
                for c, first in zip((drawn, here), next(iter(found.values())), strict=True)
            )
        found[skew] = drawn, here
    return found


def _layers(record: records.Record, drawn: Case, here: Case, names: tuple[str, ...]) -> Step:
    """The live layer: y judged at full size before and after, forward and backward timed, all implementations in turn."""
    problem = drawn.problem
    case = records.new_case(drawn.label, problem, source=drawn.label)
    ids = host(drawn.routing.topk_idx)
    case.rows, case.traffic = int((ids >= 0).sum()), traffic(problem, ids, RANKS).to_json()
    record.cases.append(case)
    reported: list[Any] = []
    able: dict[str, tuple[records.ResultRecord, dict[str, Callable[..., Any]]]] = {}
    for name in names:
        implementation = registry.complete(registry.get(name))
        result = records.ResultRecord(implementation=name, verdict="cannot run")
        case.results.append(result)
        if not (can := implementation.can_run(problem)):
            result.reason = can.reason
            continue
        layer = implementation.stage("layer")
        out = jax.jit(functools.partial(layer, problem))(here.params, here.x)
        reported += [jax.tree.map(host, out.routing)] if out.routing is not None else []
        _judge(result, drawn, reported, host(out.y), result.findings)
        calls = layer_calls(problem, layer)
        if result.verdict == "agree":
            able[name] = (result, calls)
            jax.block_until_ready(jax.jit(calls["layer forward+backward"])(here.params, here.x, here.cotangent))
    yield
    inputs = [(here.params, here.x, here.cotangent)]
    for what in ("layer forward", "layer forward+backward"):
        flops = costs.flops(problem, case.rows, backward="backward" in what) / RANKS
        measured = timed(what, [(calls[what], inputs, flops) for _, calls in able.values()])
        for name, one in zip(able, measured, strict=True):
            result = able[name][0]
            y = host(one.outputs[0] if "backward" in what else one.outputs)
            _judge(result, drawn, reported, y, result.after)
            result.timings.append(one.timing)
            share = communication_share(one.kernels)
            result.notes[what] = {"kernels_us": one.kernels, "busy_us": one.busy, "communication_share": share}
            print(_line(f"{drawn.label} {name} {what}", one), flush=True)
    for result, _ in able.values():
        result.notes["peak_bytes"] = peak_bytes()
        if result.verdict != "agree":
            result.timings.clear()


def _line(what: str, one: Any) -> str:
    t = one.timing
    wall, device = (1e3 * float(np.median(s)) if s else float("nan") for s in (t.wall_s, t.device_s))
    busy = " / ".join(f"{us / 1e3:.2f}" for us in one.busy)
    rate = f", {t.useful_flops / 1e9 / wall:.0f} wall {t.useful_flops / 1e9 / device:.0f} queued TFLOP/s"
    times = f"wall {wall:.2f} ms, queued {device:.2f} ms, busy {busy} ms"
    return f"{what}: {times}{rate if t.useful_flops else ''}"


def _judge(result: Any, drawn: Case, reported: list[Any], y: np.ndarray, into: list[Any]) -> None:
    """y against the oracle at full width, at the routing that a layer reported, which must be the drawn one."""
    from dropless.parity.findings import to_record
    from dropless.parity.streamed import streamed_experts

    if not reported:
        result.reason = "no layer here reported its routing, so an opaque one has nothing to be judged by"
        return
    routing = reported[-1]
    alike = np.array_equal(np.sort(routing.topk_idx, axis=1), np.sort(np.asarray(drawn.routing.topk_idx), axis=1))
    found = streamed_experts(drawn.replace(routing=routing), {"y": y})
    into += [to_record(f, "layer") for f in found]
    bad = [f.message for f in found if not f.ok] + ([] if alike else ["other experts were chosen than those drawn"])
    result.verdict, result.reason = ("disagree", bad[0]) if bad else ("agree", "")


def _problem(shape: tuple[int, int, int, int], t: int, tiny: bool) -> Problem:
    D, F, E, K = (64, 16, 8, 2) if tiny else shape
    router = Router(logits_dtype="activation")
    return Problem(T=RANKS * t, K=K, E=E, D=D, F=F, dtype="bfloat16", mesh=expert_mesh(RANKS), router=router)
