"""A rehearsal: the servers and the router of a topology on this machine, and requests to them.

The processes are the release's own (``embedded``) and SGLang's own router; what of the topology is
not there, ``rehearsed`` says. Before any request is sent every rank is compared with the topology
(``ranks``), and one that is unguarded, or of another release, ends the rehearsal. While requests
are sent (``repro``) each process is watched: who died or hangs is asked of the processes, and not
of the router, which names whom it likes. All goes with the block, whichever way that ends.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests

from hicache_guard import children
from hicache_guard.audit.audit import Watcher
from hicache_guard.audit.facts import Facts
from hicache_guard.audit.wire import WireError
from hicache_guard.core.errors import ConfigError, GuardError
from hicache_guard.embedded import models
from hicache_guard.embedded.server import HICACHE, Server, ServerError, last_error
from hicache_guard.nodes import commands, ranks, workloads
from hicache_guard.nodes.findings import LogFile
from hicache_guard.nodes.ranks import Found
from hicache_guard.nodes.rehearsed import Rehearsed, cut
from hicache_guard.nodes.repro import Options, Run, Workload
from hicache_guard.nodes.topology import ANYWHERE, RUN, Router, Topology, placed

#: The router that rehearsals were made with; what it needs is here already.
ROUTER = "0.3.2"
INSTALL = f"{sys.executable} -m pip install --no-deps sglang-router=={ROUTER}"
LOOPBACK = "127.0.0.1"
#: Cases beside plain requests; see ``workloads``.
CASES = ("25805", "25889", "none")
#: Seconds between two looks at a process, and that a router has to find its servers.
EVERY, ROUTER_PATIENCE = 1.0, 60.0
#: Seconds within which SGLang itself gives up on a peer of prefill or decode, or on an answer.
SGLANG = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "20",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "20",
    "SGLANG_HEALTH_CHECK_TIMEOUT": "10",
}
#: Seconds between the client's own looks. Not 5, at which SGLang closes a connection that is idle.
PROBE_EVERY = 2.0
#: Seconds for a server to make one token, after requests were lost and all seem well.
PROBE = 30.0
#: The name of the router among those that are watched.
_ROUTER = ""


class NotReadyError(GuardError):
    """The servers are not what the topology says; nothing was sent."""


@dataclass(frozen=True)
class Traffic:
    """What is asked: ``requests`` of up to so many tokens, and a case.

    ``check`` of the answers are read again cold; ``concurrency`` is the most under way.
    """

    case: str = "none"
    requests: int = 200
    prompt: tuple[int, int] = (1, 200)
    output: tuple[int, int] = (1, 8)
    check: int = 32
    cycles: int = 1
    concurrency: int = 16
    timeout: float = 60.0
    seed: int = 0


@dataclass(frozen=True)
class Culprit:
    """A process that went wrong: its name, and what it did."""

    name: str
    what: str

    def __str__(self) -> str:
        return f"{self.name} {self.what}"


@dataclass
class Outcome:
    """What came of the requests: the data of each run, and the process that ended them."""

    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    culprit: Culprit | None = None
    unwritten: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """``healthy``, ``fault``, or why that cannot be said: the worst of the runs."""
        found = {str(data["verdict"]) for data in self.runs.values()}
        if self.culprit or "fault" in found:
            return "fault"
        return next(iter(found - {"healthy"}), "healthy")


class Rehearsal:
    """The processes of a topology; ``start`` them, ``check`` the ranks, ``play`` requests."""

    def __init__(
        self,
        topology: Topology,
        tree: Path,
        out: Path,
        *,
        model: str = "alternating",
        tokens: int = 4096,
        patience: float = 180.0,
        hung_after: float = 20.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``tree`` holds ``sglang``, ``out`` is a new or empty folder; times are in seconds.

        ``tokens`` are those of a full pool. Raises ConfigError for what is missing here.
        """
        if topology.router() is not None:
            require_router()
        if model not in models.MODELS:
            raise ConfigError(f"no model {model!r}; choose one of {', '.join(models.MODELS)}")
        try:
            out.mkdir(parents=True, exist_ok=True)
            if any(out.iterdir()):
                raise ConfigError(f"--out {out} is not empty; choose another folder")
            models.write(model, out / "model")
            (out / "trace").mkdir()
        except OSError as error:
            raise ConfigError(f"--out {out}: {error.strerror}") from None
        self.out, self.say = out.absolute(), say
        self.rehearsed: Rehearsed = cut(topology, model, self.out / "model")
        self.topology = self.rehearsed.topology
        self.hung_after = hung_after
        hosts = [
            server.name
            for server in self.topology.servers()
            if server.flags.get("enable-hierarchical-cache")
        ]
        self.servers = {
            server.name: Server(
                tree,
                self.out / "model",
                max_total_tokens=tokens,
                hicache=HICACHE[0] if server.name in hosts else None,
                storage=server.name in hosts and self.topology.shape.hicache.tier == "l3",
                role=None if server.role == "plain" else server.role,
                port=server.port,
                bootstrap=server.bootstrap,
                arguments={name.replace("-", "_"): flag for name, flag in server.flags.items()},
                environment=SGLANG | self._environment(server.name),
                folder=self.out / "servers" / server.name,
                patience=patience,
            )
            for server in self.topology.servers()
        }
        self.router: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()
        data = self.topology.as_data() | {"stands_for": topology.as_data()}
        (self.out / "topology.json").write_text(json.dumps(data, indent=1) + "\n")

    def _environment(self, name: str) -> dict[str, str]:
        node = next(node for node in self.topology.nodes() if node.server == name)
        variables = self.topology.environment(node)
        return {key: value.replace(RUN, str(self.out)) for key, value in variables.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    # -- before requests -------------------------------------------------------------------------

    def start(self) -> None:
        """Start all servers, then the router. Raises NotReadyError with the name of the first that
        does not come up."""
        for name, server in self.servers.items():
            self.say(f"starting {self._of(name)}")
            try:
                self._stack.enter_context(server)
            except ServerError as error:
                raise NotReadyError(f"{self._of(name)} {str(error).splitlines()[0]}") from None
        router = self.topology.router()
        if router is not None:
            self.say("starting the router")
            self._start_router(router)

    def _of(self, name: str) -> str:
        return f"{self.topology.name}/{name}"

    def _start_router(self, router: Router) -> None:
        words = router.arguments(self.topology.servers())
        words = placed(words, lambda node: LOOPBACK, self.topology.nodes())
        words = [LOOPBACK if word == ANYWHERE else word for word in words]
        command = [sys.executable, "-P", "-m", "hicache_guard.nodes.tied", commands.ROUTER, *words]
        with self.log_of_router.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0
            )
        self.router = process
        self._stack.callback(_end, process)
        limit = time.monotonic() + ROUTER_PATIENCE
        while not _answers(f"{self.url}/readiness", 5.0):
            if process.poll() is not None or time.monotonic() > limit:
                how = f"ended with status {process.poll()}"
                if process.poll() is None:
                    how = f"finds its servers not ready after {ROUTER_PATIENCE:.0f} s"
                raise NotReadyError(f"the router {how}, see {self.log_of_router}")
            time.sleep(0.1)

    @property
    def log_of_router(self) -> Path:
        return self.out / "router.log"

    @property
    def url(self) -> str:
        """Whom to ask: the router, or the only server."""
        router = self.topology.router()
        if router is None:
            return next(iter(self.servers.values())).url
        return f"http://{LOOPBACK}:{router.port}"

    def check(self) -> list[Found]:
        """Every rank; none of a run without a guard. Raises NotReadyError with the name of one that
        is wrong."""
        if not ranks.guarded(self.out):
            return []
        self.say("comparing ranks with the topology")
        found = ranks.compare(self.out)
        for rank in found:
            if rank.wrong:
                raise NotReadyError(f"{rank.name}: {rank.wrong}")
        return found

    # -- requests --------------------------------------------------------------------------------

    def play(self, traffic: Traffic, watcher: Watcher, name: str = "requests") -> Outcome:
        """Send requests and watch all processes; files of each run lie in a folder of its own.

        ``name`` is the first run's. A run that a process ends is the last.
        """
        outcome = Outcome()
        for title, urls, workload in self.runs(traffic, name):
            self.say(f"{title}: {', '.join(urls)}")
            self._play(title, urls, workload, traffic, watcher, outcome)
            if outcome.culprit or outcome.runs[title]["verdict"] == "not finished":
                return outcome
        self.say("looking whether all servers are idle")
        outcome.culprit = self._busy()
        return outcome

    def runs(
        self, traffic: Traffic, name: str = "requests"
    ) -> list[tuple[str, list[str], Callable[[Facts], Workload]]]:
        """The runs of ``play``: folder, whom to ask, and what. Raises ConfigError for a case that
        the topology cannot have."""
        leaves = traffic.case == "25805"

        def plain(facts: Facts) -> Workload:
            return workloads.recycling(
                facts,
                traffic.seed,
                traffic.requests,
                traffic.prompt,
                traffic.output,
                abort=0.05 if leaves else 0.0,
                disconnect=0.05 if leaves else 0.0,
                share=0.5,
                check=traffic.check,
            )

        def cycles(facts: Facts) -> Workload:
            return workloads.cycles(facts, traffic.seed, traffic.cycles)

        found: list[tuple[str, list[str], Callable[[Facts], Workload]]] = []
        if traffic.requests:
            found.append((name, [self.url], plain))
        if traffic.case == "25889":
            if self.topology.shape.hicache.tier == "none":
                raise ConfigError(
                    f"25889 needs a host tier, and topology {self.topology.name} has none"
                )
            # What one server cached another does not have: each is asked for itself.
            if "plain" in self.topology.shape.hicache.roles:
                asked = {f"{name}-25889-{which}": one.url for which, one in self.servers.items()}
            else:
                asked = {f"{name}-25889": self.url}
            found += [(title, [url], cycles) for title, url in asked.items()]
        return found

    def _play(
        self,
        title: str,
        urls: Sequence[str],
        workload: Callable[[Facts], Workload],
        traffic: Traffic,
        watcher: Watcher,
        outcome: Outcome,
    ) -> None:
        options = Options(
            urls,
            self.out / title,
            watch=[server.url for server in self.servers.values()],
            concurrency=traffic.concurrency,
            timeout=traffic.timeout,
            patience=self.hung_after,
            probe=PROBE_EVERY,
            logs=[
                LogFile(name, server.log, server.log.stat().st_size)
                for name, server in self.servers.items()
            ],
        )
        try:
            run = Run(options, workload, watcher)
        except WireError as error:
            outcome.culprit = self._probed()
            outcome.runs[title] = {"verdict": "not finished", "why": [str(error)], "counts": {}}
            return
        try:
            with _Watch(self, lambda culprit: run.client.stop(str(culprit), failed=True)) as watch:
                run.play()
            outcome.culprit = watch.culprit
            if run.client.failed and outcome.culprit is None:
                self.say("requests were lost: asking each server for a token")
                outcome.culprit = self._probed()
            traces = sorted(self.out.glob("trace/*.jsonl"))
            run.options = replace(options, traces=traces)
            outcome.runs[title] = run.data()
            outcome.unwritten += run.write(outcome.runs[title])
        finally:
            run.end()

    def look(self, name: str, since: float) -> Culprit | None:
        """Whether a process runs and answers; ``since`` is when it last did (monotonic)."""
        silent = time.monotonic() - since
        hangs = f"does not answer /health for {silent:.0f} s, and runs still: it hangs"
        if name == _ROUTER:
            assert self.router is not None
            if self.router.poll() is not None:
                died = f"died (status {self.router.poll()}), see {self.log_of_router}"
                return Culprit("the router", died)
            return Culprit("the router", hangs) if silent > self.hung_after else None
        server = self.servers[name]
        if server.status is not None:
            said = last_error(server.log) or "its log tells no error"
            died = f"died (status {server.status}), see {server.log}: {said}"
            return Culprit(self._of(name), died)
        if silent > self.hung_after:
            return Culprit(self._of(name), f"{hangs}, see {server.log}")
        return None

    def url_of(self, name: str) -> str:
        return self.url if name == _ROUTER else self.servers[name].url

    @property
    def watched(self) -> list[str]:
        return [*self.servers, *([] if self.router is None else [_ROUTER])]

    def _probed(self) -> Culprit | None:
        """The first process that died, or that makes no token though it answers."""
        for name in self.watched:
            if (found := self.look(name, time.monotonic())) is not None:
                return found
            if name != _ROUTER and not _answers(f"{self.url_of(name)}/health_generate", PROBE):
                log = self.servers[name].log
                return Culprit(self._of(name), f"makes no token within {PROBE:.0f} s, see {log}")
        return None

    def _busy(self) -> Culprit | None:
        """The first server that is not idle though all is over: its cache cannot be emptied."""
        for name, server in self.servers.items():
            limit = time.monotonic() + self.hung_after
            while True:
                try:
                    server.ask("/flush_cache", {}, timeout=self.hung_after)
                    break
                except ServerError as error:
                    if time.monotonic() > limit:
                        said = str(error).splitlines()[0]
                        return Culprit(self._of(name), f"is not idle though all is over: {said}")
                time.sleep(EVERY)
        return None

    # -- what is left ----------------------------------------------------------------------------

    def write(self, outcome: Outcome, why: str, found: Sequence[Found]) -> dict[str, Any]:
        """Keep the verdict of all as ``rehearsal.json``; as data."""
        data = {
            "topology": self.topology.name,
            "release": self.topology.release,
            "guard": self.topology.guard.value,
            "verdict": outcome.verdict if outcome.runs else "not finished",
            "why": why,
            "culprit": None if outcome.culprit is None else asdict(outcome.culprit),
            "ranks": [{"name": rank.name, "wrong": rank.wrong} for rank in found],
            "runs": outcome.runs,
            "unwritten": outcome.unwritten,
            "not_rehearsed": [asdict(one) for one in self.rehearsed.missing],
        }
        try:
            (self.out / "rehearsal.json").write_text(json.dumps(data, indent=1) + "\n")
        except OSError as error:
            outcome.unwritten.append(f"{self.out / 'rehearsal.json'}: {error.strerror}")
        return data


