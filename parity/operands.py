"""What quantising a grouped product's operands may do to it: the second normative table, beside `tolerances.ROUNDINGS`.

A quantised operand a errs by at most u |a| + floor: u while a is a normal number of its element format, the floor below
that. Elements err one by one, so both enter the gauge as independent terms, never as a coherent one.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Product = Literal["forward", "d_rows", "d_kernel"]
"""rows @ kernel, d @ kernel.T and rows.T @ d: each quantises its operands along its own contraction."""
Role = Literal["activation", "kernel", "gradient"]

ELEMENT_ROUNDOFF = {"e4m3": 2.0**-4, "e5m2": 2.0**-3, "e2m1": 2.0**-2}
"""u: half the spacing of numbers at 1, for 3, 2 and 1 stored mantissa bits."""

_HALF_SUBNORMAL = {"e4m3": 2.0**-10, "e5m2": 2.0**-17, "e2m1": 2.0**-2}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


class Operand(NamedTuple):
    """How one operand of one product is rounded."""

    element: str
    u: float
    floor: float
    """Largest error below the normal range: relative to the block's amax, or absolute where the scale is fixed."""
    block: int | None
    """Values along the contraction that share a scale; 0 for all of them, None for a scale that no value sets."""


class Recipe(NamedTuple):
    """One line of the table; a role that is None is not quantised."""

    name: str
    block: int | None
    activation: str
    kernel: str
    gradient: str | None
    slack: float
    """How far a block's largest element may lie below the format's largest number, as a factor: the scale's own rounding."""
    because: str


QUANTISED: tuple[Recipe, ...] = (
    Recipe(
        "fp8-current", 0, "e4m3", "e4m3", "e5m2", 1.0, "amax lands on the largest number: normal down to amax 2^-14.8"
    ),
    Recipe("fp8-delayed", None, "e4m3", "e4m3", "e5m2", 1.0, "the first step's scale is 1, whatever the values are"),
    Recipe("fp8-block", 128, "e4m3", "e4m3", "e4m3", 2.0, "a power-of-two scale: amax lands within a binade"),
    Recipe("mxfp8", 32, "e4m3", "e4m3", "e4m3", 2.0, "a power-of-two scale: amax lands within a binade"),
    Recipe(
        "nvfp4", 16, "e2m1", "e2m1", None, 1 + 2.0**-4, "the e4m3 scale errs by 2^-4 itself; the backward pass is exact"
    ),
)
"""Every operand rounding that the gauge allows. The shared expert and the router are never quantised."""


def operand(recipe: str, product: Product, role: Role) -> Operand | None:
    """The rounding of that product's operand; None when it is not quantised.

    A floor relative to amax is half the smallest subnormal over the smallest place where amax can land. Saturation by a
    scale that was rounded down moves only the block's largest values, by less than u. Under one scale an expert another
    row's largest value sets a row's floor; gradients there are e5m2, whose floor, amax 2^-32, reaches no row.
    """
    line = next((r for r in QUANTISED if r.name == recipe), None)
    if line is None or (line.gradient is None and product != "forward"):
        return None
    element = getattr(line, role)
    fixed = line.block is None
    floor = _HALF_SUBNORMAL[element] * (1.0 if fixed else line.slack / _LARGEST[element])
    return Operand(element, ELEMENT_ROUNDOFF[element], floor, line.block)


def operand_rows() -> list[tuple[str, str, str]]:
    """(name, value, because) of every line, for `tolerances.bar_table`."""
    rows = []
    for line in QUANTISED:
        for role in ("activation", "kernel", "gradient"):
            found = operand(line.name, "forward" if role != "gradient" else "d_rows", role)  # type: ignore[arg-type]
            if found is None:
                rows.append((f"operand: {line.name}, {role}", "exact", "the recipe leaves it in storage dtype"))
                continue
            of = "" if found.block is None else " amax"
            value = f"2^{_log2(found.u)} |a| + {found.floor:.2g}{of}"
            rows.append((f"operand: {line.name}, {role}", value, f"{found.element}; {line.because}"))
    return rows


def _log2(power: float) -> int:
    return round(math.log2(power))
