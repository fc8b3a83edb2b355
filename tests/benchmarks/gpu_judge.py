"""Judges what was timed on a GPU where it lies: outputs from before and after the timing, in one pass of the oracle."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from dropless.parity import registry
from dropless.parity.compare import Finding, judge, same_bits
from dropless.parity.findings import to_record
from dropless.parity.inputs import Case
from dropless.parity.judge import dtype_of, route_findings
from dropless.parity.records import FindingRecord

Outputs = list[tuple[str, Any]]
"""What a call is called, and what it returned."""


def judged(case: Case, *groups: Outputs) -> list[list[FindingRecord]]:
    """Each group's outputs of `stage_call` on the case, against the oracle on the device.

    One pass of the oracle serves all calls of a stage, kernels are judged one expert at a time and never on the host, and
    both stages' oracles compile and run side by side.
    """
    module = importlib.import_module(registry.get("oracle_device").stage("experts").__module__)

    def of(stage: str) -> list[list[FindingRecord]]:
        outs = [[out for what, out in group if what.startswith(stage)] for group in groups]
        if not any(outs):
            return [[] for _ in groups]
        if stage == "layer":
            found = judged_layer(module, case, outs)
        else:
            pieces = module.stream_experts(case.problem, case.params, case.x, case.routing, case.cotangent)
            found = worst(case, outs, pieces)
        return [[to_record(f, stage) for f in group] for group in found]

    with ThreadPoolExecutor(2) as pool:
        experts, layer = pool.map(of, ("experts", "layer"))
    return [a + b for a, b in zip(experts, layer, strict=True)]


def judged_layer(module: Any, case: Case, groups: list[list[Any]]) -> list[list[Finding]]:
    """Live layers: their choices, which must be the same ones, and everything else at these choices."""
    parts = [[out if isinstance(out, tuple) else (out, {}) for out in group] for group in groups]
    first = next(output for group in parts for output, _ in group)
    ids = np.asarray(first.routing.topk_idx)
    counts = np.bincount(ids.ravel(), minlength=case.problem.E).astype(np.int32)
    routes = route_findings(case, jax.tree.map(np.asarray, first.routing), oracle="oracle_device", weights=False)
    found, tensors = [], []
    for group in parts:
        found.append([*routes])
        tensors.append([])
        for output, grads in group:
            found[-1].append(same_bits("topk_idx", np.asarray(output.routing.topk_idx), ids))
            found[-1].append(same_bits("group_sizes", np.asarray(output.group_sizes), counts))
            losses = {name: getattr(output.losses, name) for name in ("balance", "sequence", "z")}
            tensors[-1].append({"y": output.y, "weights": output.routing.topk_weights, **losses, **grads})
    graded = any(grads for group in parts for _, grads in group)
    pieces = module.stream_layer(case.problem, case.params, case.x, ids, case.cotangent if graded else None)
    return [a + b for a, b in zip(found, worst(case, tensors, pieces), strict=True)]


def worst(
    case: Case, groups: list[list[dict[str, Any]]], pieces: Iterator[tuple[str, int | None, Any]]
) -> list[list[Finding]]:
    """One finding a tensor for each group: the worst piece of its worst output."""
    found: list[dict[str, Finding]] = [{} for _ in groups]
    for name, expert, exact in pieces:
        for outs, kept in zip(groups, found, strict=True):
            for got in outs:
                if name not in got:
                    continue
                mine = got[name] if expert is None else got[name][expert]
                finding = judge(name, mine, exact, dtype=dtype_of(case.problem, name))
                old = kept.get(name)
                if old is None or (not finding.ok, finding.measured or 0.0) > (not old.ok, old.measured or 0.0):
                    kept[name] = finding if expert is None else finding.replace(expert=expert)
    return [list(kept.values()) for kept in found]
