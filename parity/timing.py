"""Times compiled calls: compile, wall and device time apart, interleaved, on inputs that differ between repetitions.

Ratios of medians from one interleaved run are what to compare; absolute times drift with the machine. Wall time runs
from dispatch until every output is ready. Device time is read on GPUs only: the sum of the call's kernels
as CUPTI reports them, or else the spacing of queued calls. Before each repetition on a GPU a buffer larger than the
L2 cache is overwritten, outside the timed region.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .problem import InvalidInput
from .records import TimingRecord

COMPILER_OPTIONS: dict[str, Any] = {}
"""XLA options of every timed executable; empty, so that what is timed is what a user gets."""

OVERTIME = 1.5
"""Times its budget that a measurement may last."""

FLUSH_BYTES = 256 * 2**20
"""Above the L2 cache of any current GPU."""


@dataclass
class Call:
    """One thing to time: a compiled function, its input variants, and what was measured."""

    what: str
    run: Callable[..., Any]
    inputs: Sequence[tuple[Any, ...]]
    """Variants; repetition i uses variant i mod len."""
    compile_s: float = 0.0
    temp_bytes: int | None = None
    peak_bytes: int | None = None
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)
    device_timer: str = ""
    compiles: int = 0
    """Executables built so far, by compiling and by running."""
    elapsed_s: float = 0.0
    """Wall time of the latest run, timed or not; 0 before the first."""
    elapsed_cpu_s: float = 0.0
    last: tuple[int, Any] | None = None
    """Variant and outputs of the last timed repetition, to be judged."""

    def __call__(self, variant: int) -> Any:
        """Runs one variant to the end. An eager call's first run, which compiles its pieces, is its compile time."""
        before = _COMPILED[0]
        start, cpu = time.perf_counter(), time.process_time()
        out = jax.block_until_ready(self.run(*self.inputs[variant]))
        self.elapsed_s, self.elapsed_cpu_s = time.perf_counter() - start, time.process_time() - cpu
        self.compiles += _COMPILED[0] - before
        self.compile_s = self.compile_s or self.elapsed_s
        return out

    def record(self, *, useful_flops: float = 0.0, bytes_moved: float = 0.0) -> TimingRecord:
        """The measurement as it is stored."""
        return TimingRecord(
            what=self.what,
            compile_s=self.compile_s,
            wall_s=self.wall_s,
            cpu_s=self.cpu_s,
            device_s=self.device_s,
            device_timer=self.device_timer,
            useful_flops=useful_flops,
            bytes_moved=bytes_moved,
            temp_bytes=self.temp_bytes,
            peak_bytes=self.peak_bytes,
            compiles=self.compiles,
        )


_COMPILED = [0]


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COMPILED[0] += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def prepare(what: str, function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *, eager: bool = False) -> Call:
    """Compiles `function` for the first variant and reads XLA's memory figures; an eager function is left as it is.

    Raises InvalidInput when there are no variants, or when one variant would repeat: a cached answer must not win.
    """
    if not inputs:
        raise InvalidInput(f"{what} has no inputs to time; accepted: one variant or more")
    if eager:
        return Call(what, function, inputs)
    start, before = time.perf_counter(), _COMPILED[0]
    compiled = jax.jit(function, compiler_options=COMPILER_OPTIONS or None).lower(*inputs[0]).compile()
    call = Call(what, compiled, inputs, compile_s=time.perf_counter() - start, compiles=_COMPILED[0] - before)
    memory = compiled.memory_analysis()
    if memory is not None:
        call.temp_bytes = int(memory.temp_size_in_bytes)
        call.peak_bytes = int(memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes)
    return call


