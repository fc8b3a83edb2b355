"""A case as a line of text: what a failure prints, and what `dropless check --case` reads back to the same bits."""

from __future__ import annotations

import ast
import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from .inputs import Case, make_case
from .problem import Clamp, Experts, InvalidInput, Problem, Router

Ids = tuple[tuple[int, ...], ...]
SIZES = ("T", "K", "E", "D", "F")


@dataclass(frozen=True)
class CaseSpec:
    """A problem, a seed, and a routing given as ids or by the name of a pattern; all numbers follow from these."""

    problem: Problem
    seed: int = 0
    topk_idx: Ids | None = None
    pattern: str | None = None

    def build(self) -> Case:
        """The case itself; the same spec gives the same bits on every machine, and, while it is kept, the same object."""
        return _build(self)

    def literal(self) -> str:
        """A Python dict literal that holds what differs from the defaults."""
        values: dict[str, Any] = _changes(self.problem, Problem(T=0, K=1, E=1, D=1, F=1), always=SIZES)
        values["seed"] = self.seed
        if self.topk_idx is None:
            values["pattern"] = self.pattern
        else:
            values["topk_idx"] = [list(row) for row in self.topk_idx]
        # Double quotes need no escape inside the single quotes of a shell line, and no value here holds either.
        return repr(values).replace("'", '"').replace(", ", ",").replace(": ", ":")

    @property
    def complexity(self) -> tuple[int, int, int]:
        """What a simpler failure has less of: routed rows, busy experts, and large ids."""
        ids = np.asarray(self.topk_idx if self.topk_idx is not None else self.build().routing.topk_idx)
        real = ids[ids >= 0]
        return real.size, len(np.unique(real)), int(real.sum())


def forget_cases() -> None:
    """Drops every kept case."""
    _build.cache_clear()


@functools.lru_cache(maxsize=64)
def _build(spec: CaseSpec) -> Case:
    if spec.topk_idx is None:
        return make_case(spec.problem, seed=spec.seed, pattern=spec.pattern)
    ids = np.asarray(spec.topk_idx, np.int32).reshape(spec.problem.T, spec.problem.K)
    return make_case(spec.problem, seed=spec.seed, routing=ids)


def parse_case(text: str) -> CaseSpec:
    """Reads `CaseSpec.literal` back. Raises InvalidInput that names what is wrong and what is accepted."""
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise InvalidInput(
            f"case is not a Python literal ({error}); accepted: the dict that a failure prints"
        ) from None
    if not isinstance(values, dict):
        raise InvalidInput(f"case is a {type(values).__name__}; accepted: the dict that a failure prints")
    values = dict(values)
    seed, ids, pattern = values.pop("seed", 0), values.pop("topk_idx", None), values.pop("pattern", None)
    if missing := [s for s in SIZES if s not in values]:
        raise InvalidInput(
            f"case has no {missing[0]}; accepted: the sizes T, K, E, D, F and what differs from the defaults"
        )
    if (ids is None) == (pattern is None):
        raise InvalidInput("case has both or neither of topk_idx and pattern; accepted: one of the two")
    if not isinstance(seed, int) or seed < 0:
        raise InvalidInput(f"seed is {seed!r}; accepted: 0 or more")
    try:
        problem = _problem(values)
    except TypeError as error:
        raise InvalidInput(f"case does not describe a problem: {error}") from None
    return CaseSpec(problem, seed, None if ids is None else _ids(ids, problem), pattern)


def _ids(ids: Any, problem: Problem) -> Ids:
    try:
        array = np.asarray(ids, np.int32).reshape(problem.T, problem.K)
    except (ValueError, TypeError):
        raise InvalidInput(f"topk_idx is not {problem.T} lists of {problem.K} ids") from None
    return freeze(array)


def freeze(topk_idx: np.ndarray) -> Ids:
    """Ids as nested tuples: hashable, and a literal."""
    return tuple(tuple(int(i) for i in row) for row in np.asarray(topk_idx))


def _problem(values: dict[str, Any]) -> Problem:
    if "router" in values:
        values["router"] = Router(**values["router"])
    if "experts" in values:
        experts = dict(values["experts"])
        if experts.get("clamp") is not None:
            experts["clamp"] = Clamp(**experts["clamp"])
        values["experts"] = Experts(**experts)
    if values.get("mesh") is not None:
        values["mesh"] = Problem.from_json({**Problem(T=0, K=1, E=1, D=1, F=1).to_json(), **_plain(values)}).mesh
    return Problem(**values)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {
        k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) and not isinstance(v, type) else v
        for k, v in values.items()
    }


def _changes(value: Any, default: Any, always: tuple[str, ...] = ()) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        own, usual = getattr(value, field.name), getattr(default, field.name)
        if field.name in always:
            changed[field.name] = own
        elif own != usual:
            nested = dataclasses.is_dataclass(own) and type(own) is type(usual)
            changed[field.name] = _changes(own, usual) if nested else _value(own)
    return changed


def _value(own: Any) -> Any:
    return dataclasses.asdict(own) if dataclasses.is_dataclass(own) and not isinstance(own, type) else own
