"""What laws share: the oracle's view of a case, comparison by bits or by gauge, and inputs with a known answer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from .compare import Finding, judge, same_bits
from .draws import NUMPY_DTYPES
from .inputs import Case
from .interface import Implementation, Judged
from .judge import dtype_of
from .judge import route_findings as judged_routes
from .kept import Kept, digest
from .margins import margin_inputs
from .problem import InvalidInput, Problem, Routing

ORACLES = ("oracle", "oracle_device")
_ORACLE = ["oracle"]
_VIEWS: Kept[dict[str, Judged]] = Kept(512, 1 << 30)
"""The oracle's answers by what they were asked about, so that a case that is built anew is not judged anew."""
_DIGESTS: Kept[bytes] = Kept(512, 1 << 30)


def use_oracle(name: str) -> None:
    """Makes `name` the judge of every gauge law: oracle (NumPy, small cases) or oracle_device (any width)."""
    if name not in ORACLES:
        raise InvalidInput(f"oracle is {name!r}; accepted: {', '.join(ORACLES)}")
    _ORACLE[0] = name
    forget_views()


def oracle_view(case: Case, *, grad: bool = True) -> dict[str, Judged]:
    """The oracle's y, and with `grad` the gradients, of `experts` on a case; kept for cases of the same bits."""
    cotangent = case.cotangent if grad else None
    key = ("experts", _ORACLE[0], grad, case.problem, _digest(case))
    return _VIEWS.get(
        key, lambda: layer_oracle().judge_experts(case.problem, case.params, case.x, case.routing, cotangent)
    )


def layer_view(
    case: Case, topk_idx: Any, *, loss_cotangents: tuple[float, float, float] | None = None
) -> dict[str, Judged]:
    """The oracle's layer on a case, replayed at these ids; gradients come with cotangents of the losses. Kept likewise."""
    ids, grad = np.asarray(topk_idx), loss_cotangents is not None
    key = ("layer", _ORACLE[0], loss_cotangents, case.problem, ids.tobytes(), _digest(case))
    return _VIEWS.get(
        key,
        lambda: layer_oracle().judge_layer(
            case.problem,
            case.params,
            case.x,
            ids,
            case.cotangent if grad else None,
            mask=case.mask,
            segment_ids=case.segment_ids,
            loss_cotangents=loss_cotangents or (0.0, 0.0, 0.0),
        ),
    )


def forget_views() -> None:
    """Drops every kept view of the oracle."""
    _VIEWS.clear()
    _DIGESTS.clear()


def _digest(case: Case) -> bytes:
    # Kept for the object, which is kept alive, or its id could be given to another.
    parts = (case.params, case.x, case.routing, case.cotangent, case.mask, case.segment_ids)
    return _DIGESTS.get(id(case), lambda: digest(*parts), held=case)


def layer_oracle() -> ModuleType:
    """The module that judges layers and routes at present."""
    return importlib.import_module(f"dropless.reference.{_ORACLE[0]}")


def route_findings(case: Case, routing: Routing, *, weights: bool = True) -> list[Finding]:
    """A routing against the oracle: admissible sets of distinct experts, then the weights of those sets by gauge."""
    return judged_routes(case, routing, oracle=_ORACLE[0], weights=weights)


def live_case(case: Case) -> Case | None:
    """The case with x and a gate that choose its own routing beyond doubt; None when the shape leaves no such inputs."""
    ids = _filled(case)
    try:
        made = margin_inputs(case.problem, ids, case.seed, params=case.params)
    except InvalidInput:  # too few columns for so many experts: the law has nothing to say here
        return None
    live = with_routing(case, ids, np.asarray(case.routing.topk_weights))
    return live.replace(x=jnp.asarray(made.x), params=made.params(case.params))


