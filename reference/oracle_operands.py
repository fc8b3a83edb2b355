"""The variance that quantising a grouped product's operands adds, element by element; see `parity.operands`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..parity.operands import Product, Role, operand


class Operands:
    """One recipe's operand roundings; without a recipe nothing is quantised and every variance is None."""

    def __init__(self, recipe: str):
        self.recipe = recipe

    def variance(self, product: Product, role: Role, a: Any, axis: int = -1) -> Any:
        """(u a)^2 + floor^2, the floor from the block's amax along the contracted `axis`; 0 where a block is all 0."""
        found = operand(self.recipe, product, role)
        if found is None:
            return None
        relative = found.u**2 * a * a
        if found.block is None:
            return relative + found.floor**2 * (a != 0)
        return relative + (found.floor * _amax(a, found.block, axis)) ** 2 * (a != 0)

    def relative(self, product: Product, role: Role) -> float:
        """u^2, for operands whose values are not at hand; 0 when not quantised."""
        found = operand(self.recipe, product, role)
        return 0.0 if found is None else found.u**2

    def fixed_floor(self, product: Product, role: Role) -> float:
        """floor^2 of an operand whose scale no value sets; 0 otherwise."""
        found = operand(self.recipe, product, role)
        return 0.0 if found is None or found.block is not None else found.floor**2


def _amax(a: Any, block: int, axis: int) -> Any:
    """The largest magnitude of each element's block along `axis`; block 0 is the whole axis."""
    xp = np if isinstance(a, np.ndarray) else jnp
    size = abs(xp.moveaxis(a, axis, -1))
    n = size.shape[-1]
    if block == 0 or block >= n:
        return xp.moveaxis(xp.broadcast_to(size.max(-1, keepdims=True), size.shape), -1, axis)
    padded = xp.pad(size, [(0, 0)] * (size.ndim - 1) + [(0, -n % block)])
    largest = padded.reshape(*size.shape[:-1], -1, block).max(-1)
    return xp.moveaxis(xp.repeat(largest, block, axis=-1)[..., :n], -1, axis)
