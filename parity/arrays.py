"""Layers that speak NumPy or PyTorch: called with their own arrays, judged like any other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .interface import Implementation
from .problem import InvalidInput, Params, Problem, Routing

ARRAYS = ("jax", "numpy", "torch")
_LEAVES = ("wi", "wo", "wi_bias", "wo_bias")


def speaking(implementation: Implementation, arrays: str) -> Implementation:
    """The implementation as one that is called with JAX arrays, whatever its own are.

    numpy: gradients come from its `experts_vjp`, if it has one. torch: they come from autograd. Only `experts` (and
    `experts_vjp`) is offered; both run eagerly. Raises InvalidInput for another kind, or when PyTorch is not installed.
    """
    if arrays == "jax":
        return implementation
    if arrays not in ARRAYS:
        raise InvalidInput(f"arrays is {arrays!r}; accepted: {', '.join(ARRAYS)}")
    if not implementation.offers("experts"):
        raise InvalidInput(f"{implementation.name} offers no experts; accepted with {arrays} arrays: experts")
    stages = _numpy_stages(implementation) if arrays == "numpy" else _torch_stages(implementation)
    traits = (implementation.traits | {"numpy", "eager"}) - {"host-sync"}
    return dataclasses.replace(implementation, stages=stages, traits=traits)


def _numpy_stages(implementation: Implementation) -> dict[str, Callable[..., Any]]:
    own = implementation.stages

    # The very arrays that the caller holds are handed over, so that a layer which writes into them is found out.
    def experts(problem: Problem, params: Params, x: Any, routing: Routing) -> Any:
        return own["experts"](problem, _map(_own_numpy, params), _own_numpy(x), _map(_own_numpy, routing))

    def experts_vjp(problem: Problem, params: Params, x: Any, routing: Routing, dy: Any) -> Mapping[str, Any]:
        args = (_map(_own_numpy, params), _own_numpy(x), _map(_own_numpy, routing), _own_numpy(dy))
        return own["experts_vjp"](problem, *args)

    return {"experts": experts, **({"experts_vjp": experts_vjp} if "experts_vjp" in own else {})}


def _torch_stages(implementation: Implementation) -> dict[str, Callable[..., Any]]:
    try:
        import torch
    except ImportError:
        raise InvalidInput(
            "arrays is 'torch' but PyTorch is not installed; accepted: jax, numpy, or install torch"
        ) from None
    fn = implementation.stages["experts"]

    def experts(problem: Problem, params: Params, x: Any, routing: Routing) -> Any:
        with torch.no_grad():
            y = fn(problem, *_torch_args(torch, params, x, routing)[1:])
        return _from_torch(torch, y)

    def experts_vjp(problem: Problem, params: Params, x: Any, routing: Routing, dy: Any) -> Mapping[str, Any]:
        inputs, *args = _torch_args(torch, params, x, routing, grad=True)
        y = fn(problem, *args)
        if not isinstance(y, torch.Tensor) or not y.requires_grad:
            raise TypeError(
                f"experts returned a {type(y).__name__} that autograd cannot follow; accepted: a tensor that depends on its inputs"
            )
        grads = torch.autograd.grad(y, list(inputs.values()), _to_torch(torch, dy), allow_unused=True)
        zeros = (torch.zeros_like(v) if g is None else g for v, g in zip(inputs.values(), grads, strict=True))
        return {name: _from_torch(torch, g) for name, g in zip(inputs, zeros, strict=True)}

    return {"experts": experts, "experts_vjp": experts_vjp}


def _torch_args(torch: Any, params: Params, x: Any, routing: Routing, grad: bool = False) -> tuple[Any, ...]:
    tensors = {name: _to_torch(torch, leaf) for name, leaf in params.named().items()}
    inputs = {"x": _to_torch(torch, x), "topk_weights": _to_torch(torch, routing.topk_weights)}
    inputs |= {name: tensors[name] for name in _LEAVES if name in tensors}
    if grad:
        for tensor in inputs.values():
            tensor.requires_grad_(True)
    own = dataclasses.replace(params, **tensors)
    return inputs, own, inputs["x"], Routing(_to_torch(torch, routing.topk_idx), inputs["topk_weights"])


def _to_torch(torch: Any, value: Any) -> Any:
    array = np.array(value, copy=not isinstance(value, np.ndarray) or not value.flags.writeable)
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_torch(torch: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value  # the caller's check of kinds names it
    value = value.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(jnp.bfloat16)
    return value.numpy()


def _own_numpy(value: Any) -> np.ndarray:
    # JAX's buffers are read-only as NumPy: a copy is what a NumPy layer expects.
    return value if isinstance(value, np.ndarray) else np.array(value, copy=True)


def _map(convert: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(convert, tree)
