"""``hicache-guard embedded``: a real SGLang server on a CPU, and what is replaced in it."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hicache_guard import children
from hicache_guard.core.errors import ConfigError
from hicache_guard.embedded import replacements

#: What an Engine is to be given, for a program that makes one.
ARGUMENTS_VAR = "HICACHE_EMBEDDED_ARGUMENTS"

app = typer.Typer(
    help="Run a real SGLang server on this CPU, with a tiny hybrid model.", no_args_is_help=True
)


@app.callback()
def main() -> None:
    """Run a real SGLang server on this CPU, with a tiny hybrid model."""


@app.command()
def explain(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """List everything that is replaced in the server's processes, and why."""
    rows = [(row.name, row.what, row.why, row.when) for row in replacements.TABLE]
    columns = ("name", "what", "why", "when")
    if as_json:
        print(json_module.dumps([dict(zip(columns, row, strict=True)) for row in rows]))
        return
    table = Table(title="Replaced in an embedded server; all else is the release's own")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
        table.add_section()
    Console().print(table)


def _argument(spelled: str) -> tuple[str, Any]:
    name, separator, value = spelled.partition("=")
    try:
        if separator:
            return name.replace("-", "_"), json_module.loads(value)
    except ValueError:
        pass
    raise ConfigError(f"{spelled!r} is not NAME=VALUE with a value in JSON")


@app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run_it(
    context: typer.Context,
    program: Annotated[Path, typer.Argument(help="A Python program; what follows goes to it.")],
    release: Annotated[
        str, typer.Option(help="A fetched release, or a folder with sglang/ in it.")
    ] = "0.5.23",
    model: Annotated[
        str, typer.Option(help="alternating, mimo, gemma, or a model's folder.")
    ] = "alternating",
    page_size: Annotated[int, typer.Option(min=1)] = 1,
    guard: Annotated[str, typer.Option(help="off, observe, enforce or strict.")] = "off",
    folder: Annotated[Path | None, typer.Option(help="Where the model goes.")] = None,
) -> int:
    """Run a program in which the release's own `sglang.Engine` works on this CPU.

    Options come before the program. What Engine is to be given is JSON in
    $HICACHE_EMBEDDED_ARGUMENTS: `sglang.Engine(**json.loads(os.environ[...]))`.
    """
    from hicache_guard.embedded.server import Server

    if not program.is_file():
        raise ConfigError(f"there is no program {program}")
    like = Server(
        Path(release) if Path(release).is_dir() else release,
        Path(model) if Path(model).is_dir() else model,
        page_size=page_size,
        guard=guard,
        folder=folder,
    )
    command = [sys.executable, str(program), *context.args]
    arguments = {ARGUMENTS_VAR: json_module.dumps(like.arguments)}
    return children.run(command, env=like.environment | arguments).returncode


@app.command()
def serve(
    release: Annotated[
        str, typer.Option(help="A fetched release, or a folder with sglang/ in it.")
    ] = "0.5.23",
    model: Annotated[
        str, typer.Option(help="alternating, mimo, gemma, or a model's folder.")
    ] = "alternating",
    page_size: Annotated[int, typer.Option(min=1)] = 1,
    max_total_tokens: Annotated[int, typer.Option(min=1, help="Slots of the full pool.")] = 4096,
    swa_ratio: Annotated[
        float | None, typer.Option(help="Window slots for each full slot.")
    ] = None,
    chunked_prefill_size: Annotated[int, typer.Option(min=1)] = 256,
    hicache: Annotated[str | None, typer.Option(help="write_through or write_back.")] = None,
    hicache_ratio: Annotated[float, typer.Option(help="Host slots for each full slot.")] = 2.0,
    storage: Annotated[
        bool, typer.Option("--storage", help="Files as a third tier, behind --hicache.")
    ] = False,
    attention: Annotated[str, typer.Option(help=", ".join(replacements.ATTENTION))] = "triton",
    tree: Annotated[str, typer.Option(help="default or unified.")] = "default",
    speculative: Annotated[
        str | None, typer.Option(help="ngram, or (with pages of one token) ngram-tree.")
    ] = None,
    overlap: Annotated[
        bool, typer.Option(help="Whether the scheduler overlaps with passes.")
    ] = True,
    guard: Annotated[str, typer.Option(help="off, observe, enforce or strict.")] = "off",
    argument: Annotated[
        list[str] | None, typer.Option(help="One more of ServerArgs: NAME=JSON.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the model and the log go.")] = None,
) -> None:
    """Start a server, print its URL, and run it until Ctrl-C."""
    from hicache_guard.embedded.server import Server, ServerError

    server = Server(
        Path(release) if Path(release).is_dir() else release,
        Path(model) if Path(model).is_dir() else model,
        page_size=page_size,
        max_total_tokens=max_total_tokens,
        swa_ratio=swa_ratio,
        chunked_prefill_size=chunked_prefill_size,
        hicache=hicache,
        storage=storage,
        hicache_ratio=hicache_ratio,
        attention=attention,
        tree=tree,
        speculative=speculative,
        overlap=overlap,
        guard=guard,
        arguments=dict(_argument(one) for one in argument or []),
        folder=folder,
    )
    try:
        with server:
            print(server.url, flush=True)
            print(f"log: {server.log}", flush=True)
            server.wait()
    except ServerError as error:
        raise ConfigError(f"the server {str(error).splitlines()[0]}") from None
