"""The variance that quantising a grouped product's operands adds, element by element; see `parity.operands`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ..parity.operands import Product, Role, operand
from ..parity.problem import Problem


class Operands:
    """One recipe's operand roundings; without a recipe nothing is quantised and every variance is None."""

    def __init__(self, problem: Problem):
        self.problem, self.recipe = problem, problem.recipe
        found = operand(problem.recipe, "forward", "activation")
        self.per_tensor = found is not None and found.block == 0
        """Whether all rows of an expert share a scale, so that one row's largest value sets another's floor."""

    def variance(self, product: Product, role: Role, a: Any, axis: int = -1, amax: Any = None) -> Any:
        """(u a)^2 + floor^2, the floor from `amax`, or from the block's along the contracted `axis`; 0 where a is 0."""
        found = operand(self.recipe, product, role)
        if found is None:
            return None
        xp: Any = np if isinstance(a, np.ndarray) else jnp
        floor = found.floor
        if found.block is not None:
            floor = floor * (_amax(a, found.block, axis) if amax is None else amax)
        return found.u**2 * a * a + xp.where(a != 0, floor**2, 0.0)

    def largest(self, x: Any, wi: Any, wi_bias: Any) -> tuple[Any, Any]:
        """Bounds of |x| and |h| over all tokens of one expert, by Cauchy and Schwarz; rows that are not finite go nowhere.

        A bound that is 30 times too large still leaves the floor, 2^-19 of it, far below u |h| of a usual h.
        """
        if not self.per_tensor:
            return None, None
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        spec = self.problem.experts
        x = xp.where(xp.isfinite(x), x, 0.0)
        reach = xp.sqrt((x * x).sum(-1).max()) * xp.sqrt((wi * wi).sum(0).max())
        reach = reach if wi_bias is None else reach + abs(wi_bias).max()
        if spec.clamp is not None:
            h = spec.clamp.limit * (spec.clamp.limit + abs(spec.clamp.offset))
        else:
            act = reach**2 if spec.activation == "relu2" else reach
            h = act * reach if spec.gated else act
        return abs(x).max(), h

    def relative(self, product: Product, role: Role) -> float:
        """u^2, for operands whose values are not at hand; 0 when not quantised."""
        found = operand(self.recipe, product, role)
        return 0.0 if found is None else found.u**2

    def fixed_floor(self, product: Product, role: Role) -> float:
        """floor^2 of an operand whose scale no value sets; 0 otherwise."""
        found = operand(self.recipe, product, role)
        return 0.0 if found is None or found.block is not None else found.floor**2


def _amax(a: Any, block: int, axis: int) -> Any:
    """The largest magnitude of each element's block along `axis`; block 0 is the whole array."""
    xp: Any = np if isinstance(a, np.ndarray) else jnp
    size = abs(xp.moveaxis(a, axis, -1))
    n = size.shape[-1]
    if block == 0:
        return size.max()
    if block >= n:
        return xp.moveaxis(xp.broadcast_to(size.max(-1, keepdims=True), size.shape), -1, axis)
    padded = xp.pad(size, [(0, 0)] * (size.ndim - 1) + [(0, -n % block)])
    largest = padded.reshape(*size.shape[:-1], -1, block).max(-1)
    return xp.moveaxis(xp.repeat(largest, block, axis=-1)[..., :n], -1, axis)
