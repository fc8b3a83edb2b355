"""The walk from the naive loop to the fastest layer: one change a rung, each a layer that passes the same laws."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from . import registry
from .interface import Implementation
from .records import CaseRecord, Record, loads

WHAT = "experts forward+backward"
"""The call whose time a rung shows."""


@dataclass(frozen=True)
class Rung:
    """One change."""

    name: str
    """Its name in records."""
    title: str
    changed: str
    """What changed, and what it does to cost: two sentences for a slide."""
    code: str
    """`module:attribute` of the lines that make the difference."""
    build: Callable[[], Implementation]

    def code_at(self) -> str:
        """`file:line` of the code, relative to the package."""
        module_name, _, attribute = self.code.partition(":")
        module = importlib.import_module(module_name)
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
        found = inspect.unwrap(found)
        root = Path(__file__).resolve().parent.parent
        path = Path(inspect.getsourcefile(found) or "").resolve().relative_to(root)
        return f"{path.as_posix()}:{inspect.getsourcelines(found)[1]}"


def _named(name: str) -> Callable[[], Implementation]:
    return lambda: registry.complete(registry.get(name))


def _part_of_te(name: str, *stages: str) -> Callable[[], Implementation]:
    """Some of te's stages; the rest is the baseline's."""

    def build() -> Implementation:
        te = registry.get("te")
        own = {s: te.stages[s] for s in stages}
        return registry.complete(dataclasses.replace(te, name=name, stages=own))

    return build


RUNGS: tuple[Rung, ...] = (
    Rung(
        "loop_host",
        "host loop",
        "The host reads how many tokens each expert got and runs one dense product per busy expert. No row is padded, but "
        "the device waits for the host, and every new count is a new shape to compile.",
        "dropless.reference.loop_host:experts",
        _named("loop_host"),
    ),
    Rung(
        "loop_and_pad",
        "padded static loop",
        "Every expert gets room for all T tokens, so shapes are static and one program serves every routing. Most of that room "
        "is padding: E x T rows are computed for T x K real ones.",
        "dropless.reference.loop_and_pad:experts",
        _named("loop_and_pad"),
    ),
    Rung(
        "capacity",
        "capacity contrast",
        "Every expert gets room for its fair share only, so nearly nothing is padded. Under skew the busy experts "
        "overflow and tokens are lost: this rung is fast because it does not do the work.",
        "dropless.reference.capacity:experts",
        _named("capacity"),
    ),
    Rung(
        "ragged_dot",
        "sort, then a library's ragged product",
        "Rows are sorted by expert, so each expert's rows are contiguous and none is padded or lost. What the product costs is up "
        "to the library: XLA's generic lowering multiplies every row with every expert and masks.",
        "dropless.optimized.xla.ragged_dot:grouped_gemm",
        _named("ragged_dot"),
    ),
    Rung(
        "blocked",
        "block alignment",
        "An expert's rows are one block of the smallest of a few static sizes that holds them, so one pass does all experts and "
        "one program serves every routing. What a block holds of its neighbours is selected away: at most half of it, whatever the "
        "skew.",
        "dropless.optimized.xla.experts:experts",
        _named("blocked"),
    ),
    Rung(
        "te_gemm",
        "grouped GEMM",
        "One cuBLAS call multiplies all groups, reading group sizes on the device. No block is padded, no host waits, and tensor "
        "cores stay busy across group borders.",
        "dropless.optimized.te.grouped_gemm:grouped_gemm",
        _part_of_te("te_gemm", "grouped_gemm"),
    ),
    Rung(
        "te_dispatch",
        "fused router and dispatch",
        "Top-k, weights and permutation become a few kernels instead of a sort, gathers and scatters by XLA. What is saved is "
        "memory traffic and launches, so narrow experts gain most.",
        "dropless.optimized.te.permute:permute",
        _part_of_te("te_dispatch", "route", "permute", "unpermute", "grouped_gemm"),
    ),
    Rung(
        "te",
        "early weighting, saved residuals",
        "A hand-written gradient saves the first GEMM's output only, gathers by the inverse permutation instead of adding "
        "scattered rows, and weights between the GEMMs. Both passes touch less memory for the same products.",
        "dropless.optimized.te.experts:backward",
        _named("te"),
    ),
    Rung(
        "te_ep",
        "expert parallelism",
        "Experts are spread over GPUs and tokens travel to them and back, once for each rank that they visit. Each GPU holds "
        "fewer experts with more rows each, at the price of two exchanges a pass.",
        "dropless.optimized.te.te_ep:experts",
        _named("te_ep"),
    ),
)


SPREAD = ("te_ep",)
"""Rungs of several devices: they do the same work, spread over those that are here."""


def shipped() -> list[Record]:
    """Ladder records that come with the package, data/ladder-DEVICE.json: one for each reference device."""
    folder = resources.files("dropless.parity") / "data"
    if not folder.is_dir():
        return []
    files = sorted((f for f in folder.iterdir() if f.name.startswith("ladder-")), key=lambda f: f.name)
    return [loads(f.read_text(encoding="utf-8"), f.name) for f in files]


def rows(record: Record, case: CaseRecord) -> list[dict[str, Any]]:
    """One line for each rung: measured in this case, else in a shipped record and marked as such, else the reason."""
    found = []
    for rung in RUNGS:
        row = _row(record, case, rung.name)
        if row is None or row["seconds"] is None:
            elsewhere = next(
                (r for other in shipped() for c in other.cases if (r := _row(other, c, rung.name)) and r["seconds"]),
                None,
            )
            row = elsewhere or row or {"seconds": None, "reason": "not measured", "device": ""}
        found.append({"implementation": rung.name, "title": rung.title, "changed": rung.changed, **row})
    return found


def _row(record: Record, case: CaseRecord, name: str) -> dict[str, Any] | None:
    result = case.result(name)
    if result is None:
        return None
    timing = result.timing(WHAT)
    computed = result.notes.get("computed_rows")
    device = str(record.environment.get("device_kind"))
    if timing is None:
        return {"seconds": None, "reason": result.reason, "device": device}
    return {
        "seconds": timing.median,
        "flops_per_s": timing.flops_per_s,
        "padding": None if not computed else max(0.0, 1 - case.rows / computed),
        "memory": timing.peak_bytes,
        "compiles": timing.compiles,
        "reason": result.reason,
        "verdict": result.verdict,
        "device": device,
        "devices": int(result.notes.get("devices", 1)),
        "platform": record.environment.get("platform"),
        "case": case.label,
    }
