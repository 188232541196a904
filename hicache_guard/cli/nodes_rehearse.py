"""``hicache-guard nodes rehearse``: a topology on this machine, without a GPU."""

from __future__ import annotations

import json as json_module
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hicache_guard import checkouts
from hicache_guard.audit import summary
from hicache_guard.cli import nodes_doctor
from hicache_guard.core.errors import ConfigError
from hicache_guard.embedded import models
from hicache_guard.nodes import topology
from hicache_guard.nodes.ranks import Found
from hicache_guard.nodes.rehearsal import CASES, NotReadyError, Outcome, Rehearsal, Traffic
from hicache_guard.nodes.rehearsed import Missing

#: Exit statuses: a fault was found; the rehearsal could not be made, or not to its end.
FAULT, COULD_NOT = 1, 2
_STYLES = {"healthy": "bold green", "fault": "bold red"}
_VERSION = re.compile(r"^__version__\b.*=\s*['\"]([^'\"+]+)", re.MULTILINE)


def rehearse(
    name: Annotated[str, typer.Argument(help="A topology, or the path of one's own .toml.")],
    release: Annotated[
        str, typer.Option(help="The SGLang release to run, or that a checkout is of.")
    ] = checkouts.SUPPORTED[-1],
    checkout: Annotated[
        Path | None, typer.Option(help="A (patched) checkout instead of a release.")
    ] = None,
    model: Annotated[str, typer.Option(help=f"{', '.join(models.MODELS)}.")] = "alternating",
    guard: Annotated[
        str | None, typer.Option(help="off, observe, enforce or strict. Default: the topology's.")
    ] = None,
    case: Annotated[
        str, typer.Option(help="25805: requests are left; 25889: load-backs as well; or none.")
    ] = "none",
    requests: Annotated[int, typer.Option(help="How many.", min=0)] = 200,
    prompt: Annotated[int, typer.Option(help="Most tokens of a prompt.", min=1)] = 200,
    output: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 8,
    check: Annotated[int, typer.Option(help="Answers to read again, cold.", min=0)] = 32,
    concurrency: Annotated[int, typer.Option(help="Most requests under way.", min=1)] = 16,
    seed: Annotated[int, typer.Option(help="Of all prompts.")] = 0,
    hung: Annotated[
        float, typer.Option(help="Seconds of silence after which a process hangs.", min=1)
    ] = 20.0,
    timeout: Annotated[float, typer.Option(help="Seconds for each answer.", min=1)] = 60.0,
    out: Annotated[
        Path | None, typer.Option(help="A new or empty folder for all that is kept.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> int:
    """Start the servers and the router of a topology here, compare ranks, and send requests.

    The servers are real SGLang with a tiny model, one rank each; what that leaves out is told.
    Exit status 0 where all is well, 1 for a fault or a process that died or hangs, 2 where that
    cannot be said.
    """
    if case not in CASES:
        raise ConfigError(f"--case {case}: choose one of {', '.join(CASES)}")
    tree = checkouts.require(release) if checkout is None else _checkout(checkout)
    version = _version(tree) or release
    one = topology.read(name, None, version, guard)
    folder = out or Path(tempfile.mkdtemp(prefix=f"hicache-guard-{one.name}-"))
    console = Console(stderr=as_json, highlight=False)
    live = summary.Live(console)
    traffic = Traffic(
        case=case,
        requests=requests,
        prompt=(1, prompt),
        output=(1, output),
        check=check,
        concurrency=concurrency,
        timeout=timeout,
        seed=seed,
    )

    def say(text: str) -> None:
        live.begins(text, 0)
        console.print(text, style="dim", markup=False)

    outcome, ranks, why = Outcome(), list[Found](), ""
    with Rehearsal(one, tree, folder, model=model, hung_after=hung, say=say) as rehearsal:
        rehearsal.runs(traffic)
        missing = rehearsal.rehearsed.missing
        if not as_json:
            show_missing(missing, console)
        try:
            with live.progress:
                rehearsal.start()
                ranks = rehearsal.check()
                if ranks:
                    nodes_doctor.show(ranks, console)
                outcome = rehearsal.play(traffic, live)
        except NotReadyError as error:
            why = str(error)
        data = rehearsal.write(outcome, why, ranks)
    if as_json:
        print(json_module.dumps(data))
    else:
        show(data, folder, console)
    for each in outcome.unwritten:
        Console(stderr=True, highlight=False).print(f"not written: {escape(each)}")
    if data["verdict"] == "fault":
        return FAULT
    return 0 if data["verdict"] == "healthy" and not outcome.unwritten else COULD_NOT


def show_missing(missing: Sequence[Missing], console: Console) -> None:
    """What is not rehearsed: one row a reason."""
    rows: dict[str, dict[str, list[str]]] = {}
    for one in missing:
        rows.setdefault(one.why, {}).setdefault(one.what, []).append(one.where)
    table = Table("of the topology", "why not here", title="Not rehearsed")
    for why, found in rows.items():
        all_of_it = [f"{what} ({', '.join(where)})" for what, where in found.items()]
        table.add_row(escape("; ".join(all_of_it)), escape(why))
    console.print(table)


def show(data: dict[str, Any], out: Path, console: Console) -> None:
    """The table of runs, and the verdict in sentences."""
    if data["runs"]:
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("run", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for column in ("planned", "over", "hits", "max |Δ|", "seconds"):
            table.add_column(column, justify="right", no_wrap=True)
        for name, run in data["runs"].items():
            judged = [row["largest"] for row in run.get("judged", ())]
            counts = {key: n for key, n in run["counts"].items() if key != "refused"}
            counts.pop("asked again", None)
            table.add_row(
                name, f"[{_STYLES.get(run['verdict'], 'bold magenta')}]{run['verdict']}[/]",
                f"{run.get('planned', 0):,}", f"{sum(counts.values()):,}",
                f"{run.get('hits', 0):,}", f"{max(judged, default=0):.1e}",
                f"{run.get('seconds', 0):.0f}",
            )  # fmt: skip
        console.print(table)
    style = _STYLES.get(data["verdict"], "bold magenta")
    console.print(f"[{style}]{data['verdict']}[/]:")
    if data["culprit"] is not None:
        console.print(f"  {data['culprit']['name']} {data['culprit']['what']}", markup=False)
    if data["why"]:
        console.print(f"  {data['why']}", markup=False)
    for name, run in data["runs"].items():
        for each in run["why"]:
            console.print(f"  {name}: {each}", markup=False)
    console.print(f"{out}: rehearsal.json, logs, ranks, traces, a journal of each run")


def _checkout(folder: Path) -> Path:
    for place in (folder, folder / "python"):
        if (place / "sglang").is_dir():
            return place.absolute()
    raise ConfigError(f"--checkout {folder}: there is no sglang or python/sglang in it")


def _version(tree: Path) -> str:
    """What a tree tells; a checkout of git tells nothing before it is built."""
    file = tree / "sglang" / "_version.py"
    found = _VERSION.search(file.read_text(errors="replace")) if file.is_file() else None
    return "" if found is None else found[1]
