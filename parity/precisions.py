"""`compare --precision` with several names: one layer in several precisions side by side, and which operand costs what.

Every precision is judged under its own gauge and measured against the same exact values. Except in `te` recipes are emulated, so
their time says what the emulation costs; bytes say what a kernel that has the format would read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from . import timing
from .inputs import Case, make_case
from .interface import Implementation
from .judge import dtype_of
from .operands import operand
from .problem import PRECISIONS, RECIPES, InvalidInput, Params, Problem, Routing
from .terminal import out, percent, seconds, size, table

STORAGE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NAMES = (*STORAGE, *(r for r in RECIPES if r != "none"))
TENSORS = ("y", "x", "topk_weights", "wi", "wo")
ROLES = ("activation", "kernel", "gradient")

_SHORT = {"y": "y", "x": "dx", "topk_weights": "dweights", "wi": "dwi", "wo": "dwo"}
"""Column heads: y, then gradients."""

_BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4}
_SCALE_BYTES = {"mxfp8": 1, "nvfp4": 1, "fp8-block": 4, "fp8-current": 4, "fp8-delayed": 4}


@dataclass(frozen=True)
class Measured:
    """One precision of one implementation."""

    name: str
    implementation: str
    percent_of_bar: float | None
    error: dict[str, float]
    """Root mean square of the error over that of the exact tensor, by tensor."""
    operand_bytes: int
    seconds: float | None
    reason: str = ""


def several(text: str) -> tuple[str, ...]:
    """The names in `--precision`, or () when it is one of `Problem.precision`; raises InvalidInput for an unknown name."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if len(names) == 1 and names[0] in PRECISIONS:
        return ()
    for name in names:
        if name not in NAMES:
            raise InvalidInput(
                f"precision is {name!r}; accepted: {' or '.join(PRECISIONS)}, or a list of {', '.join(NAMES)}"
            )
    return names


def compare_precisions(
    case: Case,
    names: Sequence[str],
    implementations: Sequence[Implementation],
    *,
    timed: bool = True,
    sensitivity: bool = False,
) -> bool:
    """Prints the table, and with `sensitivity` a second one; whether every tensor that was judged is within its bar."""
    measured = []
    for name in names:
        at = in_precision(case, name)
        judged = _oracle(at)
        for implementation in implementations:
            measured.append(measure(implementation, at, judged, name, timed=timed))
    _print(case.problem, measured)
    if sensitivity:
        _print_sensitivity(case, [n for n in names if n not in STORAGE])
    ran = [m for m in measured if m.percent_of_bar is not None]
    if not ran:
        raise InvalidInput(
            f"nothing that was asked for can run here: {measured[0].implementation}: {measured[0].reason}"
        )
    return all(m.percent_of_bar is not None and m.percent_of_bar <= 100 for m in ran)


def in_precision(case: Case, name: str) -> Case:
    """The case in a storage dtype, or under a recipe in bfloat16; routing and seed stay."""
    dtype = STORAGE.get(name, "bfloat16")
    recipe = "none" if name in STORAGE else name
    problem = case.problem.replace(dtype=dtype, recipe=recipe, precision="highest")
    made = make_case(problem, seed=case.seed, routing=case.routing)
    return made.replace(label=case.label)


def measure(
    implementation: Implementation, case: Case, judged: dict[str, Any], name: str, *, timed: bool = True
) -> Measured:
    """Runs value and gradients once, judges them, and times the compiled call."""
    problem, needed = case.problem, operand_bytes(case.problem)
    able = implementation.can_run(problem)
    if not able:
        return Measured(name, implementation.name, None, {}, needed, None, able.reason)
    call = timing.prepare("experts", _step(implementation.stage("experts"), problem), [_inputs(case)])
    got = jax.tree.map(np.asarray, call(0))
    took = None
    if timed:
        timing.measure([call], least=3, most=10, budget_s=2.0)
        took = float(np.median(call.wall_s))
    return Measured(name, implementation.name, _percent(case, got, judged), _errors(got, judged), needed, took)


