"""The `dropless` command: wires each command's file, and turns errors into one line and an exit code.

Exit codes: 0 no disagreement; 1 a disagreement, an alarm, or a target that raised, hung or returned the wrong kind;
2 usage, bad input, a target that does not import, or an environment that cannot run it; 130 interrupted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer

from . import cli_bench, cli_compare, cli_guard, cli_info, cli_ladder, cli_report
from .problem import InvalidInput

app = typer.Typer(
    name="dropless",
    help="Does a dropless Mixture-of-Experts layer agree with the reference, and what does it buy?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Runs the command line."""
    # XLA's and TensorFlow's C++ start-up chatter would come before the first line of output.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    app()


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a command whose return value is its exit code, and whose InvalidInput becomes one line and exit 2."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except InvalidInput as error:
            print(f"dropless: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            print("dropless: interrupted; nothing was written", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader (head, less) is gone; Python would complain again while closing stdout
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        raise typer.Exit(int(code or 0))

    return app.command(name=function.__name__.rstrip("_"))(run)


for _function in (
    cli_compare.compare,
    cli_info.list_,
    cli_info.doctor,
    cli_info.bars,
    cli_bench.bench,
    cli_guard.guard,
    cli_report.report,
    cli_ladder.ladder,
):
    command(_function)
