"""Seeded numbers: one NumPy stream per (seed, tensor name), with the same bits on every machine and JAX version."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import ml_dtypes
import numpy as np

from .problem import InvalidInput

NUMPY_DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
"""Storage dtypes as NumPy sees them."""

_CHUNK = 1 << 20
"""Numbers drawn at a time: a layer of 15 GB must not need its size in draws as well."""


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one tensor; streams of different names are independent, so shapes do not disturb each other."""
    if seed < 0:
        raise InvalidInput(f"seed is {seed}; accepted: 0 or more")
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *name.encode()])))


def normals(seed: int, name: str, shape: tuple[int, ...], std: float, dtype: str) -> np.ndarray:
    """Normal numbers in storage dtype, of 65,536 equally likely values.

    Drawing 16-bit integers and looking up rounded quantiles makes the values independent of any float library, rounds
    them once, and fills a billion elements in seconds.
    """
    bits = stream(seed, name).bit_generator
    table = (quantiles() * std).astype(NUMPY_DTYPES[dtype])
    values = np.empty(math.prod(shape), table.dtype)
    for start in range(0, values.size, _CHUNK):
        part = values[start : start + _CHUNK]
        draws = bits.random_raw(-(-part.size // 4)).astype("<u8", copy=False).view("<u2")[: part.size]
        np.take(table, draws, out=part, mode="clip")  # no index is clipped; mode "raise" would copy the output
    return values.reshape(shape)


def nonzeros(seed: int, name: str, shape: tuple[int, ...], scale: float, dtype: str) -> np.ndarray:
    """Numbers of random sign whose size is uniform between scale/5 and scale, in storage dtype."""
    rng = stream(seed, name)
    sign = rng.integers(0, 2, shape) * 2 - 1
    return (sign * rng.uniform(scale / 5, scale, shape)).astype(NUMPY_DTYPES[dtype])


@functools.cache
def quantiles() -> np.ndarray:
    """The 65,536 midpoint quantiles of the standard normal, ascending, float64."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)])
