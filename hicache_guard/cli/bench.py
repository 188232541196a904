"""``hicache-guard bench``: what the guard costs, each mode against the unguarded release."""

from __future__ import annotations

import json as json_module
import math
import subprocess
import sys
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from hicache_guard import checkouts, children
from hicache_guard.core.errors import ConfigError

app = typer.Typer(help="Measure what the guard costs.", no_args_is_help=True)

#: The most that observe and enforce may cost on the whole, as a ratio, from this batch on.
BUDGET, FROM_BATCH = 1.5, 64
#: The most that a match may cost in observe and enforce, as a ratio, for hits of so many tokens.
MATCH_BUDGET, FROM_HIT = 1.25, 8192
#: The most that a checked translation may cost, against a gather, from so many entries on; and what
#: it must use of a copy's bandwidth for very many. And the most that checked attention may cost.
TRANSLATE_BUDGET, FROM_ENTRIES = 1.1, 1 << 15
LEAST_BANDWIDTH, MANY_ENTRIES = 0.8, 1 << 20
DECODE_BUDGET = 1.03
#: The most memory that the guard may hold, in bytes a slot of either pool.
MEMORY_BUDGET = 16.0


@app.callback()
def main() -> None:
    """Measure what the guard costs."""


_Release = Annotated[str, typer.Option(help="The SGLang release to measure on.")]
_Rounds = Annotated[int, typer.Option(help="Paired rounds of each cell.", min=3)]
_AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.command()
def allocator(release: _Release = "0.5.23", rounds: _Rounds = 15, as_json: _AsJson = False) -> int:
    """Time of bare allocator calls, guarded against unguarded in one run; memory; host syncs.

    Exit status 0 where the whole cycle keeps the budget, else 1.
    """
    report = _measured("bench_allocator", release, rounds)
    heavy = [row for row in report["memory"] if row["bytes_per_slot"] > MEMORY_BUDGET]
    if as_json:
        print(json_module.dumps(report))
    else:
        _show_times(release, report, "cycle")
        _show_memory_and_syncs(report)
    return 1 if _over(report, "cycle") or heavy else 0


@app.command()
def scheduler(release: _Release = "0.5.23", rounds: _Rounds = 7, as_json: _AsJson = False) -> int:
    """Time of all that a scheduler does with its pools, guarded against unguarded in one run.

    Exit status 0 where the whole keeps the budget, else 1.
    """
    report = _measured("bench_scheduler", release, rounds)
    if as_json:
        print(json_module.dumps(report))
    else:
        _show_times(release, report, "all")
    return 1 if _over(report, "all") else 0


@app.command()
def match(
    release: _Release = "0.5.23",
    rounds: _Rounds = 15,
    quick: Annotated[bool, typer.Option("--quick", help="Few sizes, batches of 16.")] = False,
    as_json: _AsJson = False,
) -> int:
    """Time of prefix matches in every tree of the release, guarded against unguarded in one run.

    Exit status 0 where the bare match keeps the budget for every hit of 8192 tokens or more, else
    1; the match as the scheduler makes it and the insertion are shown beside it.
    """
    options = ["--suspect", str(MATCH_BUDGET), *(["--quick"] if quick else [])]
    report = _measured("bench_match", release, rounds, *options)
    if as_json:
        print(json_module.dumps(report))
    else:
        _show_matches(release, report)
    return 1 if over_match(report) else 0


@app.command()
def kernels(
    rounds: Annotated[int, typer.Option(help="Replays of each case.", min=3)] = 200,
    as_json: _AsJson = False,
) -> int:
    """Time of checked translation and attention on a GPU, against the same without a check.

    SGLang's own translation is beside it where SGLang can be imported. Exit status 0 where the
    budgets are kept, 1 where not, 2 without a GPU.
    """
    if not torch.cuda.is_available():
        raise ConfigError("bench kernels measures a GPU, and PyTorch sees none here")
    module = "hicache_guard.repro.bench_kernels"
    command = [sys.executable, "-P", "-m", module, "--rounds", str(rounds)]
    done = children.run(command, stdout=subprocess.PIPE)
    if done.returncode:
        raise ConfigError("the kernels were not measured; the error is above")
    report: dict[str, Any] = json_module.loads(done.stdout.splitlines()[-1])
    if as_json:
        print(json_module.dumps(report))
    else:
        _show_kernels(report)
    return 1 if over_kernels(report) else 0


