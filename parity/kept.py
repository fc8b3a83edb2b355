"""Results that are kept while they may be asked for again: the least recently used go first, by number and by size."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import jax
import numpy as np

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """A bounded memory; its newest entry is kept whatever its size."""

    def __init__(self, most: int, most_bytes: int):
        self.most, self.most_bytes = most, most_bytes
        self._entries: OrderedDict[Hashable, tuple[Value, Any, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable, make: Callable[[], Value], *, held: Any = None) -> Value:
        """The value of `key`, made when it is not kept; `held`, an object with arrays, lives as long as the entry does."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]
        value = make()
        size = size_of(value) + (0 if held is None else size_of(vars(held)))
        self._entries[key] = (value, held, size)
        self._bytes += size
        while len(self._entries) > self.most or (self._bytes > self.most_bytes and len(self._entries) > 1):
            self._bytes -= self._entries.popitem(last=False)[1][2]
        return value

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()
        self._bytes = 0


def size_of(tree: Any) -> int:
    """Bytes of all arrays in a structure."""
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))


def digest(*trees: Any) -> bytes:
    """A number for what arrays hold: equal for structures of equal bits, dtypes and shapes."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(trees, is_leaf=lambda leaf: leaf is None):
        if leaf is None:
            found.update(b"none")
            continue
        array = np.ascontiguousarray(np.asarray(leaf))
        found.update(f"{array.dtype.name}{array.shape}".encode())
        found.update(array.view(np.uint8).data if array.size and array.ndim else array.tobytes())
    return found.digest()
