"""``hicache-guard trace``: what a trace of matches says, and whose matches were clipped."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hicache_guard.core.matches import CLIPS, MatchRecord, MatchTally, read_trace


def trace(
    files: Annotated[
        list[Path], typer.Argument(help="Traces, one a process; older halves (.1) are found.")
    ],
    last: Annotated[int, typer.Option(help="Clipped matches to show.", min=0)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show totals, clips by reason, and the last clipped requests with their facts."""
    summary = _Summary(last)
    for path in dict.fromkeys(files):
        records = read_trace(path)
        summary.add(records)
        summary.unreadable += records.unreadable
    if as_json:
        print(json_module.dumps(summary.as_data()))
    else:
        summary.show(Console(markup=False, highlight=False))


class _Summary:
    """Everything that is shown; holds no more records than that."""

    def __init__(self, last: int) -> None:
        self.tally = MatchTally()
        self.violations: Counter[str] = Counter()
        self.clipped: deque[MatchRecord] = deque(maxlen=last)
        self.unreadable = 0
        self.first: float | None = None
        self.until: float | None = None

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            try:
                when = float(record["time"])
                datetime.fromtimestamp(when)
                self._count(record)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError):
                self.unreadable += 1  # valid JSON, and not what we write
                continue
            self.first = when if self.first is None else min(self.first, when)
            self.until = when if self.until is None else max(self.until, when)

    def _count(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "match":
            match = MatchRecord.from_trace(record)
            if match.clip is None:
                self.tally.proved(match.asked, match.used)
            else:
                self.tally.clipped(match)
                self.clipped.append(match)
        elif kind == "evict":
            self.tally.evicted(record["group"], record["tokens"])
        elif kind == "load-back" and record["refused"] is None:
            self.tally.loaded_back(record["tokens"])
        elif kind == "load-back":
            self.tally.load_backs_refused += 1
        elif kind == "insert":
            self.tally.insert_cuts += record["cut"] is not None
        elif kind == "violation":
            self.violations[record["fault"]] += 1
        elif kind != "pages":
            raise ValueError(f"no such kind: {kind}")

    def as_data(self) -> dict[str, Any]:
        return {
            "totals": self.tally.snapshot(),
            "violations": dict(self.violations),
            "clipped": [dataclasses.asdict(match) for match in self.clipped],
            "unreadable": self.unreadable,
        }

    def show(self, console: Console) -> None:
        if self.first is None or self.until is None:
            console.print("no records")
        else:
            self._show_totals(console, f"{_when(self.first)} to {_when(self.until)}")
            self._show_clips(console)
        if self.unreadable:
            console.print(f"{self.unreadable} lines could not be read (a process died writing)")

    def _show_totals(self, console: Console, span: str) -> None:
        console.print(span)
        table = Table("what", "count")
        table.columns[1].justify = "right"
        for key, count in self.tally.snapshot().items():
            name, _, label = key.partition(".")
            if name != "clips":
                table.add_row(
                    name.replace("_", " ") + (f", {label}" if label else ""), f"{count:,}"
                )
        for fault, count in self.violations.most_common():
            table.add_row(f"violations, {_plain(fault)}", f"{count:,}", style="bold red")
        console.print(table)

    def _show_clips(self, console: Console) -> None:
        if not self.tally.clips:
            console.print("no match was clipped", style="green")
            return
        table = Table("clipped because", "count", "which means", title="Clips by reason")
        table.columns[1].justify = "right"
        for reason, count in self.tally.clips.most_common():
            table.add_row(_plain(reason), f"{count:,}", CLIPS.get(reason, ""))
        console.print(table)
        if not self.clipped:
            return
        table = Table(
            "request", "tokens", "why",
            title=f"Last {len(self.clipped)} of {self.tally.clips.total()} clipped matches",
            show_lines=True,
        )  # fmt: skip
        for column in table.columns:
            column.overflow = "fold"  # a name that is cut names nobody
        for match in self.clipped:
            claimed = {**match.matched, **({"host": match.host} if match.host else {})}
            tokens = (
                f"asked {match.asked}, used {match.used}",
                f"claimed: {_by_group(claimed)}",
                f"proved: {_by_group(match.proved)}",
            )
            spots = (("page", match.page), ("slot", match.slot), ("epoch", match.epoch))
            where = [f"{name} {number}" for name, number in spots if number is not None]
            table.add_row(
                f"{_plain(match.request or '(not named)')}\n{_when(match.time)}",
                "\n".join(tokens),
                f"{_plain(match.clip or '')}\n{', '.join([*where, f'operation #{match.serial}'])}",
            )
        console.print(table)


def _by_group(tokens: Mapping[str, int]) -> str:
    return ", ".join(f"{_plain(name)} {count}" for name, count in tokens.items())


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def _plain(text: str) -> str:
    """What a client chose as its request id must not move the cursor."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
