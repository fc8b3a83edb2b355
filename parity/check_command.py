"""`dropless check` and `dropless mutants`: a target's verdict per law, and the proof that the laws can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .check import check, junit
from .check_report import record_matrix, record_report, show_matrix, show_report
from .interface import Unsupported
from .job import NotCallable
from .known import SHIPPED, read_known
from .options import check_writable
from .problem import InvalidInput
from .terminal import err, progress

TARGET = Annotated[str, typer.Argument(help="A registered name, or package.module:attribute.", metavar="TARGET")]
PROFILE = Annotated[str, typer.Option(help="quick, default, thorough or gpu.")]
ONLY = Annotated[list[str] | None, typer.Option(help="A law's name; repeatable. [default: all]")]
SEED = Annotated[int, typer.Option(help="Of the drawn routings, and of every case's numbers.", min=0)]
EXAMPLES = Annotated[int | None, typer.Option(help="Drawn routings for each law and shape.", min=1)]
KNOWN = Annotated[list[Path] | None, typer.Option(help="A file of known failures; repeatable, beside the shipped one.")]
WITH = Annotated[
    str,
    typer.Option(
        "--with",
        help="What a bare function computes beyond gated SiLU without bias, separated by commas: bias, clamp, ungated, "
        "gelu, gelu-erf, relu2, early, shared, no-expert (slots of -1), empty (no tokens), layer (a layer around it).",
    ),
]
DTYPES = Annotated[str, typer.Option(help="Dtypes to judge, separated by commas. [default: the target's own]")]
ARRAYS = Annotated[str, typer.Option(help="What the target's functions take and return: jax, numpy or torch.")]
CASE = Annotated[str, typer.Option(help="One case, as a failure prints it; needs one --only.")]
TIMEOUT = Annotated[
    float | None, typer.Option(help="Seconds without an answer after which a call counts as hung.", min=1)
]
RECORD = Annotated[Path | None, typer.Option("--json", help="Write a record of the verdicts to this file.")]
JUNIT = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML to this file.")]
MUTANT = Annotated[list[str] | None, typer.Option("--only", help="A mutant's name; repeatable. [default: all]")]
SEEDS = Annotated[int, typer.Option(help="Seeds at which a mutant's own law must kill it.", min=1)]
WHOLE = Annotated[bool, typer.Option("--whole/--named", help="Every law of the changed stages, or the named one only.")]
HONEST = ("loop_and_pad", "blocked")
"""Implementations that must fail no law of the matrix."""


def check_(
    target: TARGET,
    profile: PROFILE = "quick",
    only: ONLY = None,
    seed: SEED = 0,
    max_examples: EXAMPLES = None,
    known: KNOWN = None,
    wider: WITH = "",
    dtypes: DTYPES = "",
    arrays: ARRAYS = "jax",
    case: CASE = "",
    timeout: TIMEOUT = None,
    json_path: RECORD = None,
    junit_path: JUNIT = None,
) -> int:
    """The conformance suite on a layer: a verdict per law, and for a failure the smallest routing that shows it."""
    for path in (json_path, junit_path):
        check_writable(path)
    entries = [entry for path in (SHIPPED, *(known or [])) for entry in read_known(path)]
    try:
        with progress(total=1, first="starting") as step:
            report = check(
                target,
                profile=profile,
                only=only or (),
                seed=seed,
                max_examples=max_examples,
                known=entries,
                wider=_words(wider),
                dtypes=_words(dtypes),
                arrays=arrays,
                case=case,
                timeout_s=timeout,
                progress=lambda law, done, of: step(f"{done}/{of} {law}", 0),
            )
    except Unsupported as declined:
        raise InvalidInput(f"{target} cannot run here: {declined}") from None
    except NotCallable as wrong:
        err().print(f"dropless: {wrong}", highlight=False, markup=False, soft_wrap=True)
        return 1
    show_report(report)
    if json_path is not None:
        record_report(report, json_path)
    if junit_path is not None:
        from .records import write_text

        write_text(junit_path, junit(report))
    return report.exit_code


def mutants(
    only: MUTANT = None,
    seeds: SEEDS = 3,
    whole: WHOLE = True,
    json_path: RECORD = None,
) -> int:
    """The kill matrix: deliberately wrong layers, each with the law that must catch it, beside honest ones that must pass."""
    from .device import cores
    from .kill import kill_matrix_apart
    from .mutants import mutants_named

    check_writable(json_path)
    chosen = [m.name for m in mutants_named(only or ())]
    honest = () if only else HONEST
    with progress(total=len(chosen) + len(honest), first="starting") as step:
        matrix = kill_matrix_apart(
            chosen,
            honest=honest,
            seeds=tuple(range(seeds)),
            whole=whole,
            jobs=max(1, min(cores(), 4)),
            progress=lambda text: step(text, text.count(",") + 1),
        )
    show_matrix(matrix)
    if json_path is not None:
        record_matrix(matrix, json_path)
    return int(not matrix.ok)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
