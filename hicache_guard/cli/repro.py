"""``hicache-guard repro``: recreate reported faults on real SGLang, with the guard and without."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hicache_guard import checkouts, children
from hicache_guard.cli.releases import progress
from hicache_guard.core.errors import ConfigError
from hicache_guard.repro import matrix, trees
from hicache_guard.repro.catalogue import UNGUARDED
from hicache_guard.repro.titles import TITLES

#: Programs that are read as an explanation, by the number of the report that they recreate.
PROGRAMS = {
    "25805": ("repro_25805", "the double free of PR #25805, step by step"),
    "25805-churn": ("churn_25805", "the same by 10,240 requests of decode-side traffic"),
    "25889": ("repro_25889", "the stale translation of PR #25889, step by step"),
}


def repro(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="25805, 25805-churn, 25889, cases such as C1, all, or list."),
    ] = None,
    release: Annotated[
        list[str] | None,
        typer.Option(help="SGLang release; repeat for several. Default: every one that is here."),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="off, observe, enforce, strict; repeat for several. Default: each."),
    ] = None,
    show_matrix: Annotated[
        bool, typer.Option("--matrix", help="Print the cases as a matrix by release.")
    ] = False,
    via: Annotated[
        list[str] | None,
        typer.Option(
            help="How the hooks get in: install, plugin, patch, git-am; repeat it to compare."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    requests: Annotated[
        int, typer.Option(help="Requests of 25805-churn.", min=1, max=1_000_000)
    ] = 10_240,
) -> int:
    """Run reproductions. Exit status 0 if every outcome is as known and as promised, else 1."""
    wanted = names or ["list"]
    if wanted == ["list"]:
        _list(as_json)
        return 0
    modes = _modes(mode)
    routes = _routes(via)
    programs = [name for name in wanted if name in PROGRAMS]
    cases = list(UNGUARDED) if "all" in wanted else [n for n in wanted if n in UNGUARDED]
    unknown = [n for n in wanted if n not in PROGRAMS and n not in UNGUARDED and n != "all"]
    if unknown:
        raise ConfigError(
            f"unknown reproduction {unknown[0]!r}; `hicache-guard repro list` names them all"
        )
    releases = _releases(release)
    status = 0
    for name in programs:
        for version in release or ["0.5.12"]:
            status |= _program(name, version, modes, requests, as_json)
    if cases:
        status |= _cases(releases, cases, modes, routes, show_matrix, as_json)
    return status


def _modes(chosen: list[str] | None) -> list[str]:
    for mode in chosen or ():
        if mode not in matrix.MODES:
            raise ConfigError(f"unknown mode {mode!r}; choose from {', '.join(matrix.MODES)}")
    return chosen or list(matrix.MODES)


def _routes(chosen: list[str] | None) -> list[str]:
    for route in chosen or ():
        if route not in trees.ROUTES:
            raise ConfigError(f"unknown route {route!r}; choose from {', '.join(trees.ROUTES)}")
    return list(dict.fromkeys(chosen or ["install"]))


def _releases(chosen: list[str] | None) -> list[str]:
    if chosen:
        for version in chosen:
            checkouts.require(version)
        return chosen
    here = [version for version in checkouts.SUPPORTED if checkouts.is_fetched(version)]
    if not here:
        raise ConfigError("no SGLang release is here; run `hicache-guard releases fetch --all`")
    return here


def _list(as_json: bool) -> None:
    rows = {name: text for name, (_, text) in PROGRAMS.items()} | TITLES
    if as_json:
        print(json_module.dumps(rows))
        return
    table = Table("name", "what it recreates")
    for name, text in rows.items():
        table.add_row(name, text)
    Console().print(table)


def _program(name: str, version: str, modes: list[str], requests: int, as_json: bool) -> int:
    tree = checkouts.require(version)
    command = [sys.executable, "-P", "-m", f"hicache_guard.repro.{PROGRAMS[name][0]}"]
    command += ["--modes", *modes]
    if name == "25805-churn":
        command += ["--requests", str(requests)]
    if as_json:
        command.append("--json")
    return children.run(command, env=checkouts.environment(tree)).returncode


def _cases(
    releases: list[str],
    cases: list[str],
    modes: list[str],
    routes: list[str],
    show_matrix: bool,
    as_json: bool,
) -> int:
    cells = []
    with progress() as bar:
        task = bar.add_task("starting", total=len(routes) * len(releases) * len(cases) * len(modes))

        def advance(release: str, result: dict[str, Any]) -> None:
            bar.update(task, advance=1, description=f"SGLang {release}: {result['case']}")

        for route in routes:
            cells += matrix.run(releases, cases, modes, advance, route)
        bar.update(task, description="cases run")
    wrong = [(cell, problem) for cell in cells for problem in cell.wrong()]
    if as_json:
        print(
            json_module.dumps(
                [
                    {
                        "case": cell.case,
                        "release": cell.release,
                        "via": cell.route,
                        "expected": cell.expected,
                        "wrong": cell.wrong(),
                        "results": {
                            mode: {k: v for k, v in result.items() if k != "states"}
                            for mode, result in cell.results.items()
                        },
                    }
                    for cell in cells
                ]
            )
        )
        return 1 if wrong else 0
    console = Console()
    first = [cell for cell in cells if cell.route == routes[0]]
    console.print(matrix.table(first) if show_matrix else _details(cells))
    for cell, problem in wrong:
        by = f" by {cell.route}" if len(routes) > 1 else ""
        console.print(f"[bold red]✗[/] {cell.case} on {cell.release}{by}: {problem}")
    count = sum(1 for cell in first if cell.expected != "-")
    console.print(
        f"{count} cells, {len(first) - count} without such a call, {len(wrong)} not as they must be"
    )
    different = sum(
        _compare(console, first, [cell for cell in cells if cell.route == route])
        for route in routes[1:]
    )
    return 1 if wrong or different else 0


def _compare(console: Console, first: list[matrix.Cell], others: list[matrix.Cell]) -> int:
    """Say whether two routes to the hooks have the same verdicts; the number that differ."""
    known = {(cell.case, cell.release): cell for cell in first}
    different = 0
    for cell in others:
        modes = cell.differs(known[cell.case, cell.release])
        different += len(modes)
        if modes:
            console.print(
                f"[bold red]✗[/] {cell.case} on {cell.release}: {cell.route} differs from "
                f"{first[0].route} in {', '.join(modes)}"
            )
    total = sum(len(cell.results) for cell in others)
    console.print(
        f"{others[0].route}: {total - different} of {total} verdicts as by {first[0].route}"
    )
    return different


def _details(cells: list[matrix.Cell]) -> Table:
    table = Table("case", "release", "mode", "outcome", "counted", "what was seen")
    for cell in cells:
        for mode, result in cell.results.items():
            seen = result.get("violation") or result.get("where") or result.get("detail") or ""
            faults = result.get("faults") or []
            kinds = ", ".join(result.get("detected", []))
            lines = [
                part for part in (kinds, faults[0] if faults else "", seen.split("\n")[0]) if part
            ]
            table.add_row(
                cell.case, cell.release, mode, result["outcome"], str(result.get("count", "")),
                "\n".join(dict.fromkeys(lines)),
            )  # fmt: skip
    return table
