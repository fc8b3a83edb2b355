"""Known failures: a file that turns one law into `known` for one implementation, as long as the versions fit.

An entry that no longer describes what happens is an alarm: the law passes, or a version lies outside the range.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .laws import laws_named
from .problem import InvalidInput
from .schema import decode
from .verdict import Verdict

SHIPPED = Path(__file__).parent / "data" / "known.json"
"""Upstream faults that this package knows of."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """One known failure."""

    implementation: str
    """A registered name, or package.module:attribute as on the command line."""
    law: str
    versions: dict[str, str] = field(default_factory=dict)
    """Distribution -> range, such as ">=2.20,<2.21"; all must hold."""
    case: str = ""
    """The smallest case that shows it, as a literal."""
    link: str = ""
    reason: str


@dataclass(frozen=True, kw_only=True)
class KnownFile:
    """The file: a list of entries."""

    known: list[Known]


def read_known(path: str | Path) -> list[Known]:
    """The entries of a file; raises InvalidInput that names the file and the field."""
    try:
        values = json.loads(Path(path).read_text())
    except FileNotFoundError:
        raise InvalidInput(f"{path} does not exist; accepted: a file of known failures") from None
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from None
    entries = decode(KnownFile, values, str(path)).known
    for entry in entries:
        try:
            laws_named([entry.law])
        except InvalidInput as error:
            raise InvalidInput(f"{path}: {error}") from None
        for package, wanted in entry.versions.items():
            for part in wanted.split(","):
                _part(part, f"{path}, {package}")
    return entries


def apply_known(verdicts: Sequence[Verdict], entries: Iterable[Known], implementation: str) -> list[Verdict]:
    """The verdicts with known failures marked, and with alarms for entries that no longer hold."""
    by_law: dict[str, list[Known]] = {}
    for entry in entries:
        if entry.implementation == implementation:
            by_law.setdefault(entry.law, []).append(entry)
    return [_marked(v, _fitting(by_law[v.law])) if v.law in by_law else v for v in verdicts]


def _fitting(entries: Sequence[Known]) -> Known:
    """The first entry whose versions are those here, else the first."""
    return next((e for e in entries if not _outside(e)), entries[0])


def _outside(entry: Known) -> tuple[str, str, str] | None:
    """The first (package, range, version here) that does not fit; None when all do."""
    for package, wanted in entry.versions.items():
        here = _version(package)
        if here is None or not all(_holds(here, part) for part in wanted.split(",")):
            return package, wanted, here or "none"
    return None


def _marked(verdict: Verdict, entry: Known) -> Verdict:
    if verdict.status == "cannot run":
        return verdict
    reason = " ".join(filter(None, (entry.reason, entry.link)))
    if outside := _outside(entry):
        package, wanted, here = outside
        said = f"known only for {package} {wanted}; here is {here}: try it again and change the entry ({reason})"
        return dataclasses.replace(verdict, status="alarm", reason=said)
    if verdict.status == "agree":
        return dataclasses.replace(
            verdict, status="alarm", reason=f"known to fail, and passed: remove the entry ({reason})"
        )
    if verdict.status in ("disagree", "not repeatable"):
        return dataclasses.replace(verdict, status="known", reason=reason)
    return verdict


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _part(part: str, where: str) -> tuple[str, tuple[int, ...]]:
    match = re.fullmatch(r"\s*(>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+)*)\s*", part)
    if not match:
        raise InvalidInput(f"{where}: version range is {part!r}; accepted: >=, <=, ==, !=, < or > and a number")
    return match[1], _numbers(match[2])


def _holds(version: str, part: str) -> bool:
    sign, wanted = _part(part, "known")
    found = re.match(r"\d+(?:\.\d+)*", version)
    here = _numbers(found[0] if found else "0")
    length = max(len(here), len(wanted))
    a, b = here + (0,) * (length - len(here)), wanted + (0,) * (length - len(wanted))
    return {">=": a >= b, "<=": a <= b, "==": a == b, "!=": a != b, "<": a < b, ">": a > b}[sign]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split("."))
