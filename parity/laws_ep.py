"""Laws of a layer spread over ranks: for one global batch, no mesh changes y, a gradient, a loss or a route."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import running
from .compare import Finding, same_bits
from .ep_cases import rank_routings, usual_ranks
from .inputs import Case
from .interface import Implementation
from .judge import layer_findings
from .law import Law, law
from .law_tools import by_oracle, expect, idle_experts, with_routing
from .placement import describe, expert_mesh
from .problem import Mesh, Routing

MESHES: tuple[Mesh, ...] = (
    expert_mesh(4, data=2),
    expert_mesh(2, copies=2),
    expert_mesh(8),
    expert_mesh(4),
    expert_mesh(2),
    expert_mesh(1),
)
"""Data x expert, an axis of copies, and expert parallel alone; where most can go wrong comes first."""
LAYER_MESHES = 2
"""How many of them the live layer runs on."""

GRADIENTS = ("x", "topk_weights", *running.EXPERT_LEAVES)


@law("ep-mesh", stage="experts", judged_by="gauge", faults="HJ", needs={"ranks", "gradients"}, scope="once")
def ep_mesh(implementation: Implementation, case: Case) -> list[Finding]:
    """On every mesh (EP 1, 2, 4, 8, data x expert, copies) y and every gradient are the oracle's; expert gradients are summed over data ranks once."""
    findings: list[Finding] = []
    for spread in _spreads(implementation, case):
        got = running.experts(implementation, spread)
        findings += _named(by_oracle(case, got, ("y", *GRADIENTS)), describe(_mesh(spread)))
        if not all(f.ok for f in findings):
            break
    return findings


@law("ep-routings", stage="experts", judged_by="gauge", faults="ABJ", needs={"ranks", "gradients"}, scope="once")
def ep_routings(implementation: Implementation, case: Case) -> list[Finding]:
    """All tokens to one rank, an idle rank, a rank without tokens, never-local and uneven batches give the oracle's y and gradients, and an idle rank's are exactly 0."""
    spread = _largest(implementation, case)
    problem = spread.problem
    W = usual_ranks(problem)
    if problem.T % W:
        return []
    findings: list[Finding] = []
    for name, ids in rank_routings(problem, W, case.seed).items():
        one = with_routing(spread, ids, np.where(ids >= 0, np.asarray(spread.routing.topk_weights), 0))
        got = running.experts(implementation, one)
        findings += _named(by_oracle(one, got, ("y", *GRADIENTS)), name)
        idle = idle_experts(one)
        for leaf in running.EXPERT_LEAVES:
            if leaf in got and idle.size:
                zero = not np.asarray(got[leaf])[idle].astype(np.float64).any()
                findings.append(expect(leaf, zero, f"{name}: an idle expert's gradient of {leaf} is not exactly 0"))
    return findings


@law(
    "ep-layer",
    stage="layer",
    judged_by="gauge",
    faults="EFGHJ",
    needs={"ranks", "gradients", "reports routing"},
    scope="once",
)
def ep_layer(implementation: Implementation, case: Case) -> list[Finding]:
    """Spread over ranks the live layer has the oracle's y, routes, losses (from global counts) and gradients, the gate's and the shared expert's counted once."""
    findings: list[Finding] = []
    for spread in _spreads(implementation, _uneven_segments(case))[:LAYER_MESHES]:
        findings += _named(layer_findings(implementation, spread), describe(_mesh(spread)))
        if not all(f.ok for f in findings):
            break
    return findings


@law("ep-replicas", stage="experts", judged_by="bits", faults="HJ", needs={"ranks", "gradients", "jit"}, scope="once")
def ep_replicas(implementation: Implementation, case: Case) -> list[Finding]:
    """Every device that holds a copy of y or of a gradient holds the same bits."""
    spread = _largest(implementation, case)
    # On the problem's own mesh: JAX accepts one mesh in a program.
    mesh = _mesh(spread)
    grid = np.array(jax.devices()[: mesh.devices]).reshape([size for _, size in mesh.axes])
    axes = {"axis_names": [n for n, _ in mesh.axes], "axis_types": (AxisType.Auto,) * len(mesh.axes)}
    whole = NamedSharding(jax.sharding.Mesh(grid, **axes), PartitionSpec())
    fn, problem = implementation.stage("experts"), spread.problem

    @functools.partial(jax.jit, out_shardings=whole, compiler_options=running.OPTIONS or None)
    def step(params: Any, x: jax.Array, routing: Routing, dy: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda p, x: fn(problem, p, x, routing), params, x)
        return {"y": y, "gradients": vjp(dy)}

    with running.blaming_target():
        out = step(spread.params, spread.x, spread.routing, spread.cotangent)
    findings: list[Finding] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        alike = all(_bits(copy) == _bits(copies[0]) for copy in copies)
        name = jax.tree_util.keystr(path)
        findings.append(expect(name, alike, f"{len(copies)} copies of {name} are not the same bits"))
    return findings


