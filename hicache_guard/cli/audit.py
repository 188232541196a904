"""``hicache-guard audit``: is what a server answers from its cache what it would answer without?"""

from __future__ import annotations

import json as json_module
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from hicache_guard import checkouts, children
from hicache_guard.audit import facts, summary
from hicache_guard.audit.audit import Auditor, Reference
from hicache_guard.audit.judge import Verdict
from hicache_guard.audit.page import page
from hicache_guard.audit.plan import Plan
from hicache_guard.audit.report import as_data, traced
from hicache_guard.audit.scenarios import SCENARIOS, Scenario, planned
from hicache_guard.audit.wire import Wire
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.matches import TRACE_VAR, read_trace
from hicache_guard.core.modes import Mode
from hicache_guard.embedded import faults, models, reference
from hicache_guard.embedded.server import (
    ATTENTION,
    DYING,
    SPECULATIVE,
    Server,
    ServerError,
    free_port,
    last_error,
)

#: Exit statuses: a fault was found; the audit could not be made, or not to its end.
FAULT, COULD_NOT = 1, 2
#: Tokens of a chunk of the embedded server: less than most prompts have.
CHUNK = 128
#: Host slots for each full slot: room for what drives old prefixes from the device, and for these.
HOST_RATIO = 3.0
#: Options that are none of a server that runs, or that is launched.
EMBEDDED = (
    "release", "checkout", "model", "page_size", "pool", "hicache", "storage", "attention",
    "speculative", "fault", "guard",
)  # fmt: skip
#: Instead of a key.
HIDDEN = "HIDDEN"
_SCENARIOS = {scenario.name: scenario for scenario in SCENARIOS}