def measure(
    calls: Sequence[Call],
    *,
    rounds: int | None = None,
    budget_s: float = 5.0,
    least: int = 5,
    most: int = 30,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Times the calls in turn, round by round, so that a slow moment meets all of them; fills each call's lists.

    Calls of one name run next to each other and equally often, so that their times pair up; every other round runs in
    reverse order. Without `rounds`, each name repeats as often as its share of `budget_s` allows, `least` to `most` times,
    spread over the whole run; a call longer than the share of its name repeats once. `tick` is called after each repetition.
    """
    counts = _counts(calls, rounds, budget_s, least, most)
    flush = _flusher()
    total = max(counts, default=0)
    end = math.inf if rounds is not None else time.perf_counter() + OVERTIME * budget_s
    for i in range(total):
        if time.perf_counter() > end and all(
            len(c.wall_s) >= min(n, least) for c, n in zip(calls, counts, strict=True)
        ):
            break  # the machine became slower than the warm-up promised
        turn = [(call, n) for call, n in zip(calls, counts, strict=True) if (i + 1) * n // total > i * n // total]
        for call, n in turn if i % 2 == 0 else reversed(turn):
            # The last repetition runs variant 1 whatever the count: the outputs of every call are then judged on one case.
            _repeat(call, (len(call.wall_s) - n + 2) % len(call.inputs), flush)
            tick()
    if jax.default_backend() == "gpu":
        for call, count in zip(calls, counts, strict=True):
            if call.last is not None and _devices(call.last[1]) > 1:
                continue  # the kernels of several GPUs would be added up as if they ran one after the other
            call.device_s, call.device_timer = _device_times(call, count, flush)


def _counts(calls: Sequence[Call], rounds: int | None, budget_s: float, least: int, most: int) -> list[int]:
    """Warms the calls up and says how often each is to be repeated; what quick names leave of the budget goes to the others."""
    names = list(dict.fromkeys(call.what for call in calls))
    for call in calls:
        if call.elapsed_s == 0.0 or call.elapsed_s < budget_s / len(names):
            call(-1)  # not again when it ran before and is slow
            call(-1)
    if rounds is not None:
        return [rounds] * len(calls)
    cost = {name: sum(c.elapsed_s for c in calls if c.what == name) for name in names}
    counts: dict[int, int] = {}
    left = budget_s
    for done, name in enumerate(sorted(names, key=cost.__getitem__)):
        share = left / (len(names) - done)
        quick = sum(c.elapsed_s for c in calls if c.what == name and c.elapsed_s <= share)
        repeats = max(least, min(most, int(share / max(quick, 1e-9))))
        for i, call in enumerate(calls):
            if call.what == name:
                counts[i] = repeats if call.elapsed_s <= share else 1
                left -= counts[i] * call.elapsed_s
        left = max(left, 0.0)
    return [counts[i] for i in range(len(calls))]


def _repeat(call: Call, variant: int, flush: Callable[[], None]) -> None:
    call.last = None  # frees the outputs before the next ones are made
    flush()
    out = call(variant)
    call.wall_s.append(call.elapsed_s)
    if jax.default_backend() == "cpu":
        call.cpu_s.append(call.elapsed_cpu_s)
    call.last = (variant, out)


def _flusher() -> Callable[[], None]:
    if jax.default_backend() != "gpu":
        return lambda: None
    fill = jax.jit(lambda seed: jnp.full((FLUSH_BYTES // 4,), seed, jnp.float32))
    state = {"seed": 0.0}

    def flush() -> None:
        state["seed"] += 1.0
        jax.block_until_ready(fill(state["seed"]))

    return flush


def _devices(outputs: Any) -> int:
    """How many devices the outputs lie on."""
    return max((len(a.devices()) for a in jax.tree.leaves(outputs) if isinstance(a, jax.Array)), default=1)


def _device_times(call: Call, count: int, flush: Callable[[], None]) -> tuple[list[float], str]:
    """Kernel times by CUPTI, one repetition at a time; queued calls where CUPTI is not to be had."""
    extension = _cupti()
    if extension is None:
        return _queued_times(call, count), "queued calls"
    times = []
    for i in range(count):
        flush()
        extension._cupti_init()
        try:
            jax.block_until_ready(call.run(*call.inputs[i % len(call.inputs)]))
        finally:
            kernels = extension._cupti_get_timings(False)
        times.append(sum(milliseconds for _, milliseconds in kernels) / 1e3)
    if min(times) <= 0:  # kernels launched from a graph may be invisible to this subscriber
        return _queued_times(call, count), "queued calls"
    return times, "CUPTI kernels"


def _queued_times(call: Call, count: int, depth: int = 8) -> list[float]:
    """(time of 2*depth queued calls - time of depth) / depth: the device's pace once launches are hidden."""

    def queue(n: int, i: int) -> float:
        start = time.perf_counter()
        outs = [call.run(*call.inputs[(i + j) % len(call.inputs)]) for j in range(n)]
        jax.block_until_ready(outs)
        return time.perf_counter() - start

    times = [(queue(2 * depth, i) - queue(depth, i)) / depth for i in range(count)]
    return [t for t in times if t > 0]


def _cupti() -> Any | None:
    try:
        from jax._src.lib import mosaic_gpu
    except ImportError:
        return None
    return getattr(mosaic_gpu, "_mosaic_gpu_ext", None)
