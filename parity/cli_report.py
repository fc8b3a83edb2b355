"""`report RECORD...`: Markdown and one HTML file; `--readme` fills the generated parts of Markdown files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .problem import InvalidInput
from .records import read, write_text
from .terminal import out


def report(
    records: Annotated[list[Path] | None, typer.Argument(help="Records of any kind.")] = None,
    html: Annotated[Path, typer.Option(help="The HTML file.")] = Path("dropless-report.html"),
    markdown: Annotated[Path, typer.Option(help="The Markdown file.")] = Path("dropless-report.md"),
    readme: Annotated[
        list[Path] | None,
        typer.Option(
            help="Instead, rewrite the generated parts of this Markdown file from the records that it names. Repeatable."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --readme: change nothing; exit 1 when a part is out of date.")
    ] = False,
) -> int:
    """Renders records: agreement, speedup against skew, times, roofline, time split, errors against the gauge."""
    if readme:
        from .report_readme import refresh

        stale = [path for path in readme if not refresh(path, check=check)]
        for path in stale:
            out().print(f"{path} {'is out of date' if check else 'rewritten'}", highlight=False)
        return 1 if check and stale else 0
    if check:
        raise InvalidInput("--check was given without --readme; accepted: --check with the --readme files to look at")
    if not records:
        raise InvalidInput("no record was given; accepted: one or more files written by dropless")
    from . import options as o
    from .report import markdown as to_markdown
    from .report import page
    from .report_sections import sections

    for path in (html, markdown):
        o.check_writable(path)
    found = sections([read(path) for path in records])
    try:
        whole = page(found)
    except ModuleNotFoundError as error:
        raise InvalidInput(f"plots need {error.name}; accepted: an installation with the extra 'plot'") from None
    write_text(markdown, to_markdown(found))
    write_text(html, whole)
    out().print(f"{markdown}\n{html}", highlight=False, soft_wrap=True)
    return 0
