"""``hicache-guard releases``: which SGLang releases are supported, which are here, and where."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache_guard import checkouts
from hicache_guard.core.errors import ConfigError

app = typer.Typer(help="Supported SGLang releases: list them, fetch and unpack them.")


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        show(as_json=False)


@app.command("list")
def show(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """List supported releases and where those on this machine lie."""
    rows = [
        (version, str(checkouts.place_of(version)), checkouts.is_fetched(version))
        for version in checkouts.SUPPORTED
    ]
    if as_json:
        print(json_module.dumps([{"version": v, "path": p, "fetched": f} for v, p, f in rows]))
        return
    table = Table("release", "here", "where")
    for version, place, fetched in rows:
        table.add_row(version, "[green]yes" if fetched else "no", place if fetched else "")
    Console().print(table)


@app.command()
def fetch(
    versions: Annotated[list[str] | None, typer.Argument(help="Releases to fetch.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every supported release.")] = False,
) -> None:
    """Fetch releases from PyPI and unpack them as checkouts; what is here already stays."""
    wanted = list(checkouts.SUPPORTED) if everything else versions or []
    if not wanted:
        raise ConfigError("name the releases to fetch, or give --all")
    for version in wanted:
        checkouts.place_of(version)  # refuses an unknown one before anything is fetched
    with progress() as bar:
        task = bar.add_task("fetching", total=len(wanted))
        for version in wanted:
            checkouts.fetch(version, lambda text: bar.update(task, description=text))
            bar.advance(task)
        bar.update(task, description="releases are here")
    for version in wanted:
        print(checkouts.place_of(version))


def progress() -> Progress:
    """A progress bar on stderr, so that results on stdout can be piped."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    )
