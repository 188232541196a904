"""``hicache-guard bench``: what the guard costs, each mode against the unguarded release."""

from __future__ import annotations

import json as json_module
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hicache_guard import checkouts
from hicache_guard.core.errors import ConfigError

app = typer.Typer(help="Measure what the guard costs.", no_args_is_help=True)

#: The most that observe and enforce may cost, as a ratio, from this batch on.
BUDGET, FROM_BATCH = 1.5, 64
#: The most memory that the guard may hold, in bytes a slot of either pool.
MEMORY_BUDGET = 16.0


@app.callback()
def main() -> None:
    """Measure what the guard costs."""


@app.command()
def allocator(
    release: Annotated[str, typer.Option(help="The SGLang release to measure on.")] = "0.5.23",
    rounds: Annotated[int, typer.Option(help="Paired rounds of each cell.", min=3)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> int:
    """Time of allocator operations, guarded against unguarded in one run; memory; host syncs.

    Exit status 0 where the whole cycle keeps the budget, else 1.
    """
    tree = checkouts.require(release)
    command = [sys.executable, "-P", "-m", "hicache_guard.repro.bench_allocator"]
    done = subprocess.run(
        [*command, "--rounds", str(rounds)],
        env=checkouts.environment(tree),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise ConfigError(f"the benchmark did not run on SGLang {release}; its error is above")
    report: dict[str, Any] = json_module.loads(done.stdout.splitlines()[-1])
    over = [
        row
        for row in report["times"]
        if row["what"] == "cycle"
        and row["batch"] >= FROM_BATCH
        and row["mode"] in ("observe", "enforce")
        and row["ratio"] > BUDGET
    ]
    heavy = [row for row in report["memory"] if row["bytes_per_slot"] > MEMORY_BUDGET]
    if as_json:
        print(json_module.dumps(report))
    else:
        _show(release, report)
    return 1 if over or heavy else 0


def _show(release: str, report: dict[str, Any]) -> None:
    console = Console()
    operations = list(dict.fromkeys(row["what"] for row in report["times"]))
    table = Table(
        "page", "batch", "mode", *operations,
        title=f"SGLang {release} on {report['device']}: ratio to unguarded (µs guarded)",
    )  # fmt: skip
    keys = dict.fromkeys((row["page_size"], row["batch"], row["mode"]) for row in report["times"])
    for page_size, batch, mode in keys:
        cells = []
        for what in operations:
            row = next(
                row
                for row in report["times"]
                if (row["page_size"], row["batch"], row["mode"], row["what"])
                == (page_size, batch, mode, what)
            )
            watched = what == "cycle" and batch >= FROM_BATCH and mode in ("observe", "enforce")
            colour = "[bold red]" if row["ratio"] > BUDGET else "[green]"
            text = f"{row['ratio']:.2f} ({row['guarded_us']:.0f})"
            cells.append(colour + text if watched else text)
        table.add_row(str(page_size), str(batch), mode, *cells)
    console.print(table)
    memory = Table("page", "full slots", "window slots", "bytes a slot", title="Memory")
    for row in report["memory"]:
        memory.add_row(
            str(row["page_size"]), f"{row['full_slots']:,}", f"{row['window_slots']:,}",
            f"{row['bytes_per_slot']:.2f}",
        )  # fmt: skip
    console.print(memory)
    syncs = Table("mode", "operation", "host reads added", title="Synchronising operations added")
    for row in report["syncs"]:
        syncs.add_row(row["mode"], row["what"], row["added"])
    console.print(syncs)
