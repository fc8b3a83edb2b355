"""TE's FP8 quantiser against the reference on one GPU, bit for bit: values in both layouts, and scales.

Both are handed the same scales: XLA's division on a GPU is not the IEEE one, and would put a place of the scale on TE's
account. How often that happens is noted beside the findings.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dropless.optimized.te import fp8
from dropless.parity.compare import Finding, same_bits
from dropless.parity.findings import to_record
from dropless.parity.problem import Problem
from dropless.parity.records import ResultRecord, new_case, new_record, write
from dropless.reference import formats

SIZES = (16, 48, 16, 32, 112, 16, 64, 208)
"""Rows of each group: whole sixteens, as the product wants them."""
WIDTH = 272


def record_quantisers(path: Path, name: str) -> None:
    """Judges both element formats on rows and on kernels, hard values among them, and writes a record of kind `check`."""
    findings = [f for element in fp8.ELEMENTS for f in (*of_rows(element), *of_kernels(element))]
    failed = [f for f in findings if not f.ok]
    result = ResultRecord(implementation=name, verdict="disagree" if failed else "agree")
    result.reason = f"{failed[0].tensor}: {failed[0].message}" if failed else ""
    result.notes = {"largest / amax against IEEE division": apart_from_ieee()}
    result.findings = [to_record(f, "quantize") for f in findings]
    problem = Problem(T=sum(SIZES), K=1, E=len(SIZES), D=WIDTH, F=16, dtype="bfloat16", recipe="fp8-current")
    case = new_case("TE's quantiser", problem, source="random groups with hard values")
    case.group_sizes, case.rows = list(SIZES), sum(SIZES)
    case.results.append(result)
    record = new_record("check", command={"part": "fp8"})
    record.cases.append(case)
    write(path, record)
    for f in findings:
        print(f"{f.tensor:34s} {'same bits' if f.ok else f.message}", flush=True)
    print(f"quotients that are not IEEE: {apart_from_ieee()}", flush=True)


def hard_rows(seed: int = 0) -> np.ndarray:
    """[P, A] bfloat16: group 0 zeros, 1 with infinities, 2 with NaN, 3 subnormal, 4 and 5 with amax a power of two, the
    rest of all magnitudes."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((sum(SIZES), WIDTH)) * np.exp2(random.integers(-30, 30, (sum(SIZES), 1)))
    ends = np.cumsum(SIZES)
    group = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    x[group[0]] = 0
    x[group[1]][3, 5], x[group[1]][7, 9] = np.inf, -np.inf
    x[group[2]][2, 11] = np.nan
    x[group[3]] = np.clip(random.standard_normal((SIZES[3], WIDTH)), -2, 2) * 2.0**-130
    for g, top in ((4, 2.0), (5, 448.0)):
        x[group[g]] = np.clip(x[group[g]], -1, 1)
        x[group[g]][0, 0] = top
    return x.astype(jnp.bfloat16)


def of_rows(element: str) -> list[Finding]:
    """Rows in groups: values row-wise and column-wise, and one scale a group."""
    x, sizes = jnp.asarray(hard_rows()), jnp.asarray(SIZES, jnp.int32)
    scale = jax.jit(lambda x: fp8.encode(x, sizes, element))(x)
    values = _elements(x, jnp.repeat(scale, sizes)[:, None], element)
    both = jax.jit(lambda x, s: fp8.scaled(x, s, sizes, element=element))(x, scale)
    starts = np.cumsum((0, *SIZES))
    turned = np.concatenate([values[a:b].T.reshape(-1) for a, b in itertools.pairwise(starts)])
    return _compare(f"rows, {element}", both, values, turned, np.asarray(scale))


def of_kernels(element: str) -> list[Finding]:
    """Kernels: one scale each."""
    kernels = jnp.asarray(np.random.default_rng(1).standard_normal((8, 96, 160)), jnp.bfloat16)
    kernels = kernels.at[3].set(0).at[4].multiply(jnp.bfloat16(2.0**-20)).at[5, 0, 0].set(jnp.bfloat16(256.0))
    scale = jax.jit(lambda k: fp8.encode(k, jnp.ones(8, jnp.int32), element))(kernels)
    values = _elements(kernels, scale[:, None, None], element)
    both = jax.jit(lambda k, s: fp8.scaled(k, s, None, element=element))(kernels, scale)
    return _compare(f"kernels, {element}", both, values, values.swapaxes(1, 2), np.asarray(scale))


def _elements(x: jax.Array, scale: jax.Array, element: str) -> np.ndarray:
    return np.asarray(jax.jit(lambda x, s: formats.cast(x.astype(jnp.float32) * s, formats.FORMATS[element]))(x, scale))


def _compare(name: str, both: Any, values: np.ndarray, turned: np.ndarray, scale: np.ndarray) -> list[Finding]:
    """TE's two layouts and its scales, which are the IEEE reciprocals of those handed over."""
    row, column = both.rowwise_tensor, both.colwise_tensor
    return [
        same_bits(f"{name}: values", np.asarray(row.data).reshape(values.shape), values),
        same_bits(f"{name}: values, turned", np.asarray(column.data).reshape(turned.shape), turned),
        same_bits(f"{name}: scales", np.asarray(row.scale_inv), np.float32(1) / scale),
    ]


def apart_from_ieee() -> str:
    """How often the quotient largest / amax, which XLA divides on the device, is not the IEEE one."""
    found = []
    for element, (_, largest) in fp8.ELEMENTS.items():
        amax = np.abs(np.random.default_rng(2).standard_normal(4096)).astype(jnp.bfloat16)
        amax = np.maximum(amax, np.asarray(2.0**-10, amax.dtype))
        x = jnp.asarray(np.repeat(amax, 16)[:, None])
        got = np.asarray(jax.jit(lambda x, e=element: fp8.encode(x, jnp.full(4096, 16, jnp.int32), e))(x))
        places = np.abs(got.view(np.int32) - (np.float32(largest) / amax.astype(np.float32)).view(np.int32))
        found.append(f"{element}: {np.count_nonzero(places)} of 4096 quotients, by {places.max()} place")
    return "; ".join(found)
