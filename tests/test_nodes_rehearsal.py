"""Topologies on this machine: what is left out, two servers and the router, and what befalls them.

Proved by mutation, each of which makes this fail: a flag that no rule names kept; ranks not
compared before requests; a process that died not looked at; silence of a process taken for life;
health asked of the router instead of each server; no watcher in ``tied``; and processes left when a
block ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from programs import fetched
from typer.testing import CliRunner

from hicache_guard import children
from hicache_guard.cli.main import app
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.modes import ENV_VAR
from hicache_guard.nodes import rehearsal, rehearsed, tables, topology
from hicache_guard.nodes.rehearsal import NotReadyError, Outcome, Rehearsal, Traffic
from hicache_guard.nodes.topology import NotForThis, Topology

GUARD = str(Path(sys.executable).with_name("hicache-guard"))

TWO = """
purpose = "Two servers with a host tier, behind a router"
model = "gpt-oss-120b"
gpus = 8
[roles.plain]
count = 2
[hicache]
tier = "l2"
[hicache.flags]
enable-hierarchical-cache = true
hicache-ratio = 2.0
hicache-write-policy = "write_through"
[router.flags]
policy = "cache_aware"
"""
ALONE = """
purpose = "One server"
model = "gpt-oss-120b"
gpus = 8
[roles.plain]
"""


class Quiet:
    def begins(self, name: str, steps: int) -> None: ...
    def goes_on(self) -> None: ...
    def ends(self, result: Any) -> None: ...


def written(folder: Path, text: str, name: str = "two") -> str:
    file = folder / f"{name}.toml"
    file.write_text(text)
    return str(file)


# -- what is left out ----------------------------------------------------------------------------


def test_what_no_rule_names_is_left_out_and_told() -> None:
    kept, lost = rehearsed.sorted_out(
        {
            "page-size": 64,
            "speculative-algorithm": "EAGLE",
            "enable-magic": True,
            "enable-two-batch-overlap": False,
            "NCCL_DEBUG": "INFO",
        }
    )
    assert kept == {"page-size": 64}
    told = dict(lost)
    assert [*told] == ["--speculative-algorithm EAGLE", "--enable-magic", "NCCL_DEBUG=INFO"]
    assert told["--enable-magic"] == "not known to work on a CPU"


@pytest.mark.parametrize("name", tables.shapes())
@pytest.mark.parametrize("release", ["0.5.12", "0.5.23"])
def test_every_topology_can_be_cut_down(name: str, release: str, tmp_path: Path) -> None:
    """Servers, roles, guard and router as before; one rank each; and rules for all of our flags."""
    for model in tables.models():
        try:
            whole = topology.read(name, model, release)
        except NotForThis:
            continue
        found = rehearsed.cut(whole, "alternating", tmp_path)
        here = found.topology
        assert [(s.name, s.role) for s in here.servers()] == [
            (s.name, s.role) for s in whole.servers()
        ]
        assert [rank.name for rank in here.ranks()] == [
            f"{name}/{server.name}/node0/tp0" for server in here.servers()
        ]
        assert (here.guard, here.release) == (whole.guard, release)
        assert (here.router() is None) == (whole.router() is None)
        assert here.shape.hicache.tier == whole.shape.hicache.tier
        whys = {one.why for one in found.missing}
        assert "not known to work on a CPU" not in whys
        assert any("tensor-parallel" in one.what for one in found.missing)
        # All that the topology says is kept or told.
        for server, cut_down in zip(whole.servers(), here.servers(), strict=True):
            told = {one.what.split()[0] for one in found.missing if one.where == server.role}
            flags = {f"--{flag}" for flag, value in server.flags.items() if value is not False}
            left = flags - {f"--{flag}" for flag in cut_down.flags}
            assert left <= told
            assert {f"--{flag}" for flag in cut_down.flags} <= flags


def test_ports_are_free_ones(tmp_path: Path) -> None:
    whole = topology.read("4p2d")
    one, other = (rehearsed.cut(whole, "alternating", tmp_path).topology for _ in range(2))
    topology._no_port_twice(one)
    ports = [server.port for server in one.servers()]
    assert ports != [server.port for server in other.servers()]
    for port in ports:
        with socket.socket() as free:
            free.bind(("127.0.0.1", port))


def test_without_the_router_one_line_tells_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps sglang-router==0\.3\.2"):
        Rehearsal(topology.read("1p1d"), tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere"], "no topology 'nowhere'"),
        (["tp", "--case", "1"], "--case 1: choose one of 25805, 25889, none"),
        (["tp", "--checkout", "/nowhere"], "there is no sglang or python/sglang in it"),
        (["tp", "--model", "gpt"], "no model 'gpt'; choose one of"),
        (["tp", "--case", "25889"], "25889 needs a host tier, and topology tp has none"),
        (["tp", "--out", "/proc/nowhere"], "--out /proc/nowhere: "),
    ],
)
def test_a_mistake_is_told(arguments: list[str], complaint: str) -> None:
    fetched("0.5.23")
    done = CliRunner().invoke(app, ["nodes", "rehearse", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert complaint in str(done.exception)


def test_what_is_tied_ends_with_its_parent(tmp_path: Path) -> None:
    """Also where it never comes back to Python, and its parent is killed."""
    (tmp_path / "stuck.py").write_text(
        "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(99)"
    )
    parent = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "hicache_guard.nodes.tied", "stuck"],
                 stdin=subprocess.PIPE, process_group=0)
time.sleep(99)
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        group = int(process.stdout.readline())
        assert children.lives(group)
        process.kill()
        until(lambda: not children.lives(group), 20)


# -- real servers --------------------------------------------------------------------------------


def until(what: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.5.23 with all of our patches."""
    tree = tmp_path_factory.mktemp("patched") / "tree"
    shutil.copytree(fetched("0.5.23"), tree)
    subprocess.run([GUARD, "patch", "apply", str(tree)], check=True, capture_output=True)
    return tree


