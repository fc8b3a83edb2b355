"""Where commands print: tables to stdout, progress to stderr; plain and 80 columns wide when it is no terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


def out() -> Console:
    """The console for results. COLUMNS sets the width; without a terminal it is at least 100."""
    return _console(sys.stdout)


def err() -> Console:
    """The console for progress and warnings."""
    return _console(sys.stderr)


def table(*columns: str, title: str = "", numbers: tuple[str, ...] = ()) -> Table:
    """A table with a light frame; columns named in `numbers` are right-aligned and never wrap."""
    t = Table(title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        number = name in numbers
        t.add_column(name, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return t


@contextlib.contextmanager
def progress(total: int, first: str = "starting") -> Iterator[Callable[..., None]]:
    """A step function step(text, advance=1): a bar on a terminal, otherwise one line for each new text."""
    console = err()
    if not console.is_terminal:
        last = [""]

        def plain(text: str, advance: int = 1) -> None:
            if text != last[0]:
                last[0] = text
                print(f"  {text}", file=sys.stderr, flush=True)

        yield plain
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(first, total=total)

        def step(text: str, advance: int = 1) -> None:
            bar.update(task, description=text, advance=advance)

        yield step


def seconds(value: float) -> str:
    """A time with three figures and its unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale or unit == "µs":
            return f"{value / scale:.3g} {unit}"
    return ""


def rate(flops_per_s: float) -> str:
    """A FLOP rate with three figures and its unit."""
    for scale, unit in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")):
        if flops_per_s >= scale or unit == "MFLOP/s":
            return f"{flops_per_s / scale:.3g} {unit}"
    return ""


def size(count: float | None) -> str:
    """Bytes with their unit; a dash for None."""
    if count is None:
        return "-"
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def percent(value: float | None) -> str:
    """A percentage of a bar; a dash for None."""
    return "-" if value is None else f"{value:.0f} %" if value >= 0.5 or value == 0 else "<1 %"


def _console(file: object) -> Console:
    is_terminal = hasattr(file, "isatty") and file.isatty()  # type: ignore[attr-defined]
    width = (
        None
        if is_terminal
        else int(os.environ.get("COLUMNS", 0)) or max(shutil.get_terminal_size((100, 24)).columns, 80)
    )
    return Console(file=file, width=width, soft_wrap=False)  # type: ignore[arg-type]
