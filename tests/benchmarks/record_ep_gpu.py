"""Records expert parallelism on several GPUs: the laws, dispatch and combine alone, and whole layers, beside TE's block.

    python tests/benchmarks/record_ep_gpu.py [--out FOLDER] [--only laws,moves-7168-256,...] [--limit SECONDS]
                                             [--names te_ep,...] [--skews zipf,...] [--tiny]

NCCL EP has one group of one size a process, so each part below is a process of its own, ended after --limit seconds.
Each writes its record after every step, so what was measured before a crash is kept. Leave NVLink multicast off
(NCCL_NVLS_ENABLE=0) and keep NCCL_EP_JIT_CACHE_DIR, or every part compiles the exchange kernels anew. --tiny runs the
same steps at small sizes on whatever devices are here, virtual ones too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
RANKS = 2
SHAPES = {
    "4096-8": (4096, 3584, 8, 2),
    "7168-32": (7168, 2048, 32, 8),
    "2048-128": (2048, 768, 128, 8),
    "7168-256": (7168, 2048, 256, 8),
}
"""Name -> D, F, E, K. The last is DeepSeek-V3's, whose kernels do not fit: it is exchanged only."""
TOKENS = 8192
"""A rank."""
PARTS = ("laws", "layer-2048-128", "layer-7168-32", "layer-4096-8", "moves-7168-256", "moves-2048-128", "moves-4096-8")
NAMES = ("te_ep", "te_block", "xla_ep")
GENERAL_LAWS = ("value", "zero-weights", "repeatable", "dirty-memory", "layers-apart", "scan", "checkpoint")
"""Laws that are not about ranks, but whose state expert parallelism could share between calls."""


