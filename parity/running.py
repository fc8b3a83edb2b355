"""Runs one stage of an implementation on a case and hands back what it returned, as NumPy.

One executable per (stage function, problem), shared by every law and every implementation that has that very
function; routing, weights and inputs are arguments, so a suite of many routings compiles each stage once. What comes
back is checked for kind (dtype, then shape) before anything reads it: `WrongKind` carries the finding.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from . import launch
from .compare import Finding
from .inputs import Case
from .interface import Implementation, Unsupported
from .kept import Kept
from .problem import Losses, Output, Params, Problem, Routing

EXPERT_LEAVES = ("wi", "wo", "wi_bias", "wo_bias")
"""The parameters that `experts` reads."""

OPTIONS: dict[str, Any] = {}
"""Compiler options of every executable built from here on; `quick_compile` fills it for a kill matrix."""

QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Half the compile time on CPU for code that runs a few times at tiny sizes."""

_EXECUTABLES: dict[tuple[Any, ...], Callable[..., Any]] = {}
_RESULTS: Kept[Any] = Kept(256, 1 << 29)


class WrongKind(Exception):
    """A stage returned another dtype, shape or structure than the contract says; `finding` tells which."""

    def __init__(self, finding: Finding):
        super().__init__(finding.message)
        self.finding = finding


class TargetRaised(Exception):
    """Something went wrong while the target ran or was traced, and not in this suite; `error` is what it was."""

    def __init__(self, error: Exception):
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def blaming_target() -> Iterator[None]:
    """Turns any exception inside into TargetRaised: also those of its backward and of JAX, outside of any stage's call."""
    try:
        yield
    except (Unsupported, WrongKind, TargetRaised):
        raise
    except Exception as error:
        raise TargetRaised(error) from error


def experts(implementation: Implementation, case: Case, *, grad: bool = True) -> dict[str, np.ndarray]:
    """`y`, and with `grad` the gradients by the name of what they are of, for the case's cotangent.

    The result of a case object is kept, so laws that ask for the same thing run it once. Gradients are left out for a
    NumPy implementation without `experts_vjp`.
    """
    key = ("experts", implementation.stage("experts"), grad, id(case))
    return dict(_kept(key, case, lambda: _run_experts(implementation, case, grad)))


def layer(
    implementation: Implementation, case: Case, *, loss_cotangents: tuple[float, float, float] | None = None
) -> tuple[Output, dict[str, np.ndarray]]:
    """The live layer's Output, and its gradients by name when cotangents of the three losses are given."""
    key = ("layer", implementation.stage("layer"), loss_cotangents, id(case))
    return _kept(key, case, lambda: _run_layer(implementation, case, loss_cotangents))


def route(implementation: Implementation, case: Case) -> Routing:
    """The routing that the implementation chooses for the case's x, as NumPy."""
    problem = case.problem
    routing = call(implementation, "route", _plain, case.params, case.x, problem)
    wanted = (problem.T, problem.K)
    check_kind("route", "topk_idx", routing.topk_idx, wanted, np.int32)
    check_kind("route", "topk_weights", routing.topk_weights, wanted, np.float32)
    return to_host(routing)


def call(implementation: Implementation, stage: str, how: Callable[..., Any], *args: Any) -> Any:
    """`how(stage function, *args)` under one cached `jit`; the last argument is the static Problem.

    Eager and host-synchronising implementations are called as they are.
    """
    fn = implementation.stage(stage)
    *arrays, problem = args
    if implementation.traits & {"eager", "host-sync", "numpy"}:
        with blaming_target():
            return how(fn, *arrays, problem)
    key = (how, fn, problem, *sorted(OPTIONS.items()))
    if key not in _EXECUTABLES:
        _EXECUTABLES[key] = jax.jit(lambda *a: how(fn, *a, problem), compiler_options=OPTIONS or None)
    with blaming_target():
        out = _EXECUTABLES[key](*arrays)
        return out if jax.process_count() == 1 else launch.to_host(out)


def forget_results() -> None:
    """Drops every kept result, so that the next law runs its case anew."""
    _RESULTS.clear()


def forget_executables() -> None:
    """Drops every compiled stage."""
    _EXECUTABLES.clear()


def to_host(tree: Any) -> Any:
    """The same structure with NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


def check_kind(stage: str, name: str, got: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Raises WrongKind unless `got` is an array of this dtype and shape."""
    if not hasattr(got, "shape") or not hasattr(got, "dtype"):
        raise WrongKind(_wrong(name, "ran", f"{stage} returned a {type(got).__name__} for {name}; accepted: an array"))
    if jnp.dtype(got.dtype) != jnp.dtype(dtype):
        message = f"{stage} returned {name} as {got.dtype}; accepted: {jnp.dtype(dtype).name}"
        raise WrongKind(_wrong(name, "dtype", message))
    if tuple(got.shape) != tuple(shape):
        message = f"{stage} returned {name} of shape {list(got.shape)}; accepted: {list(shape)}"
        raise WrongKind(_wrong(name, "shape", message))


def _kept(key: tuple[Any, ...], case: Case, run: Callable[[], Any]) -> Any:
    return _RESULTS.get(key, run, held=case)  # the case is kept alive, or its id could be given to another


