"""``hicache-guard patch``: source patches for an SGLang checkout, wheel or site-packages."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache_guard.core.errors import ConfigError
from hicache_guard.patches import catalogue, plan, upstream, work
from hicache_guard.patches.patch import Patch
from hicache_guard.patches.plan import State, Tree

app = typer.Typer(help="Patch the source of an SGLang checkout, or take patches out again.")

_TreePath = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkout, wheel, site-packages.")
]
_Only = Annotated[list[str] | None, typer.Option(help="Only these; repeat it, or use commas.")]
_Without = Annotated[list[str] | None, typer.Option(help="All but these; as --only.")]
_Force = Annotated[
    bool, typer.Option("--force-unknown", help="Go on although the release is not known.")
]

_STYLES = {
    State.APPLIES: "yellow",
    State.APPLIED: "green",
    State.NOT_NEEDED: "dim",
    State.MISFIT: "bold red",
}


@app.callback(no_args_is_help=True)
def main() -> None:
    """Patch the source of an SGLang checkout, or take patches out again."""
    # Syntax trees are millions of objects without cycles; to look for some takes half of the time.
    gc.disable()


@app.command("list")
def show(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The table of docs/upstream-issues.md.")
    ] = False,
) -> None:
    """List the patches, their reports and the releases that they are for."""
    if markdown:
        print(upstream.table(catalogue.PATCHES))
        return
    table = _table("kind", "reports", "what it does", "releases")
    for patch in catalogue.PATCHES:
        first, last = patch.affects[0], patch.affects[-1]
        table.add_row(
            patch.name,
            patch.kind,
            _reports(patch),
            patch.summary,
            first if first == last else f"{first} to {last}",
        )
    Console().print(table)


@app.command()
def check(path: _TreePath) -> int:
    """Say what each patch is to a tree and why. Exit status 1 where one does not fit."""
    with _opened(path) as tree:
        console = Console()
        _show_tree(console, tree)
        verdicts = tree.survey()
        table = _table("reports", "state", "why")
        for verdict in verdicts:
            table.add_row(
                verdict.patch.name, _reports(verdict.patch), _state(verdict), escape(verdict.why)
            )
        console.print(table)
        misfit = any(verdict.state is State.MISFIT for verdict in verdicts)
        if misfit or not tree.recognition.is_known:
            _show_anchors(console, verdicts)
        if tree.recognition.differs:
            _show_differing(console, tree.recognition)
        for verdict in verdicts:
            if verdict.difference:
                console.print(f"[bold]{verdict.patch.name}[/]")
                console.print(verdict.difference, markup=False, highlight=False, soft_wrap=True)
        return int(misfit)


@app.command()
def apply(
    path: _TreePath,
    only: _Only = None,
    without: _Without = None,
    commit: Annotated[bool, typer.Option(help="Make one git commit a patch.")] = False,
    force_unknown: _Force = False,
) -> None:
    """Apply every patch that is needed, or those named: all of them or, where one fails, none."""
    with _opened(path) as tree:
        chosen = plan.choose(tree, _split(only), _split(without), force_unknown=force_unknown)
        changes = work.apply(tree, chosen, commit=commit)
        for patch in chosen:
            print(f"applied {patch.name}")
        for file in changes:
            print(f"  {tree.layout.name(file)}")
        if not changes:
            print("nothing to do")
            for verdict in tree.survey() if only else ():
                if verdict.patch.is_named(_split(only)):
                    why = f" ({verdict.why})" if verdict.why else ""
                    print(f"  {verdict.patch.name}: {verdict.state.value}{why}")


@app.command()
def diff(
    path: _TreePath,
    only: _Only = None,
    without: _Without = None,
    force_unknown: _Force = False,
) -> None:
    """Show what ``apply`` would change, as a unified diff; write nothing."""
    with _opened(path) as tree:
        chosen = plan.choose(tree, _split(only), _split(without), force_unknown=force_unknown)
        names = {*tree.present(), *(patch.name for patch in chosen)}
        print(work.diff(tree, tree.changes(names)), end="")


@app.command()
def export(
    path: _TreePath,
    output: Annotated[Path, typer.Option("--output", "-o", help="A new or empty folder.")],
    only: _Only = None,
    without: _Without = None,
    force_unknown: _Force = False,
) -> None:
    """Write one file a patch, for ``git am`` on a clean checkout of the same release."""
    with _opened(path) as tree:
        plan.choose(tree, _split(only), _split(without), force_unknown=force_unknown)
        chosen = work.exportable(tree, _split(only), _split(without))
        for name in work.export(tree, chosen, output):
            print(output / name)


@app.command()
def reverse(path: _TreePath, only: _Only = None, without: _Without = None) -> None:
    """Take patches out again, all or those named: each file as it was without them."""
    with _opened(path) as tree:
        catalogue.named([*_split(only), *_split(without)])
        chosen = [
            patch
            for patch in catalogue.PATCHES
            if patch.name in tree.traces()
            and (not only or patch.is_named(_split(only)))
            and not patch.is_named(_split(without))
        ]
        changes = work.reverse(tree, chosen)
        for patch in chosen:
            print(f"reversed {patch.name}")
        for file in changes:
            print(f"  {tree.layout.name(file)}")
        if not changes:
            print("nothing to do: none of these is in the tree" if only else "nothing to do")


@app.command()
def status(path: _TreePath) -> None:
    """List the patches that a tree carries."""
    with _opened(path) as tree:
        console = Console()
        _show_tree(console, tree)
        table = _table("reports", "state", "why")
        for verdict in tree.survey():
            if verdict.patch.name in tree.traces():
                table.add_row(
                    verdict.patch.name,
                    _reports(verdict.patch),
                    _state(verdict),
                    escape(verdict.why),
                )
        console.print(table if table.row_count else "no patch is applied")


@contextmanager
def _opened(path: Path) -> Iterator[Tree]:
    with work.opened(path) as (tree, repaired):
        if repaired:
            Console(stderr=True).print(repaired)
        yield tree


def _split(names: list[str] | None) -> list[str]:
    found = [name.strip() for text in names or () for name in text.split(",")]
    if "" in found:
        raise ConfigError("an empty patch name was given; `hicache-guard patch list` names them")
    return found


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("patch", no_wrap=True)
    for column in columns:
        table.add_column(column)
    return table


def _reports(patch: Patch) -> str:
    return " ".join(f"#{number}" for number in patch.reports) or "-"


def _state(verdict: plan.Verdict) -> str:
    return f"[{_STYLES[verdict.state]}]{verdict.state.value}"


def _show_tree(console: Console, tree: Tree) -> None:
    line = f"{tree.layout.root} ({tree.layout.kind}): {tree.recognition}"
    console.print(line, markup=False, soft_wrap=True)


def _show_anchors(console: Console, verdicts: list[plan.Verdict]) -> None:
    """Anchor by anchor, a line each: a symbol is too long for a column."""
    for verdict in verdicts:
        for anchor in verdict.anchors:
            told = f"[green]✓[/] {anchor.symbol} {anchor.found}"
            if not anchor.holds:
                expected = " or ".join(anchor.accepted)
                told = (
                    f"[bold red]✗[/] {anchor.symbol} {anchor.found or 'missing'}, "
                    f"expected {expected}"
                )
            console.print(f"{told} [dim]{verdict.patch.name}", highlight=False, soft_wrap=True)


def _show_differing(console: Console, recognition: plan.Recognition) -> None:
    console.print(f"differs from SGLang {recognition.nearest} in:")
    for symbol in recognition.differs:
        console.print(f"  {symbol}", highlight=False)
