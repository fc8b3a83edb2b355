"""NCCL EP's five steps through Transformer Engine, each with what TE and XLA need around it.

Two rules hold. Every operand and result is pinned to its rank (`split`), and a backward takes the forward's routing state
only in the program that made it (`again`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from ...parity.placement import expert_mesh, expert_ranks, token_ranks
from ...parity.problem import Mesh, Problem
from ..xla.mesh import by_token, device_mesh
from .group import ALIGN, current

# Without an outer `jit` each step is a program of its own, pins included; inside one it leaves no trace.
one_program = partial(jax.jit, static_argnums=0, inline=True)


def whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(problem, ...)` as one program: under an outer `jit` as it is, on arrays by a `jit` of its own.

    A routing state lives in the program that made it: a forward of several programs ends the process.
    """
    compiled = jax.jit(function, static_argnums=0)

    @wraps(function)
    def run(problem: Problem, *args: Any) -> Any:
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))
        return (function if traced else compiled)(problem, *args)

    return run


@one_program
def prepare(problem: Problem, topk_idx: Int[Array, "W t K"]) -> tuple[Array, Array, Array]:
    """(padded group sizes, rows that each rank is sent, routing state), each pinned to its rank."""
    (topk_idx,) = split(problem, topk_idx)
    padded, received, handle = split(problem, *_tex().ep_prepare(config(problem), topk_idx))
    return padded, received, handle


@one_program
def dispatch(problem: Problem, handle: Array, topk_idx: Array, x: Array, weights: Array) -> tuple[Array, Array]:
    """(rows, their weights): TE's dispatch."""
    handle, topk_idx, x, weights = split(problem, handle, topk_idx, x, weights)
    found = _tex().ep_dispatch_fwd(config(problem), handle, topk_idx, x, weights, _capacity())
    rows, row_weights = split(problem, *found)
    return rows, row_weights


@one_program
def dispatch_gradient(problem: Problem, handle: Array, d_rows: Array, d_row_weights: Array) -> tuple[Array, Array]:
    """(gradient of x, gradient of the weights): tokens sum their rows."""
    handle, d_rows, d_row_weights = split(problem, handle, d_rows, d_row_weights)
    found = _tex().ep_dispatch_bwd(
        config(problem),
        handle,
        d_rows,
        d_row_weights,
        num_local_tokens=_tokens(problem),
        out_partition_spec=spec(problem),
    )
    dx, d_weights = split(problem, *found)
    return dx, d_weights


@one_program
def combine(problem: Problem, handle: Array, rows: Array) -> Array:
    """Tokens sum their rows: TE's combine."""
    handle, rows = split(problem, handle, rows)
    found = _tex().ep_combine_fwd(config(problem), handle, rows, _tokens(problem), spec(problem))
    return split(problem, found)[0]


@one_program
def combine_gradient(problem: Problem, handle: Array, dy: Array) -> Array:
    """dy in every row of its token; zeros where an expert's block is padded."""
    handle, dy = split(problem, handle, dy)
    return split(problem, _tex().ep_combine_bwd(config(problem), handle, dy, _capacity()))[0]


@jax.tree_util.register_static
class Made:
    """Marks in which trace, and so in which place of a program, a routing state was made."""

    def __init__(self, handle: Array):
        self.handle = weakref.ref(handle)


def again(problem: Problem, handle: Array, topk_idx: Array, made: Made) -> Array:
    """The routing state for a backward: the forward's own, or else a new one from the same ids.

    TE knows a state by the address of its buffer, and asks for the same address at every step. Where forward and backward
    are one program the buffer stays; a loop such as `scan` stacks what its forward saves, and the backward's slice of
    that stack lies elsewhere. There, and wherever it cannot be told (`jax.checkpoint`), the state is prepared again.
    """
    return handle if made.handle() is handle else prepare(problem, topk_idx)[2]


def group_sizes(problem: Problem, topk_idx: Int[Array, "W t K"]) -> Int[Array, "W e"]:
    """Real rows of each expert; NCCL EP itself reports them rounded up. Ranks exchange E counts each, no ids."""
    W, ep = topk_idx.shape[0], mesh_for(problem).ep
    counts = (topk_idx[..., None] == jnp.arange(problem.E)).sum((1, 2), dtype=jnp.int32)
    (counts,) = split(problem, counts)
    return split(problem, counts.reshape(W // ep, ep, problem.E).sum(1).reshape(W, problem.E // ep))[0]


def mesh_for(problem: Problem) -> Mesh:
    """The mesh that `on_ranks` has put there."""
    assert problem.mesh is not None
    return problem.mesh


def on_ranks(problem: Problem, W: int, t: int) -> Problem:
    """The problem at this number of tokens, with the mesh that its ranks lie on."""
    ep = expert_ranks(problem, W)
    return problem.replace(T=W * t, mesh=problem.mesh or expert_mesh(ep))


def config(problem: Problem) -> Any:
    """TE's per-layer settings."""
    from transformer_engine.jax.ep import EpLayerConfig

    return EpLayerConfig(top_k=problem.K, dispatch_output_per_expert_alignment=ALIGN)


def split(problem: Problem, *arrays: Array) -> tuple[Array, ...]:
    """The arrays, pinned so that each rank holds its own part: TE reads a rank's share from the sharding.

    Results of an exchange are pinned too. TE runs an exchange as an asynchronous region of the collective stream; a
    result that is left free may be wanted whole, XLA then gathers it inside that region, and its latency-hiding
    scheduler finds no order for two collectives there (kExceedsOverlapLimit), or reads the rows before they have come.
    """
    mesh = mesh_for(problem)
    sharding = NamedSharding(device_mesh(mesh), by_token(mesh))
    return tuple(jax.lax.with_sharding_constraint(a, sharding) for a in arrays)


def spec(problem: Problem) -> tuple[Any, ...]:
    """How TE is told that tokens lie by rank."""
    return (*by_token(mesh_for(problem)), None, None)


def _tokens(problem: Problem) -> tuple[int, int]:
    W = token_ranks(mesh_for(problem))
    return W, problem.T // W


def _capacity() -> int:
    group = current()
    assert group is not None
    return group.capacity


def _tex() -> Any:
    from transformer_engine.jax import cpp_extensions

    return cpp_extensions
