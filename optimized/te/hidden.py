"""What happens between an expert's two products, forward and backward, as one pass over the rows each.

Computed in float32 and rounded once per result. The backward recomputes the activation from the saved first product, so
that nothing else is kept, and yields at once everything that later products need.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...parity.problem import Experts
from . import kernels


def hidden(
    experts: Experts,
    pre: Float[Array, "P I"],
    weight: Float[Array, " P"] | None = None,
    bias: Float[Array, "E I"] | None = None,
    expert: Int[Array, " P"] | None = None,
    *,
    filled: Int[Array, ""] | None = None,
) -> Float[Array, "P F"]:
    """h = act(gate) * up, or act(pre), of pre + bias[expert]; times the row's weight if there is one. In pre's dtype.

    Only the first `filled` rows, where that is given, are needed; the others are undefined.
    """
    parts = 2 if experts.gated else 1
    if _fused(experts) and (filled is not None or pre.shape[1] >= parts * kernels.WIDEST):
        return kernels.hidden(partial(act, experts), parts, pre, weight, bias, expert, filled=filled)
    h = act(experts, *_parts(experts, pre, bias, expert))
    return (h if weight is None else h * weight[:, None]).astype(pre.dtype)


def hidden_gradient(
    experts: Experts,
    pre: Float[Array, "P I"],
    d: Float[Array, "P F"],
    weight: Float[Array, " P"],
    bias: Float[Array, "E I"] | None = None,
    expert: Int[Array, " P"] | None = None,
    *,
    filled: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "P F"], Float[Array, "P I"], Float[Array, " P"]]:
    """(w * h, gradient of pre, gradient of w) of w * h, where d is the cotangent of w * h.

    From row `filled` on, where that is given, w's gradient is 0 and the other two are undefined.

    The weight multiplies here, F wide, instead of the rows of dy, D wide: dy @ wo.T needs no weight, and
    wo's gradient is (w * h).T @ dy.
    """
    if _fused(experts):
        parts = 2 if experts.gated else 1
        return kernels.hidden_gradient(partial(act, experts), parts, pre, d, weight, bias, expert, filled=filled)
    h, pull = jax.vjp(partial(act, experts), *_parts(experts, pre, bias, expert))
    d = d.astype(jnp.float32)
    w = weight[:, None]
    d_pre = jnp.concatenate([part.astype(pre.dtype) for part in pull(w * d)], axis=1)
    dot = jnp.sum(d * h, axis=1)
    return (
        (w * h).astype(pre.dtype),
        d_pre,
        dot if filled is None else jnp.where(jnp.arange(len(dot)) < filled, dot, 0.0),
    )


def act(experts: Experts, gate: Array, up: Array | None = None) -> Array:
    """act(gate) * up, or act(gate) alone when there is no up; float32 in and out."""
    if up is None:
        return _ACTIVATIONS[experts.activation](gate)
    if (clamp := experts.clamp) is not None:
        gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
        return gate * jax.nn.sigmoid(clamp.alpha * gate) * (up + clamp.offset)
    return _ACTIVATIONS[experts.activation](gate) * up


def _fused(experts: Experts) -> bool:
    # Pallas's Triton backend has no erfc, and 1 + erf would lose the left tail.
    return kernels.usable() and experts.activation != "gelu_erf"


def _parts(experts: Experts, pre: Array, bias: Array | None, expert: Array | None) -> tuple[Array, ...]:
    z = pre.astype(jnp.float32)
    if bias is not None:
        assert expert is not None
        z = z + bias.astype(jnp.float32)[expert]
    return (z[:, : z.shape[1] // 2], z[:, z.shape[1] // 2 :]) if experts.gated else (z,)


_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu_tanh": lambda z: jax.nn.gelu(z, approximate=True),
    "gelu_erf": lambda z: jax.nn.gelu(z, approximate=False),
    "relu2": lambda z: jnp.square(jax.nn.relu(z)),
}
