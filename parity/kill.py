"""The kill matrix: every mutant against every law of the stages that it changes, and honest code beside them.

A mutant is killed when the law that it names fails at every seed. Shapes are tiny and few, and executables are built
with less optimisation, so the whole matrix takes minutes; a stage that a mutant leaves alone is the honest one, which
all mutants share.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Literal

import jax

from . import running
from .interface import Implementation
from .law import Law
from .laws import LAWS, laws_named
from .mutant import Mutant, reference
from .mutants import mutants_named
from .placement import expert_mesh
from .problem import Problem
from .registry import complete, get
from .suite import Settings, run_law

Cell = Literal["killed", "raised", "passed", "not run"]

SEEDS = (0, 1, 2)
CHUNK = 2
"""Mutants that a process is given at a time: neighbours share a stage, and so executables."""
HALF_BATCH = ("prefix", "split-batch")
"""Laws that compile a second shape; like those that run once a suite they judge a mutant only when it names them."""
EXAMPLES = 5
"""Drawn routings beside the pinned ones: those of the quick profile."""

QUICK_COMPILE = running.QUICK_COMPILE | (
    {} if jax.__version_info__ >= (0, 11) else {"xla_cpu_use_fusion_emitters": False}
)
"""Code of plain LLVM instead of MLIR compiles in less than half the time; later versions know no such option."""

PLAIN = Problem(T=32, K=2, E=8, D=33, F=33)
RICH = Problem(T=16, K=3, E=16, D=33, F=33).replace(
    router_score="sigmoid",
    router_groups=4,
    router_group_topk=2,
    router_group_score_topk=2,
    router_selection_bias=True,
    router_gate_bias=True,
    experts_wi_bias=True,
    experts_wo_bias=True,
)
SPREAD = Problem(T=16, K=2, E=8, D=8, F=8, mesh=expert_mesh(2, data=2))
"""For laws about ranks: mutants of them are of the global view, which needs one device whatever the mesh."""
TOP_1 = Problem(T=16, K=1, E=4, D=33, F=33)
WIDE = Problem(T=32, K=8, E=16, D=96, F=96, dtype="bfloat16")
"""Wide enough for the row bar, and bfloat16, where a small fault can hide behind rounding."""
MANY = Problem(T=65_536, K=2, E=4, D=33, F=8)


@dataclass
class Row:
    """One mutant's line of the matrix."""

    mutant: str
    fault: str
    law: str
    killed: bool
    """By the law that it names, at every seed."""
    said: str
    """What that law said."""
    cells: dict[str, Cell] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Matrix:
    """The whole result."""

    rows: list[Row]
    honest: dict[str, list[str]]
    """Honest implementation -> laws that it failed; every list must be empty."""
    seeds: tuple[int, ...]
    seconds: float = 0.0

    @property
    def kill_rate(self) -> float:
        """Share of the mutants that the law they name killed at every seed."""
        return sum(r.killed for r in self.rows) / max(len(self.rows), 1)

    @property
    def ok(self) -> bool:
        """Whether every mutant is dead and no honest implementation failed."""
        return bool(self.rows) and self.kill_rate == 1 and not any(self.honest.values())


