"""Timing calls over several GPUs: inputs placed where they are used, wall time, and device time by kernel."""

from __future__ import annotations

import collections
import glob
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from dropless.optimized.xla.mesh import by_expert, by_token, device_mesh
from dropless.parity.inputs import Case
from dropless.parity.problem import Problem, Routing
from dropless.parity.records import TimingRecord
from dropless.parity.timing import measure, prepare
from jax.sharding import NamedSharding, PartitionSpec

ROUNDS = 12
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


def timed(
    what: str, function: Callable[..., Any], variants: list[tuple[Any, ...]], flops: float = 0.0, moved: float = 0.0
):
    """(TimingRecord, outputs of the last repetition and which variant they are of, kernels of one call by device time)."""
    call = prepare(what, function, variants)
    measure([call], rounds=ROUNDS)
    assert call.last is not None
    record: TimingRecord = call.record(useful_flops=flops, bytes_moved=moved)
    return record, call.last, kernels(call.run, variants)


def kernels(run: Callable[..., Any], variants: list[tuple[Any, ...]], most: int = 16) -> dict[str, float]:
    """Kernel name -> microseconds of one call on the first GPU, the longest first; empty without a GPU."""
    if jax.default_backend() != "gpu":
        return {}
    total: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for i in range(PROFILED):
                jax.block_until_ready(run(*variants[i % len(variants)]))
        found = sorted(glob.glob(f"{folder}/**/*.xplane.pb", recursive=True))
        for plane in jax.profiler.ProfileData.from_file(found[-1]).planes:
            if "/device:GPU:0" in plane.name:
                for line in plane.lines:
                    if "Stream" in line.name:
                        for event in line.events:
                            total[event.name[:96]] += event.duration_ns
    return {name: ns / PROFILED / 1e3 for name, ns in total.most_common(most)}


def communication_share(times: dict[str, float]) -> float | None:
    """The part of the kernels' time that moves tokens or finds out where they go."""
    whole = sum(times.values())
    moving = sum(us for name, us in times.items() if any(word in name.lower() for word in COMMUNICATION))
    return moving / whole if whole else None


def peak_bytes() -> int | None:
    """The most memory that the first device ever held, by its allocator."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use")


def host(a: Any) -> np.ndarray:
    """A whole array on the host."""
    return np.asarray(a)
