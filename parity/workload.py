"""Turns what a command was asked for into a problem and input variants: preset, sizes, skew, text, trace, x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .inputs import Case, make_case
from .presets import PRESETS
from .problem import InvalidInput, Mesh, Problem, Routing
from .trace import check_ids, read_trace, read_x

DEFAULT_PRESET = "qwen3-30b-a3b"
VARIANTS = 3
"""Input variants that repetitions go through."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of `compare` and `bench`; None takes the preset's value."""

    preset: str | None = None
    full: bool = False
    tokens: int | None = None
    experts: int | None = None
    topk: int | None = None
    width: int | None = None
    expert_width: int | None = None
    groups: int | None = None
    skew: str | None = None
    exponent: float = 1.0
    text: Sequence[Path] = ()
    trace: Path | None = None
    x: Path | None = None
    dtype: str | None = None
    precision: str = "highest"
    ep: int | None = None
    seed: int = 0


@dataclass(frozen=True)
class Workload:
    """A problem with its input variants."""

    problem: Problem
    cases: list[Case]
    label: str
    source: str
    layer: bool = True
    """Whether the live layer is judged too."""
    nan_rows: list[int] = field(default_factory=list)
    """Rows of x that hold NaN."""


def build(r: Request, variants: int = VARIANTS) -> Workload:
    """The workload; raises InvalidInput that names the option's value and what is accepted."""
    given = [name for name, value in (("--text", r.text), ("--trace", r.trace), ("--skew", r.skew)) if value]
    if len(given) > 1:
        raise InvalidInput(f"{' and '.join(given)} were given together; accepted: one source of routings")
    x = None if r.x is None else read_x(r.x).astype(np.float32)
    trace = None if r.trace is None else read_trace(r.trace)
    problem = _problem(r, x, trace)
    if trace is not None:
        check_ids(np.asarray(trace.topk_idx), problem.E, where=str(r.trace))
    cases, source = _cases(r, problem, x, trace, variants)
    nan_rows = [] if x is None else np.flatnonzero(np.isnan(x).any(axis=1)).tolist()
    label = f"{r.preset or DEFAULT_PRESET}{'' if r.full else ' shrunk'}"
    return Workload(problem, cases, label, source, layer=not nan_rows, nan_rows=nan_rows)


def preset_problem(name: str, *, full: bool, dtype: str | None = None, tokens: int | None = None) -> Problem:
    """A preset's problem at full width, or shrunk to a CPU."""
    if name not in PRESETS:
        raise InvalidInput(f"preset is {name!r}; accepted: {', '.join(PRESETS)}")
    preset = PRESETS[name] if full else PRESETS[name].shrunk()
    dtype = dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    return preset.problem(T=tokens, dtype=dtype)


def _problem(r: Request, x: np.ndarray | None, trace: Routing | None) -> Problem:
    base = preset_problem(r.preset or DEFAULT_PRESET, full=r.full, dtype=r.dtype)
    sizes = {"T": r.tokens, "E": r.experts, "K": r.topk, "D": r.width, "F": r.expert_width}
    if x is not None:
        _agree("--tokens", sizes["T"], "--x", x.shape[0])
        _agree("--width", sizes["D"], "--x", x.shape[1])
        sizes["T"], sizes["D"] = x.shape
    if trace is not None:
        T, K = trace.topk_idx.shape
        for option, axis, value in (("--tokens", "T", T), ("--topk", "K", K)):
            _agree(option, sizes[axis], "--trace", value)
            sizes[axis] = value
    changes: dict[str, object] = {k: v for k, v in sizes.items() if v is not None}
    changes["precision"] = r.precision
    changes |= _router_changes(r, base, changes)
    if r.ep is not None:
        changes["mesh"] = Mesh(axes=(("ep", r.ep),), ep_axis="ep")
    return base.replace(**changes)


def _router_changes(r: Request, base: Problem, changes: dict[str, object]) -> dict[str, object]:
    """Group settings that follow from --groups; a preset's groups are kept while they still fit its experts."""
    E, K = int(changes.get("E", base.E)), int(changes.get("K", base.K))  # type: ignore[call-overload]
    old = base.router
    if r.groups is None:
        fits = E % old.groups == 0 and K <= old.group_topk * (E // old.groups)
        return {} if fits else {"router_groups": 1, "router_group_topk": 1, "router_group_score_topk": 1}
    if r.groups < 1 or E % r.groups:
        raise InvalidInput(f"--groups is {r.groups} for {E} experts; accepted: a divisor of {E}")
    size = E // r.groups
    kept = old.group_topk if old.groups > 1 else (r.groups + 1) // 2
    return {
        "router_groups": r.groups,
        "router_group_topk": min(r.groups, max(kept, -(-K // size))),
        "router_group_score_topk": min(old.group_score_topk, size),
    }


def _cases(r: Request, problem: Problem, x: Any, trace: Routing | None, variants: int) -> tuple[list[Case], str]:
    if trace is not None:
        made = [make_case(problem, seed=r.seed + v, routing=_rolled(trace, v), x=x) for v in range(variants)]
        source = f"trace {r.trace.name}" if r.trace else "trace"
    elif r.text:
        from .text import text_note, text_tokens

        made = []
        for v in range(variants):
            rows: Any = text_tokens(problem, list(r.text), seed=r.seed, offset=v * problem.T)
            made.append(make_case(problem, seed=r.seed, pattern=None, x=rows))
        source = f"text {', '.join(p.name for p in r.text)}, {text_note(list(r.text), problem.T)}"
    else:
        skew = r.skew or "zipf"
        # The router of a whole layer should meet the skew too, where x and the gate can be built so.
        live = x is None and problem.E <= problem.D and skew != "ties"
        made = [make_case(problem, seed=r.seed, pattern=skew, exponent=r.exponent, x=x, live=live)]
        for v in range(1, variants):
            seed, params = r.seed + v, made[0].params
            made.append(make_case(problem, seed=seed, pattern=skew, exponent=r.exponent, x=x, live=live, params=params))
        source = made[0].label
    return same_params(made), source


def same_params(cases: list[Case]) -> list[Case]:
    """The cases with the first one's parameters: a layer's weights do not change between the calls that are timed."""
    return [c.replace(params=cases[0].params) for c in cases]


def _rolled(trace: Routing, by: int) -> Routing:
    """The same routing with tokens moved on by `by` places: other data, equal loads."""
    return Routing(np.roll(trace.topk_idx, by, axis=0), np.roll(trace.topk_weights, by, axis=0))  # type: ignore[arg-type]


def _agree(option: str, asked: int | None, source: str, found: int) -> None:
    if asked is not None and asked != found:
        raise InvalidInput(f"{option} is {asked} but {source} holds {found}; accepted: {found}, or leave {option} out")
