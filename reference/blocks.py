"""Which block a position belongs to, when blocks may not cross from one group into the next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def block_count(length: int, block: int, groups: int = 1) -> int:
    """The static number of blocks that holds every way to cut `length` positions into `groups` groups.

    Each busy group may end in a partial block, so the bound is floor(length / block) + min(groups, length), at least 1.
    """
    return max(length // block + min(groups, length), 1)


def block_of_position(length: int, block: int, group_sizes: Int[Array, " E"] | None = None) -> Int[Array, " n"]:
    """The block of each of `length` positions along the quantised axis; a group's first block starts with the group.

    Positions beyond the groups get the index one past the last block: a scatter drops them and a gather must not happen.
    """
    position = jnp.arange(length, dtype=jnp.int32)
    if group_sizes is None:
        return position // block
    sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(sizes)
    blocks = -(-sizes // block)
    first_block = jnp.cumsum(blocks) - blocks
    group = jnp.searchsorted(ends, position, side="right").astype(jnp.int32)
    inside = jnp.minimum(group, sizes.shape[0] - 1)
    found = first_block[inside] + (position - (ends - sizes)[inside]) // block
    return jnp.where(group < sizes.shape[0], found, block_count(length, block, sizes.shape[0]))


def block_amax(x: Float[Array, "n m"], block_id: Int[Array, " n"], blocks: int) -> Float[Array, "b m"]:
    """The largest magnitude of each block and column in float32; NaN is ignored, so it stays in its own element; an empty block has 0."""
    magnitude = jnp.abs(x.astype(jnp.float32))
    magnitude = jnp.where(jnp.isnan(magnitude), 0.0, magnitude)
    return jnp.maximum(jax.ops.segment_max(magnitude, block_id, num_segments=blocks), 0.0)