class _Watch:
    """Looks at every process beside a block, and tells of the first that died or hangs."""

    def __init__(self, rehearsal: Rehearsal, tell: Callable[[Culprit], None]) -> None:
        self.culprit: Culprit | None = None
        self._rehearsal, self._tell = rehearsal, tell
        self._done, self._lock = threading.Event(), threading.Lock()
        self._heard = dict.fromkeys(rehearsal.watched, time.monotonic())
        self._threads = [
            threading.Thread(target=self._ask, args=(name,), daemon=True) for name in self._heard
        ] + [threading.Thread(target=self._look, daemon=True)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """One more look, so that who died at the end is seen."""
        self._done.set()
        self._threads[-1].join()

    def _ask(self, name: str) -> None:
        """By its own thread for each, as a process that hangs keeps whoever asks it waiting."""
        url = f"{self._rehearsal.url_of(name)}/health"
        while not self._done.wait(EVERY):
            if _answers(url, self._rehearsal.hung_after):
                self._heard[name] = time.monotonic()

    def _look(self) -> None:
        while True:
            last = self._done.wait(EVERY)
            for name, since in self._heard.items():
                found = self._rehearsal.look(name, since)
                if found is not None and self.culprit is None:
                    self.culprit = found
                    self._tell(found)
            if last or self.culprit is not None:
                return


def require_router() -> None:
    """Raises ConfigError of one line where SGLang's router is not installed."""
    if importlib.util.find_spec("sglang_router") is None:
        raise ConfigError(f"SGLang's router is not installed; run `{INSTALL}`")


def _answers(url: str, patience: float) -> bool:
    with requests.Session() as session:
        session.trust_env = False  # a proxy is never meant for this machine
        try:
            return session.get(url, timeout=patience).status_code == 200
        except requests.RequestException:
            return False


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    children.end(process, 1.0)
    process.stdin.close()
