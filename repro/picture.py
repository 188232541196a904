"""Pictures of page pools for a terminal: a row of cells a pool, carets under what is wrong.

Shared by the programs that explain one fault. Everything is readable without colour: what colour
says is also said by a sign in the cell, by a caret below it, and by a caption.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

#: Columns that a picture is laid out for, whatever the terminal has.
NARROWEST, WIDEST = 80, 100
_CELL = 5
_LABEL = 14

GOOD, BAD, ODD, DIM, HEAD = "green", "bold red", "yellow", "dim", "bold"


@dataclass(frozen=True)
class Cell:
    """One page: its number, what it holds in at most three signs, and whether it is marked."""

    number: int
    text: str
    style: str = ""
    marked: bool = False


def console(*, stderr: bool = False) -> Console:
    """A console whose lines have 80 to 100 columns, also where the output is not a terminal."""
    made = Console(stderr=stderr, highlight=False, emoji=False)
    wide = made.width if made.is_terminal else 96
    made.width = min(max(wide, NARROWEST), WIDEST)
    return made


def strip(label: str, cells: Sequence[Cell], per_line: int = 12) -> Text:
    """A pool as a row of cells under their page numbers, in lines of at most ``per_line``."""
    drawn = Text()
    for start in range(0, len(cells), per_line):
        line = cells[start : start + per_line]
        drawn.append(f"{label:<{_LABEL}}", DIM)
        drawn.append("".join(f"{cell.number:^{_CELL}}" for cell in line).rstrip() + "\n", DIM)
        drawn.append(" " * _LABEL)
        for cell in line:
            drawn.append("[", DIM)
            drawn.append(f"{cell.text:^{_CELL - 2}}", cell.style)
            drawn.append("]", DIM)
        drawn.append("\n")
        if any(cell.marked for cell in line):
            carets = "".join(("^^^" if cell.marked else "").center(_CELL) for cell in line)
            drawn.append(" " * _LABEL + carets.rstrip() + "\n", BAD)
    return drawn


def framed(parts: Iterable[Text], captions: Iterable[tuple[str, str]]) -> Text:
    """Strips, then captions (text, style), indented as one picture."""
    whole = Text()
    for part in parts:
        whole.append(part)
    for caption, style in captions:
        whole.append(f"{caption}\n", style)
    whole.rstrip()
    return Text("\n").join(Text("     ") + line for line in whole.split("\n"))


def hanging(out: Console, lead: str, text: Text) -> Text:
    """``text`` wrapped to the console with every line two columns right of a short ``lead``."""
    lines = list(text.wrap(out, out.width - 5))
    for line in lines:
        line.rstrip()
    return Text("\n     ").join([Text(f"{lead:<3}  ") + lines[0], *lines[1:]])


def report(out: Console, text: str) -> Text:
    """A report of the guard, indented, without the folders that this machine keeps its trees in."""
    ours = str(Path(__file__).resolve().parents[1])
    for folder in sorted({*sys.path, ours} - {""}, key=len, reverse=True):
        text = text.replace(f"{folder}/", "")
    return Text("\n").join(hanging(out, "", Text(line, DIM)) for line in text.splitlines())


def chapter(title: str) -> Group:
    """A heading after an empty line."""
    return Group("", Rule(Text(title, HEAD), align="left", characters="-", style=DIM))


def verdicts(
    title: str, columns: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]
) -> Table:
    """The table at the end: one row a mode, the last column says whether it is as it must be."""
    table = Table(title=title, title_justify="left", title_style=HEAD)
    for column in columns:
        table.add_column(column)
    table.add_column("as it must be")
    for row, right in rows:
        table.add_row(*row, Text("yes" if right else "NO", GOOD if right else BAD))
    return table


def progress() -> Progress:
    """A progress bar on stderr that starts no thread, so that the process may fork beside it."""
    out = console(stderr=True)
    return Progress(
        TextColumn("{task.description:<8}"),
        BarColumn(),
        TextColumn("{task.completed:>6.0f}/{task.total:.0f} requests"),
        TextColumn("{task.fields[pools]}"),
        TimeElapsedColumn(),
        console=out,
        auto_refresh=False,
        disable=not out.is_terminal,
    )
