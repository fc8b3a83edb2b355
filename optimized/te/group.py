"""The NCCL EP group of this process: its limits, checked before anything starts, and its one eager start.

NCCL EP allocates for one number of experts, one top-k, one alignment, one width and one receive capacity, once per
process; a smaller batch of the same kind fits in. Everything but `start` and `finish` is a pure function of sizes, so
that each refusal can be tested on a machine without a GPU.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...parity.demand import worst_case_rows
from ...parity.interface import Support
from ...parity.placement import check_mesh, describe, token_axes, token_ranks
from ...parity.problem import InvalidInput, Mesh, Problem
from ..xla.mesh import device_mesh, mesh_of
from .support import Facts, device_side_gemm, several

ALIGN = 128
"""Rows that each expert's block of a receive buffer is padded to; NCCL EP's high-throughput kernels need 128."""
MOST_TOKENS = 8192
"""Tokens a rank, of NCCL EP's high-throughput mode."""
MOST_RANKS = 64
LEAST_ROW = 16
"""Bytes of a token."""
COMM_SMS = 64
"""Most multiprocessors of an exchange's kernels, beside which nothing else runs here; TE's own choice is 32."""


@dataclass(frozen=True)
class Signature:
    """What a group is started for."""

    mesh: Mesh
    E: int
    K: int
    D: int
    tokens: int
    """The most tokens of one rank."""
    capacity: int
    """Rows of one rank's receive buffer."""

    def __str__(self) -> str:
        return (
            f"{describe(self.mesh)}, {self.E} experts, top-k {self.K}, width {self.D}, {self.tokens} tokens and "
            f"{self.capacity} rows a rank"
        )


