"""Is it slower than it was? A judgement on ratios, made so that a slow moment raises no alarm.

Every call is timed in rounds next to the same call of `loop_and_pad`; what is compared between two runs is the median over
rounds of log(time / loop_and_pad's time in that round). Two runs differ by more than their rounds tell (memory
placement, clocks, neighbours), so one large shift is only a suspicion: the case is timed again, and it is
an alarm when every repetition shows it. Bars: see `bar`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .records import CaseRecord, Record
from .registry import BASELINE

LEAST_SHIFT = math.log(1.10)
"""Shifts below 10 % are never alarms."""

NOISE_FACTOR = 3.0
"""A shift must also exceed this many standard errors of both runs' medians."""

TICK = 1e-7
"""Seconds below which a clock says nothing."""

BLOCKS = 5
"""Stretches of a run whose medians are compared with each other."""

RUN_NOISE = 0.05
"""Log shift between two runs of the same program that no spread inside a run tells of: memory placement, what else runs."""

CONFIRMATIONS = 2
"""Further measurements that must agree before a suspicion is an alarm."""


@dataclass(frozen=True)
class Shift:
    """How one call's ratio moved between two runs."""

    case: str
    implementation: str
    what: str
    clock: str
    """time: wall time, or device time on a GPU. cpu: processor time."""
    before: float
    """Ratio to loop_and_pad in the baseline: below 1 is faster than loop_and_pad."""
    after: float
    noise: float
    """Standard error of log(after / before)."""

    @property
    def log(self) -> float:
        """log(after / before): positive is slower."""
        return math.log(self.after / self.before)

    @property
    def factor(self) -> float:
        """after / before."""
        return self.after / self.before

    @property
    def bar(self) -> float:
        """Factor above which the shift is suspicious."""
        return math.exp(bar(self.noise))

    @property
    def suspicious(self) -> bool:
        """Whether it is above the bar."""
        return self.log > bar(self.noise)


def bar(noise: float) -> float:
    """Smallest suspicious log shift: 10 %, or three standard errors, those between runs included, when that is more."""
    return max(LEAST_SHIFT, NOISE_FACTOR * math.hypot(noise, RUN_NOISE))


CLOCKS = ("time", "cpu")
"""Both are judged: processor time is steady beside other programs, and only wall time sees work that no longer runs in parallel."""


def log_ratios(case: CaseRecord, implementation: str, what: str, clock: str = "time") -> np.ndarray:
    """log(time / loop_and_pad's time) of each round; empty when either was not timed by that clock."""
    own, base = case.result(implementation), case.result(BASELINE)
    a = own.timing(what) if own else None
    b = base.timing(what) if base else None
    if a is None or b is None:
        return np.zeros(0)
    x, y = (a.samples, b.samples) if clock == "time" else (a.cpu_s, b.cpu_s)
    n = min(len(x), len(y))
    return np.log(np.maximum(x[:n], TICK)) - np.log(np.maximum(y[:n], TICK))


def shifts(before: CaseRecord, after: CaseRecord) -> list[Shift]:
    """Every call of every implementation that both cases timed, by every clock, but the baseline's own."""
    found = []
    timed = [(r.implementation, t.what) for r in after.results for t in r.timings if r.implementation != BASELINE]
    for implementation, what in timed:
        for clock in CLOCKS:
            old, new = (log_ratios(c, implementation, what, clock) for c in (before, after))
            if old.size and new.size:
                found.append(
                    Shift(
                        case=before.label,
                        implementation=implementation,
                        what=what,
                        clock=clock,
                        before=float(np.exp(np.median(old))),
                        after=float(np.exp(np.median(new))),
                        noise=math.hypot(median_error(old), median_error(new)),
                    )
                )
    return found


def median_error(samples: np.ndarray) -> float:
    """Standard error of the median: the larger of what independent rounds would give and what stretches of the run show.

    Independent: 1.2533 * 1.4826 * MAD / sqrt(n). Stretches: the run is cut into BLOCKS in the order of time, and the
    spread of their medians divided by sqrt(BLOCKS); a slow stretch makes neighbouring rounds alike, and this sees it.
    """
    if samples.size < 2:
        return 0.0
    spread = float(np.median(np.abs(samples - np.median(samples)))) * 1.4826
    independent = 1.2533 * spread / math.sqrt(samples.size)
    if samples.size < 2 * BLOCKS:
        return independent
    medians = [float(np.median(block)) for block in np.array_split(samples, BLOCKS)]
    return max(independent, float(np.std(medians, ddof=1)) / math.sqrt(BLOCKS))


def confirmed(first: Shift, again: Sequence[Shift]) -> bool:
    """Whether a suspicion is an alarm: suspicious, and in each further measurement too."""
    key = (first.implementation, first.what, first.clock)
    same = [s for s in again if (s.implementation, s.what, s.clock) == key]
    return first.suspicious and len(same) >= CONFIRMATIONS and all(s.suspicious for s in same)


def parity_changes(before: CaseRecord, after: CaseRecord) -> list[str]:
    """One line for each implementation that agreed in the baseline and does not now."""
    lines = []
    for old in before.results:
        new = after.result(old.implementation)
        if old.verdict in ("agree", "expected-different") and new is not None and new.verdict != old.verdict:
            lines.append(f"{before.label}: {old.implementation} was {old.verdict!r}, now {new.verdict!r}: {new.reason}")
    return lines


def environment_changes(before: Record, after: Record) -> list[str]:
    """What differs between the two machines and installations, one line each."""
    lines = [f"{name}: {old} -> {new}" for name, old, new in _differences(before.environment, after.environment)]
    if before.source_hash != after.source_hash:
        lines.append(f"dropless source: {before.source_hash[:12]} -> {after.source_hash[:12]}")
    if before.contract != after.contract:
        lines.append(f"contract: {before.contract} -> {after.contract}")
    return lines


def _differences(a: dict[str, Any], b: dict[str, Any], path: str = "") -> list[tuple[str, Any, Any]]:
    found = []
    for key in dict.fromkeys([*a, *b]):
        old, new = a.get(key), b.get(key)
        name = f"{path}.{key}" if path else key
        if isinstance(old, dict) or isinstance(new, dict):
            found += _differences(old or {}, new or {}, name)
        elif old != new:
            found.append((name, old, new))
    return found
