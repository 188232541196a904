"""``hicache-guard demo``: the main job in one command and one table.

Recreates the failures of PR #25805 and PR #25889 on a real, unpatched SGLang and shows that the
same sequences are caught and contained with the guard.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hicache_guard import checkouts, children
from hicache_guard.cli.releases import progress
from hicache_guard.core.errors import ConfigError
from hicache_guard.repro import matrix

#: Case of the catalogue to the row that a newcomer reads.
STORIES = {
    "C1": "#25805: recycled page keeps an old mapping",
    "C4": "#25805 residue: tail of length 0",
    "C2": "#25889: translation outlives its mapping",
    "C2b": "#25889: and the pool shrank",
    "C3": "#25889 residue: mapping written in place",
    "C3b": "#25889 residue: another batch first",
}

_UNGUARDED = {
    "S": "two owners",
    "SA": "two owners, dies",
    "range": "out of bounds",
    "ok": "correct",
}


def demo(
    release: Annotated[str, typer.Option(help="The SGLang release to break.")] = "0.5.12",
    requests: Annotated[
        int, typer.Option(help="Requests of decode-side churn for #25805.", min=1, max=1_000_000)
    ] = 10_240,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> int:
    """Recreate #25805 and #25889 with the guard off and on. Exit 0 if every row is as expected."""
    checkouts.require(release)
    with progress() as bar:
        task = bar.add_task(f"importing SGLang {release}", total=len(STORIES) * len(matrix.MODES))

        def advance(_: str, result: dict[str, Any]) -> None:
            bar.update(task, advance=1, description=STORIES[result["case"]][:60])

        cells = matrix.run([release], list(STORIES), on_result=advance)
        bar.update(task, description="cases run")
    churn = _churn(release, requests)
    wrong = [problem for cell in cells for problem in cell.wrong()]
    wrong += churn["wrong"]
    if as_json:
        rows = [{"case": cell.case, "wrong": cell.wrong()} for cell in cells]
        print(json.dumps({"release": release, "cases": rows, "churn": churn}))
    else:
        _show(release, cells, churn)
    return 1 if wrong else 0


def _churn(release: str, requests: int) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "hicache_guard.repro.churn_25805", "--json"]
    done = children.run(
        [*command, "--requests", str(requests)],
        env=checkouts.environment(checkouts.require(release)),
        stdout=subprocess.PIPE,
    )
    if not done.stdout.strip():
        raise ConfigError(f"the churn did not run on SGLang {release}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    report["wrong"] = [] if done.returncode == 0 else ["the churn ended otherwise than expected"]
    return report


def _show(release: str, cells: list[matrix.Cell], churn: dict[str, Any]) -> None:
    table = Table(
        title=f"Real SGLang {release}, unpatched, on a CPU", box=SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("", no_wrap=True)
    table.add_column("what happens")
    table.add_column("guard off", style="red")
    for mode in matrix.MODES[1:]:
        table.add_column(mode, style="green")
    for case, story in STORIES.items():
        cell = next(cell for cell in cells if cell.case == case)
        outcome = cell.outcome("off")
        table.add_row(
            _mark(not cell.wrong()),
            story,
            _UNGUARDED.get(outcome, outcome),
            f"{cell.results['observe'].get('count', 0)} reported",
            "contained" if cell.outcome("enforce") == "ok" else "[red]not contained",
            "raises" if cell.outcome("strict") == "raised" else "[red]no error",
        )
    table.add_section()
    table.add_row(*churn_row(churn))
    console = Console()
    console.print(table)
    for cell in cells:
        for problem in cell.wrong():
            console.print(f"[bold red]✗[/] {STORIES[cell.case]}: {problem}")
    for problem in churn["wrong"]:
        console.print(f"[bold red]✗[/] churn: {problem}")
    console.print(
        "✓ as expected. observe: behaviour as unguarded, reported. enforce: contained, the "
        "independent\naudit clean after every step. strict: an error before any state changes.\n"
        "As stories: [bold]hicache-guard repro 25805[/], [bold]hicache-guard repro 25889[/]"
    )


def churn_row(churn: dict[str, Any]) -> tuple[str, ...]:
    """The table's last row: decode-side traffic until the crash, and to the end with the guard."""
    modes = churn["modes"]
    off, observe, enforce, strict = (modes[mode] for mode in matrix.MODES)
    silent = f"2 owners after {off['owners']['finished']},\n" if off["owners"] else ""
    audit = "audit clean" if not enforce["fault"] else f"[red]audit: {enforce['fault']['what']}"
    return (
        _mark(not churn["wrong"]),
        f"#25805: {churn['requests']:,} requests",
        silent + _ending(off),
        f"{sum(observe['violations'].values())} reported,\n{_ending(observe)}",
        f"{_ending(enforce)},\n{audit},\n{sum(enforce['violations'].values()):,} contained",
        _ending(strict),
    )


def _mark(right: bool) -> str:
    return "[green]✓" if right else "[bold red]✗"


def _ending(outcome: dict[str, Any]) -> str:
    count = outcome["finished"]
    return {
        "completed": f"all {count:,} done",
        "asserted": f"dies after {count:,}",
        "raised": f"raises\nafter {count:,}",
    }.get(outcome["ended"], f"{outcome['ended']} after {count}")
