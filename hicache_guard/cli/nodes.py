"""``hicache-guard nodes``: topologies, the commands and manifests made of them, and their check."""

from __future__ import annotations

import json as json_module
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hicache_guard import checkouts
from hicache_guard.cli import nodes_doctor, nodes_rehearse, nodes_repro
from hicache_guard.core.errors import ConfigError
from hicache_guard.nodes import commands, flags, kubernetes, slurm, tables, topology
from hicache_guard.nodes.topology import NotForThis, Topology

app = typer.Typer(help="Topologies of several nodes: look at them, check them, render them.")
app.add_typer(nodes_repro.app, name="repro")
app.command("rehearse")(nodes_rehearse.rehearse)
app.command("doctor")(nodes_doctor.doctor)

Name = Annotated[str, typer.Argument(help="A topology, or the path of one's own .toml.")]
ModelOption = Annotated[
    str | None, typer.Option(help="A model, or the path of a .toml. Default: the topology's own.")
]
ReleaseOption = Annotated[str, typer.Option(help="The SGLang release it is for.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
_NEWEST = checkouts.SUPPORTED[-1]
#: Forms, and what writes each.
FORMS: dict[str, Callable[[Topology], dict[str, str]]] = {
    "commands": commands.files,
    "slurm": slurm.files,
    "kubernetes": kubernetes.files,
    "json": lambda one: {"topology.json": json_module.dumps(one.as_data(), indent=1) + "\n"},
}


@app.command("list")
def list_them(as_json: JsonOption = False) -> None:
    """List topologies and models."""
    shapes = [tables.shape(name) for name in tables.shapes()]
    models = [tables.model(name) for name in tables.models()]
    if as_json:
        data = {
            "topologies": [
                {"name": one.name, "purpose": one.purpose, "model": one.model} for one in shapes
            ],
            "models": [
                {"name": one.name, "path": one.path, "source": one.source} for one in models
            ],
        }
        print(json_module.dumps(data))
        return
    table = Table("topology", "nodes", "what", "its own model", title="Topologies")
    for shape in shapes:
        nodes = sum(role.count * role.nodes for role in shape.roles)
        table.add_row(shape.name, f"{nodes} of {shape.gpus} GPUs", shape.purpose, shape.model)
    Console().print(table)
    table = Table("model", title="Models")
    for column in ("path", "GPUs of a server", "its flags are from"):
        table.add_column(column, overflow="fold")
    for model in models:
        table.add_row(model.name, model.path, f"{model.fewest} to {model.most}", model.source)
    Console().print(table)


@app.command()
def show(
    name: Name,
    model: ModelOption = None,
    release: ReleaseOption = _NEWEST,
    guard: Annotated[str | None, typer.Option(help="off, observe, enforce or strict.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the nodes of a topology: servers, ranks, ports."""
    one = topology.read(name, model, release, guard)
    if as_json:
        print(json_module.dumps(one.as_data()))
        return
    title = f"{one.name}: {one.model.path} on SGLang {one.release}, guard {one.guard.value}"
    table = Table(title=title)
    for column in ("node", "ranks", "GPUs", "parallel", "ports"):
        table.add_column(column, overflow="fold")
    for server in one.servers():
        for node in server.nodes:
            ranks = [rank for rank in server.ranks() if rank.node == node.index]
            ends = dict.fromkeys(rank.name[len(node.name) + 1 :] for rank in (ranks[0], ranks[-1]))
            table.add_row(
                node.name,
                " to ".join(ends),
                f"{server.gpus} of {one.shape.gpus}",
                _parallel(server),
                _ports(server),
            )
    router = one.router()
    if router is not None:
        ports = f"{router.port}, metrics {router.metrics}"
        table.add_row(f"router, on {router.node.name}", "", "", "", ports)
    Console().print(table)
    tier = one.shape.hicache
    if tier.tier != "none":
        Console().print(f"HiCache tier {tier.tier} on {', '.join(tier.roles)}", highlight=False)


def _parallel(server: topology.Server) -> str:
    words = [f"tp {server.tp}"]
    words += [f"pp {server.pp}"] if server.pp > 1 else []
    if server.dp > 1:
        words.append(f"{server.dp} attention groups" if server.dp_attention else f"dp {server.dp}")
    return ", ".join(words)


def _ports(server: topology.Server) -> str:
    words = [str(server.port)]
    words += [f"bootstrap {server.bootstrap}"] if server.bootstrap is not None else []
    words += [f"dist {server.dist}"] if server.dist is not None else []
    return ", ".join(words)


@app.command()
def render(
    name: Name,
    form: Annotated[str, typer.Option("--as", help=f"{', '.join(FORMS)}.")] = "commands",
    out: Annotated[
        Path | None,
        typer.Option(help="A new or empty folder. Without it: to be read, on the terminal."),
    ] = None,
    model: ModelOption = None,
    release: ReleaseOption = _NEWEST,
    guard: Annotated[str | None, typer.Option(help="off, observe, enforce or strict.")] = None,
    check: Annotated[
        bool, typer.Option(help="Ask the release and the router whether they take the flags.")
    ] = True,
) -> None:
    """Write a topology as commands for each node, a Slurm job, Kubernetes manifests, or JSON."""
    if form not in FORMS:
        raise ConfigError(f"--as {form}: choose one of {', '.join(FORMS)}")
    one = topology.read(name, model, release, guard)
    if check:
        flags.check(one)
    files = FORMS[form](one)
    if out is not None:
        _write(files, out)
        typer.echo(f"{out}: {', '.join(sorted(files))}", err=True)
    elif form == "commands":
        print(commands.text(one), end="")
    elif len(files) == 1:
        print(next(iter(files.values())), end="")
    else:
        raise ConfigError(f"--as {form} writes {len(files)} files: say where, with --out FOLDER")


def _write(files: dict[str, str], out: Path) -> None:
    """All files or none: written beside the folder, which is then put in its place."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"--out {out} is there and not an empty folder; choose another")
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}") from None
    try:
        fresh.chmod(0o755)
        for name, text in files.items():
            (fresh / name).write_text(text)
        fresh.replace(out.absolute())
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"--out {out}: {error.strerror}") from None
        raise


@app.command()
def check(
    name: Annotated[str | None, typer.Argument(help="A topology, or the path of a .toml.")] = None,
    everything: Annotated[
        bool,
        typer.Option("--all", help="Every topology with every model on every fetched release."),
    ] = False,
    model: ModelOption = None,
    release: Annotated[
        list[str] | None, typer.Option(help="A release; may be repeated. Default: those fetched.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Ask releases whether they take the flags of topologies. Exit status 1 where one does not."""
    if (name is None) != everything:
        raise ConfigError("name one topology, or give --all")
    names = tables.shapes() if name is None else [name]
    models = [model] if model else tables.models() if everything else [None]
    releases = release or [one for one in checkouts.SUPPORTED if checkouts.is_fetched(one)]
    if not releases:
        raise ConfigError("no release is on this machine; run `hicache-guard releases fetch`")
    asked: list[Topology] = []
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for shape in names:
        for which in models:
            for version in releases:
                try:
                    one = topology.read(shape, which, version)
                except NotForThis as reason:
                    rows.setdefault((shape, which or "its own"), {})[version] = f"- {reason}"
                    continue
                asked.append(one)
                rows.setdefault((one.name, one.model.name), {})[version] = ""
    refused = flags.refusals(asked)
    if as_json:
        data = [
            {"topology": key[0], "model": key[1], "release": version, "not_for_this": why[2:]}
            for key, row in rows.items()
            for version, why in row.items()
        ]
        print(json_module.dumps({"asked": data, "refused": [vars(one) for one in refused]}))
        return 1 if refused else 0
    console = Console(markup=False, highlight=False)
    bad = {(one.topology, one.model, one.release) for one in refused}
    table = Table("topology", "model", "taken by", "refused by", title="Flags")
    for (shape, which), row in rows.items():
        refusing = [version for version in row if (shape, which, version) in bad]
        taking = sum(not why for why in row.values()) - len(refusing)
        table.add_row(
            shape, which, f"{taking} of {len(row)}", Text(", ".join(refusing), "bold red")
        )
    console.print(table)
    for why_not in dict.fromkeys(why[2:] for row in rows.values() for why in row.values() if why):
        console.print(f"- {why_not}", style="dim")
    for refusal in refused:
        console.print(str(refusal), style="red")
    return 1 if refused else 0