def operand_bytes(problem: Problem) -> int:
    """Bytes of both forward products' operands for the routed rows, scales included: x, wi, h, wo."""
    R, D, F, E, wide = problem.routed_rows, problem.D, problem.F, problem.E, problem.wi_columns
    total = 0
    for role, rows, contracted, columns in (
        ("activation", R, D, 1),
        ("kernel", E, D, wide),
        ("activation", R, F, 1),
        ("kernel", E, F, D),
    ):
        values, found = rows * contracted * columns, operand(problem.recipe, "forward", role)  # type: ignore[arg-type]
        if found is None:
            total += values * np.dtype(_stored(problem)).itemsize
            continue
        blocks = -(-contracted // found.block) if found.block else 1
        # Kernels of fp8-block have a scale for 128 x 128; one scale an expert, or one for a whole tensor, else.
        across = -(-columns // 128) if problem.recipe == "fp8-block" else columns
        scales = rows * blocks * across if found.block else E
        total += values * _BITS[found.element] // 8 + scales * _SCALE_BYTES[problem.recipe]
    return total


def sensitivity_of(case: Case, recipe: str) -> dict[str, dict[str, float]]:
    """Relative RMS error by tensor when only one role's operands are quantised; `none` and `all` frame it."""
    at = in_precision(case, recipe)
    exact = _oracle(at)
    found = {}
    for label, roles in (("none", ()), *((role, (role,)) for role in ROLES), ("all", ROLES)):
        got = jax.jit(_step(_one_role(recipe, roles), at.problem))(*_inputs(at))
        found[label] = _errors(jax.tree.map(np.asarray, got), exact)
    return found


def _one_role(recipe: str, roles: tuple[str, ...]) -> Callable[..., Any]:
    recipes, experts, stages = (
        importlib.import_module(f"dropless.reference.{m}") for m in ("recipes", "experts", "permute")
    )
    gemm = importlib.import_module("dropless.reference.grouped_gemm").grouped_gemm
    quantised = recipes.grouped_gemm_of(recipe, gemm, roles=roles)
    return experts.experts_of(permute=stages.permute, grouped_gemm=quantised, unpermute=stages.unpermute)


def _step(experts: Callable[..., Any], problem: Problem) -> Callable[..., dict[str, Any]]:
    def step(wi, wo, others, x, topk_weights, topk_idx, cotangent):
        def forward(wi, wo, x, topk_weights):
            return experts(problem, Params(wi=wi, wo=wo, **others), x, Routing(topk_idx, topk_weights))

        y, pull = jax.vjp(forward, wi, wo, x, topk_weights)
        return {"y": y, **dict(zip(("wi", "wo", "x", "topk_weights"), pull(cotangent), strict=True))}

    return step


def _inputs(case: Case) -> tuple[Any, ...]:
    others = {name: leaf for name, leaf in case.params.named().items() if name not in ("wi", "wo")}
    params, routing = case.params, case.routing
    return params.wi, params.wo, others, case.x, routing.topk_weights, routing.topk_idx, case.cotangent


def _oracle(case: Case) -> dict[str, Any]:
    oracle = importlib.import_module("dropless.reference.oracle")
    return oracle.judge_experts(case.problem, case.params, case.x, case.routing, case.cotangent)


def _percent(case: Case, got: dict[str, np.ndarray], judged: dict[str, Any]) -> float:
    from .compare import judge

    found = [judge(n, got[n], judged[n], dtype=dtype_of(case.problem, n)) for n in TENSORS]
    return 100 * max(
        (f.measured if f.ok else max(f.measured or 0.0, np.inf if f.check != "values" else 1.0)) or 0.0 for f in found
    )


def _errors(got: dict[str, np.ndarray], judged: dict[str, Any]) -> dict[str, float]:
    errors = {}
    for name in TENSORS:
        exact = np.asarray(judged[name].value, np.float64)
        size = float(np.sqrt((exact**2).mean()))
        errors[name] = float(np.sqrt(((got[name].astype(np.float64) - exact) ** 2).mean())) / (size or 1.0)
    return errors


def _stored(problem: Problem) -> Any:
    import ml_dtypes

    return {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[problem.dtype]


def _print(problem: Problem, measured: Sequence[Measured]) -> None:
    costs = ("of bar", "operands", "fwd + bwd")
    title = f"Experts: {problem.T} tokens, D {problem.D}, F {problem.F}, {problem.E} experts, top-{problem.K}"
    # Two tables: in one, 80 columns leave no room for the names.
    summary = table("experts in", "by", *costs, title=title, numbers=costs)
    errors = table("experts in", *_SHORT.values(), title="RMS error against float64", numbers=tuple(_SHORT.values()))
    for m in measured:
        if m.reason:
            summary.add_row(m.name, m.implementation, m.reason)
            continue
        took = "" if m.seconds is None else seconds(m.seconds)
        summary.add_row(m.name, m.implementation, percent(m.percent_of_bar), size(m.operand_bytes), took)
        errors.add_row(f"{m.name}, {m.implementation}", *(f"{m.error[t]:.2g}" for t in TENSORS))
    out().print(summary)
    out().print(errors)
    out().print(
        "Errors are relative to the tensor's own RMS. Only te multiplies a recipe's operands; elsewhere the time is "
        "the emulation's.",
        style="dim",
    )


def _print_sensitivity(case: Case, recipes: Sequence[str]) -> None:
    if not recipes:
        raise InvalidInput(
            "--sensitivity is given but --precision names no recipe; accepted: one of " + ", ".join(NAMES[3:])
        )
    rows = table(
        "recipe", "quantised", *_SHORT.values(), title="What each operand costs", numbers=tuple(_SHORT.values())
    )
    for recipe in recipes:
        for label, errors in sensitivity_of(case, recipe).items():
            rows.add_row(recipe, label, *(f"{errors[t]:.2g}" for t in TENSORS))
    out().print(rows)
