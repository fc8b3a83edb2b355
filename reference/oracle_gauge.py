"""How rounding errors enter and travel: the oracle's arithmetic of variances, in units that `parity.tolerances` fixes.

A tensor travels as (value, variance): the variance is the sum of squares of (unit roundoff x sensitivity) over every
allowed rounding so far, and a gauge is its square root. Works on NumPy and on jnp arrays alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..parity.problem import Problem
from ..parity.tolerances import COUNT, SUMMATION, TRANSCENDENTAL, underflow, unit_roundoff
from .oracle_operands import Operands


class Expert(NamedTuple):
    """One expert's float64 parameters, their squares, and what quantising them adds; absent ones are None."""

    wi: Any
    wo: Any
    wi_bias: Any
    wo_bias: Any
    wi2: Any
    wo2: Any
    quantised_wi: Any = None
    """Variance of wi as an operand of x @ wi."""
    quantised_wo: Any = None
    """Likewise of h @ wo."""
    turned_wi: Any = None
    """Likewise of dpre @ wi.T, quantised along the other axis; already transposed."""
    turned_wo: Any = None
    amax_x: Any = None
    """Bound of |x| over all tokens, and of |h|, where all rows share a scale; else None."""
    amax_h: Any = None

    @classmethod
    def of(
        cls,
        wi: Any,
        wo: Any,
        wi_bias: Any = None,
        wo_bias: Any = None,
        *,
        operands: Operands | None = None,
        tokens: Any = None,
    ) -> Expert:
        """From float64 arrays; without `operands` (a shared expert) nothing is quantised, with them `tokens` is all of x."""
        exact = cls(wi, wo, wi_bias, wo_bias, wi * wi, wo * wo)
        if operands is None:
            return exact
        amax_x, amax_h = operands.largest(tokens, wi, wi_bias)
        return exact._replace(
            amax_x=amax_x,
            amax_h=amax_h,
            quantised_wi=operands.variance("forward", "kernel", wi, 0),
            quantised_wo=operands.variance("forward", "kernel", wo, 0),
            turned_wi=operands.variance("d_rows", "kernel", wi.T, 0),
            turned_wo=operands.variance("d_rows", "kernel", wo.T, 0),
        )


class Lumps(NamedTuple):
    """The parts of a row's variance that move the whole row together, each through one hidden unit or weight."""

    total: Any
    squares: Any
    """Sum of the squared parts: (sum of all)^2 / squares counts a row's independent errors."""


class Noise:
    """The rounding model of one problem: storage dtype, float32 accumulators, operands of float32 products."""

    def __init__(self, problem: Problem):
        self.u2 = unit_roundoff(problem.dtype) ** 2
        self.tiny2 = underflow(problem.dtype) ** 2
        operand = unit_roundoff(problem.dtype, problem.precision)
        self.operands = Operands(problem)
        self.operand2 = operand**2 if (problem.dtype, problem.precision) == ("float32", "tf32") else 0.0

    def rounded(self, name: str, value: Any) -> Any:
        """Variance of rounding `value` to the storage dtype as often as the table allows for `name`."""
        return COUNT[name] * (self.u2 * value * value + self.tiny2)

    def per_square(self, n: Any) -> Any:
        """A float32 sum of n products adds this times sum (a b)^2 ...

        Partial sums s_j, averaged over all orders, have sum_j s_j^2 = (n+1)/3 S^2 + ((n+1)/6 - 1/n) sum (a b)^2;
        1 more for the products themselves, and both operands' rounding under tf32.
        """
        return SUMMATION**2 * ((n + 1) / 6 - 1 / n + 1) + 2 * self.operand2

    def per_total(self, n: Any) -> Any:
        """... and this times its square S^2."""
        return SUMMATION**2 * (n + 1) / 3 + 2 * self.operand2

    def partial_sums(self, n: Any, total: Any, squares: Any) -> Any:
        """Variance of summing n >= 1 values in storage dtype, in any order."""
        orders = (n + 1) / 3 * total * total + ((n + 1) / 6 - 1 / n) * squares
        return COUNT["partial_sums"] * (self.u2 * orders + (n - 1) * self.tiny2)

    def dot(
        self, a: Any, var_a: Any, b: Any, b2: Any, n: Any, quantised_a: Any = None, quantised_b: Any = None
    ) -> tuple[Any, Any]:
        """(a @ b, variance) for uncertain a and exact b with squares b2, n terms a sum, float32 accumulator.

        The last two are what quantising either operand adds; their product counts too, since u may be as large as 1/4.
        """
        value = a @ b
        var = (var_a + self.per_square(n) * a * a) @ b2 + self.per_total(n) * value * value
        if quantised_b is not None:
            var = var + quantised_a @ b2 + (a * a + var_a + quantised_a) @ quantised_b
        return value, var

    def parameter(self, n: Any, value: Any, var: Any, squares: Any, *, products: bool) -> Any:
        """Variance of a parameter's gradient: a float32 sum over n tokens (of products, for a kernel), rounded once."""
        operand = 0.0 if products else 2 * self.operand2
        sums = (self.per_square(n) - operand) * squares + (self.per_total(n) - operand) * value * value
        return var + sums + self.rounded("gradient", value)


def transcendental(argument: Any, magnitude: Any) -> Any:
    """Variance of a float32 function value of this magnitude; exp's error grows with its argument."""
    return ((TRANSCENDENTAL + abs(argument)) * SUMMATION * magnitude) ** 2