def _filled(case: Case) -> np.ndarray:
    """The case's ids with every slot filled and every token inside group_topk groups."""
    p, r = case.problem, case.problem.router
    size = p.E // r.groups
    filled = np.empty((p.T, p.K), np.int32)
    for token, row in enumerate(real_rows(case)):
        kept: list[int] = []
        groups: list[int] = []
        start = int(row.max(initial=0))
        for expert in [*row.tolist(), *((start + i) % p.E for i in range(p.E))]:
            if len(kept) == p.K:
                break
            if expert < 0 or expert in kept:
                continue
            if expert // size not in groups:
                if len(groups) == r.group_topk:
                    continue
                groups.append(expert // size)
            kept.append(expert)
        filled[token] = kept
    return filled


def by_oracle(case: Case, got: Mapping[str, np.ndarray], names: Iterable[str]) -> list[Finding]:
    """Each named tensor against the oracle, by gauge; a tensor that was not computed gives no finding."""
    view = oracle_view(case)
    return [judge(n, got[n], view[n], dtype=dtype_of(case.problem, n)) for n in names if n in got and n in view]


def by_gauge(
    problem: Problem, views: Mapping[str, Judged], got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]
) -> list[Finding]:
    """Two results of one implementation: apart by no more than two honest roundings in quadrature."""
    findings = []
    for name in want:
        if name in got and name in views:
            gauge = np.sqrt(2.0) * np.asarray(views[name].gauge)
            view = views[name]._replace(value=np.asarray(want[name]).astype(np.float64), gauge=gauge)
            findings.append(judge(name, got[name], view, dtype=dtype_of(problem, name)))
    return findings


def moved(
    views: Mapping[str, Judged],
    *,
    rows: Callable[[str], Any] = lambda name: None,
    gauge: Callable[[str, np.ndarray], np.ndarray] = lambda name, value: value,
) -> dict[str, Judged]:
    """The same gauges elsewhere: `rows(name)` indexes a tensor's first axis, `gauge(name, values)` changes the values."""
    changed = {}
    for name, view in views.items():
        at, values, dof = rows(name), np.asarray(view.gauge), view.dof
        if at is not None:
            if dof is not None and len(dof) == len(values):
                dof = np.asarray(dof)[at]
            values = values[at]
        changed[name] = view._replace(value=None, gauge=gauge(name, values), dof=dof)
    return changed


def by_bits_or_gauge(
    implementation: Implementation,
    case: Case,
    got: Mapping[str, np.ndarray],
    want: Mapping[str, np.ndarray],
    keep: Any = None,
) -> list[Finding]:
    """Two results of one executable: bit for bit where determinism is claimed, else by gauge; `keep` picks tokens."""
    if "deterministic" in implementation.traits:
        return by_bits(got, want)
    views = {name: view for name, view in oracle_view(case).items() if name in want}
    return by_gauge(case.problem, moved(views, rows=lambda name: keep), got, want)


def by_bits(
    got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], names: Iterable[str] | None = None
) -> list[Finding]:
    """Two results, bit for bit."""
    return [same_bits(n, got[n], want[n]) for n in (want if names is None else names) if n in got and n in want]


def expect(tensor: str, holds: Any, message: str, **more: object) -> Finding:
    """A yes-or-no fact as a finding."""
    return Finding(tensor=tensor, check="values", ok=bool(holds), message="" if holds else message, **more)  # type: ignore[arg-type]


def real_rows(case: Case) -> np.ndarray:
    """The ids as NumPy, -1 where there is no expert."""
    return np.asarray(case.routing.topk_idx)


def idle_experts(case: Case) -> np.ndarray:
    """The experts that no slot names."""
    return np.setdiff1d(np.arange(case.problem.E), real_rows(case))


def with_routing(case: Case, topk_idx: np.ndarray, topk_weights: np.ndarray) -> Case:
    """The case at another routing."""
    routing = Routing(jnp.asarray(topk_idx, jnp.int32), jnp.asarray(topk_weights, jnp.float32))
    return case.replace(routing=routing)


def take(array: Any, order: Any) -> jnp.ndarray:
    """`array[order]`, picked by NumPy: JAX would compile a program for each shape."""
    return jnp.asarray(np.asarray(array)[order])


def storage(problem: Problem, values: np.ndarray) -> jnp.ndarray:
    """Values in the problem's storage dtype; raises when they do not fit exactly, since a payload must."""
    stored = np.asarray(values).astype(NUMPY_DTYPES[problem.dtype])
    if not np.array_equal(stored.astype(np.float64), np.asarray(values, np.float64)):
        raise AssertionError(f"a payload is not exact in {problem.dtype}")
    return jnp.asarray(stored)


def dyadic_weights(topk_idx: np.ndarray, levels: int = 4) -> np.ndarray:
    """Weights 1/2, 1/4, ... that differ between neighbouring slots and sum exactly in any dtype here; 0 for no expert."""
    T, K = topk_idx.shape
    exponents = 1 + (np.arange(K)[None] + np.arange(T)[:, None]) % levels
    return np.where(topk_idx < 0, 0.0, 2.0**-exponents).astype(np.float32)
