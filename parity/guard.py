"""Is it slower than it was? A judgement on ratios, made so that a slow moment raises no alarm.

Every call is timed in rounds next to the same call of `loop_and_pad`; what is compared between two runs is the middle over
rounds of log(time / loop_and_pad's time in that round). Two processes differ by more than their rounds tell (where memory
and code lie, what else runs), so one large shift is only a suspicion: the case is timed again in new processes, and
the mean of all measurements is held against a bar. Which calls count: see `LEAST_SHARE`. Bars: see `Shift.bar`.
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

SUSPICIOUS = 0.5
"""Part of its bar that the first measurement must exceed for a call to be measured again."""

NOISE_FACTOR = 3.0
"""A shift must also exceed this many standard errors: 1 % of false alarms, shared out over eight ratios."""

RUN_NOISE = {"time": 0.06, "cpu": 0.03}
"""Standard deviation of one process's log ratio that no spread inside the process tells of, by clock."""

LEAST_SHARE = 0.15
"""A call is judged when it takes at least this part of its implementation's `experts forward`, now or in the baseline."""

MEASUREMENTS = 3
"""Of a suspected call, each in a process of its own, before it can be an alarm."""

TICK = 1e-7
"""Seconds below which a clock says nothing."""


@dataclass(frozen=True)
class Shift:
    """How one call's ratio moved between the baseline and the measurements made now."""

    case: str
    implementation: str
    what: str
    clock: str
    """time: wall time, or device time on a GPU. cpu: processor time."""
    before: float
    """Ratio to loop_and_pad in the baseline: below 1 is faster than loop_and_pad."""
    after: float
    """The same now: the mean over the measurements' logarithms."""
    noise: float
    """Standard error of log(after / before), between processes included."""
    allowance: float = 0.0
    """Log shift that another load of the machine explains: by how much loop_and_pad waited more or less for processors."""
    share: float = 1.0
    """Part of the implementation's `experts forward` that the call takes, now or in the baseline, whichever is more."""
    measurements: int = 1
    """Made now."""

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
        """Factor above which it is an alarm: 10 %, or NOISE_FACTOR errors when that is more, on top of the allowance."""
        return math.exp(max(LEAST_SHIFT, NOISE_FACTOR * self.noise) + self.allowance)

    @property
    def judged(self) -> bool:
        """Whether the call takes enough of the layer to matter."""
        return self.share >= LEAST_SHARE

    @property
    def suspicious(self) -> bool:
        """Whether it is worth measuring again."""
        return self.judged and self.log > SUSPICIOUS * math.log(self.bar)

    @property
    def alarm(self) -> bool:
        """Whether it is slower than it was, by every measurement taken together."""
        return self.judged and self.measurements >= MEASUREMENTS and self.factor > self.bar


CLOCKS = ("time", "cpu")
"""Both are judged: processor time is steady beside other programs, and only wall time sees work that no longer runs in parallel."""


@dataclass(frozen=True)
class Ratio:
    """What one process measured of one call by one clock."""

    log: float
    """`middle` over rounds of log(time / loop_and_pad's time)."""
    error: float
    """Standard error of that, as far as the rounds tell."""
    waited: float
    """Wall time: log(wall / processor time) of loop_and_pad's call, which tells the load of the machine. Else 0."""
    share: float
    """Part of the implementation's `experts forward` that the call takes; 1 where one of the two was not timed."""


Key = tuple[str, str, str]
"""Implementation, call, clock."""


def ratios(case: CaseRecord) -> dict[Key, Ratio]:
    """The ratio of every call that was timed beside loop_and_pad's, by each clock that timed it."""
    found = {}
    for result in case.results:
        for timing in result.timings if result.implementation != BASELINE else ():
            for clock in CLOCKS:
                rounds = log_ratios(case, result.implementation, timing.what, clock)
                if rounds.size:
                    found[result.implementation, timing.what, clock] = Ratio(
                        log=middle(rounds),
                        error=middle_error(rounds),
                        waited=waited(case, timing.what) if clock == "time" else 0.0,
                        share=share(case, result.implementation, timing.what, clock),
                    )
    return found