def signature_of(problem: Problem, capacity: int | None = None) -> Signature:
    """The group that a problem needs; capacity None is the worst case of any routing, so that nothing is dropped."""
    mesh = mesh_of(problem)
    tokens = max(-(-problem.T // token_ranks(mesh)), 1)
    if capacity is None:
        capacity = worst_case_rows(tokens * mesh.ep, problem.K, problem.E // mesh.ep, ALIGN)
    return Signature(mesh, problem.E, problem.K, problem.D, tokens, capacity)


def limits(here: Facts, problem: Problem) -> Support:
    """Whether NCCL EP can exchange this problem's tokens on this machine; the reason names the number that failed."""
    if not (machine := several(here)):
        return machine
    try:
        mesh = mesh_of(problem)
        check_mesh(mesh)
    except InvalidInput as error:
        return Support(False, str(error))
    if mesh.devices > here.devices:
        return Support(False, f"the mesh {describe(mesh)} needs {mesh.devices} GPUs, {here.devices} are here")
    return sizes(problem, mesh)


def sizes(problem: Problem, mesh: Mesh) -> Support:
    """The part of `limits` that no machine changes."""
    if mesh.ep < 2:
        return Support(False, f"the mesh {describe(mesh)} has {mesh.ep} expert rank; NCCL EP needs 2 or more")
    if mesh.devices > MOST_RANKS:
        return Support(False, f"the mesh {describe(mesh)} has {mesh.devices} ranks; NCCL EP accepts up to {MOST_RANKS}")
    if len(token_axes(mesh)) > 2:
        return Support(False, f"the mesh {describe(mesh)} has {len(token_axes(mesh)) - 1} data axes; TE accepts one")
    if problem.capacity_factor is not None:
        return Support(False, f"capacity_factor is {problem.capacity_factor}; accepted: None, since nothing is dropped")
    if problem.D * 2 < LEAST_ROW:
        return Support(
            False, f"D is {problem.D}; NCCL EP sends {LEAST_ROW} bytes or more, D {LEAST_ROW // 2} in bfloat16"
        )
    tokens = -(-problem.T // token_ranks(mesh))
    if not 1 <= tokens <= MOST_TOKENS:
        return Support(False, f"there are {tokens} tokens a rank; NCCL EP accepts 1 to {MOST_TOKENS}")
    return device_side_gemm(problem)


def fits_in(started: Signature | None, wanted: Signature) -> Support:
    """Whether a group that was started can serve these sizes too; None, no group yet, serves any."""
    if started is None:
        return Support(True)
    same = (started.mesh, started.E, started.K, started.D) == (wanted.mesh, wanted.E, wanted.K, wanted.D)
    if same and wanted.tokens <= started.tokens and wanted.capacity <= started.capacity:
        return Support(True)
    return Support(
        False,
        f"this process started NCCL EP for {started}; this needs {wanted}; accepted: the same or fewer tokens and rows, "
        "or another process",
    )


def current() -> Signature | None:
    """The group that this process has, if any."""
    return _STATE.signature


def start(problem: Problem, *, capacity: int | None = None, drop_on_overflow: bool = False) -> Signature:
    """Starts this process's group for a problem's sizes, once; later calls check that they fit into it.

    May be called while JAX traces: the start itself runs eagerly. All processes of a run must call it at the same
    point. With drop_on_overflow rows beyond a capacity below the worst case are dropped and counted, which
    `te_ep.counted` returns; without it NCCL EP ends the process. Raises InvalidInput for sizes that do not fit.
    """
    wanted = signature_of(problem, capacity)
    with _STATE.lock:
        if not (ok := fits_in(_STATE.signature, wanted)):
            raise InvalidInput(ok.reason)
        if _STATE.signature is not None:
            return _STATE.signature
        _eagerly(lambda: _bootstrap(wanted, drop_on_overflow))
        # TE reads its mesh and axis names when XLA partitions the program, after this call has returned: they stay.
        _STATE.entered = _enter(wanted.mesh)
        _STATE.signature = wanted
        return wanted


def finish() -> None:
    """Ends the group, so that another can be started; drops every compiled program of the process."""
    with _STATE.lock:
        if _STATE.signature is None:
            return
        from transformer_engine.jax.ep import ep_finalize

        ep_finalize()
        _STATE.entered.close()
        _STATE.signature = None


class _State:
    """One per process, as the group is."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.signature: Signature | None = None
        self.entered = ExitStack()


_STATE = _State()


def _bootstrap(wanted: Signature, drop_on_overflow: bool) -> None:
    from transformer_engine.jax import moe
    from transformer_engine.jax.ep import ep_bootstrap

    with _enter(wanted.mesh):
        ep_bootstrap(
            world_size=wanted.mesh.devices,
            rank=jax.process_index(),
            num_experts=wanted.E,
            max_tokens_per_rank=wanted.tokens,
            recv_capacity_per_rank=wanted.capacity,
            hidden_dim=wanted.D,
            max_token_dtype=jnp.bfloat16,
            max_num_sms=COMM_SMS,
            drop_on_overflow=drop_on_overflow,
        )
    # TE's own block refuses to run before it is told what the group was started for.
    record = getattr(moe, "record_ep_bootstrap_signature_for_moe", None)
    if record is not None:
        record(wanted.E, wanted.tokens, wanted.capacity, wanted.D, wanted.mesh.ep)


def _enter(mesh: Mesh) -> ExitStack:
    """The device mesh and its axis names, where TE looks for them."""
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    data = token_axes(mesh)[:-1]
    stack = ExitStack()
    with warnings.catch_warnings():
        # `jax.set_mesh`, which is to follow the mesh's own context, refuses to be entered while JAX traces.
        warnings.simplefilter("ignore", DeprecationWarning)
        stack.enter_context(device_mesh(mesh))
    stack.enter_context(
        global_shard_guard(MeshResource(dp_resource=data[0] if data else None, ep_resource=mesh.ep_axis))
    )
    return stack


def _eagerly(work: Any) -> None:
    """Runs `work` in a thread of its own, where no trace is active; what it raises is raised here."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="nccl-ep-start")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
