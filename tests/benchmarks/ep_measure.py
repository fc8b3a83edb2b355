"""Timing calls over several GPUs: inputs placed where they are used, wall and device time, and device time by kernel.

Device time is the pace of queued calls: kernels of several GPUs wait for each other, so their sum is no duration, and a
call alone also pays for its launches, which a training step hides behind the call before.
"""

from __future__ import annotations

import collections
import glob
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from dropless.optimized.xla.mesh import by_expert, by_token, device_mesh
from dropless.parity.inputs import Case
from dropless.parity.problem import Problem, Routing
from dropless.parity.records import TimingRecord
from dropless.parity.timing import Call, measure, prepare
from jax.sharding import NamedSharding, PartitionSpec

ROUNDS = 12
SLOW, SLOW_ROUNDS = 0.1, 3
"""Seconds from which a call is slow, and its repetitions: in wall time, where its launches are nothing, and one of them profiled."""
DEPTH = 4
"""Calls in a queue; the pace is that of a second queue behind the first."""
PROFILED = 4
COMMUNICATION = ("nccl", "dispatch", "combine", "permute", "all_to_all", "alltoall", "scan", "prepare", "routing_map")
"""Parts of the names of kernels that move tokens or find out where they go."""


def placed(case: Case) -> Case:
    """The case with each array where its mesh wants it: tokens by rank, kernels by expert, the rest everywhere."""
    mesh = case.problem.mesh
    assert mesh is not None

    def put(a: Any, spec: PartitionSpec) -> Any:
        return jax.device_put(a, NamedSharding(device_mesh(mesh), spec))

    held = {
        n: put(a, by_expert(mesh)) for n, a in case.params.named().items() if n in ("wi", "wo", "wi_bias", "wo_bias")
    }
    rest = {n: put(a, PartitionSpec()) for n, a in case.params.named().items() if n not in held}
    split = by_token(mesh)
    return case.replace(
        params=case.params.replace(**held, **rest),
        x=put(case.x, split),
        cotangent=put(case.cotangent, split),
        routing=Routing(put(case.routing.topk_idx, split), put(case.routing.topk_weights, split)),
    )


def layer_calls(problem: Problem, layer: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Forward, and forward + backward, of (params, x, dy)."""

    def forward(params: Any, x: jax.Array, dy: jax.Array) -> Any:
        return layer(problem, params, x).y

    def both(params: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, pull = jax.vjp(lambda p, x: layer(problem, p, x).y, params, x)
        return y, pull(dy)

    return {"layer forward": forward, "layer forward+backward": both}


@dataclass(frozen=True)
class Measured:
    """What one call took."""

    timing: TimingRecord
    outputs: Any
    """Of the last repetition."""
    kernels: list[dict[str, float]]
    """GPU by GPU: kernel name -> microseconds of one call, the longest first. A kernel that waits for another GPU counts its waiting."""
    busy: list[float]
    """GPU by GPU: microseconds of one call in which any kernel ran."""


def timed(
    what: str, functions: Sequence[tuple[Callable[..., Any], list[tuple[Any, ...]], float]], moved: float = 0.0
) -> list[Measured]:
    """Measures (function, input variants, useful FLOPs) side by side, round by round."""
    calls = [prepare(what, function, variants) for function, variants, _ in functions]
    for call in calls:
        call(0)
        call(0)
    slow = [call.elapsed_s >= SLOW for call in calls]
    measure([call for call, is_slow in zip(calls, slow, strict=True) if not is_slow], rounds=ROUNDS)
    measure([call for call, is_slow in zip(calls, slow, strict=True) if is_slow], rounds=SLOW_ROUNDS)
    found = []
    for call, (_, variants, flops), is_slow in zip(calls, functions, slow, strict=True):
        assert call.last is not None
        outputs, call.last = call.last[1], None
        if jax.default_backend() == "gpu":
            if not is_slow:
                call.device_s, call.device_timer = pace(call, ROUNDS), "queued calls"
        times, busy = kernels(call.run, variants, 1 if is_slow else PROFILED)
        found.append(Measured(call.record(useful_flops=flops, bytes_moved=moved), outputs, times, busy))
    return found


def pace(call: Call, rounds: int) -> list[float]:
    """(time of 2 * DEPTH queued calls - time of DEPTH) / DEPTH, `rounds` times."""

    def queue(depth: int) -> float:
        start = time.perf_counter()
        for _ in range(depth):
            out = call.run(*call.inputs[0])  # the one before is freed once its memory is no longer in use
        jax.block_until_ready(out)
        return time.perf_counter() - start

    times = [(queue(2 * DEPTH) - queue(DEPTH)) / DEPTH for _ in range(rounds)]
    return [t for t in times if t > 0]


def kernels(
    run: Callable[..., Any], variants: list[tuple[Any, ...]], calls: int, most: int = 24
) -> tuple[list[dict[str, float]], list[float]]:
    """(each GPU's kernels, each GPU's busy time) of one call, from a profile of `calls`; empty without a GPU."""
    if jax.default_backend() != "gpu":
        return [], []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(calls):
                jax.block_until_ready(run(*variants[i % len(variants)]))
        file = sorted(glob.glob(f"{folder}/**/*.xplane.pb", recursive=True))[-1]
        planes = {plane.name: plane for plane in jax.profiler.ProfileData.from_file(file).planes}
        tables, busy = [], []
        for _, plane in sorted(item for item in planes.items() if "/device:GPU:" in item[0]):
            total: collections.Counter[str] = collections.Counter()
            spans = []
            for line in plane.lines:
                if "Stream" in line.name:
                    for event in line.events:
                        total[event.name[:96]] += event.duration_ns
                        spans.append((event.start_ns, event.start_ns + event.duration_ns))
            tables.append({name: ns / calls / 1e3 for name, ns in total.most_common(most)})
            busy.append(_union(spans) / calls / 1e3)
    return tables, busy


def _union(spans: list[tuple[float, float]]) -> float:
    covered, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        covered += max(last - max(first, end), 0.0)
        end = max(end, last)
    return covered


def communication_share(times: list[dict[str, float]]) -> float | None:
    """The part of the kernels' time that moves tokens or finds out where they go, on the GPU where it is least: waiting least."""
    shares = []
    for table in times:
        moving = sum(us for name, us in table.items() if any(word in name.lower() for word in COMMUNICATION))
        shares.append(moving / sum(table.values()))
    return min(shares, default=None)


def by_rank(problem: Problem) -> Callable[[Any], Any]:
    """Splits an array's leading axis over the problem's ranks."""
    assert problem.mesh is not None
    sharding = NamedSharding(device_mesh(problem.mesh), by_token(problem.mesh))
    return lambda a: jax.device_put(a, sharding)


def peak_bytes() -> int | None:
    """The most memory that the first device ever held, by its allocator."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def host(a: Any) -> np.ndarray:
    """A whole array on the host."""
    return np.asarray(a)
