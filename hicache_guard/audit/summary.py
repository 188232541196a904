"""An audit on a terminal: how far it is, and what it found."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache_guard.audit.audit import Result
from hicache_guard.audit.judge import Verdict

STYLES = {
    Verdict.EQUAL: "green",
    Verdict.NOISE: "green",
    Verdict.NO_HITS: "bold red",
    Verdict.FAULT: "bold red",
    Verdict.NOT_TESTED: "dim",
}


class Live:
    """Shows a bar for the scenario that runs, and a line for each that is over."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self.progress.add_task("starting", total=None)

    def begins(self, name: str, steps: int) -> None:
        self.progress.reset(self._task, total=steps, description=name)

    def goes_on(self) -> None:
        self.progress.advance(self._task)

    def ends(self, result: Result) -> None:
        verdict = result.judgement.verdict
        self.progress.update(self._task, description="making it small" if verdict.bad else "next")
        self.console.print(
            f"[{STYLES[verdict]}]{verdict.value:<10}[/] {result.name}: "
            f"{escape(result.judgement.why)}"
        )


def show(data: dict[str, Any], console: Console) -> None:
    """The end of an audit: the table, the noise, the verdict."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("scenario", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in ("requests", "hits", "cached", "max |Δ|", "mean |Δ|"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in data["scenarios"]:
        style = STYLES[Verdict(row["verdict"])]
        numbers = [""] * 5
        if row["requests"]:
            numbers = [
                str(row["requests"]), str(row["hits"]), f"{row['cached_tokens']:,}",
                f"{row['largest']:.1e}", f"{row['mean']:.1e}",
            ]  # fmt: skip
        table.add_row(row["name"], f"[{style}]{row['verdict']}[/]", *numbers)
    console.print(table)
    for row in data["scenarios"]:
        if row["smallest"] is not None:
            small = row["smallest"]
            console.print(
                f"{row['name']}: {small['requests']} requests of {small['tokens']:,} prompt tokens "
                f"still show it: {small['name']}"
            )
    noise = data["noise"]
    if noise is not None:
        console.print(
            f"noise: {len(noise['samples'])} cold answers differ by "
            f"{max(noise['samples'], default=0):.1e} at most; a fault is more than "
            f"{noise['limit']:.1e} (false alarms: {noise['false_alarms']:g} an audit)"
        )
    if data["broken"]:
        console.print(f"[bold red]not finished:[/] {escape(data['broken'])}")
    verdict = Verdict(data["verdict"])
    console.print(
        f"[{STYLES[verdict]}]{verdict.value}[/]: {data['requests']:,} requests, "
        f"{data['tokens']:,} tokens, {data['seconds']:.0f} s"
    )
