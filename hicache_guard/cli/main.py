"""``hicache-guard``: one command, its subcommands in modules of this package."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from hicache_guard import __version__
from hicache_guard.cli import (
    audit,
    bench,
    churn,
    dashboard,
    demo,
    doctor,
    embedded,
    nodes,
    patch,
    releases,
    replay,
    repro,
    trace,
)
from hicache_guard.core.errors import GuardError, printable

#: Exit statuses: of Ctrl-C, and of a fault of our own, which is none of a server (sysexits.h).
_INTERRUPTED, _OURS = 130, 70

app = typer.Typer(
    name="hicache-guard",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(releases.app, name="releases")
app.add_typer(bench.app, name="bench")
app.add_typer(patch.app, name="patch")
app.add_typer(embedded.app, name="embedded")
app.add_typer(nodes.app, name="nodes")
app.command("audit", context_settings={"allow_extra_args": True})(audit.audit)
app.command("replay")(replay.replay)
app.command("churn")(churn.churn)
app.command("repro")(repro.repro)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("trace")(trace.trace)
app.command("dashboard")(dashboard.dashboard)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Make SGLang prove each prefix-cache hit on hybrid sliding-window models."""


@app.command()
def version() -> None:
    """Print the version."""
    _print_version(True)


def run() -> None:
    """Entry point. Bad input is one line on stderr and exit status 2; a found fault is status 1.

    To be asked to end is as Ctrl-C: children go, and what was measured is kept.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not every terminal knows every character
            stream.reconfigure(errors="backslashreplace")
    try:
        status = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        _say_interrupted()
    except GuardError as error:
        _complain(str(error))
    except OSError as error:
        # Nobody reads, or there is no room for it; what is left must not be tried at exit again.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"cannot go on: {where}{error.strerror or error}")
    except SystemExit as ended:  # rich's way of telling that nobody reads
        if isinstance(ended.__context__, BrokenPipeError):
            sys.exit(2)
        raise
    except Exception as error:
        # typer brings its own copy of click, so a usage error is known by what it can do
        if hasattr(error, "format_message"):
            _complain(error.format_message() or "run hicache-guard --help")
        traceback.print_exc()
        sys.exit(_OURS)
    if status == _INTERRUPTED:  # typer's way of telling of Ctrl-C
        _say_interrupted()
    sys.exit(status if isinstance(status, int) else 0)


def _say_interrupted() -> NoReturn:
    print("hicache-guard: interrupted", file=sys.stderr)
    sys.exit(_INTERRUPTED)


def _complain(complaint: str) -> NoReturn:
    print(f"hicache-guard: {printable(complaint)}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    run()
