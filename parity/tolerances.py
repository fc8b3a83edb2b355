"""The bars: what counts as honest rounding, and how far beyond its gauge an honest value may lie.

A verdict is |error| / gauge against a bar. The gauge of an element is the root sum of squares of (unit roundoff x
sensitivity) over the roundings that `ROUNDINGS` allows, so it already knows dtype, depth, scale and cancellation; the
bars are therefore pure numbers, the same for every tensor, and no test holds a tolerance of its own.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np

from .operands import operand_rows

ELEMENT_BAR = 6.0
"""Largest |error| / gauge of one element."""

SUMMATION = 2.0**-24
"""Unit roundoff of the accumulators, which are float32 whatever the storage dtype."""

TRANSCENDENTAL = 8.0
"""Relative error of a float32 exp, tanh, erf, log or logistic, in units of 2**-24 (4 ulp), before its argument's own."""

_UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
_UNDERFLOW = {"bfloat16": 2.0**-126, "float16": 2.0**-25, "float32": 2.0**-126}
_ROW_SCALE = 0.75
_ROW_TAIL = math.log(1e9)
_ROW_WIDTH = 64


class Rounding(NamedTuple):
    """One line of the normative table: a value that an honest layer may round to the storage dtype."""

    name: str
    value: str
    """The value, in the notation of `Params` and the stages."""
    count: int
    """How many times it may be rounded."""
    when: Literal["always", "late", "early", "wi_bias", "wo_bias", "clamp", "activation logits"]
    outputs: str
    """The compared tensors whose gauge it enters."""
    because: str


ROUNDINGS: tuple[Rounding, ...] = (
    Rounding(
        "logits",
        "x @ gate_kernel (+ gate_bias)",
        1,
        "activation logits",
        "weights, losses, all",
        "the gate runs in x's dtype",
    ),
    Rounding(
        "logits_product", "x @ gate_kernel", 1, "activation logits", "weights, losses, all", "the bias is added apart"
    ),
    Rounding("pre", "x @ wi: gate, up", 1, "always", "all but wo_bias", "output of the first grouped GEMM"),
    Rounding(
        "pre_biased", "x @ wi + wi_bias", 1, "wi_bias", "all but wo_bias", "the bias is added apart from the GEMM"
    ),
    Rounding(
        "act", "act(gate)", 1, "always", "all but wo_bias", "the activation is stored, or multiplied in storage dtype"
    ),
    Rounding("up_offset", "clip(up) + offset", 1, "clamp", "all but wo_bias", "the shift by the clamp's offset"),
    Rounding("h", "act(gate) * up", 1, "always", "y, topk_weights, wo", "operand of the second grouped GEMM"),
    Rounding(
        "weight", "topk_weights", 1, "always", "y, x, wi, wo, biases", "the routing weight is cast before it multiplies"
    ),
    Rounding("weighted_h", "w * h", 1, "early", "y, wo", "operand of the second grouped GEMM"),
    Rounding("expert_y", "h @ wo", 1, "always", "y, topk_weights", "output of the second grouped GEMM"),
    Rounding(
        "expert_y_biased", "h @ wo + wo_bias", 1, "wo_bias", "y, topk_weights", "the bias is added apart from the GEMM"
    ),
    Rounding("weighted_y", "w * y_k, w * wo_bias", 1, "late", "y", "the weighted row is stored before the combine"),
    Rounding(
        "partial_sums",
        "partial sums over k, shared expert included",
        1,
        "always",
        "y, x",
        "the combine runs in storage dtype",
    ),
    Rounding("y", "y", 1, "always", "y", "the result"),
    Rounding(
        "part",
        "a layer's routed sum, before the shared expert's or the router's share is added",
        1,
        "always",
        "y, x",
        "two stages' results are added",
    ),
    Rounding("weighted_dy", "w * dy", 1, "late", "x, wi, wo, biases", "operand of the backward grouped GEMMs"),
    Rounding("unit_dh", "dy @ wo.T", 1, "early", "x, topk_weights, wi", "the weight comes after this product"),
    Rounding("dh", "w * dy @ wo.T", 1, "always", "x, wi, wi_bias", "output of the backward grouped GEMM"),
    Rounding("dact", "dh * up", 1, "always", "x, wi, wi_bias", "one factor of dgate"),
    Rounding("slope", "act'(gate)", 1, "always", "x, wi, wi_bias", "the other factor of dgate"),
    Rounding("dpre", "dgate, dup", 1, "always", "x, wi, wi_bias", "operands of the last backward GEMMs"),
    Rounding("dx_half", "dgate @ wi_gate.T, dup @ wi_up.T", 1, "always", "x", "wi may be kept as two kernels"),
    Rounding("dx_expert", "[dgate, dup] @ wi.T", 1, "always", "x", "output of the backward grouped GEMM"),
    Rounding("dx", "dx", 1, "always", "x", "the result"),
    Rounding(
        "dweight_terms",
        "dy * y_k, or (dy @ wo.T) * h",
        1,
        "always",
        "topk_weights",
        "products in storage dtype, summed in float32",
    ),
    Rounding("dweight", "sum of the above", 1, "always", "topk_weights", "the weight was cast, so its gradient is too"),
    Rounding("dlogits", "dlogits", 1, "activation logits", "x, gate_kernel, gate_bias", "cotangent of rounded logits"),
    Rounding(
        "dx_router", "dlogits @ gate_kernel.T", 1, "always", "x", "the router's share, rounded before it is added"
    ),
    Rounding("gradient", "wi, wo, biases, gate_kernel", 1, "always", "each", "a gradient has its parameter's dtype"),
)
"""Every rounding to the storage dtype that the gauge allows; accumulators are float32, kernel gradients' too.

"late" and "early" name the weight placement in which a rounding arises. The gauge admits both, whichever the problem
asks for: they are equal in exact arithmetic, and a fused backward pass may mix them.
"""