@law("ep-twins", stage="experts", judged_by="bits", faults="J", needs={"ranks", "deterministic"}, scope="once")
def ep_twins(implementation: Implementation, case: Case) -> list[Finding]:
    """The same token with the same routing on two ranks has the same bits in y: nothing depends on where it started."""
    spread = _largest(implementation, case)
    problem, W = spread.problem, usual_ranks(spread.problem)
    if problem.T % W or problem.T < 2 * W:
        return []
    per_rank = problem.T // W
    index = np.tile(np.arange(per_rank), W)
    ids, weights = (np.asarray(a)[index] for a in (spread.routing.topk_idx, spread.routing.topk_weights))
    one = with_routing(spread.replace(x=jnp.asarray(np.asarray(spread.x)[index])), ids, weights)
    y = running.experts(implementation, one)["y"].reshape(W, per_rank, -1)
    return [_on(w, same_bits("y", y[w], y[0])) for w in range(1, W)]


@law("ep-alone", stage="experts", judged_by="bits", faults="J", needs={"ranks", "deterministic"}, scope="once")
def ep_alone(implementation: Implementation, case: Case) -> list[Finding]:
    """Changing one token changes that token's row of y and no other."""
    spread = _largest(implementation, case)
    token = spread.problem.T // 2
    x = np.asarray(spread.x).copy()
    x[token] = -x[token]
    before = running.experts(implementation, spread)["y"].copy()
    after = running.experts(implementation, spread.replace(x=jnp.asarray(x)))["y"].copy()
    moved = _bits(before[token]) != _bits(after[token])
    real = (np.asarray(spread.routing.topk_idx)[token] >= 0).any()
    before[token] = after[token] = 0
    return [
        same_bits("y", after, before),
        expect("y", moved or not real, f"token {token} did not change with its own x", token=token),
    ]


LAWS: tuple[Law, ...] = (ep_mesh, ep_routings, ep_layer, ep_replicas, ep_twins, ep_alone)
"""Judged on as many devices as are here; meshes that need more are left out."""


def _spreads(implementation: Implementation, case: Case) -> list[Case]:
    """The case on each mesh that the devices and the implementation allow; on its own where it has one."""
    if case.problem.mesh is not None:
        return [case]
    found = []
    for mesh in MESHES:
        if mesh.devices <= jax.device_count() and case.problem.E % mesh.ep == 0:
            problem = case.problem.replace(mesh=mesh)
            if implementation.can_run(problem):
                found.append(case.replace(problem=problem))
    return found


def _largest(implementation: Implementation, case: Case) -> Case:
    """The case on expert ranks alone, as many as a law usually takes."""
    if case.problem.mesh is not None:
        return case
    return case.replace(problem=case.problem.replace(mesh=expert_mesh(usual_ranks(case.problem))))


def _mesh(case: Case) -> Mesh:
    assert case.problem.mesh is not None
    return case.problem.mesh


def _uneven_segments(case: Case) -> Case:
    """Marks tokens so that ranks differ in how many are real, and segments cross the ranks' borders."""
    T = case.problem.T
    mask = np.arange(T) % 7 != 3
    mask[: T // 4] = np.arange(T // 4) % 2 == 0
    return case.replace(mask=jnp.asarray(mask), segment_ids=jnp.asarray(np.arange(T) * 3 // max(T, 1), jnp.int32))


def _bits(values: np.ndarray) -> bytes:
    return np.ascontiguousarray(values).tobytes()


def _on(rank: int, finding: Finding) -> Finding:
    return finding if finding.ok else finding.replace(message=f"rank {rank}: {finding.message}")


def _named(findings: list[Finding], name: str) -> list[Finding]:
    return [f if f.ok else f.replace(message=f"{name}: {f.message}") for f in findings]
