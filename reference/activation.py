"""What happens between an expert's two products, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..parity.problem import Experts


def activate(experts: Experts, pre: Float[Array, "*rows I"]) -> Float[Array, "*rows F"]:
    """Turns a pre-activation into h: act(gate) * up when gated, act(pre) otherwise.

    pre = [gate | up], gate half first. With a clamp (gpt-oss): g = min(gate, limit), u = clip(up, -limit, limit),
    h = g * sigmoid(alpha * g) * (u + offset).

    Computes and returns float32, whatever comes in; rounding h to the storage dtype is the caller's.
    NaN and infinity stay in their row.
    """
    pre = pre.astype(jnp.float32)
    if not experts.gated:
        return _ACTIVATIONS[experts.activation](pre)
    gate, up = jnp.split(pre, 2, axis=-1)
    if (clamp := experts.clamp) is not None:
        gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
        return gate * jax.nn.sigmoid(clamp.alpha * gate) * (up + clamp.offset)
    return _ACTIVATIONS[experts.activation](gate) * up


def _relu2(z: Array) -> Array:
    return jnp.square(jax.nn.relu(z))


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
    "gelu_erf": lambda z: jax.nn.gelu(z, approximate=False),
    "relu2": _relu2,
}
