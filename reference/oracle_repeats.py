"""Rows of x with equal bits: their errors are one error, so a sum over tokens adds them up, not their squares.

Text repeats its words. Equal rows meet an expert with equal bits, and h, its slopes and (in a layer, whose router sees x) the
weight err equally in each of them; only dy tells them apart. Over n such rows a kernel's gradient errs by that one error times sum(w dy),
whose square may be n times what n independent errors would give.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np


class Repeats(NamedTuple):
    """For each row of one expert what its copies share; rows without a copy have dy 0 and copies 1."""

    dy: Any
    """sum over the copies of w * dy, divided by sqrt(copies): the squares of all copies add up to the whole."""
    copies: Any
    """How many rows are equal, this one included: [..., 1]."""

    def row(self, i: int) -> Repeats:
        """Those of one row."""
        return Repeats(self.dy[i], self.copies[i])

    def block(self, start: int, n: int, size: int) -> Repeats:
        """Rows start to start + n, padded to `size`."""
        return Repeats(*(jnp.pad(a[start : start + n], ((0, size - n), (0, 0))) for a in self))


def contents_of(x: Any) -> np.ndarray | None:
    """A number for each row of x [T, D], equal for rows of equal bits; None when no two are."""
    rows = np.ascontiguousarray(np.asarray(x))
    if not rows.size:
        return None
    bits = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    found, contents = np.unique(bits, return_inverse=True)
    return None if len(found) == len(rows) else contents.reshape(-1)


def repeats(contents: np.ndarray | None, token: np.ndarray, w: Any, dy: Any) -> Repeats | None:
    """What the rows of tokens `token` [n] with weights w [n] and cotangents dy [n, D] share; None when no two are equal."""
    if contents is None or not len(token):
        return None
    _, content, count = np.unique(contents[token], return_inverse=True, return_counts=True)
    if count.max() < 2:
        return None
    content = content.reshape(-1)
    copies = count[content].astype(np.float64)[:, None]
    weighted = w[:, None] * dy
    if isinstance(dy, np.ndarray):
        total = np.zeros((len(count), dy.shape[1]))
        np.add.at(total, content, weighted)
        return Repeats(np.where(copies > 1, total[content] / np.sqrt(copies), 0.0), copies)
    total = jnp.zeros((len(count), dy.shape[1]), weighted.dtype).at[content].add(weighted)
    return Repeats(jnp.where(copies > 1, total[content] / np.sqrt(copies), 0.0), jnp.asarray(copies))
