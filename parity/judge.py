"""Runs an implementation on a case and judges every tensor it returns: the two parity tests.

Fixed-route parity (`experts_findings`) runs the experts at the case's routing. Live-route parity (`layer_findings`)
lets the layer route, checks that its choices are admissible, and replays the oracle at those choices; a layer that
reports no routing is judged at the case's own, which must then be one that its router cannot miss (`margin_inputs`).
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from . import running
from .compare import Finding, judge, merge, same_bits
from .inputs import Case
from .interface import Implementation, Judged, Unsupported
from .problem import Output, Problem, Routing

FLOAT32 = ("topk_weights", "expert_bias", "weights", "balance", "sequence", "z")
"""Tensors that are float32 whatever the storage dtype; a gradient has the dtype of what it is of."""

LOSSES = ("balance", "sequence", "z")

LARGE = 50_000_000
"""Kernel elements above which the oracle's tensors are judged expert by expert and never kept whole."""

_LAYER_VIEWS: OrderedDict[tuple[Any, ...], tuple[Case, dict[str, Judged]]] = OrderedDict()
_KEPT_VIEWS = 8


def experts_findings(
    implementation: Implementation, case: Case, *, oracle: str = "oracle", grad: bool = True
) -> list[Finding]:
    """y, and with grad the gradients of x, topk_weights and every kernel, at the case's routing.

    Raises Unsupported when the implementation declines; any other failure to run is a finding.
    """
    if grad and vacuous(case):
        return [vacuous_finding()]
    try:
        got = running.experts(implementation, case, grad=grad)
    except Exception as error:
        return [_failed(error, "y")]
    want = _oracle(oracle).judge_experts(
        case.problem, case.params, case.x, case.routing, case.cotangent if grad else None
    )
    return [
        judge(name, got[name], j, dtype=dtype_of(case.problem, name), empty_ok=case.problem.T == 0)
        for name, j in want.items()
        if name in got
    ]


def layer_findings(
    implementation: Implementation, case: Case, *, oracle: str = "oracle", grad: bool = True
) -> list[Finding]:
    """The live layer: its routes, counts, weights, losses and y, and with grad every gradient, losses included.

    A NumPy layer cannot be differentiated, so its gradients are left out.
    """
    grad = grad and "numpy" not in implementation.traits
    if grad and vacuous(case):
        return [vacuous_finding()]
    losses = loss_cotangents(case)
    try:
        output, grads = running.layer(implementation, case, loss_cotangents=losses if grad else None)
    except Exception as error:
        return [_failed(error, "y")]
    return output_findings(
        case, output, grads, oracle=oracle, losses=losses if output.losses is not None else (0.0, 0.0, 0.0)
    )


