"""What happens between an expert's two products, in float32."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...parity.problem import Experts


def activate(experts: Experts, pre: Float[Array, "*rows I"]) -> Float[Array, "*rows F"]:
    """Turns a pre-activation into h: act(gate) * up when gated, act(pre) otherwise.

    pre = [gate | up], gate half first. With a clamp (gpt-oss): g = min(gate, limit), u = clip(up, -limit, limit),
    h = g * sigmoid(alpha * g) * (u + offset).

    Computes and returns float32, whatever comes in; rounding h to the storage dtype is the caller's.
    """
    pre = pre.astype(jnp.float32)
    if not experts.gated:
        return _act(experts, pre)
    gate, up = jnp.split(pre, 2, axis=-1)
    if (clamp := experts.clamp) is not None:
        gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
        return gate * jax.nn.sigmoid(clamp.alpha * gate) * (up + clamp.offset)
    return _act(experts, gate) * up


def activate_vjp(
    experts: Experts, pre: Float[Array, "*rows I"]
) -> tuple[Float[Array, "*rows F"], Callable[[Float[Array, "*rows F"]], Float[Array, "*rows I"]]]:
    """h, and the function from its cotangent to that of pre; both float32."""
    h, vjp = jax.vjp(lambda p: activate(experts, p), pre.astype(jnp.float32))
    return h, lambda d: vjp(d)[0]


def _act(experts: Experts, z: Array) -> Array:
    match experts.activation:
        case "silu":
            return jax.nn.silu(z)
        case "gelu_tanh":
            return jax.nn.gelu(z, approximate=True)
        case "gelu_erf":
            return jax.nn.gelu(z, approximate=False)
        case "relu2":
            return jnp.square(jnp.maximum(z, 0.0))
