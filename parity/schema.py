"""Turns JSON into dataclasses and back, checking every field: the shape of a record is the dataclass, nothing else."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar

import numpy as np

from .problem import InvalidInput

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Plain JSON values of a dataclass tree. Floats that JSON cannot hold become the strings "nan", "inf", "-inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return encode(value.tolist())
    raise TypeError(f"a record cannot hold a {type(value).__name__}")


def decode(kind: type[T], value: Any, where: str = "record") -> T:
    """The dataclass that `value` describes; missing fields take their defaults.

    Raises InvalidInput that names the path of the first field that is missing, unknown or of the wrong type.
    """
    return _decode(kind, value, where)


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_fields(typing.cast(type, kind), value, where)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(args, value, where)
    if origin is typing.Literal:
        if value not in args:
            raise InvalidInput(f"{where} is {value!r}; accepted: {', '.join(map(str, args))}")
        return value
    if origin is list:
        _need(isinstance(value, list), where, value, "a list")
        return [_decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value)]
    if origin is dict:
        _need(isinstance(value, dict), where, value, "an object")
        return {k: _decode(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if kind is float:
        if value in ("nan", "inf", "-inf"):
            return float(value)
        _need(isinstance(value, (int, float)) and not isinstance(value, bool), where, value, "a number")
        return float(value)
    if kind is int:
        _need(isinstance(value, int) and not isinstance(value, bool), where, value, "an integer")
        return value
    _need(isinstance(value, kind), where, value, f"a {kind.__name__}")
    return value


def _decode_fields(kind: type, value: Any, where: str) -> Any:
    _need(isinstance(value, dict), where, value, "an object")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name in value:
        if name not in fields:
            raise InvalidInput(f"{where} has an unknown field {name!r}; accepted: {', '.join(fields)}")
    values: dict[str, Any] = {}
    for name, f in fields.items():
        if name in value:
            values[name] = _decode(hints[name], value[name], f"{where}.{name}")
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise InvalidInput(f"{where} has no {name!r}; it is required")
    return kind(**values)


def _decode_union(args: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in args:
        return None
    kinds = [a for a in args if a is not type(None)]
    if len(kinds) == 1:
        return _decode(kinds[0], value, where)
    for kind in kinds:
        try:
            return _decode(kind, value, where)
        except InvalidInput:
            continue
    raise InvalidInput(f"{where} is {value!r}; accepted: {' or '.join(getattr(k, '__name__', str(k)) for k in kinds)}")


def _need(ok: bool, where: str, value: Any, accepted: str) -> None:
    if not ok:
        shown = repr(value)
        raise InvalidInput(f"{where} is {shown if len(shown) < 60 else shown[:57] + '...'}; accepted: {accepted}")
