"""Does a release take the command lines of a topology? Its own parser is asked, without a GPU.

Parsing takes a process and some seconds, most of them imports. So lines that a release took are
remembered by their digest, beside the releases; what it refused is asked again each time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hicache_guard import checkouts, children
from hicache_guard.core.errors import ConfigError
from hicache_guard.nodes.topology import Topology

#: The wheel of SGLang's router, which is a package of its own.
ROUTER = "sglang-router"
#: Variables that only SGLang reads; others are the business of its libraries.
_OURS = "SGLANG_"
#: Command lines, or variables, and who needs each.
_Askers = dict[tuple[str, ...], list[Topology]]


@dataclass(frozen=True)
class Refusal:
    """Why a release, or the router (``by``), does not take a topology."""

    topology: str
    model: str
    release: str
    by: str
    why: str

    def __str__(self) -> str:
        return f"topology {self.topology} with {self.model}: {self.by}: {self.why}"


def check(topology: Topology) -> None:
    """Raises ConfigError of one line for the first thing that the release or the router refuses."""
    for refusal in refusals([topology]):
        raise ConfigError(str(refusal))


def refusals(topologies: Iterable[Topology]) -> list[Refusal]:
    """What is refused of topologies, one process for each release that is asked about."""
    asked = list(topologies)
    found: list[Refusal] = []
    for release in dict.fromkeys(topology.release for topology in asked):
        found += _of_release(release, [one for one in asked if one.release == release])
    return found + _of_router([one for one in asked if one.router() is not None])


def router_version() -> str | None:
    """The version of the router here, or None where it is not installed."""
    if importlib.util.find_spec("sglang_router") is None:
        return None
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(ROUTER)
    return "of unknown version"


def _of_release(release: str, topologies: list[Topology]) -> list[Refusal]:
    tree = checkouts.require(release)
    lines: _Askers = {}
    variables: _Askers = {}
    for topology in topologies:
        for server in topology.servers():
            for node in server.nodes:
                lines.setdefault(tuple(server.arguments(node.index)), []).append(topology)
            for name in server.environment:
                if name.startswith(_OURS):
                    variables.setdefault((name,), []).append(topology)
    taken = _Taken(release, tree)
    left = [line for line in lines if not taken.has(line)]
    unasked = [name for name in variables if not taken.has(name)]
    if not left and not unasked:
        return []
    by = f"SGLang {release}"
    names = [name for (name,) in unasked]
    complaints, unnamed = _asked(left, names, checkouts.environment(tree), by, router=False)
    taken.add(line for line, why in zip(left, complaints, strict=True) if not why)
    taken.add((name,) for name in names if name not in unnamed)
    found = [
        Refusal(one.name, one.model.name, release, by, why)
        for line, why in zip(left, complaints, strict=True)
        for one in lines[line]
        if why
    ]
    found += [
        Refusal(one.name, one.model.name, release, by, f"its source names no variable {name}")
        for name in unnamed
        for one in variables[(name,)]
    ]
    return list(dict.fromkeys(found))


def _of_router(topologies: list[Topology]) -> list[Refusal]:
    if not topologies:
        return []
    version = router_version()
    if version is None:
        raise ConfigError(
            f"{ROUTER} is not here to be asked about its flags; run `pip install {ROUTER}`"
        )
    lines: _Askers = {}
    for topology in topologies:
        router = topology.router()
        assert router is not None
        lines.setdefault(tuple(router.arguments(topology.servers())), []).append(topology)
    by = f"{ROUTER} {version}"
    complaints, _ = _asked([*lines], [], dict(os.environ), by, router=True)
    return [
        Refusal(one.name, one.model.name, one.release, by, why)
        for line, why in zip(lines, complaints, strict=True)
        for one in lines[line]
        if why
    ]


def _asked(
    lines: list[tuple[str, ...]],
    variables: list[str],
    environment: dict[str, str],
    whom: str,
    *,
    router: bool,
) -> tuple[list[str], list[str]]:
    with tempfile.TemporaryDirectory(prefix="hicache-guard-flags-") as folder:
        question = Path(folder) / "question.json"
        question.write_text(json.dumps({"lines": lines, "variables": variables, "router": router}))
        done = children.run(
            [sys.executable, "-P", "-m", "hicache_guard.nodes.flag_report", str(question)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"{whom} cannot be asked about flags: {last}")
    answer = json.loads(done.stdout.splitlines()[-1])
    return answer["complaints"], answer["unnamed"]


class _Taken:
    """Digests of what a release took. One that cannot be read or kept is asked again, no more."""

    def __init__(self, release: str, tree: Path) -> None:
        self._file = checkouts.home() / "nodes" / f"flags-{release}.json"
        self._source = _digest_of_source(tree)
        self._known: set[str] = set()
        with suppress(OSError, ValueError, TypeError):
            self._known = set(json.loads(self._file.read_text()))

    def has(self, line: tuple[str, ...]) -> bool:
        return self._digest(line) in self._known

    def add(self, lines: Iterable[tuple[str, ...]]) -> None:
        more = {self._digest(line) for line in lines}
        if more <= self._known:
            return
        self._known |= more
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            fresh = self._file.with_suffix(f".{os.getpid()}")
            fresh.write_text(json.dumps(sorted(self._known)))
            fresh.replace(self._file)

    def _digest(self, line: tuple[str, ...]) -> str:
        return hashlib.sha256("\0".join([self._source, *line]).encode()).hexdigest()


def _digest_of_source(tree: Path) -> str:
    """Of what defines the flags: a checkout in the place of a release may differ from it."""
    digest = hashlib.sha256()
    srt = tree / "sglang" / "srt"
    for file in [srt / "server_args.py", *sorted((srt / "arg_groups").rglob("*.py"))]:
        with suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()