def main() -> None:
    """Runs each part in a process of its own and says what became of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--limit", type=float, default=150.0)
    parser.add_argument("--names", default=",".join(NAMES), help="implementations to measure")
    parser.add_argument("--skews", default="zipf,balanced", help="loads of the whole layers")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--part", default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part is not None:
        run_part(chosen.part, chosen.out, chosen)
        return
    out = chosen.out or Path(__file__).parent / "recorded" / f"ep-{RANKS}"
    out.mkdir(parents=True, exist_ok=True)
    for part in chosen.only.split(","):
        if part not in PARTS:
            sys.exit(f"--only has {part!r}; accepted: {', '.join(PARTS)}")
        command = [sys.executable, __file__, "--part", part, "--out", str(out), *(["--tiny"] if chosen.tiny else [])]
        command += ["--names", chosen.names, "--skews", chosen.skews]
        try:
            code = subprocess.run(command, timeout=chosen.limit, check=False).returncode
            print(f"{part}: {'done' if code == 0 else f'ended with status {code}'}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"{part}: ended after {chosen.limit:g} s; what it had written is kept", flush=True)


def run_part(part: str, out: Path, chosen: argparse.Namespace) -> None:
    """One part: measures, and writes `out`/`part`.json after every step."""
    from dropless.parity import launch, records

    launch.start_devices(RANKS)
    record = records.new_record(
        "bench", command={"part": part, "ranks": RANKS, "names": chosen.names, "tiny": chosen.tiny}
    )
    kind, _, shape = part.partition("-")
    steps = {"laws": laws, "moves": moves, "layer": layers}[kind](record, SHAPES.get(shape), chosen)
    for name, step in steps:
        try:
            step()
        except Exception as error:  # one step's failure must not cost the others; it is in the record
            traceback.print_exc()
            record.extra.setdefault("failed", {})[name] = f"{type(error).__name__}: {str(error)[:400]}"
        records.write(out / f"{part}.json", record)
        print(f"  {part}: {name}", flush=True)


def laws(record: Any, shape: None, chosen: argparse.Namespace) -> list[tuple[str, Callable[[], None]]]:
    """Every law about ranks and those of shared state, in bfloat16, each implementation against the oracle."""
    from dropless.parity import registry
    from dropless.parity.inputs import make_case
    from dropless.parity.judge import layer_findings
    from dropless.parity.laws import LAWS
    from dropless.parity.laws_ep import LAWS as OF_RANKS
    from dropless.parity.laws_exchange import LAWS as OF_EXCHANGE
    from dropless.parity.placement import expert_mesh
    from dropless.parity.problem import Problem, Router
    from dropless.parity.suite import Settings, run_law

    wide = {} if chosen.tiny else {"D": 256, "F": 128}
    problem = Problem(
        **({"T": 32, "K": 2, "E": 8, "D": 16, "F": 16} | wide),
        dtype="bfloat16",
        mesh=expert_mesh(RANKS),
        router=Router(logits_dtype="activation"),
    )
    wanted = [*OF_EXCHANGE, *OF_RANKS, *(one for one in LAWS if one.name in GENERAL_LAWS)]
    found = record.extra.setdefault("laws", [])

    def judge(name: str, law: Any) -> None:
        verdict = run_law(law, registry.complete(registry.get(name)), [problem], Settings(max_examples=2, shrink=False))
        line = {"implementation": name, "law": law.name, "status": verdict.status, "percent": verdict.percent}
        reason = verdict.reason or (verdict.finding.message if verdict.finding else "")
        found.append(line | {"reason": reason, "seconds": verdict.seconds})

    def block() -> None:
        case = make_case(problem, seed=1, live=True)
        findings = layer_findings(registry.complete(registry.get("te_block")), case, oracle="oracle_device")
        bad = next((f.message for f in findings if not f.ok), "")
        percent = max((100 * f.measured for f in findings if f.measured is not None), default=None)
        status = "disagree" if bad or not findings else "agree"
        found.append(
            {"implementation": "te_block", "law": "live layer", "status": status, "percent": percent, "reason": bad}
        )

    steps: list[tuple[str, Callable[[], None]]] = []
    names = chosen.names.split(",")
    for name in (n for n in names if n != "te_block"):
        if able := registry.get(name).can_run(problem):
            steps += [(f"{name} {law.name}", lambda name=name, law=law: judge(name, law)) for law in wanted]
        else:
            found.append({"implementation": name, "law": "", "status": "cannot run", "reason": able.reason})
    if "te_block" not in names:
        return steps
    if able := registry.get("te_block").can_run(problem):
        return [("te_block live layer", block), *steps]
    found.append({"implementation": "te_block", "law": "", "status": "cannot run", "reason": able.reason})
    return steps


def moves(
    record: Any, shape: tuple[int, int, int, int], chosen: argparse.Namespace
) -> list[tuple[str, Callable[[], None]]]:
    """Dispatch and combine alone, and prepare where it is a call of its own, at two batch sizes: the larger one first."""
    sizes = (16, 8) if chosen.tiny else (TOKENS, TOKENS // 2)
    return [
        (f"{name} {t} tokens a rank", lambda name=name, t=t: _moves(record, name, shape, t, chosen.tiny))
        for name in chosen.names.split(",")
        if name != "te_block"
        for t in sizes
    ]


def _moves(record: Any, name: str, shape: tuple[int, int, int, int], t: int, tiny: bool) -> None:
    import jax
    import numpy as np
    from dropless.parity import records, registry
    from dropless.parity.ep_cases import stored, token_payload
    from dropless.parity.problem import Routing
    from dropless.parity.traffic import traffic
    from ep_measure import host, peak_bytes, timed

    problem = _problem(shape, t, tiny)
    implementation = registry.get(name)
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
    split = _by_rank(problem)
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
    rows, _, state = jax.jit(lambda x, r: dispatch(problem, x, r))(x, routing)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "dispatch": (lambda x, r: dispatch(problem, x, r)[0], (x, routing)),
        "combine": (lambda rows, state: combine(problem, rows, state), (rows, state)),
    }
    if name == "te_ep":
        calls |= _te_calls(problem, x, routing, state)
    for what, (function, inputs) in calls.items():
        timing, _, times = timed(what, function, [inputs], moved=float(moved.sent.max()))
        result.timings.append(timing)
        result.notes[what] = {"kernels_us": times, "GB_per_s_once": moved.sent.max() / timing.median / 1e9}
        result.notes[what]["GB_per_s_raw"] = moved.sent_raw.max() / timing.median / 1e9
    result.notes["peak_bytes"], result.notes["receive_rows"] = peak_bytes(), int(rows.shape[1])


def _te_calls(problem: Any, x: Any, routing: Any, state: Any) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """TE's own two steps of a dispatch, each alone."""
    from dropless.optimized.te.exchange import config
    from dropless.optimized.te.group import start
    from transformer_engine.jax import cpp_extensions as tex

    cfg, capacity = config(problem), start(problem).capacity
    ids, weights = (a.reshape(*x.shape[:2], problem.K) for a in (routing.topk_idx, routing.topk_weights))

    def send(handle: Any, ids: Any, x: Any, weights: Any) -> Any:
        return tex.ep_dispatch_fwd(cfg, handle, ids, x, weights, capacity)

    return {
        "prepare": (lambda ids: tex.ep_prepare(cfg, ids), (ids,)),
        "dispatch prepared": (send, (state.handle, ids, x, weights)),
    }