def output_findings(
    case: Case,
    output: Output,
    grads: dict[str, Any],
    *,
    oracle: str = "oracle",
    losses: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> list[Finding]:
    """Judges what a layer returned on a case: routes first, then everything else, replayed at those routes.

    `losses` are the cotangents of balance, sequence and z under which `grads` were taken.
    """
    problem, empty = case.problem, case.problem.T == 0
    findings: list[Finding] = []
    routing = case.routing if output.routing is None else output.routing
    if output.routing is not None:
        findings = route_findings(case, output.routing, oracle=oracle, weights=False)
        if not all(f.ok for f in findings):
            return findings
    ids = np.asarray(routing.topk_idx)
    if output.group_sizes is not None:
        sizes = np.bincount(ids[ids >= 0], minlength=problem.E).astype(np.int32)
        findings.append(same_bits("group_sizes", output.group_sizes, sizes))
    got = {"y": output.y, **grads}
    if output.routing is not None:
        got["weights"] = output.routing.topk_weights
    if output.losses is not None:
        got |= {name: getattr(output.losses, name) for name in LOSSES}
    if oracle == "oracle_device" and is_large(problem):
        pieces = _oracle(oracle).stream_layer(*_replay(case, ids, bool(grads)), **_marks(case, losses))
        return findings + judge_pieces(problem, got, pieces)
    want = _layer_view(oracle, case, ids, bool(grads), losses)
    return findings + [
        judge(name, got[name], j, dtype=dtype_of(problem, name), empty_ok=empty)
        for name, j in want.items()
        if name in got
    ]


def judge_pieces(
    problem: Problem, got: Mapping[str, Any], pieces: Iterable[tuple[str, int | None, Judged]]
) -> list[Finding]:
    """Judges what `oracle_device` streams, where it lies; an expert's pieces become one finding, their worst."""
    found: dict[str, list[Finding]] = {}
    for name, expert, judged in pieces:
        if name not in got:
            continue
        mine = got[name] if expert is None else got[name][expert]
        finding = judge(name, mine, judged, dtype=dtype_of(problem, name), empty_ok=problem.T == 0)
        if expert is not None:
            finding = finding.replace(expert=expert, index=None if finding.index is None else (expert, *finding.index))
        found.setdefault(name, []).append(finding)
    return [merge(each) for each in found.values()]


def is_large(problem: Problem) -> bool:
    """Whether value and gauge of all kernels, 16 bytes an element, are too much to be kept whole."""
    return problem.E * problem.D * (problem.wi_columns + problem.F) > LARGE


def route_findings(case: Case, routing: Routing, *, oracle: str = "oracle", weights: bool = True) -> list[Finding]:
    """A routing against the oracle: admissible sets of distinct experts, then the weights of those sets by gauge."""
    view = _oracle(oracle).judge_route(case.problem, case.params, case.x)
    return view.findings(routing, case.mask, weights=weights)


def loss_cotangents(case: Case) -> tuple[float, float, float]:
    """Cotangents of balance, sequence and z of order T, so that a token's share of each is of order one."""
    draws = np.random.default_rng(case.seed).uniform(0.5, 2.0, 3) * np.array([1.0, -1.0, 0.5]) * max(case.problem.T, 1)
    balance, sequence, z = (float(np.float32(v)) for v in draws)
    return balance, sequence, z


def dtype_of(problem: Problem, name: str) -> str:
    """The dtype in which a tensor, or the gradient of it, must come."""
    return "float32" if name in FLOAT32 else problem.dtype


def vacuous(case: Case) -> bool:
    """Whether gradients would be compared for a cotangent that is zero everywhere."""
    return case.problem.T > 0 and not np.asarray(case.cotangent).astype(np.float32).any()


def vacuous_finding() -> Finding:
    """The verdict on such a case."""
    return Finding(
        tensor="cotangent", check="values", ok=False, message="the cotangent is zero everywhere: gradients say nothing"
    )


def _layer_view(
    oracle: str, case: Case, ids: np.ndarray, grad: bool, losses: tuple[float, float, float]
) -> dict[str, Judged]:
    """The oracle's replay, kept for the last few: implementations that choose alike share one answer."""
    key = (oracle, id(case), ids.tobytes(), grad, losses)
    if key not in _LAYER_VIEWS:
        view = _oracle(oracle).judge_layer(*_replay(case, ids, grad), **_marks(case, losses))
        _LAYER_VIEWS[key] = (case, view)  # the case is kept alive, or its id could be given to another
        while len(_LAYER_VIEWS) > _KEPT_VIEWS:
            _LAYER_VIEWS.popitem(last=False)
    return _LAYER_VIEWS[key][1]


def _replay(case: Case, ids: np.ndarray, grad: bool) -> tuple[Any, ...]:
    return case.problem, case.params, case.x, ids, case.cotangent if grad else None


def _marks(case: Case, losses: tuple[float, float, float]) -> dict[str, Any]:
    return {"mask": case.mask, "segment_ids": case.segment_ids, "loss_cotangents": losses}


def _failed(error: Exception, tensor: str) -> Finding:
    """A failure to run as a finding; a skip goes on to the caller."""
    if isinstance(error, Unsupported):
        raise error
    if isinstance(error, running.WrongKind):
        return error.finding
    if isinstance(error, running.TargetRaised):
        error = error.error
    line = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {line[0] if line else ''}"
    return Finding(tensor=tensor, check="ran", ok=False, message=message)


def _oracle(name: str) -> Any:
    return importlib.import_module(f"..reference.{name}", __package__)
