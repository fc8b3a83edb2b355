"""Combinations of versions known to be wrong or missing, each with what it does to a result.

The table is data and `diagnose` a pure function of an environment, so every line can be tested on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "wrong results"]


@dataclass(frozen=True)
class Rule:
    """One known combination."""

    name: str
    level: Level
    applies: Callable[[dict[str, Any]], bool]
    consequence: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """A rule that applies here, with the value that made it apply."""

    rule: Rule
    found: str


def version(text: str | None) -> tuple[int, ...]:
    """Leading numbers of a version, for comparison; () when there is none."""
    found = re.match(r"\d+(?:\.\d+)*", text or "")
    return tuple(int(n) for n in found.group(0).split(".")) if found else ()


def diagnose(env: dict[str, Any]) -> list[Diagnosis]:
    """The rules of RULES that apply to an environment as `device.environment` gives it."""
    return [Diagnosis(rule, _found(rule, env)) for rule in RULES if rule.applies(env)]


JAX_TESTED = ((0, 10, 2), (0, 13))
"""First tested JAX, and the first that is not tested yet."""


def _v(env: dict[str, Any], name: str) -> tuple[int, ...]:
    return version(env.get("versions", {}).get(name))


def _below(name: str, bound: tuple[int, ...]) -> Callable[[dict[str, Any]], bool]:
    return lambda env: env.get("platform") == "gpu" and () < _v(env, name) < bound


def _hopper(env: dict[str, Any]) -> bool:
    return env.get("platform") == "gpu" and 9 <= (env.get("compute_capability") or 0) < 10


RULES: tuple[Rule, ...] = (
    Rule(
        "cuBLAS 13.2",
        "wrong results",
        lambda e: e.get("platform") == "gpu" and _v(e, "cublas")[:2] == (13, 2),
        "the grouped weight gradient is wrong as soon as one expert has no tokens",
        "pip install 'nvidia-cublas>=13.8.1'",
    ),
    Rule(
        "cuBLAS below 13.4 on Hopper",
        "warning",
        lambda e: _hopper(e) and () < _v(e, "cublas") < (13, 4),
        "the device-side grouped GEMM is not available on compute capability 9.0: te declines every problem",
        "pip install 'nvidia-cublas>=13.8.1'",
    ),
    Rule(
        "cuBLAS below 13.8.1",
        "wrong results",
        _below("cublas", (13, 8, 1)),
        "grouped GEMMs may return corrupted data on some paths (Transformer Engine warns of it itself)",
        "pip install 'nvidia-cublas>=13.8.1'",
    ),
    Rule(
        "NCCL below 2.30.4",
        "warning",
        _below("nccl", (2, 30, 4)),
        "expert parallelism over NCCL EP cannot start: te_ep and te_block decline",
        "pip install 'nvidia-nccl-cu13>=2.30.4'",
    ),
    Rule(
        "Transformer Engine below 2.20.2",
        "warning",
        lambda e: _hopper(e) and () < _v(e, "transformer_engine") < (2, 20, 2),
        "no bf16 grouped GEMM with device-side group sizes on Hopper: each call copies group sizes to the host, or fails",
        "install Transformer Engine 2.20.2 or newer (recipe in optimized/README.md)",
    ),
    Rule(
        "GPU without Transformer Engine",
        "note",
        lambda e: e.get("platform") == "gpu" and not _v(e, "transformer_engine"),
        "te, te_ep and te_block cannot run; blocked and ragged_dot still do",
        "install Transformer Engine (recipe in optimized/README.md)",
    ),
    Rule(
        "compute capability below 9.0",
        "note",
        lambda e: e.get("platform") == "gpu" and 0 < (e.get("compute_capability") or 0) < 9,
        "Transformer Engine's grouped GEMM with device-side group sizes needs Hopper or newer",
        "run the optimized/te implementations on a newer GPU",
    ),
    Rule(
        "JAX outside the tested range",
        "warning",
        lambda e: not JAX_TESTED[0] <= _v(e, "jax") < JAX_TESTED[1],
        "nothing is known about this version; run `dropless check blocked` before trusting it",
        f"use a JAX from {'.'.join(map(str, JAX_TESTED[0]))} up to, not including, {'.'.join(map(str, JAX_TESTED[1]))}",
    ),
    Rule(
        "default matmul precision below float32",
        "note",
        lambda e: (
            e.get("platform") == "gpu" and e.get("matmul_precision") in ("tensorfloat32", "bfloat16", "high", "medium")
        ),
        "float32 products outside the layers run in TF32; the layers here pin their own precision",
        "leave jax_default_matmul_precision unset",
    ),
    Rule(
        "no GPU",
        "note",
        lambda e: e.get("platform") != "gpu",
        "the optimized default is blocked; te, te_ep and te_block cannot run, expert parallelism runs on virtual devices",
        "nothing to do; GPU figures come from the shipped records",
    ),
)


def _found(rule: Rule, env: dict[str, Any]) -> str:
    name = rule.name.lower()
    for key, word in (("cublas", "cublas"), ("nccl", "nccl"), ("transformer_engine", "transformer"), ("jax", "jax")):
        if word in name:
            return f"{word} {env.get('versions', {}).get(key)}"
    if "capability" in name:
        return f"compute capability {env.get('compute_capability')}"
    if "precision" in name:
        return f"precision {env.get('matmul_precision')}"
    return str(env.get("device_kind"))