COUNT: dict[str, int] = {r.name: r.count for r in ROUNDINGS}
"""How often each named value may be rounded: what the gauge reads."""


def unit_roundoff(dtype: str, precision: str = "highest") -> float:
    """u: half the distance from 1 to the next number; for float32 under "tf32", that of a product's operands, 2**-11."""
    return 2.0**-11 if dtype == "float32" and precision == "tf32" else _UNIT_ROUNDOFF[dtype]


def underflow(dtype: str) -> float:
    """Largest error of a rounding below the normal range: half the smallest float16 subnormal; elsewhere a flush to zero."""
    return _UNDERFLOW[dtype]


def row_bar(width: Any, xp: Any = np) -> Any:
    """Largest norm(error) / norm(gauge) of a row with `width` independent errors; also of an array of widths.

    With an rms of 0.75 gauges, which covers any mantissa (0.58) and correlated errors, the squared ratio behaves as
    0.75^2 * chi2(n) / n, whose quantile at 1 - 1e-9 is at most 0.75^2 * (1 + 2 sqrt(a/n) + 2a/n), a = ln 1e9
    (Laurent and Massart's bound). That is 5.4 at n = 1 and 1.25 at n = 64, where it stays.
    """
    n = xp.clip(width, 1, _ROW_WIDTH)
    return _ROW_SCALE * xp.sqrt(1 + 2 * xp.sqrt(_ROW_TAIL / n) + 2 * _ROW_TAIL / n)


class Bar(NamedTuple):
    """One row of `dropless bars`."""

    name: str
    value: str
    because: str


def bar_table() -> list[Bar]:
    """The bars and the unit roundoffs with their derivations, then the normative table of roundings."""
    bars = [
        Bar(
            "element",
            f"{ELEMENT_BAR:g}",
            "max |error| / gauge; honest layers of every dtype stay below 60 % of it, visible faults lie beyond it",
        ),
        *(
            Bar(
                f"block, {n} independent errors{'' if n < _ROW_WIDTH else ' or more'}",
                f"{row_bar(n):.3g}",
                "norm ratio of a token's row, an expert's kernel gradient or a small tensor: 0.75 sqrt(1 + 2 sqrt(a/n) + "
                "2a/n), a = ln 1e9, a chi-square tail of one in 1e9",
            )
            for n in (1, 4, 16, 33, _ROW_WIDTH)
        ),
        *(
            Bar(f"u, {d}", f"2^{round(math.log2(u))}", "half the spacing of numbers at 1")
            for d, u in _UNIT_ROUNDOFF.items()
        ),
        Bar("u, float32 operands under tf32", "2^-11", "10 stored mantissa bits"),
        Bar("underflow, float16", "2^-25", "half the smallest subnormal, once for each rounding"),
        Bar(
            "summation",
            "2^-24",
            "n terms with sum S and squares Q: u^2 ((n+1)/3 S^2 + ((n+1)/6 - 1/n) Q), the mean over all orders, "
            "and u^2 Q for the products",
        ),
        Bar("transcendental", f"{TRANSCENDENTAL:g} x 2^-24", "4 ulp of float32, plus the argument's own rounding"),
        Bar(
            "kink",
            "the jump",
            "where a pre-activation lies within its own error of a clamp's edge, the derivative's jump joins the gauge",
        ),
    ]
    return [
        *bars,
        *(
            Bar(f"rounding: {r.value}", f"{r.count} x u ({r.when})", f"{r.because}; enters {r.outputs}")
            for r in ROUNDINGS
        ),
        *(Bar(*row) for row in operand_rows()),
    ]