def audit(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Option(help="A running server; its cache is not emptied.")
    ] = None,
    launch: Annotated[
        bool, typer.Option("--launch", help="Start `sglang.launch_server` with what follows `--`.")
    ] = False,
    release: Annotated[str, typer.Option(help="Embedded: the SGLang release.")] = "0.5.23",
    checkout: Annotated[
        Path | None, typer.Option(help="Embedded: a (patched) checkout instead of a release.")
    ] = None,
    model: Annotated[
        str, typer.Option(help=f"Embedded: {', '.join(models.MODELS)}.")
    ] = "alternating",
    page_size: Annotated[int, typer.Option(help="Embedded: tokens a page.", min=1)] = 16,
    pool: Annotated[int, typer.Option(help="Embedded: tokens of the full pool.", min=512)] = 1536,
    hicache: Annotated[
        str, typer.Option(help="Embedded: none, write_through or write_back.")
    ] = "none",
    storage: Annotated[
        bool, typer.Option("--storage", help="Embedded: files as a third tier, behind --hicache.")
    ] = False,
    attention: Annotated[str, typer.Option(help=f"Embedded: {', '.join(ATTENTION)}.")] = "triton",
    speculative: Annotated[
        str, typer.Option(help=f"Embedded: none, {' or '.join(SPECULATIVE)}.")
    ] = "none",
    fault: Annotated[
        str | None,
        typer.Option(
            help=f"Embedded: befalls the server, to be found. {', '.join(faults.FAULTS)}."
        ),
    ] = None,
    guard: Annotated[str, typer.Option(help="Embedded: off, observe, enforce or strict.")] = "off",
    only: Annotated[
        list[str] | None, typer.Option(help="Scenarios to play; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all prompts.")] = 0,
    api_key: Annotated[
        str | None, typer.Option(envvar="HICACHE_GUARD_API_KEY", help="Of the server.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for each answer.", min=0.1)] = 120.0,
    patience: Annotated[
        float, typer.Option(help="Seconds for a launched server to become ready.", min=1)
    ] = 1800.0,
    window: Annotated[
        int | None, typer.Option(help="The model's window, if its config is not here.", min=1)
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(help="Token ids to draw from, as --window.", min=facts.LEAST_VOCABULARY),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="With --url: what the server's guard traces to; may be repeated."),
    ] = None,
    flush: Annotated[
        bool, typer.Option("--flush", help="With --url: the server's cache may be emptied.")
    ] = False,
    shrink: Annotated[
        bool, typer.Option(help="Look for the smallest requests that show a fault.")
    ] = True,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    keep: Annotated[
        Path, typer.Option(help="Folder for programs that show a fault, and logs.")
    ] = Path("hicache-guard-audit"),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> int:
    """Compare what a server answers from its cache with what it answers cold.

    Without --url or --launch: a real server of a release, on this CPU, with a tiny model.
    Exit status 0 where all is well, 1 for a fault or missing hits, 2 where that cannot be said.
    """
    if url is not None and launch:
        raise ConfigError("--url and --launch exclude each other: choose one server")
    if context.args and not launch:
        raise ConfigError(
            f"unexpected {context.args[0]!r}; arguments of a server follow --launch --"
        )
    if url is not None or launch:
        for name in EMBEDDED:
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is of the embedded server, and another is audited")
    if html is not None and not html.absolute().parent.is_dir():
        raise ConfigError(f"--html {html}: there is no folder {html.absolute().parent}")
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {html}: a folder; give the name of a file")
    if keep.exists() and not keep.is_dir():
        raise ConfigError(f"--keep {keep}: not a folder")
    job = _Job(_chosen(only), seed, shrink, window, vocabulary, html, keep, as_json)
    if url is not None:
        wire = Wire(url, key=api_key, timeout=timeout)
        for file in trace or ():
            read_trace(file)  # or the whole audit would be for nothing
        return job.run(wire, may_flush=flush, traces=lambda: trace or [])
    if trace:
        raise ConfigError("--trace is for --url: what is started here traces into --keep")
    keep.mkdir(parents=True, exist_ok=True)
    ours = keep.absolute() / "hicache-guard-trace.jsonl"
    for old in keep.glob(ours.name + "*"):
        old.unlink()

    def traces() -> list[Path]:
        return [file for file in sorted(keep.glob(ours.name + "*")) if file.suffix != ".1"]

    if launch:
        with _launched(context.args, keep / "server.log", ours, patience, api_key) as found:
            wire = Wire(found.url, key=found.key, timeout=timeout)
            return job.run(wire, may_flush=True, ended=found.ended, traces=traces)
    mode = Mode.parse(guard)
    if hicache not in ("none", "write_through", "write_back"):
        raise ConfigError(f"--hicache {hicache}: choose none, write_through or write_back")
    if fault is not None and fault not in faults.FAULTS:
        raise ConfigError(f"--fault {fault}: choose one of {', '.join(faults.FAULTS)}")
    needs = faults.FAULTS[fault].needs if fault is not None else ()
    has = {
        "--hicache": hicache != "none",
        "--storage": storage,
        "--speculative": speculative != "none",
    }
    if any(not has.get(word, True) for word in needs):
        raise ConfigError(f"--fault {fault} befalls what is not there: add {' '.join(needs)}")
    if pool - 2 * page_size < facts.LEAST_CONTEXT:
        raise ConfigError(f"--page-size {page_size}: --pool {pool} has too few such pages")
    server = Server(
        checkouts.require(release) if checkout is None else _checkout(checkout),
        model,
        page_size=page_size,
        max_total_tokens=pool,
        chunked_prefill_size=-(-CHUNK // page_size) * page_size,
        hicache=None if hicache == "none" else hicache,
        hicache_ratio=HOST_RATIO,
        storage=storage,
        # A stock one reads full slots of the window pool, and dies beyond its end: C16.
        swa_ratio=1.0 if attention.endswith("stock") else None,
        attention=attention,
        speculative=None if speculative == "none" else speculative,
        guard=guard,
        # That it takes in more than it can hold, or it would never retract.
        arguments={"enable_streaming_session": True, "schedule_conservativeness": 0.1},
        environment=(faults.environment(fault) if fault else {})
        | ({TRACE_VAR: str(ours)} if mode is not Mode.OFF else {}),
        folder=keep / "server",
    )
    try:
        server.start()
    except ServerError as error:
        raise ConfigError(f"the server {str(error).splitlines()[0]}") from None
    with ExitStack() as stack:
        stack.callback(server.stop)

        def cold(prompt: Sequence[int], output: Sequence[int]) -> list[float]:
            rows = reference.logprobs(server.model, [*prompt, *output])[len(prompt) - 1 :]
            return [float(rows[place, token]) for place, token in enumerate(output)]

        wire = Wire(server.url, timeout=timeout)
        return job.run(wire, may_flush=True, cold=cold, ended=server.ended, traces=traces)


@dataclass(frozen=True)
class _Job:
    """What is to be audited of whichever server, and where the result goes."""

    chosen: Sequence[Scenario]
    seed: int
    shrink: bool
    window: int | None
    vocabulary: int | None
    html: Path | None
    keep: Path
    as_json: bool

    def run(
        self,
        wire: Wire,
        *,
        may_flush: bool,
        cold: Reference | None = None,
        ended: Callable[[], str] = lambda: "",
        traces: Callable[[], list[Path]] = list,
    ) -> int:
        """Audit a server that runs, and say what was found: the exit status.

        ``traces`` are, afterwards, those of its guard.
        """
        console = Console(stderr=self.as_json, highlight=False)
        known = facts.ask(wire, window=self.window, vocabulary=self.vocabulary)
        todo = planned(self.chosen, known, self.seed)
        plans = [plan for plan in todo.values() if isinstance(plan, Plan)]
        server = (
            f"{wire.url}: SGLang {known.version}, {known.architecture}, window {known.window}, "
            f"page {known.page}, pools of {known.full_pool:,} and {known.window_pool:,} tokens"
        )
        console.print(escape(server))
        console.print(
            f"{sum(1 for plan in plans for _ in plan.asks()):,} requests, "
            f"{sum(plan.prompt_tokens for plan in plans):,} tokens of prompts, and all again cold"
        )
        live = summary.Live(console)
        with live.progress:
            auditor = Auditor(wire, known, live, self.seed, may_flush, self.shrink, cold, ended)
            found = auditor.run(todo)
        data = as_data(found, _command(wire.url))
        if files := traces():
            data["trace"] = traced(files)
        if self.as_json:
            print(json_module.dumps(data), flush=True)
        else:
            summary.show(data, console)
        unwritten = self._write(data)
        for said in unwritten:
            print(f"hicache-guard: {said}", file=sys.stderr)
        if found.verdict.bad:
            return FAULT
        undecided = found.broken or unwritten or found.verdict is Verdict.NOT_TESTED
        return COULD_NOT if undecided else 0

    def _write(self, data: dict[str, Any]) -> list[str]:
        """The programs and the page; what could not be written."""
        small = [row["smallest"] for row in data["scenarios"] if row["smallest"] is not None]
        files = {self.keep / each["name"]: each["program"] for each in small}
        files |= {} if self.html is None else {self.html: page(data)}
        unwritten = []
        for file, text in files.items():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                unwritten.append(f"{file}: {error.strerror}")
        return unwritten


def _command(url: str) -> str:
    """How this was called, without what nobody else may read."""
    words = [*sys.argv[1:]]
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name.endswith("api-key"):
            words[place] = f"{name}={HIDDEN}" if value else name
        if name == "--url":
            words[place] = f"--url={url}" if value else name
        before = words[place - 1] if place else ""
        if before.endswith("api-key"):
            words[place] = HIDDEN
        if before == "--url":
            words[place] = url
    return shlex.join(["hicache-guard", *words])


def _chosen(only: list[str] | None) -> list[Scenario]:
    for name in only or ():
        if name not in _SCENARIOS:
            raise ConfigError(f"no scenario {name!r}; there are {', '.join(_SCENARIOS)}")
    return [scenario for scenario in SCENARIOS if not only or scenario.name in only]


def _checkout(folder: Path) -> Path:
    for place in (folder, folder / "python"):
        if (place / "sglang").is_dir():
            return place.absolute()
    raise ConfigError(f"--checkout {folder}: there is no sglang or python/sglang in it")


@contextmanager
def _launched(
    arguments: Sequence[str], log: Path, trace: Path, patience: float, key: str | None
) -> Iterator[_Launched]:
    """A server of this environment's SGLang, on loopback unless told otherwise; its log is kept.

    A guard in it writes a ``trace``, if the environment names none.
    """
    given = [argument.split("=")[0] for argument in arguments]
    arguments = list(arguments)
    if "--model-path" not in given and "--model" not in given:
        raise ConfigError("--launch: give the server's arguments after --, with --model-path")
    found = {name: _after(arguments, name) for name in ("--host", "--port", "--api-key")}
    port = found["--port"]
    if port is None:
        port = str(free_port())
        arguments += ["--port", port]
    host = found["--host"] or "127.0.0.1"
    if found["--host"] is None:
        arguments += ["--host", host]
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    wire = Wire(f"http://{host}:{port}", key=found["--api-key"] or key, timeout=10)
    command = [sys.executable, "-P", "-m", "sglang.launch_server", *arguments]
    with (
        log.open("ab") as out,
        children.started(
            command,
            env={TRACE_VAR: str(trace), **os.environ},
            stdout=out.fileno(),
            stderr=out.fileno(),
        ) as process,
    ):
        try:
            limit = time.monotonic() + patience
            while not wire.healthy():
                if process.poll() is not None:
                    raise ConfigError(
                        f"the server ended with status {process.returncode} before it answered, "
                        f"see {log}: {last_error(log) or 'no error is told'}"
                    )
                if time.monotonic() > limit:
                    raise ConfigError(f"the server was not ready after {patience:g} s; see {log}")
                time.sleep(1)
            yield _Launched(wire.url, found["--api-key"] or key, process, log)
        finally:
            children.end(process)


@dataclass(frozen=True)
class _Launched:
    """A server that was launched, and answers."""

    url: str
    key: str | None
    process: subprocess.Popen[str]
    log: Path

    def ended(self) -> str:
        """Why it runs no more, in one line; nothing while it does."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(DYING)
            status, said = self.process.returncode, last_error(self.log) or "no error is told"
            return f"the server ended with status {status}, see {self.log}: {said}"
        return ""


def _after(arguments: Sequence[str], name: str) -> str | None:
    """The value of an option."""
    for place, argument in enumerate(arguments):
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(name + "="):
            return argument.split("=", 1)[1]
    return None
