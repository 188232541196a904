"""``hicache-guard churn``: generated traffic at a node's scale on one machine, guarded and not.

The release runs in one process a mode, see ``repro/churn_scale``. Both serve the same traffic in
slices, and take turns or go side by side, so that they see the same machine. Every slice is a line
of a file the moment it is done: what a run that was ended early has measured is kept, and can be
shown by ``--show``.
"""

from __future__ import annotations

import json as json_module
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hicache_guard import checkouts, children
from hicache_guard.cli.releases import progress
from hicache_guard.core.errors import ConfigError
from hicache_guard.repro.churn_page import page
from hicache_guard.repro.churn_report import (
    Measured,
    faults,
    growth,
    growth_rows,
    part_rows,
    read,
    rows,
    summary,
)
from hicache_guard.repro.churn_scale import Scale

TREES = ("legacy", "unified", "unified-rust")
#: Requests of a slice, unless the run is too short for it.
SLICE = 2000


def churn(
    release: Annotated[str, typer.Option(help="The SGLang release to run.")] = "0.5.23",
    requests: Annotated[int, typer.Option(help="Requests that each mode serves.", min=1)] = 20_000,
    slots: Annotated[int, typer.Option(help="Slots of the full pool.", min=1)] = 1_000_000,
    page_size: Annotated[int, typer.Option(help="Slots of a page.", min=2)] = 64,
    window: Annotated[int, typer.Option(help="The model's window, in tokens.", min=1)] = 1024,
    longest: Annotated[int, typer.Option(help="Tokens of the longest request.", min=256)] = 4096,
    tree: Annotated[
        str, typer.Option(help="legacy, unified or unified-rust. Default: the release's newest.")
    ] = "",
    mode: Annotated[str, typer.Option(help="The guarded run: observe or enforce.")] = "enforce",
    host: Annotated[
        float, typer.Option(help="Host slots for each slot of the device; 0: no load-backs.", min=0)
    ] = 0.0,
    grow: Annotated[
        int, typer.Option(help="Requests of each run about growing cost; 0: none.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 7,
    together: Annotated[
        bool, typer.Option("--together", help="Both modes at the same time; needs two idle cores.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write each slice here as a line of JSON.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots here.")] = None,
    show: Annotated[
        Path | None, typer.Option(help="Run nothing; show what `--out` wrote, ended early or not.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> int:
    """Serve generated traffic at scale. Exit status 1 where the guarded run saw a fault, else 0."""
    if html is not None and (html.is_dir() or not html.parent.is_dir()):
        raise ConfigError(f"cannot write {str(html)!r}: it is a folder, or is in none")
    if show is not None:
        return _tell(read(show), html, as_json)
    if mode not in ("observe", "enforce"):
        raise ConfigError(f"unknown mode {mode!r}; choose observe or enforce")
    scale = Scale(tree, slots, page_size, window, longest, host)
    _check(scale)
    tree_of_release = checkouts.require(release)
    runs = [("main", scale, requests)]
    if grow:
        runs += [(name, each, grow) for name, each in growth(scale)]
    measured = Measured()
    with _writing(out) as file:
        for name, each, count in runs:
            head = {
                "kind": "run",
                "name": name,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "release": release,
                "requests": count,
                "mode": mode,
                "seed": seed,
                "together": together,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "scale": vars(each),
            }
            for line in _run(tree_of_release, head, each):
                measured.take(line)
                if file is not None:
                    file.write(json_module.dumps(line) + "\n")
                    file.flush()
    return _tell(measured, html, as_json)


def _check(scale: Scale) -> None:
    if scale.slots < scale.least:
        raise ConfigError(
            f"{scale.slots:,} slots are too few for requests of {scale.longest:,} tokens; "
            f"give --slots {scale.least} or more, or a shorter --longest"
        )
    if scale.tree and scale.tree not in TREES:
        raise ConfigError(f"unknown tree {scale.tree!r}; choose from {', '.join(TREES)}")
    if scale.host and scale.tree == "legacy":
        raise ConfigError("the legacy tree has no host tier here; leave --host or --tree out")


@contextmanager
def _writing(out: Path | None) -> Iterator[IO[str] | None]:
    if out is None:
        yield None
        return
    try:
        file = out.open("w")
    except OSError as error:
        raise ConfigError(f"cannot write {str(out)!r}: {error.strerror}") from None
    with file:
        yield file


class _Worker:
    """One mode in a process of its own; it serves as many requests as it is told, and answers."""

    def __init__(self, tree: Path, mode: str, scale: Scale, seed: int) -> None:
        command = [sys.executable, "-P", "-m", "hicache_guard.repro.churn_scale", "--mode", mode]
        for name, value in (("seed", seed), *vars(scale).items()):
            command += [f"--{name.replace('_', '-')}", str(value)]
        self.mode = mode
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, env=checkouts.environment(tree), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.errors, text=True, process_group=0,
        )  # fmt: skip

    def close(self) -> None:
        children.end(self._process)
        self.errors.close()

    def ask(self, count: int) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{count}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died; the answer says so

    def answer(self) -> dict[str, Any]:
        """What it measured, or how it died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line.endswith("\n"):
            return {"kind": "slice", **json_module.loads(line)}
        return {
            "kind": "died",
            "mode": self.mode,
            "status": self._process.wait(),
            "why": self.why(),
        }

    def why(self) -> str:
        """The last line that it wrote on stderr."""
        self.errors.seek(0)
        lines = self.errors.read().split("\n")
        return next((line for line in reversed(lines) if line.strip()), "no error was written")


def _run(tree: Path, head: dict[str, Any], scale: Scale) -> Iterator[dict[str, Any]]:
    """The lines of one run: its head, and a slice of each mode in turn."""
    modes, count = ("off", head["mode"]), head["requests"]
    with ExitStack() as stack, progress() as bar:
        task = bar.add_task(f"{head['name']}: starting SGLang {head['release']}", total=count)
        workers = [_Worker(tree, mode, scale, head["seed"]) for mode in modes]
        for worker in workers:
            stack.callback(worker.close)
        for worker in workers:
            ready = worker.answer()
            if ready["kind"] == "died":
                raise ConfigError(f"churn cannot start on SGLang {head['release']}: {ready['why']}")
            head["tree"] = ready["tree"]
        yield head
        served = 0
        while served < count and workers:
            size = min(SLICE, max(count // 20, 1), count - served)
            for line in _slice(workers, size, head["together"]):
                if line["kind"] == "died":
                    workers = [worker for worker in workers if worker.mode != line["mode"]]
                elif line["mode"] != "off":
                    wrong = sum(faults(line).values())
                    told = f"{head['name']}: {line['tree']:,} tokens cached, {wrong} faults"
                    bar.update(task, description=told)
                yield {**line, "asked": served + size}
            served += size
            bar.update(task, completed=served)


def _slice(workers: Sequence[_Worker], size: int, together: bool) -> Iterator[dict[str, Any]]:
    """One slice of every mode."""
    if together:
        for worker in workers:
            worker.ask(size)
        for worker in workers:
            yield worker.answer()
        return
    for worker in workers:
        worker.ask(size)
        yield worker.answer()


def _tell(measured: Measured, html: Path | None, as_json: bool) -> int:
    if html is not None:
        try:
            html.write_text(page(measured))
        except OSError as error:
            raise ConfigError(f"cannot write {str(html)!r}: {error.strerror}") from None
    run = measured.main
    if as_json:
        print(json_module.dumps(summary(measured)))
    else:
        _show(Console(), measured)
    mode = run.head["mode"]
    guarded = run.last(mode)
    died = any(death["mode"] == mode for death in run.died)
    return 1 if guarded is None or died or faults(guarded) else 0


def _show(console: Console, measured: Measured) -> None:
    run = measured.main
    head, scale = run.head, run.head["scale"]
    mode = head["mode"]
    title = (
        f"SGLang {head['release']}, {head['tree']} tree, {scale['slots']:,} slots in pages of "
        f"{scale['page_size']}, window {scale['window']:,}"
    )
    _print(console, title, ("", "guard off", mode), rows(run))
    _print(console, "CPU seconds", ("part", "guard off", mode, "ratio"), part_rows(run))
    if len(measured.runs) > 1:
        names = ("run", "guard off", mode, "ratio", "faults, guard off", f"faults, {mode}")
        _print(console, "CPU time of a request", names, growth_rows(measured))
    for death in run.died:
        console.print(f"[bold red]✗[/] {death['mode']}: its process ended: {death['why']}")


def _print(
    console: Console, title: str, names: Sequence[str], lines: Iterable[Sequence[str]]
) -> None:
    table = Table(*names, title=title)
    for line in lines:
        table.add_row(*line)
    console.print(table)