def over_kernels(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a report on kernels that do not keep their budget."""
    return [row for row in report["times"] if row["ratio"] > _kernel_budget(row) or _slow(row)]


def _kernel_budget(row: dict[str, Any]) -> float:
    if row["what"] == "decode":
        return DECODE_BUDGET
    return TRANSLATE_BUDGET if row["entries"] >= FROM_ENTRIES else math.inf


def _slow(row: dict[str, Any]) -> bool:
    """Whether a translation of many entries uses too little of the bandwidth of a copy."""
    many = row["what"] == "translate" and row["entries"] >= MANY_ENTRIES
    return bool(many and row["bandwidth"] < LEAST_BANDWIDTH)


def _show_kernels(report: dict[str, Any]) -> None:
    table = Table(
        "what", "case", "checked", "unchecked", "ratio", "SGLang", "of a copy's bandwidth",
        title=f"Window kernels on {report['device']}",
    )  # fmt: skip
    for row in report["times"]:
        if row["what"] == "translate":
            case = f"{row['entries']:,} entries, page {row['page_size']}"
            sglang = f"{row['sglang_us']:.1f} µs" if row["sglang_us"] else "not importable"
            share = f"{row['bandwidth']:.0%}"
        else:
            cores = "tensor cores" if row["tensor_cores"] else "no tensor cores"
            case, sglang, share = f"{row['model']}, batch {row['batch']}, {cores}", "", ""
        ratio = ("[bold red]" if over_kernels({"times": [row]}) else "") + f"{row['ratio']:.2f}"
        ours, bare = f"{row['ours_us']:.1f} µs", f"{row['plain_us']:.1f} µs"
        table.add_row(row["what"], case, ours, bare, ratio, sglang, share)
    Console().print(table)
    if report["no decode"]:
        Console().print(f"decode was not measured: {report['no decode']}")


def _measured(benchmark: str, release: str, rounds: int, *options: str) -> dict[str, Any]:
    """What a benchmark reports, run in a process of its own on ``release``."""
    module = f"hicache_guard.repro.{benchmark}"
    done = children.run(
        [sys.executable, "-P", "-m", module, "--rounds", str(rounds), *options],
        env=checkouts.environment(checkouts.require(release)),
        stdout=subprocess.PIPE,
    )
    if done.returncode:
        raise ConfigError(f"the benchmark did not run on SGLang {release}; its error is above")
    report: dict[str, Any] = json_module.loads(done.stdout.splitlines()[-1])
    return report


def _is_bounded(row: dict[str, Any], whole: str) -> bool:
    """Whether the budget is for this row: the sum of all parts, at a batch worth the name."""
    return (
        row["what"] == whole
        and row["batch"] >= FROM_BATCH
        and row["mode"] in ("observe", "enforce")
    )


def _over(report: dict[str, Any], whole: str) -> bool:
    return any(_is_bounded(row, whole) and row["ratio"] > BUDGET for row in report["times"])


def _show_times(release: str, report: dict[str, Any], whole: str) -> None:
    operations = list(dict.fromkeys(row["what"] for row in report["times"]))
    table = Table(
        "page", "batch", "mode", *operations,
        title=f"SGLang {release} on {report['device']}: guarded / unguarded",
    )  # fmt: skip
    lines: dict[tuple[int, int, str], list[str]] = {}
    for row in report["times"]:
        text = f"{row['ratio']:.2f}"
        if row["what"] == whole:
            text += f" ({row['guarded_us']:.0f} µs)"
        if _is_bounded(row, whole):
            text = ("[bold red]" if row["ratio"] > BUDGET else "[green]") + text
        lines.setdefault((row["page_size"], row["batch"], row["mode"]), []).append(text)
    for (page_size, batch, mode), cells in lines.items():
        table.add_row(str(page_size), str(batch), mode, *cells)
    Console().print(table)


def over_match(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a report on matches that do not keep the budget."""
    return [row for row in report["times"] if _bounds_match(row) and row["ratio"] > MATCH_BUDGET]


def _bounds_match(row: dict[str, Any]) -> bool:
    """Whether the budget of matches is for this row: a bare match of a hit worth the name."""
    return bool(row["what"] == "match" and row["hit"] >= FROM_HIT)


def _show_matches(release: str, report: dict[str, Any]) -> None:
    """A table for each tree; in a cell the time of a match unguarded, and the ratio by mode."""
    device, rows = report["device"], report["times"]
    for tree in dict.fromkeys(row["tree"] for row in rows):
        table = Table(
            "page", "path", "hit", "cached", "batch", "match", "schedule", "insert",
            title=f"SGLang {release} on {device}, {tree} tree: unguarded; observe, enforce",
        )  # fmt: skip
        lines: dict[tuple[str, ...], dict[str, list[str]]] = {}
        for row in rows:
            if row["tree"] != tree:
                continue
            sizes = [f"{row[name]:,}" for name in ("hit", "cached", "batch")]
            cells = lines.setdefault((str(row["page_size"]), row["path"], *sizes), {})
            text = f"{row['ratio']:.2f}"
            if _bounds_match(row):
                text = ("[bold red]" if row["ratio"] > MATCH_BUDGET else "[green]") + text + "[/]"
            cells.setdefault(row["what"], [f"{row['unguarded_us']:.0f} µs"]).append(text)
        for line, cells in lines.items():
            found = (" ".join(cells.get(what, [])) for what in ("match", "schedule", "insert"))
            table.add_row(*line, *found)
        Console().print(table)


def _show_memory_and_syncs(report: dict[str, Any]) -> None:
    console = Console()
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