def kill_matrix(
    mutants: Sequence[Mutant],
    *,
    honest: Sequence[Implementation] = (),
    seeds: tuple[int, ...] = SEEDS,
    whole: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Matrix:
    """Runs the named law at every seed, and with `whole` every other law of the changed stages that fits the named law's shape.

    Those others are there to be read: only the named law decides. They run on the named law's executables, so laws that
    need another shape or compile programs of their own (HALF_BATCH, and those that run once a suite) are `not run`.
    Honest code runs every law (without `whole`, those that the mutants name) on the mutants' shapes.
    """
    start = time.perf_counter()
    running.OPTIONS.update(QUICK_COMPILE)
    try:
        rows = []
        for mutant in mutants:
            progress(mutant.name)
            rows.append(_row(mutant, seeds, whole))
        failed = {}
        for implementation in honest:
            progress(implementation.name)
            failed[implementation.name] = _failed(implementation, mutants, seeds, whole)
    finally:
        running.OPTIONS.clear()
    return Matrix(rows, failed, seeds, time.perf_counter() - start)


def kill_matrix_apart(
    names: Sequence[str],
    *,
    honest: Sequence[str] = (),
    seeds: tuple[int, ...] = SEEDS,
    whole: bool = True,
    jobs: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> Matrix:
    """The same over `jobs` processes, since compilation is what takes the time; mutants and honest code go by name."""
    start = time.perf_counter()
    tasks = [((), (name,)) for name in honest] + [
        (tuple(names[i : i + CHUNK]), ()) for i in range(0, len(names), CHUNK)
    ]
    # Processes that share a GPU must not each take most of its memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    rows: dict[str, Row] = {}
    failed: dict[str, list[str]] = {}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        # The widest task, honest code under every law, starts first.
        futures = [pool.submit(_part, tuple(names), *task, seeds, whole) for task in tasks]
        for future in as_completed(futures):
            part = future.result()
            rows |= {row.mutant: row for row in part.rows}
            failed |= part.honest
            progress(", ".join([*part.honest, *(row.mutant for row in part.rows)]))
    return Matrix([rows[n] for n in names], {n: failed[n] for n in honest}, seeds, time.perf_counter() - start)


def _part(
    all_names: tuple[str, ...], names: tuple[str, ...], honest: tuple[str, ...], seeds: tuple[int, ...], whole: bool
) -> Matrix:
    """One process's share; honest code is judged where any of the mutants is."""
    mutants = mutants_named(names) if names else ()
    running.OPTIONS.update(QUICK_COMPILE)
    rows = [_row(mutant, seeds, whole) for mutant in mutants]
    everyone = mutants_named(all_names) if all_names else ()
    return Matrix(rows, {n: _failed(complete(get(n)), everyone, seeds, whole) for n in honest}, seeds)


def shapes_for(law: Law, mutant: Mutant | None = None) -> tuple[Problem, ...]:
    """The one shape on which a law judges mutants: the first that has what it needs."""
    if mutant is not None and mutant.fault == "M" and law.name == mutant.law:
        return (MANY,) if law.name == "exact-experts" else (WIDE,)
    if "ranks" in law.needs:
        return (SPREAD,)
    honest = reference("loop_and_pad").IMPLEMENTATION
    return next(((p,) for p in (PLAIN, RICH, TOP_1) if not law.unmet(honest, p)), (PLAIN,))


def _row(mutant: Mutant, seeds: tuple[int, ...], whole: bool) -> Row:
    start = time.perf_counter()
    implementation = mutant.build()
    named = laws_named([mutant.law])[0]
    row = Row(mutant.name, mutant.fault, mutant.law, killed=True, said="")
    own = shapes_for(named, mutant)
    beside = (PLAIN,) if own == (MANY,) else own  # an oracle that goes token by token does not end there
    for seed in seeds:
        cell, said = _cell(named, implementation, own, seed)
        # A fault that shows as an exception says so; for all others an exception would be an accident.
        row.killed &= cell == "killed" or (cell == "raised" and mutant.raises)
        row.said = row.said or said
        row.cells[named.name] = cell
    for law in LAWS:
        if law is named:
            continue
        touched = law.stage in mutant.stages and law.scope != "once" and law.name not in HALF_BATCH
        row.cells[law.name] = _cell(law, implementation, beside, seeds[0], 1)[0] if whole and touched else "not run"
    row.seconds = time.perf_counter() - start
    return row


def _cell(
    law: Law, implementation: Implementation, shapes: tuple[Problem, ...], seed: int, examples: int = EXAMPLES
) -> tuple[Cell, str]:
    verdict = run_law(law, implementation, shapes, Settings(seed, examples, shrink=False))
    if verdict.status == "cannot run":
        return "not run", verdict.reason
    if verdict.finding is None:
        return "passed", ""
    return "raised" if verdict.finding.check == "ran" else "killed", verdict.finding.message


def _failed(
    implementation: Implementation, mutants: Sequence[Mutant], seeds: tuple[int, ...], whole: bool
) -> list[str]:
    """The laws, all or those that mutants name, that honest code fails on the shapes on which mutants are judged."""
    named = {m.law for m in mutants}
    failed = []
    for law in LAWS if whole else laws_named(named):
        shapes = shapes_for(law) + tuple(s for m in mutants if m.law == law.name for s in shapes_for(law, m))
        for seed in seeds if law.name in named else seeds[:1]:
            cell, said = _cell(law, implementation, tuple(dict.fromkeys(shapes)), seed)
            if cell in ("killed", "raised"):
                failed.append(f"{law.name}: {said}")
                break
    return failed
