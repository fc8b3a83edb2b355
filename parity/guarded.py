"""Calls into other people's code: what goes wrong there is told from what goes wrong here."""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .interface import Implementation, Support
from .problem import Problem
from .running import blaming_target


def guarded(implementation: Implementation) -> Implementation:
    """The implementation with stages whose exceptions are told from this suite's own, and a `supports` that has none."""
    stages = {name: _guarded(fn) for name, fn in implementation.stages.items()}

    def supports(problem: Problem) -> Support:
        try:
            return implementation.supports(problem)
        except Exception as error:
            return Support(False, f"supports {short(error)}")

    return dataclasses.replace(implementation, stages=stages, supports=supports)


def short(error: BaseException) -> str:
    """An exception in one line, with the last line of the target's own code that it passed through."""
    ours = str(Path(__file__).parent)
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "/site-packages/" not in f.filename and not f.filename.startswith(ours)
    ]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}{where}: {text[:300]}"


@functools.lru_cache(maxsize=1024)
def _guarded(fn: Callable[..., Any]) -> Callable[..., Any]:
    # One wrapper a function: executables and results are kept by the function's identity.
    if hasattr(fn, "_dropless_guarded"):
        return fn

    @functools.wraps(fn, updated=())  # JAX's messages name the target's function
    def run(*args: Any, **kwargs: Any) -> Any:
        with blaming_target():
            return fn(*args, **kwargs)

    run._dropless_guarded = True  # type: ignore[attr-defined]
    return run
