"""Judging layers too large for a whole gauge on the host: the oracle hands tensors over expert by expert."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from .compare import Finding
from .inputs import Case
from .judge import is_large, judge_pieces

__all__ = ["is_large", "streamed_experts"]


def streamed_experts(case: Case, got: Mapping[str, Any]) -> list[Finding]:
    """y and gradients of `experts` against `oracle_device`, one expert's kernels at a time, where they lie."""
    module = importlib.import_module("..reference.oracle_device", __package__)
    cotangent = case.cotangent if len(got) > 1 else None
    pieces = module.stream_experts(case.problem, case.params, case.x, case.routing, cotangent)
    return judge_pieces(case.problem, got, pieces)