def layers(
    record: Any, shape: tuple[int, int, int, int], chosen: argparse.Namespace
) -> list[tuple[str, Callable[[], None]]]:
    """The live layer under zipf and balanced loads: y judged at full size before and after, forward and backward timed."""
    return [(skew, lambda skew=skew: _layers(record, shape, skew, chosen)) for skew in chosen.skews.split(",")]


def _layers(record: Any, shape: tuple[int, int, int, int], skew: str, chosen: argparse.Namespace) -> None:
    import jax
    from dropless.parity import costs, records, registry
    from dropless.parity.inputs import make_case
    from dropless.parity.traffic import traffic
    from ep_measure import communication_share, host, layer_calls, peak_bytes, placed, timed

    problem = _problem(shape, 16 if chosen.tiny else TOKENS, chosen.tiny)
    drawn = make_case(problem, seed=1, pattern=skew, live=True)
    case = records.new_case(drawn.label, problem, source=drawn.label)
    ids = host(drawn.routing.topk_idx)
    case.rows, case.traffic = int((ids >= 0).sum()), traffic(problem, ids, RANKS).to_json()
    record.cases.append(case)
    here = placed(drawn)
    reported: list[Any] = []
    for name in chosen.names.split(","):
        implementation = registry.complete(registry.get(name))
        result = records.ResultRecord(implementation=name, verdict="cannot run")
        case.results.append(result)
        if not (able := implementation.can_run(problem)):
            result.reason = able.reason
            continue
        layer = implementation.stage("layer")
        out = jax.jit(lambda p, x, layer=layer: layer(problem, p, x))(here.params, here.x)
        reported += [jax.tree.map(host, out.routing)] if out.routing is not None else []
        _judge(result, drawn, reported, host(out.y), result.findings)
        for what, function in layer_calls(problem, layer).items() if result.verdict == "agree" else ():
            flops = costs.flops(problem, case.rows, backward="backward" in what) / RANKS
            timing, (_, outputs), times = timed(what, function, [(here.params, here.x, here.cotangent)], flops)
            _judge(result, drawn, reported, host(outputs[0] if "backward" in what else outputs), result.after)
            result.timings.append(timing)
            result.notes[what] = {"kernels_us": times, "communication_share": communication_share(times)}
        result.notes["peak_bytes"] = peak_bytes()
        if result.verdict != "agree":
            result.timings.clear()


def _judge(result: Any, drawn: Any, reported: list[Any], y: Any, into: list[Any]) -> None:
    """y against the oracle at full width, at the routing that a layer reported, which must be the drawn one."""
    import numpy as np
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


def _problem(shape: tuple[int, int, int, int], t: int, tiny: bool) -> Any:
    from dropless.parity.placement import expert_mesh
    from dropless.parity.problem import Problem, Router

    D, F, E, K = (64, 16, 8, 2) if tiny else shape
    router = Router(logits_dtype="activation")
    return Problem(T=RANKS * t, K=K, E=E, D=D, F=F, dtype="bfloat16", mesh=expert_mesh(RANKS), router=router)


def _by_rank(problem: Any) -> Callable[[Any], Any]:
    import jax
    from dropless.optimized.xla.mesh import by_token, device_mesh
    from jax.sharding import NamedSharding

    sharding = NamedSharding(device_mesh(problem.mesh), by_token(problem.mesh))
    return lambda a: jax.device_put(a, sharding)


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main()
