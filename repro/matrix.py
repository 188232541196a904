"""The catalogue on every release in every mode: run it, judge it, show it.

The judgement is a rule and not a recording: where the unguarded release is at fault, the guard must
detect it in observe and leave behaviour bit for bit alone, contain it in enforce with the audit
clean after every step, and raise in strict with the state as it was; where it is correct, the guard
must do and count nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hicache_guard import checkouts, children
from hicache_guard.core.errors import ConfigError
from hicache_guard.repro import trees
from hicache_guard.repro.catalogue import UNGUARDED
from hicache_guard.repro.titles import TITLES

MODES = ("off", "observe", "enforce", "strict")

#: What two runs of a case in a mode must have in common to be the same verdict.
_VERDICT = ("outcome", "ended", "count", "detected", "faults", "states", "whole")

#: Releases side by side in one table: as many as 80 columns hold.
_PER_TABLE = 6


@dataclass
class Cell:
    """One case on one release: results by mode, and what is wrong with them."""

    case: str
    release: str
    route: str = "install"
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def expected(self) -> str:
        return UNGUARDED[self.case][self.release]

    def outcome(self, mode: str) -> str:
        return str(self.results[mode]["outcome"])

    def differs(self, other: Cell) -> list[str]:
        """The modes in which another route to the hooks led to another verdict."""
        modes = [mode for mode in MODES if mode in {*self.results, *other.results}]
        return [
            mode
            for mode in modes
            if any(
                self.results.get(mode, {}).get(fact) != other.results.get(mode, {}).get(fact)
                for fact in _VERDICT
            )
        ]

    def wrong(self) -> list[str]:
        """Why this cell is not as it must be; empty when it is."""
        problems = []
        faulty = self.expected not in ("ok", "-")
        for mode, result in self.results.items():
            got, count = result["outcome"], result.get("count", 0)
            if self.expected == "-":
                if got != "-":
                    problems.append(f"{mode}: {got}, though the call should not exist")
            elif mode == "off":
                if got != self.expected:
                    problems.append(f"off: {got}, known is {self.expected}")
            elif not faulty:
                if got != "ok" or count:
                    problems.append(f"{mode}: false alarm ({got}, {count} counted)")
            elif mode == "observe":
                problems += self._wrong_observe(result)
            elif mode == "enforce":
                if not count:
                    problems.append("enforce: not counted")
                if got != "ok":
                    problems.append(f"enforce: not contained ({got}: {result.get('faults')})")
            elif got != "raised":
                problems.append(f"strict: {got} instead of an error")
            elif not result.get("whole"):
                problems.append("strict: state changed although it raised")
            elif not result["told"]:
                problems.append("strict: it raised what it did not report")
        return problems

    def _wrong_observe(self, result: dict[str, Any]) -> list[str]:
        problems = []
        if not result.get("count"):
            problems.append("observe: not detected")
        off = self.results.get("off")
        if off is not None and (
            off["outcome"] != result["outcome"] or off.get("states") != result.get("states")
        ):
            problems.append("observe: behaviour differs from the unguarded release")
        return problems


def run(
    releases: Sequence[str],
    cases: Sequence[str] | None = None,
    modes: Sequence[str] = MODES,
    on_result: Callable[[str, dict[str, Any]], None] = lambda release, result: None,
    route: str = "install",
) -> list[Cell]:
    """Run ``cases`` (all by default) on ``releases`` in ``modes``; one subprocess a release.

    ``route`` is one of ``trees.ROUTES``: how the hooks get into the release. Raises ConfigError
    where a release is not on this machine or cannot be imported.
    """
    cells: dict[tuple[str, str], Cell] = {}
    for release in releases:
        for result in _results(release, cases, modes, route):
            cell = cells.setdefault((result["case"], release), Cell(result["case"], release, route))
            cell.results[result.pop("mode")] = result
            on_result(release, result)
    return list(cells.values())


def _results(
    release: str, cases: Sequence[str] | None, modes: Sequence[str], route: str
) -> Iterator[dict[str, Any]]:
    with trees.tree(release, route) as tree:
        yield from _results_in(tree, release, cases, modes, route)


def _results_in(
    tree: Path, release: str, cases: Sequence[str] | None, modes: Sequence[str], route: str
) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", "hicache_guard.repro.worker", "--modes", *modes]
    command += ["--route", route if route in ("install", "plugin") else "source"]
    if cases is not None:
        command += ["--cases", *cases]
    with children.started(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=checkouts.environment(tree),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            yield json.loads(line)
        errors = process.stderr.read()
    if process.returncode:
        last = errors.strip().splitlines()[-1:] or ["no reason given"]
        raise ConfigError(
            f"SGLang {release} does not run here: {last[0]}; what it needs is in "
            "scripts/sglang-cpu.lock (pip install --no-deps -r scripts/sglang-cpu.lock)"
        )


def table(cells: Sequence[Cell]) -> Group:
    """The matrix: a row a case, a column a release; unguarded outcome, then what the guard does."""
    releases = [
        release for release in checkouts.SUPPORTED if any(c.release == release for c in cells)
    ]
    shown = [case for case in UNGUARDED if any(cell.case == case for cell in cells)]
    parts = []
    for start in range(0, len(releases), _PER_TABLE):
        title = "Fault catalogue on real SGLang: unguarded → with the guard" if not start else None
        drawn = Table(title=title)
        drawn.add_column("case", no_wrap=True)
        columns = releases[start : start + _PER_TABLE]
        for release in columns:
            drawn.add_column(release.replace(".post", ".p"), no_wrap=True)
        for case in shown:
            row = {cell.release: cell for cell in cells if cell.case == case}
            drawn.add_row(case, *(_cell_text(row.get(release)) for release in columns))
        parts.append(drawn)
    legend = Table.grid(padding=(0, 1))
    for case in shown:
        legend.add_row(case, TITLES[case])
    for sign, meaning in _SIGNS.items():
        legend.add_row(sign, meaning, style="dim")
    return Group(*parts, legend)


_SIGNS = {
    "S L A": "unguarded: silent corruption, leak, assertion (SA: silent first, then assertion)",
    "range": "unguarded: a write out of range",
    "ok": "unguarded: correct, and with the guard quiet (nothing counted, nothing changed)",
    "d": "observe: detected, behaviour bit for bit that of the release",
    "c": "enforce: counted and contained, the independent audit clean after every step",
    "r": "strict: raised, state after the error equal to the state before",
    "✗": "not as it must be",
}


def _cell_text(cell: Cell | None) -> Text:
    if cell is None:
        return Text("")
    off = cell.results.get("off", {}).get("outcome", cell.expected)
    if off == "-":
        return Text("-", style="dim")
    text = Text(off, style="green" if off == "ok" else "red")
    problems = cell.wrong()
    if off == "ok":
        text.append(" ✗" if problems else " quiet", style="bold red" if problems else "dim green")
        return text
    text.append(" → ")
    for mode, letter in (("observe", "d"), ("enforce", "c"), ("strict", "r")):
        if mode in cell.results:
            bad = any(problem.startswith(mode) for problem in problems)
            text.append("✗" if bad else letter, style="bold red" if bad else "green")
    if any(problem.startswith("off") for problem in problems):
        text.append(" ✗", style="bold red")
    return text