def _run_layer(
    implementation: Implementation, case: Case, loss_cotangents: tuple[float, float, float] | None
) -> tuple[Output, dict[str, np.ndarray]]:
    problem, fn = case.problem, implementation.stage("layer")
    args = (case.params, case.x, case.mask, case.segment_ids)
    if loss_cotangents is None:
        out = call(implementation, "layer", _forward_layer, *args, problem)
        _check_output(problem, out)
        return to_host(out), {}
    untraceable = bool(implementation.traits & {"eager", "host-sync", "numpy"})  # not even for its shapes
    if untraceable:
        _check_output(problem, call(implementation, "layer", _forward_layer, *args, problem))
    coefficients = jnp.asarray(loss_cotangents, jnp.float32)
    try:
        out, grads = call(implementation, "layer", _layer_vjp, *args, case.cotangent, coefficients, problem)
    except TargetRaised:
        if not untraceable:  # an output of the wrong kind has no backward, and is what should be said
            given = _given(case.mask, case.segment_ids)
            with blaming_target():
                shape = jax.eval_shape(functools.partial(fn, problem), case.params, case.x, **given)
            _check_output(problem, shape)
        raise
    _check_output(problem, out)
    return to_host(out), to_host(grads)


def _run_experts(implementation: Implementation, case: Case, grad: bool) -> dict[str, np.ndarray]:
    problem = case.problem
    y_shape = (problem.T, problem.D)
    own_vjp = "experts_vjp" in implementation.stages
    if implementation.traits & {"numpy"} or (own_vjp and implementation.traits & {"eager"}):
        y = implementation.stage("experts")(problem, case.params, case.x, case.routing)
        check_kind("experts", "y", y, y_shape, problem.dtype)
        out = {"y": np.asarray(y)}
        if grad and own_vjp:
            grads = implementation.stage("experts_vjp")(problem, case.params, case.x, case.routing, case.cotangent)
            out |= check_gradients(case, grads)
        return out
    args = (case.params, case.x, case.routing.topk_weights, case.routing.topk_idx)
    if not grad:
        y = call(implementation, "experts", _forward_experts, *args, problem)
        check_kind("experts", "y", y, y_shape, problem.dtype)
        return {"y": np.asarray(y)}
    try:
        y, grads = call(implementation, "experts", _experts_vjp, *args, case.cotangent, problem)
    except TargetRaised:
        if not implementation.traits & {"eager", "host-sync"}:  # a y of the wrong kind has no backward: say that
            check_kind(
                "experts", "y", _shape_of(implementation.stage("experts"), problem, case), y_shape, problem.dtype
            )
        raise
    check_kind("experts", "y", y, y_shape, problem.dtype)
    return {"y": np.asarray(y), **check_gradients(case, grads)}


def check_gradients(case: Case, grads: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The gradients as NumPy, each of its primal's shape and dtype; raises WrongKind otherwise."""
    if not isinstance(grads, Mapping):
        message = f"experts_vjp returned a {type(grads).__name__}; accepted: a dict of gradients by name"
        raise WrongKind(_wrong("", "ran", message))
    primals = {"x": case.x, "topk_weights": case.routing.topk_weights}
    primals |= {name: leaf for name in EXPERT_LEAVES if (leaf := getattr(case.params, name)) is not None}
    for name, primal in primals.items():
        check_kind("experts", f"gradient of {name}", grads.get(name), primal.shape, primal.dtype)
    return {name: np.asarray(grads[name]) for name in primals}


def _shape_of(fn: Callable[..., Any], problem: Problem, case: Case) -> Any:
    with blaming_target():
        return jax.eval_shape(functools.partial(fn, problem), case.params, case.x, case.routing)


def _plain(fn: Callable[..., Any], params: Params, x: jax.Array, problem: Problem) -> Any:
    return fn(problem, params, x)


def _forward_experts(fn, params, x, topk_weights, topk_idx, problem):
    return fn(problem, params, x, Routing(topk_idx, topk_weights))


def _experts_vjp(fn, params, x, topk_weights, topk_idx, cotangent, problem):
    leaves = {name: leaf for name in EXPERT_LEAVES if (leaf := getattr(params, name)) is not None}

    def forward(leaves, x, topk_weights):
        return fn(problem, params.replace(**leaves), x, Routing(topk_idx, topk_weights))

    y, pull = jax.vjp(forward, leaves, x, topk_weights)
    grads, dx, dw = pull(cotangent)
    return y, {"x": dx, "topk_weights": dw, **grads}


def _forward_layer(fn, params, x, mask, segment_ids, problem):
    return fn(problem, params, x, **_given(mask, segment_ids))


def _layer_vjp(fn, params, x, mask, segment_ids, cotangent, loss_cotangents, problem):
    def forward(leaves, x):
        out = fn(problem, params.replace(**leaves), x, **_given(mask, segment_ids))
        return (out.y, out.losses), out

    (_, losses), pull, out = jax.vjp(forward, params.named(), x, has_aux=True)
    bars = None
    if losses is not None:
        bars = Losses(*(loss_cotangents[i].astype(v.dtype) for i, v in enumerate(jax.tree.leaves(losses))))
    grads, dx = pull((cotangent, bars))
    return out, {"x": dx, **grads}


def _given(mask: Any, segment_ids: Any) -> dict[str, Any]:
    # Left out when absent: a user's layer need not name keywords that it does not use.
    marks = {"mask": mask, "segment_ids": segment_ids}
    return {name: value for name, value in marks.items() if value is not None}


def _check_output(problem: Problem, out: Any) -> None:
    if not isinstance(out, Output):
        message = f"layer returned a {type(out).__name__}; accepted: dropless.parity.Output"
        raise WrongKind(_wrong("y", "ran", message))
    check_kind("layer", "y", out.y, (problem.T, problem.D), problem.dtype)
    if out.group_sizes is not None:
        check_kind("layer", "group_sizes", out.group_sizes, (problem.E,), np.int32)


def _wrong(tensor: str, check: Literal["ran", "dtype", "shape"], message: str) -> Finding:
    return Finding(tensor=tensor, check=check, ok=False, message=message)
