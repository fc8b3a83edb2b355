"""`list`, `doctor` and `bars`: what there is, what is wrong with this machine, and what counts as agreeing."""

from __future__ import annotations

import importlib
import json
from typing import Annotated

import typer
from rich.markup import escape

from . import registry
from .device import describe, environment
from .interface import Support
from .problem import RECIPES, InvalidInput, Problem
from .terminal import out, table

JSON = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def list_(as_json: JSON = False) -> int:
    """Implementations: what each is, and for each that cannot run here the reason."""
    rows = []
    for name in registry.names():
        entry = registry.BUILTIN.get(name)
        support, recipes = _probe(name)
        rows.append(
            {
                "name": name,
                "folder": entry.folder if entry else "entry point",
                "runs_on": entry.runs_on if entry else "",
                "summary": entry.summary if entry else "",
                "here": support.ok,
                "reason": support.reason,
                "recipes": recipes,
            }
        )
    if as_json:
        print(json.dumps(rows, indent=1))
        return 0
    t = table("implementation", "folder", "here", "what it is", title="Implementations")
    for r in rows:
        t.add_row(r["name"], r["folder"], "yes" if r["here"] else "no", r["summary"])
    out().print(t)
    for r in rows:
        if not r["here"]:
            out().print(f"[bold]{r['name']}[/] cannot run here: {r['reason']}", highlight=False)
    able = {r["name"]: [n for n, found in r["recipes"].items() if found["here"]] for r in rows}
    if every := [name for name, found in able.items() if len(found) == len(RECIPES) - 1]:
        out().print(f"every recipe: {', '.join(every)}", highlight=False)
    for r in rows:
        if not able[r["name"]] or r["name"] in every:
            continue
        out().print(f"[bold]{r['name']}[/] takes recipe {', '.join(able[r['name']])}", highlight=False)
        for n, found in r["recipes"].items():
            if found["here"] and found["host_sync"]:
                out().print(f"  {n} copies group sizes to the host: {found['host_sync']}", highlight=False)
            elif not found["here"]:
                out().print(f"  not {n}: {found['reason']}", highlight=False)
    return 0


def doctor(as_json: JSON = False) -> int:
    """Device, driver and library versions here, and every known-bad combination with what it does."""
    from .doctor import diagnose

    env = environment()
    found = diagnose(env)
    bad = [d for d in found if d.rule.level == "wrong results"]
    if as_json:
        findings = [
            {
                "rule": d.rule.name,
                "level": d.rule.level,
                "found": d.found,
                "consequence": d.rule.consequence,
                "remedy": d.rule.remedy,
            }
            for d in found
        ]
        print(json.dumps({"environment": env, "findings": findings}, indent=1))
        return 1 if bad else 0
    t = table("what", "value", title=describe(env))
    for key, value in env.items():
        if key == "versions":
            for name, number in value.items():
                source = env["versions_from"].get(name)
                t.add_row(name, (number or "not installed") + (f" ({source})" if source and number else ""))
        elif key not in ("versions_from", "flags"):
            t.add_row(key.replace("_", " "), "none" if value is None else str(value))
    for name, value in env["flags"].items():
        t.add_row(name, value)
    out().print(t)
    for d in found:
        style = {"note": "dim", "warning": "yellow", "wrong results": "bold red"}[d.rule.level]
        out().print(f"[{style}]{d.rule.level}[/]: {d.rule.name} ({d.found}): {d.rule.consequence}", highlight=False)
        out().print(f"  {d.rule.remedy}", highlight=False)
    if not bad:
        out().print("No combination known to give wrong results.")
    return 1 if bad else 0


def bars(as_json: JSON = False) -> int:
    """The bars that decide "agree", and the roundings behind them, each with its derivation."""
    rows = importlib.import_module(".tolerances", __package__).bar_table()
    if as_json:
        print(json.dumps([r._asdict() for r in rows], indent=1))
        return 0
    t = table("name", "value", "because", title="Bars: |error| / gauge, and what the gauge counts")
    for row in rows:
        t.add_row(*(escape(cell) for cell in row))
    out().print(t)
    return 0


ASKED = Problem(T=16, K=2, E=4, D=128, F=128, dtype="bfloat16")
"""The problem that is put to each implementation under each recipe: widths that fit every block."""


def _probe(name: str) -> tuple[Support, dict[str, dict[str, object]]]:
    """Whether it runs here, and under each recipe: whether too, why not, and why it copies group sizes to the host."""
    try:
        implementation = registry.get(name)
        here = implementation.available()
    except InvalidInput as error:
        return Support(False, str(error)), {}
    except ImportError as error:
        return Support(False, f"its module does not import: {error}"), {}
    recipes = {}
    for recipe in (r for r in RECIPES if r != "none"):
        problem = ASKED.replace(recipe=recipe)
        able = implementation.supports(problem) if here else here
        recipes[recipe] = {"here": able.ok, "reason": able.reason, "host_sync": implementation.host_sync(problem)}
    return here, recipes