def log_ratios(case: CaseRecord, implementation: str, what: str, clock: str = "time") -> np.ndarray:
    """log(time / loop_and_pad's time) of each round; empty when either was not timed by that clock."""
    x, y = (_samples(case, name, what, clock) for name in (implementation, BASELINE))
    n = min(len(x), len(y))
    return np.log(np.maximum(x[:n], TICK)) - np.log(np.maximum(y[:n], TICK))


def share(case: CaseRecord, implementation: str, what: str, clock: str = "time") -> float:
    """The call's median time over that of the implementation's `experts forward`; 1 where one of the two was not timed."""
    part, whole = (_samples(case, implementation, w, clock) for w in (what, "experts forward"))
    if not part or not whole:
        return 1.0
    return float(np.median(part)) / max(float(np.median(whole)), TICK)


def shifts(before: CaseRecord, *after: CaseRecord) -> list[Shift]:
    """Every call that the baseline and each of the measurements `after` timed, but loop_and_pad's own, by every clock."""
    return compare(before.label, ratios(before), *map(ratios, after))


def compare(case: str, before: dict[Key, Ratio], *after: dict[Key, Ratio]) -> list[Shift]:
    """`shifts`, of ratios. The call's share is the first measurement's, which has `experts forward` beside it."""
    found = []
    for key in before:
        old, new = before[key], [a[key] for a in after if key in a]
        if len(new) == len(after):
            between = RUN_NOISE[key[2]]
            now = math.sqrt(sum(n.error**2 + between**2 for n in new)) / len(new)
            found.append(
                Shift(
                    case,
                    *key,
                    before=math.exp(old.log),
                    after=math.exp(sum(n.log for n in new) / len(new)),
                    noise=math.hypot(old.error, between, now),
                    allowance=abs(sum(n.waited for n in new) / len(new) - old.waited),
                    share=max(old.share, new[0].share),
                    measurements=len(new),
                )
            )
    return found


def settled(first: Sequence[Shift], together: Sequence[Shift]) -> list[Shift]:
    """The first measurement's shifts, the suspicious ones replaced by what all measurements together say."""
    by_key = {(s.implementation, s.what, s.clock): s for s in together}
    return [by_key.get((s.implementation, s.what, s.clock), s) if s.suspicious else s for s in first]


def waited(case: CaseRecord, what: str) -> float:
    """log(wall / processor time) of loop_and_pad's call; 0 on a GPU, whose time no other program takes.

    A call that uses two processors has -0.7 on an idle machine and 0.7 where it gets a quarter of them. Wall times of two
    implementations then no longer have the ratio that they had, since they do not use equally many processors.
    """
    result = case.result(BASELINE)
    timing = result.timing(what) if result else None
    if timing is None or timing.device_s or not timing.cpu_s:
        return 0.0
    wall, cpu = np.median(timing.wall_s), np.median(timing.cpu_s)
    return math.log(max(float(wall), TICK) / max(float(cpu), TICK))


def middle(samples: np.ndarray) -> float:
    """Hodges and Lehmann's estimate, the median of all pairs' means: steadier than a median, and deaf to a few slow rounds."""
    i, j = np.triu_indices(samples.size)
    return float(np.median((samples[i] + samples[j]) / 2))


def middle_error(samples: np.ndarray) -> float:
    """Its standard error, from the ranks of the pairs' means about it (Wilcoxon's signed ranks); 0 for a single sample.

    As deaf to a few slow rounds as `middle` is: a standard deviation would let two of thirty double the error. Few samples say
    little about their own spread, so it is widened as Student's distribution is: 1.4 x for five, 1.04 x for thirty.
    """
    n = samples.size
    if n < 2:
        return 0.0
    i, j = np.triu_indices(n)
    means = np.sort((samples[i] + samples[j]) / 2)
    centre, reach = (means.size - 1) / 2, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    low, high = np.interp([centre - reach, centre + reach], np.arange(means.size), means)
    return float(high - low) / 2 * math.sqrt((n - 1) / max(n - 3, 1))


def _samples(case: CaseRecord, implementation: str, what: str, clock: str) -> list[float]:
    result = case.result(implementation)
    timing = result.timing(what) if result else None
    if timing is None:
        return []
    return timing.samples if clock == "time" else timing.cpu_s


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
