"""``hicache-guard nodes repro``: the two faults that the project starts from, on real servers."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache_guard.audit import summary
from hicache_guard.audit.audit import Result
from hicache_guard.audit.facts import Facts
from hicache_guard.audit.judge import Verdict
from hicache_guard.core.errors import ConfigError
from hicache_guard.nodes import workloads
from hicache_guard.nodes.findings import LogFile
from hicache_guard.nodes.repro import Options, Run, Workload

#: Exit statuses: something broke; the run could not be made, or not to its end.
FAULT, COULD_NOT = 1, 2
_STYLES = {"healthy": "bold green", "fault": "bold red"}

app = typer.Typer(
    help="Reproduce #25805 or #25889 on servers that run, and say what broke first, and where.",
    no_args_is_help=True,
)

Url = Annotated[
    list[str], typer.Option("--url", help="A server or router to ask; may be repeated, in turns.")
]
Out = Annotated[Path, typer.Option(help="Folder of the journal, the results and the report.")]
Watch = Annotated[
    list[str] | None,
    typer.Option(help="A server to look at only, as one behind a router; may be repeated."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out, if there is one.")
]
Concurrency = Annotated[int, typer.Option(help="Most requests under way.", min=1)]
Timeout = Annotated[float, typer.Option(help="Seconds for an answer, then it is lost.", min=0.1)]
Patience = Annotated[
    float, typer.Option(help="Seconds in which a server may refuse everything.", min=0.1)
]
InARow = Annotated[
    int, typer.Option("--lost", help="So many lost in a row by one server end the run.", min=1)
]
ProbeOption = Annotated[float, typer.Option("--probe", help="Seconds between probes.", min=0.1)]
Key = Annotated[str | None, typer.Option(envvar="HICACHE_GUARD_API_KEY", help="Of the servers.")]
Log = Annotated[
    list[str] | None, typer.Option("--log", help="NAME=FILE: a server's log; may be repeated.")
]
Trace = Annotated[
    list[Path] | None, typer.Option("--trace", help="A guard's trace; may be repeated.")
]
Window = Annotated[
    int | None, typer.Option(help="The model's window, if its config is not here.", min=1)
]
Vocabulary = Annotated[
    int | None, typer.Option(help="Token ids to draw from, as --window.", min=100)
]
Seed = Annotated[int, typer.Option(help="Of all prompts.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@app.callback()
def main() -> None:
    """Reproduce #25805 or #25889 on servers that run."""


