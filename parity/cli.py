"""The `dropless` command: wires each command's file, and turns errors into one line and an exit code.

Exit codes: 0 no disagreement; 1 a disagreement, an alarm, or a target that raised, hung or returned the wrong kind;
2 usage, bad input, a target that does not import, or an environment that cannot run it; 130 interrupted.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer

from . import check_command, cli_bench, cli_compare, cli_guard, cli_info, cli_ladder, cli_report
from .problem import InvalidInput

app = typer.Typer(name="dropless", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")


@app.callback(invoke_without_command=True)
def _help(context: typer.Context) -> None:
    """Does a dropless Mixture-of-Experts layer agree with the reference, and what does it buy?"""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Runs the command line."""
    # XLA's C++ start-up chatter would come before the first line of output.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if not hasattr(
            error, "format_message"
        ):  # only usage errors have one; whatever else is a bug, with its traceback
            raise
        print(f"dropless: {usage_line(error, sys.argv[1:])}", file=sys.stderr)
        code = 2
    sys.exit(code)


def usage_line(error: Any, arguments: Sequence[str]) -> str:
    """A usage error in one line that names the value; typer's own message leaves it out."""
    parameter = getattr(error, "param", None)
    for name in getattr(parameter, "opts", ()):
        for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
            given = (
                following
                if argument == name
                else argument[len(name) + 1 :]
                if argument.startswith(f"{name}=")
                else None
            )
            if given is not None:
                return f"{name} is {given!r}: {error.message}"
    return " ".join(error.format_message().split())


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
            print("dropless: interrupted; nothing was written", file=sys.stderr, flush=True)
            # At once: a compilation that still runs in XLA's threads brings an orderly shutdown down with a signal.
            os._exit(130)
        except BrokenPipeError:  # the reader (head, less) is gone; Python would complain again while closing stdout
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        raise typer.Exit(int(code or 0))

    return app.command(name=function.__name__.rstrip("_"))(run)


for _function in (
    cli_compare.compare,
    check_command.check_,
    check_command.mutants,
    cli_info.list_,
    cli_info.doctor,
    cli_info.bars,
    cli_bench.bench,
    cli_guard.guard,
    cli_report.report,
    cli_ladder.ladder,
):
    command(_function)
