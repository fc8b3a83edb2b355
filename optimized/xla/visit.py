"""Visits the rows of every busy expert in blocks of static size: the loop under each block-sparse pass.

Experts are taken in the order of their block's size, not of their number. An expert whose rows fit into a block of some
size has exactly one visit, with the smallest such block; only an expert above the largest size has several. So the work
follows the real rows, each kernel is read once a pass, and a kernel's gradient is nearly always one product, not a sum.

A block may reach into its neighbours' rows: `Block.own` says which rows are its own. What the others hold is selected
away wherever rows are summed, and kept wherever rows are written. No row is padded, and none is changed by a neighbour's visit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

SMALLEST = 8
"""Below 8 rows a product costs nearly as much as with 8: reading the kernel is all there is (README.md)."""
LARGEST = 128
"""From 128 rows on a product runs at the speed of a large one (README.md)."""


class Block(NamedTuple):
    """`size` consecutive rows of which some, consecutive again, belong to one expert."""

    start: Int[Array, ""]
    size: int
    own: Bool[Array, "size 1"]

    def read(self, rows: Array) -> Array:
        """The block's rows, its neighbours' included."""
        return lax.dynamic_slice_in_dim(rows, self.start, self.size)

    def read_own(self, rows: Array) -> Array:
        """The block's own rows, and 0 for its neighbours'."""
        return self.select(self.read(rows))

    def select(self, block: Array) -> Array:
        """Sets the neighbours' rows to 0: selected, since 0 * NaN is NaN."""
        return jnp.where(self.own if block.ndim == 2 else self.own[:, 0], block, 0)

    def write(self, rows: Array, block: Array) -> Array:
        """Writes the block's own rows and leaves its neighbours' alone."""
        kept = jnp.where(self.own if block.ndim == 2 else self.own[:, 0], block, self.read(rows))
        return lax.dynamic_update_slice_in_dim(rows, kept, self.start, 0)


def block_sizes(rows: int, largest_group: int) -> tuple[int, ...]:
    """The sizes of block for groups of up to `largest_group` of `rows` rows, ascending; none exceeds `rows`.

    Powers of two from SMALLEST to LARGEST, so that a group above SMALLEST fills at least half of its block.
    """
    top = min(rows, largest_group)
    sizes = [SMALLEST]
    while sizes[-1] < min(top, LARGEST):
        sizes.append(2 * sizes[-1])
    return tuple(sorted({min(size, rows) for size in sizes}))


def visit(
    group_sizes: Int[Array, " E"],
    sizes: tuple[int, ...],
    rows: int,
    block: Callable[[Any, Block, Any], tuple[Any, Any]],
    carry: Any,
    *,
    enter: Callable[[Array], Any],
    leave: Callable[[Array, Any, Any], Any] = lambda expert, total, carry: carry,
    largest_group: int,
) -> Any:
    """Runs `block` on every block of every busy expert and returns the carry.

    `enter(e)` is what an expert's blocks share; `block(shared, Block, carry)` returns (carry, part), and
    `leave(e, total, carry)` takes the sum of an expert's parts. Idle experts are not visited. Trip counts are data;
    nothing is copied to the host. `sizes` ascend and none exceeds `rows`.
    """
    end = jnp.cumsum(group_sizes, dtype=jnp.int32)
    begin = end - group_sizes
    kind = jnp.searchsorted(jnp.array(sizes[:-1], jnp.int32), group_sizes).astype(jnp.int32)
    kind = jnp.where(group_sizes == 0, len(sizes), kind)
    order = jnp.argsort(kind, stable=True).astype(jnp.int32)
    upto = jnp.searchsorted(kind[order], jnp.arange(len(sizes), dtype=jnp.int32), side="right").astype(jnp.int32)

    def at(expert: Array, nominal: Array, size: int) -> Block:
        start = jnp.minimum(nominal, rows - size)
        row = start + jnp.arange(size, dtype=jnp.int32)
        return Block(start, size, ((nominal <= row) & (row < end[expert]))[:, None])

    def single(size: int, i: Array, carry: Any) -> Any:
        e = order[i]
        carry, part = block(enter(e), at(e, begin[e], size), carry)
        return leave(e, part, carry)

    def several(size: int, i: Array, carry: Any) -> Any:
        e = order[i]
        shared = enter(e)

        def one(j: Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
            carry, total = state
            carry, part = block(shared, at(e, begin[e] + j * size, size), carry)
            return carry, jax.tree.map(jnp.add, total, part)

        part = jax.eval_shape(lambda carry: block(shared, at(e, begin[e], size), carry)[1], carry)
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), part)
        carry, total = lax.fori_loop(0, -(-group_sizes[e] // size), one, (carry, nothing))
        return leave(e, total, carry)

    for n, size in enumerate(sizes):
        last = n + 1 == len(sizes)
        step = several if last and size < largest_group else single
        lower = upto[n - 1] if n else jnp.int32(0)
        carry = lax.fori_loop(lower, upto[n], lambda i, c, step=step, size=size: step(size, i, c), carry)
    return carry