@app.command("25805")
def recycling(
    url: Url,
    out: Out,
    requests: Annotated[int, typer.Option(help="How many.", min=1)] = 10_240,
    prompt: Annotated[
        str | None, typer.Option(help="MIN:MAX tokens. Default: up to four windows.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="MIN:MAX tokens. Default: up to two windows.")
    ] = None,
    abort: Annotated[float, typer.Option(help="Part that is aborted.", min=0, max=1)] = 0.05,
    disconnect: Annotated[float, typer.Option(help="Part that hangs up.", min=0, max=1)] = 0.05,
    share: Annotated[float, typer.Option(help="Part that shares a prefix.", min=0, max=1)] = 0.5,
    check: Annotated[int, typer.Option(help="Answers to read again, cold.", min=0)] = 64,
    watch: Watch = None,
    resume: Resume = False,
    concurrency: Concurrency = 64,
    timeout: Timeout = 120.0,
    patience: Patience = 30.0,
    lost: InARow = 8,
    probe: ProbeOption = 5.0,
    seed: Seed = 0,
    api_key: Key = None,
    log: Log = None,
    trace: Trace = None,
    window: Window = None,
    vocabulary: Vocabulary = None,
    as_json: Json = False,
) -> int:
    """Requests of all lengths, some aborted or left, so that pages are recycled all the time.

    Exit status 0 where all is well, 1 for a fault, 2 where that cannot be said.
    """
    lengths = _lengths("--prompt", prompt), _lengths("--output", output)

    def workload(facts: Facts) -> Workload:
        return workloads.recycling(
            facts, seed, requests, *lengths, abort=abort, disconnect=disconnect, share=share,
            check=check,
        )  # fmt: skip

    options = _options(
        url, out, watch, resume, concurrency, timeout, patience, lost, probe, api_key, log, trace,
        window, vocabulary,
    )  # fmt: skip
    return _run(options, workload, as_json)


@app.command("25889")
def cycles(
    url: Url,
    out: Out,
    count: Annotated[int, typer.Option("--cycles", help="How many.", min=1)] = 10,
    watch: Watch = None,
    resume: Resume = False,
    timeout: Timeout = 120.0,
    patience: Patience = 30.0,
    lost: InARow = 8,
    probe: ProbeOption = 5.0,
    seed: Seed = 0,
    api_key: Key = None,
    log: Log = None,
    trace: Trace = None,
    window: Window = None,
    vocabulary: Vocabulary = None,
    as_json: Json = False,
) -> int:
    """Write prompts, evict them, load them back from the host, go on; each answer against cold.

    Exit status 0 where all is well, 1 for a fault or missing hits, 2 where that cannot be said.
    """
    if len(url) > 1:
        raise ConfigError("25889 needs one --url: what one server cached another does not have")
    options = _options(
        url, out, watch, resume, 2, timeout, patience, lost, probe, api_key, log, trace, window,
        vocabulary,
    )  # fmt: skip
    return _run(options, lambda facts: workloads.cycles(facts, seed, count), as_json)


def _lengths(name: str, spelled: str | None) -> tuple[int, int] | None:
    if spelled is None:
        return None
    least, _, most = spelled.partition(":")
    if not (least.isascii() and least.isdigit() and most.isascii() and most.isdigit()):
        raise ConfigError(f"{name} {spelled}: it should be MIN:MAX, in tokens")
    if not 1 <= int(least) <= int(most):
        raise ConfigError(f"{name} {spelled}: the first should be from 1 to the second")
    return int(least), int(most)


def _options(
    urls: list[str],
    out: Path,
    watch: list[str] | None,
    resume: bool,
    concurrency: int,
    timeout: float,
    patience: float,
    lost: int,
    probe: float,
    key: str | None,
    logs: list[str] | None,
    traces: list[Path] | None,
    window: int | None,
    vocabulary: int | None,
) -> Options:
    for name, given in (("--url", urls), ("--watch", watch or [])):
        for url in given:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{name} {url}: it should begin with http:// or https://")
    return Options(
        [url.rstrip("/") for url in dict.fromkeys(urls)], out, watch or [], resume, concurrency,
        timeout, patience, lost, probe, key, [LogFile.parse(each) for each in logs or []],
        traces or [], window, vocabulary,
    )  # fmt: skip


def _run(options: Options, workload: Callable[[Facts], Workload], as_json: bool) -> int:
    console = Console(stderr=as_json, highlight=False)
    live = _Live(console)
    run = Run(options, workload, live)
    try:
        console.print(
            f"{run.wires[0].url}: SGLang {run.facts.version}, {run.facts.architecture}, window "
            f"{run.facts.window}, page {run.facts.page}, speculation {run.facts.speculative}, "
            f"disaggregation {run.facts.disaggregation}, host tier {run.facts.hierarchical}"
        )
        with live.progress:
            run.play()
        data = run.data()
        unwritten = run.write(data)
        if as_json:
            print(json_module.dumps(data | {"unwritten": unwritten}))
        else:
            _show(data, options.out, console)
    finally:
        run.end()
    for each in unwritten:
        Console(stderr=True, highlight=False).print(f"not written: {escape(each)}")
    if data["verdict"] == "fault":
        return FAULT
    return 0 if data["verdict"] == "healthy" and not unwritten else COULD_NOT


class _Live(summary.Live):
    """As an audit's, but of its results only what is about the servers."""

    def ends(self, result: Result) -> None:
        if result.plan is not None:
            super().ends(result)


def _show(data: dict[str, Any], out: Path, console: Console) -> None:
    if data["judged"]:
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("answers", "verdict"):
            table.add_column(name, no_wrap=True)
        for name in ("requests", "due", "hits", "cached", "max |Δ|"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in data["judged"]:
            style = summary.STYLES[Verdict(row["verdict"])]
            numbers = (row["requests"], row["due"], row["hits"], f"{row['cached_tokens']:,}")
            table.add_row(
                row["name"], f"[{style}]{row['verdict']}[/]", *map(str, numbers),
                f"{row['largest']:.1e}",
            )  # fmt: skip
        console.print(table)
    counts = ", ".join(f"{count:,} {name}" for name, count in data["counts"].items() if count)
    console.print(
        f"{data['planned']:,} requests: {counts or 'none asked'}; {data['hits']:,} hits, "
        f"{data['cached_tokens']:,} of {data['prompt_tokens']:,} prompt tokens cached; "
        f"{data['seconds']:.0f} s"
    )
    first = data["first"]
    if first is not None:
        where = [first["source"]]
        where += [f"rank {first['rank']}"] if first["rank"] else []
        where += [first["url"]] if first.get("url") else []
        what = first["kind"] if first["n"] is None else f"{first['kind']}, request {first['n']}"
        console.print(
            f"[bold red]first:[/] after {first['after']:,} answered requests: {what} "
            f"({', '.join(map(escape, where))}): {escape(first['text'])}"
        )
    if data["probes_missed"]:
        console.print(f"health was not answered {data['probes_missed']} times, for a while")
    for each in data["unmerged"]:
        console.print(f"not read: {escape(each)}")
    console.print(f"[{_STYLES.get(data['verdict'], 'bold magenta')}]{data['verdict']}[/]:")
    for each in data["why"]:
        console.print(f"  {escape(each)}")
    console.print(f"{out}: journal.jsonl, results.jsonl, merged.jsonl, report.html")
