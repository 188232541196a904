"""Servers that die, hang, refuse or answer wrongly, full disks and dead clients, in a run on nodes.

The server is ``stand_in.Model``. What must hold: the run ends with a clear verdict and its exit
status, and nothing is lost: each request that was planned has one outcome at the end, and each that
was begun is closed once. Runs on real servers are in ``docs/nodes.md``.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stand_in import Model

from hicache_guard.audit.play import OURS
from hicache_guard.cli import main
from hicache_guard.core.errors import ConfigError
from hicache_guard.core.faults import FACTS, Fault
from hicache_guard.core.matches import TraceFile
from hicache_guard.core.report import Violation
from hicache_guard.nodes import findings
from hicache_guard.nodes.ledger import CLOSED, Ledger
from hicache_guard.nodes.load import Gate

HICACHE = {"enable_hierarchical_cache": True, "hicache_write_policy": "write_through"}


@contextmanager
def served() -> Iterator[Model]:
    server = Model()
    server.info |= HICACHE
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def model() -> Iterator[Model]:
    with served() as server:
        yield server


@dataclass
class Done:
    """What a command left behind."""

    status: Any
    stdout: str
    stderr: str

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.stdout))


Command = Callable[..., Done]
SMALL = ("--window", "16", "--json", "--probe", "0.2", "--prompt", "1:24", "--output", "1:4")


@pytest.fixture
def repro(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """Runs ``hicache-guard nodes repro`` in this process; the import of torch takes seconds."""

    def run(what: str, url: str, *more: str) -> Done:
        given = SMALL if what == "25805" else SMALL[:5]
        arguments = ["nodes", "repro", what, "--url", url, "--out", str(tmp_path / "out"), *given]
        monkeypatch.setattr(sys, "argv", ["hicache-guard", *arguments, *more])
        with pytest.raises(SystemExit) as ended:
            main.run()
        told = capsys.readouterr()
        assert "Traceback (most" not in told.err
        return Done(ended.value.code, told.out, told.err)

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_books(out: Path, planned: int, *, whole: bool = True) -> dict[int, str]:
    """One outcome for each request, and one closing for each that was begun; the outcomes."""
    journal = lines(out / "journal.jsonl")
    begun = [record["rid"] for record in journal if record["kind"] == "begun"]
    closed = [record["rid"] for record in journal if record["kind"] in CLOSED]
    assert len(set(begun)) == len(begun), "an id was used twice"
    assert sorted(closed) == sorted(begun)
    assert all(rid.startswith(OURS) for rid in begun)
    final = Counter(
        record["n"]
        for record in journal
        if record["kind"] == "ended" or (record["kind"] == "lost" and not record["again"])
    )
    assert max(final.values(), default=1) == 1
    results = lines(out / "results.jsonl")
    assert [row["n"] for row in results] == list(range(planned))
    outcomes = {row["n"]: row["outcome"] for row in results}
    assert {number for number, outcome in outcomes.items() if outcome != "not asked"} == {*final}
    if whole:
        assert set(final) == set(range(planned))
    return outcomes


def test_gate_is_additive_up_and_halves_down() -> None:
    """Mutations seen to fail: no cut, a cut for each of a flight, growth beyond the most."""
    gate = Gate(8)
    assert all(gate.enter() for _ in range(8))
    begun = time.monotonic()
    for _ in range(4):  # one flight: they saw the same trouble
        gate.leave(begun=begun, trouble=True)
    assert gate.limit == 4
    gate.leave(begun=begun, trouble=False)
    assert gate.limit == 4.25
    gate.leave(begun=time.monotonic(), trouble=True)
    assert gate.limit == 2.125
    for _ in range(100):
        gate.under_way += 1
        gate.leave(begun=begun, trouble=False)
    assert gate.limit == 8
    for _ in range(9):
        gate.under_way += 1
        gate.leave(begun=time.monotonic(), trouble=True)
    assert gate.limit == 1, "one is always let in"
    waiting = threading.Thread(target=gate.enter)
    gate.under_way = 1
    waiting.start()
    gate.close()
    waiting.join(5)
    assert not waiting.is_alive()


def test_healthy_run_is_told_whole(model: Model, repro: Command, tmp_path: Path) -> None:
    done = repro("25805", model.url, "--requests", "60", "--check", "8", "--concurrency", "6")
    assert done.status == 0, done.stderr
    data = done.data
    assert data["verdict"] == "healthy"
    outcomes = check_books(tmp_path / "out", 60)
    assert set(outcomes.values()) == {"answered", "left"}
    assert {row["name"]: row["read"] for row in data["judged"]} == {"cold": 0, "checked answers": 8}
    merged = lines(tmp_path / "out" / "merged.jsonl")
    assert [event["time"] for event in merged] == sorted(event["time"] for event in merged)
    assert {event["n"] for event in merged if event["n"] is not None} == set(range(60))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Healthy" in page
    assert "<script" not in page
    assert "src=" not in page
    rids = [wanted["rid"] for wanted in model.heard if "rid" in wanted]
    assert len(rids) == len(set(rids))


def test_refused_requests_are_sent_again_under_new_ids(
    model: Model, repro: Command, tmp_path: Path
) -> None:
    """Mutations seen to fail: refused taken for failed, the same id again, no back-pressure."""
    model.busy = 12
    done = repro("25805", model.url, "--requests", "40", "--check", "0", "--concurrency", "8")
    assert done.status == 0, done.stderr
    assert done.data["counts"]["refused"] == 12
    assert done.data["lowest_concurrency"] < 8
    check_books(tmp_path / "out", 40)
    asked = Counter(number_of(wanted["rid"]) for wanted in model.heard)
    assert asked == dict.fromkeys(range(40), 1), "a refused request was taken once, in the end"


def number_of(rid: str) -> int:
    number = findings.request_of(rid)[1]
    assert number is not None
    return number


def test_lost_requests_are_not_sent_again(model: Model, repro: Command, tmp_path: Path) -> None:
    """Mutation seen to fail: a line that was cut taken for a refusal."""
    model.fails, model.after = "cuts", 20

    def mend(_wanted: dict[str, Any]) -> None:
        if model.asked >= 23:
            model.fails = ""

    model.on_ask = mend
    done = repro("25805", model.url, "--requests", "40", "--check", "0", "--concurrency", "1",
                 "--abort", "0", "--disconnect", "0")  # fmt: skip
    assert done.status == 1
    outcomes = check_books(tmp_path / "out", 40)
    assert Counter(outcomes.values()) == {"answered": 37, "lost": 3}
    assert len(model.heard) == 40
    first = done.data["first"]
    assert (first["kind"], first["n"], first["after"]) == ("lost", 20, 20)
    assert first["url"] == model.url


def test_killed_server_ends_the_run_which_goes_on_with_another(
    model: Model, repro: Command, tmp_path: Path
) -> None:
    model.fails, model.after = "dies", 30
    done = repro("25805", model.url, "--requests", "60", "--check", "0", "--concurrency", "4",
                 "--patience", "0.5")  # fmt: skip
    assert done.status == 1
    assert "nobody answers" in done.data["broken"]
    assert done.data["down"] == [model.url]
    outcomes = check_books(tmp_path / "out", 60, whole=False)
    assert "not asked" in outcomes.values()
    with served() as other:
        done = repro("25805", other.url, "--requests", "60", "--check", "0", "--resume")
        again = check_books(tmp_path / "out", 60)
        heard = {number_of(wanted["rid"]) for wanted in other.heard}
    assert done.status == 1, "what broke stays broken"
    known = {number for number, outcome in outcomes.items() if outcome != "not asked"}
    assert heard == set(range(60)) - known
    assert {number: again[number] for number in known} == {n: outcomes[n] for n in known}


def test_hung_server_ends_the_run(model: Model, repro: Command, tmp_path: Path) -> None:
    model.fails, model.after = "hangs", 10
    done = repro("25805", model.url, "--requests", "60", "--check", "0", "--concurrency", "3",
                 "--abort", "0", "--disconnect", "0", "--timeout", ".4", "--lost", "3")  # fmt: skip
    assert done.status == 1
    assert "requests in a row were lost" in done.data["broken"]
    assert "no answer within 0.4 s" in done.data["broken"]
    outcomes = Counter(check_books(tmp_path / "out", 60, whole=False).values())
    assert outcomes["answered"] == 10
    assert 3 <= outcomes["lost"] <= 5


def test_failed_requests_are_faults_with_their_text(
    model: Model, repro: Command, tmp_path: Path
) -> None:
    model.fails, model.after = "500", 25
    done = repro("25805", model.url, "--requests", "30", "--check", "0", "--concurrency", "1",
                 "--abort", "0", "--disconnect", "0")  # fmt: skip
    assert done.status == 1
    first = done.data["first"]
    assert (first["kind"], first["n"], first["after"]) == ("failed", 25, 25)
    assert "status 500" in first["text"]
    assert done.data["counts"]["failed"] == 5
    check_books(tmp_path / "out", 30)


def test_full_disk_ends_the_run_and_keeps_what_was_measured(
    model: Model, repro: Command, tmp_path: Path
) -> None:
    """Mutation seen to fail: a line that was written in part is left in the file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
    try:
        done = repro("25805", model.url, "--requests", "60", "--check", "0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done.status == 2
    assert "cannot be written" in done.data["broken"]
    journal = (tmp_path / "out" / "journal.jsonl").read_bytes()
    assert 5000 < len(journal) <= 6000
    ended = {r["n"] for r in map(json.loads, journal.splitlines()) if r["kind"] == "ended"}
    assert ended
    heard = len(model.heard)
    done = repro("25805", model.url, "--requests", "60", "--check", "0", "--resume")
    assert done.status == 0, done.stderr
    check_books(tmp_path / "out", 60)
    assert not ended & {number_of(wanted["rid"]) for wanted in model.heard[heard:]}


def test_journal_that_cannot_be_begun_is_one_line(
    model: Model, repro: Command, tmp_path: Path
) -> None:
    """Mutation seen to fail, for want of memory: a device, which never ends, is read."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        done = repro("25805", model.url, "--requests", "6")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal = tmp_path / "out" / "journal.jsonl"
    assert not journal.read_bytes()
    assert "cannot be written" in done.stderr
    journal.unlink()
    journal.symlink_to("/dev/full")
    again = repro("25805", model.url, "--requests", "6")
    assert "not a regular file" in again.stderr
    for each in (done, again):
        assert each.status == 2
        assert len(each.stderr.strip().splitlines()) == 1
    assert not model.heard


def test_interrupted_run_goes_on(model: Model, repro: Command, tmp_path: Path) -> None:
    model.fails, model.after = "hangs", 20

    def interrupt(_wanted: dict[str, Any]) -> None:
        if model.asked == 22:  # two hang already
            os.kill(os.getpid(), signal.SIGINT)

    model.on_ask = interrupt
    done = repro("25805", model.url, "--requests", "40", "--check", "0", "--concurrency", "3")
    model.on_ask = lambda _wanted: None
    assert done.status == 2
    assert done.data["verdict"] == "not finished"
    assert done.data["broken"] == "interrupted"
    check_books(tmp_path / "out", 40, whole=False)
    assert model.aborted, "the server need not go on with what nobody waits for"
    model.fails = ""
    done = repro("25805", model.url, "--requests", "40", "--check", "0", "--resume")
    assert done.status == 0, done.stderr
    outcomes = check_books(tmp_path / "out", 40)
    assert set(outcomes.values()) == {"answered", "left"}


def test_killed_client_is_resumed(model: Model, repro: Command, tmp_path: Path) -> None:
    """Mutations seen to fail: what was begun is taken for over; it is asked under its old id."""
    model.fails, model.after = "hangs", 20
    given = ("--requests", "40", "--check", "0", "--concurrency", "3")
    program = [sys.executable, "-P", "-m", "hicache_guard.cli.main", "nodes", "repro", "25805"]
    program += ["--url", model.url, "--out", str(tmp_path / "out"), *SMALL, *given]
    with subprocess.Popen(program, stdout=subprocess.DEVNULL) as process:
        while model.asked < 22:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    model.fails = ""
    done = repro("25805", model.url, *given, "--resume")
    assert done.status == 0, done.stderr
    outcomes = check_books(tmp_path / "out", 40)
    assert set(outcomes.values()) == {"answered", "left"}
    assert 1 <= done.data["counts"]["asked again"] <= 3
    lost = [each for each in lines(tmp_path / "out" / "journal.jsonl") if each["kind"] == "lost"]
    assert all(each["rid"] in model.aborted for each in lost)


@pytest.mark.parametrize(("what", "points"), [("25805", 24), ("25889", 8)])
def test_nothing_is_lost_wherever_the_client_died(
    what: str, points: int, model: Model, repro: Command, tmp_path: Path
) -> None:
    """The journal cut at any byte is what a client that was killed there left.

    Mutations seen to fail: a torn line kept, orphans forgotten, ended requests asked again.
    """
    more = ["--cycles", "1"]
    if what == "25805":
        more = ["--requests", "24", "--check", "0", "--concurrency", "4"]
    done = repro(what, model.url, *more)
    assert done.status == 0, done.stderr
    journal = tmp_path / "out" / "journal.jsonl"
    whole = journal.read_bytes()
    planned = done.data["planned"]
    dice = random.Random(5)
    edges = [0, 1, len(whole) - 1, len(whole)]
    for cut in edges + [dice.randrange(len(whole)) for _ in range(points - len(edges))]:
        journal.write_bytes(whole[:cut])
        ended, begun = set(), set()
        for line in whole[:cut].splitlines(keepends=True):
            if line.endswith(b"\n"):
                record = json.loads(line)
                ended |= {record["n"]} if record["kind"] == "ended" else set()
                begun |= {record["rid"]} if record["kind"] == "begun" else set()
        model.heard.clear()
        done = repro(what, model.url, *more, "--resume")
        assert done.status == 0, (cut, done.stderr, done.stdout)
        outcomes = check_books(tmp_path / "out", planned)
        assert set(outcomes.values()) <= {"answered", "left"}
        rids = [each["rid"] for each in model.heard if OURS in each.get("rid", "")]
        asked = [number_of(rid) for rid in rids if ".0" not in rid and "cold" not in rid]
        asked = [number for number, rid in zip(asked, rids, strict=False) if rid not in begun]
        assert not ended & {*asked}, cut


def test_journals_are_not_mixed_up(model: Model, repro: Command, tmp_path: Path) -> None:
    """Mutations seen to fail: no comparison of configurations, no lock."""
    given = ("--requests", "6", "--check", "0")
    assert repro("25805", model.url, *given).status == 0
    asked = len(model.heard)
    for more, said in (
        ((), "add --resume"),
        (("--resume", "--seed", "3"), "a run with seed 0, and this one has 3"),
        (("--resume", "--requests", "7"), "a run with requests 6, and this one has 7"),
    ):
        done = repro("25805", model.url, *given, *more)
        assert done.status == 2
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    model.info["version"] = "0.1"
    assert "a run with version '0.0'" in repro("25805", model.url, *given, "--resume").stderr
    model.info["version"] = "0.0"
    path = tmp_path / "out" / "journal.jsonl"
    head = lines(path)[0]
    held = Ledger(path, head["config"], resume=True)
    assert "another run writes" in repro("25805", model.url, *given, "--resume").stderr
    held.end()
    path.write_text("something else\n")
    assert "is not a journal" in repro("25805", model.url, *given, "--resume").stderr
    assert path.read_text() == "something else\n"
    assert len(model.heard) == asked


def test_cycles_load_back_and_are_compared(model: Model, repro: Command, tmp_path: Path) -> None:
    done = repro("25889", model.url, "--cycles", "2")
    assert done.status == 0, done.stderr
    rows = {row["name"]: row for row in done.data["judged"]}
    for cycle in (1, 2):
        assert rows[f"cycle {cycle}: load-back"]["due"] == 3
        assert rows[f"cycle {cycle}: rewrite"]["due"] == 3
        assert rows[f"cycle {cycle}: load-back"]["hits"] >= 3
        assert all(rows[f"cycle {cycle}: {phase}"]["read"] for phase in ("write", "evict"))
    check_books(tmp_path / "out", done.data["planned"])


def test_missing_hits_are_as_loud_as_faults(model: Model, repro: Command) -> None:
    model.remembers = False
    done = repro("25889", model.url, "--cycles", "1")
    assert done.status == 1
    assert any("load-back: no hits" in each for each in done.data["why"])


def test_answers_whose_cold_readings_waver_are_no_fault(model: Model, repro: Command) -> None:
    """A token that comes out in two ways, and in no cold answer by which the noise is measured.

    Mutation: what is beyond the limit is not read again.
    """
    ways = itertools.cycle((0.0, 5e-4))

    def bend(meta: dict[str, Any]) -> None:
        if meta["prompt_tokens"] > 100:
            rows = meta["input_token_logprobs"] or meta["output_token_logprobs"]
            rows[-1][0] += next(ways) if meta["input_token_logprobs"] else 5e-4

    model.bend = bend
    done = repro("25805", model.url, "--requests", "24", "--check", "24", "--prompt", "110:190")
    assert done.data["verdict"] == "healthy", done.data["why"]


@pytest.mark.parametrize("what", ["25805", "25889"])
def test_wrong_answers_from_the_cache_are_found(what: str, model: Model, repro: Command) -> None:
    """Mutation seen to fail: checked answers are not read again."""
    model.wrong = True
    more = ("--requests", "40", "--share", "1", "--prompt", "12:24", "--check", "20")
    done = repro(what, model.url, *(more if what == "25805" else ("--cycles", "1")))
    assert done.status == 1
    assert done.data["first"]["kind"] == "corrupt"
    assert "off by 1 with" in done.data["first"]["text"]


def test_readings_that_are_not_cold_are_no_verdict(model: Model, repro: Command) -> None:
    model.tells_keys_apart = False
    done = repro("25805", model.url, "--requests", "10", "--check", "4")
    assert done.status in (1, 2)
    assert "does not tell extra keys apart" in done.data["broken"] + done.data["unread"]


def test_logs_and_traces_say_which_rank_and_what(
    model: Model, repro: Command, tmp_path: Path
) -> None:
    """Mutations seen to fail: what was logged before the run counts; ranks are not read."""
    log, trace = tmp_path / "decode.log", tmp_path / "trace.jsonl"
    log.write_text("Traceback (most recent call last):\nOldError: before the run\n")
    with log.open("a") as out:
        writer = TraceFile(trace)

        def tell(wanted: dict[str, Any]) -> None:
            if model.asked == 10:
                writer.violation(
                    Violation(Fault.DOUBLE_FREE, "window", 9, 2, 1, "free", wanted["rid"])
                )
                stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + 1))
                out.write(f"[{stamp} DP0 TP1] Scheduler hit an exception: {findings.TRACEBACK}:\n")
                out.write('  File "x.py", line 1\nAssertionError: pool \x1b[31mleak\n')
                out.write(f"[{stamp} TP3] double-free: {FACTS[Fault.DOUBLE_FREE].says}: window\n")
                out.write(f"[{stamp}] scheduler_0 crashed with exit code -9\n")
                out.flush()

        writer.load_back(None, 1, refused=None, epoch=0, serial=0)  # a trace before the run
        model.on_ask = tell
        done = repro("25805", model.url, "--requests", "20", "--check", "0", "--concurrency", "1",
                     "--log", f"decode-0={log}", "--trace", str(trace))  # fmt: skip
    assert done.status == 1
    data = done.data
    assert data["kinds"] == {"violation": 2, "traceback": 1, "broken": 1}
    first = data["first"]
    assert (first["kind"], first["source"], first["n"]) == ("violation", "trace:trace.jsonl", 10)
    assert first["url"] == model.url
    raised = next(event for event in data["bad"] if event["kind"] == "traceback")
    assert (raised["rank"], raised["source"]) == ("DP0 TP1", "log:decode-0")
    assert raised["text"] == "AssertionError: pool \\u001b[31mleak"
    assert "OldError" not in done.stdout


def test_servers_that_are_watched_are_told_of(model: Model, repro: Command) -> None:
    done = repro("25805", model.url, "--requests", "6", "--check", "0",
                 "--watch", "http://127.0.0.1:9")  # fmt: skip
    assert done.status == 1
    assert done.data["down"] == ["http://127.0.0.1:9"]
    assert set(done.data["kinds"]) == {"down"}


@pytest.mark.parametrize(
    ("what", "arguments", "said"),
    [
        ("25805", ("--prompt", "9:3"), "--prompt 9:3"),
        ("25805", ("--output", "many"), "--output many"),
        ("25805", ("--prompt", "1:400"), "lower --prompt"),
        ("25805", ("--abort", "0.7", "--disconnect", "0.7"), "more than all"),
        ("25805", ("--log", "nonsense"), "NAME=FILE"),
        ("25805", ("--log", "a=/nowhere"), "No such file"),
        ("25805", ("--trace", "/nowhere"), "cannot read"),
        ("25805", ("--watch", "localhost"), "--watch localhost"),
        ("25889", ("--url", "http://127.0.0.1:9"), "one --url"),
        ("25889", (), "--enable-hierarchical-cache"),
    ],
)
def test_bad_input_is_one_line(
    what: str, arguments: tuple[str, ...], said: str, model: Model, repro: Command, tmp_path: Path
) -> None:
    model.info["enable_hierarchical_cache"] = False
    done = repro(what, model.url, *arguments)
    assert done.status == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_ledger_of_a_closed_run_takes_nothing(tmp_path: Path) -> None:
    """The first word on a request counts."""
    ledger = Ledger(tmp_path / "journal.jsonl", {"a": 1}, resume=False)
    ledger.begin(0, "x", "u")
    assert ledger.close("x", "lost", error="gone", again=False)
    assert not ledger.close("x", "ended", outcome="answered")
    assert ledger.outcomes[0]["kind"] == "lost"
    ledger.end()
    with pytest.raises(ConfigError, match="add --resume"):
        Ledger(tmp_path / "journal.jsonl", {"a": 1}, resume=False)