@pytest.fixture(scope="module")
def two(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """Two servers behind the router, ranks compared; none of it is left afterwards."""
    if importlib.util.find_spec("sglang_router") is None:
        pytest.skip(f"SGLang's router is not installed; run {rehearsal.INSTALL}")
    folder = tmp_path_factory.mktemp("two")
    one = topology.read(written(folder, TWO), release="0.5.23")
    with Rehearsal(one, patched, folder / "out", hung_after=6.0) as running:
        running.start()
        found = running.check()
        assert [rank.name for rank in found] == ["two/plain0/node0/tp0", "two/plain1/node0/tp0"]
        groups = [server.group for server in running.servers.values()]
        assert running.router is not None
        groups.append(running.router.pid)
        yield running
    assert not any(children.lives(group) for group in groups)


@contextmanager
def befallen(running: Rehearsal, name: str, sign: signal.Signals, run: str) -> Iterator[None]:
    """A server is sent a signal after twenty requests of a run."""
    journal = running.out / run / "journal.jsonl"
    group = running.servers[name].group

    def strike() -> None:
        until(lambda: journal.exists() and journal.read_text().count('"ended"') > 20, 120)
        os.killpg(group, sign)

    thread = threading.Thread(target=strike)
    thread.start()
    yield
    thread.join()


def whole(running: Rehearsal, outcome: Outcome, run: str, planned: int) -> None:
    """Nothing is lost: each request has one row, and each that was begun was closed."""
    rows = [json.loads(line) for line in (running.out / run / "results.jsonl").open()]
    assert [row["n"] for row in rows] == [*range(planned)]
    counts = outcome.runs[run]["counts"]
    for kind in ("answered", "failed", "lost"):
        assert sum(row["outcome"] == kind for row in rows) == counts.get(kind, 0)
    records = [json.loads(line) for line in (running.out / run / "journal.jsonl").open()]
    begun = {record["rid"] for record in records if record["kind"] == "begun"}
    ended = [r["rid"] for r in records if r["kind"] in ("ended", "lost", "refused")]
    assert sorted(begun) == sorted(ended)


@pytest.mark.sglang
def test_a_guarded_and_patched_rehearsal_is_healthy(two: Rehearsal) -> None:
    """200 requests through the router, then load-backs of each server, each against cold."""
    outcome = two.play(Traffic(case="25889", requests=200, check=16), Quiet(), "healthy")
    assert outcome.verdict == "healthy", outcome.runs
    assert [*outcome.runs] == ["healthy", "healthy-25889-plain0", "healthy-25889-plain1"]
    assert outcome.runs["healthy"]["counts"]["answered"] == 200
    served = [server.log.read_text().count("POST /generate") for server in two.servers.values()]
    assert min(served) > 100, "the router shares requests out"
    for name in ("plain0", "plain1"):
        cycle = outcome.runs[f"healthy-25889-{name}"]
        back = next(row for row in cycle["judged"] if row["name"].endswith("load-back"))
        assert back["hits"] >= 3, "load-backs are hits"
        assert not cycle["kinds"]
    whole(two, outcome, "healthy", 200)


@pytest.mark.sglang
def test_a_server_that_hangs_is_named(two: Rehearsal) -> None:
    began = time.monotonic()
    try:
        with befallen(two, "plain1", signal.SIGSTOP, "hung"):
            outcome = two.play(Traffic(requests=4000, check=0), Quiet(), "hung")
    finally:
        os.killpg(two.servers["plain1"].group, signal.SIGCONT)
    assert time.monotonic() - began < 100
    assert outcome.verdict == "fault"
    assert "two/plain1 does not answer /health" in str(outcome.culprit)
    whole(two, outcome, "hung", 4000)


@pytest.mark.sglang
def test_a_server_that_dies_is_named(two: Rehearsal) -> None:
    """The last of those that share the servers."""
    with befallen(two, "plain0", signal.SIGKILL, "died"):
        outcome = two.play(Traffic(requests=4000, check=0), Quiet(), "died")
    assert outcome.verdict == "fault"
    assert "two/plain0 died (status -9), see " in str(outcome.culprit)
    assert 20 < outcome.runs["died"]["counts"]["answered"] < 4000
    whole(two, outcome, "died", 4000)


@pytest.mark.sglang
def test_an_unguarded_rank_ends_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = fetched("0.5.23")
    environment = Topology.environment
    monkeypatch.setattr(
        Topology, "environment", lambda self, node: environment(self, node) | {ENV_VAR: "off"}
    )
    one = topology.read(written(tmp_path, ALONE, "alone"), release="0.5.23")
    with Rehearsal(one, tree, tmp_path / "out") as running:
        running.start()
        with pytest.raises(
            NotReadyError, match=r"^alone/plain0/node0/tp0: no report: it is unguar"
        ):
            running.check()


@pytest.mark.sglang
@pytest.mark.slow
def test_a_rehearsal_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """The command itself, killed while its servers run."""
    fetched("0.5.23")
    command = [
        GUARD,
        "nodes",
        "rehearse",
        "1p1d",
        "--requests",
        "9000",
        "--out",
        str(tmp_path / "o"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        journal = tmp_path / "o/requests/journal.jsonl"
        until(lambda: journal.exists() and journal.read_text().count('"ended"') > 5, 240)
        told = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
        groups = {os.getpgid(int(pid)) for pid in told.stdout.split()} - {os.getpgid(process.pid)}
        assert len(groups) >= 2
        process.kill()
    until(lambda: not any(children.lives(group) for group in groups), 20)


def commanded(release: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit status of a rehearsal of 1p1d, and what it leaves."""
    fetched(release)
    command = [
        GUARD, "nodes", "rehearse", "1p1d", "--release", release, "--case", "25805", "--json",
        "--requests", "120", "--out", str(folder / "out"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    data: dict[str, Any] = json.loads(done.stdout)
    assert data == json.loads((folder / "out/rehearsal.json").read_text())
    assert [rank["wrong"] for rank in data["ranks"]] == ["", ""]
    return done.returncode, data


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.5.18", "0.5.23"])
def test_prefill_and_decode_are_rehearsed(release: str, tmp_path: Path) -> None:
    status, data = commanded(release, tmp_path)
    assert data["culprit"] is None
    assert (status, data["verdict"]) == (0, "healthy"), data["runs"]
    counts = data["runs"]["requests"]["counts"]
    assert counts["answered"] + counts["left"] == 120
    assert {one["what"] for one in data["not_rehearsed"]} > {"8 tensor-parallel ranks"}


@pytest.mark.sglang
@pytest.mark.slow
def test_a_third_tier_is_rehearsed(tmp_path: Path) -> None:
    """Its files are written, and read where prompts come again after the host ran over."""
    fetched("0.5.23")
    command = [GUARD, "nodes", "rehearse", "l3", "--case", "25889", "--requests", "40", "--json"]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    data = json.loads(done.stdout)
    assert (done.returncode, data["verdict"]) == (0, "healthy"), data["runs"]
    assert [*(tmp_path / "out/servers/plain0/storage").glob("*.bin")]


@pytest.mark.sglang
@pytest.mark.slow
def test_an_old_pair_is_not_asked_for_what_it_dies_of(tmp_path: Path) -> None:
    """#26286: up to 0.5.12.post1 a prefill server dies of a request for top log-probabilities."""
    status, data = commanded("0.5.12", tmp_path)
    assert (status, data["verdict"]) == (0, "healthy"), data
