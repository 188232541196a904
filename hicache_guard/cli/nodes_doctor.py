"""``hicache-guard nodes doctor``: is every rank of a run there, of one release, and guarded?"""

from __future__ import annotations

import dataclasses
import json as json_module
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hicache_guard.nodes import ranks
from hicache_guard.nodes.ranks import Found

#: Seconds between two looks.
_PAUSE = 1.0


def doctor(
    run: Annotated[Path, typer.Argument(help="The folder of a run, that all nodes write to.")],
    wait: Annotated[
        float, typer.Option(help="Seconds to give ranks that have not reported yet.", min=0)
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> int:
    """List every rank. Exit status 1 where one is missing, unguarded, or of another release.

    Each server answers only after its ranks are up, so nothing is waited for unless asked.
    """
    limit = time.monotonic() + wait
    found = ranks.compare(run)
    while any(not rank.report for rank in found) and time.monotonic() < limit:
        time.sleep(_PAUSE)
        found = ranks.compare(run)
    wrong = [rank for rank in found if rank.wrong]
    if as_json:
        print(json_module.dumps([dataclasses.asdict(rank) for rank in found]))
    else:
        show(found, Console())
    return 1 if wrong else 0


def show(found: Sequence[Found], console: Console) -> None:
    """The table of all ranks, and one line for each that is wrong."""
    table = Table("rank", "host", "pid", "SGLang", "guard", "hooks", "pools")
    for rank in found:
        report = rank.report
        style = "bold red" if rank.wrong else "green"
        told = [""] * 6
        if "slots" in report:
            in_place = report["hooks"] - len(report["missing"])
            told = [
                str(report["host"]), str(report["pid"]), str(report["sglang"]),
                f"{report['mode']} ({report['route']})", f"{in_place}/{report['hooks']}",
                " + ".join(f"{slots:,}" for slots in report["slots"].values()),
            ]  # fmt: skip
        table.add_row(Text(rank.name, style), *told)
    console.print(table)
    wrong = [rank for rank in found if rank.wrong]
    for rank in wrong:
        console.print(f"✗ {rank.name}: {rank.wrong}", style="bold red", markup=False)
    if not wrong:
        console.print(f"✓ all {len(found)} ranks are guarded", style="green", markup=False)
