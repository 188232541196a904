"""``hicache-guard trace`` and ``dashboard``: whose match was clipped, and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_guard.core.faults import Fault
from hicache_guard.core.matches import MatchRecord, TraceFile
from hicache_guard.core.report import Violation


def _run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "hicache_guard.cli.main", *map(str, arguments)]
    environment = {**os.environ, "COLUMNS": "80", "TZ": "UTC"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def _match(request: str | None, **changes: Any) -> MatchRecord:
    facts: dict[str, Any] = {
        "time": 1_796_000_000.25,
        "asked": 600,
        "matched": {"full": 512, "window": 448},
        "host": 0,
        "proved": {"full": 512, "window": 256},
        "used": 256,
        "clip": "window-unproved: handed out again by #41",
        "epoch": 3,
        "serial": 42,
        "slot": 29,
        "page": 7,
    }
    return MatchRecord(request=request, **facts | changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A trace of everything once, five clipped requests, and the torn line of a crash."""
    trace = TraceFile(tmp_path / "trace.jsonl")
    trace.match(_match("whole", clip=None, used=448, proved={"full": 512, "window": 448}))
    for n in range(5):
        trace.match(_match(f"request-{n}"))
    trace.evict("window", 64, epoch=3, serial=43)
    trace.load_back("request-1", 64, refused=None, epoch=3, serial=44)
    trace.load_back("request-1", 64, refused="host-copy-stale", epoch=3, serial=44)
    trace.insert("request-1", 512, 512, cut=None, epoch=3, serial=45)
    trace.insert("request-1", 512, 256, cut="window-unproved", epoch=3, serial=45)
    trace.violation(Violation(Fault.DOUBLE_FREE, "full", 9, 2, 1, "#7 free", "r1"))
    trace.close()
    with trace.path.open("a") as file:
        file.write('{"v":1,"ki')
    return trace.path


def test_clips_name_their_requests(path: Path) -> None:
    """Mutations: the first instead of the last; the request or its page left out."""
    done = _run("trace", path, "--last", "2")
    assert done.returncode == 0, done.stderr
    for shown in ("request-3", "request-4", "window-unproved", "page 7", "slot 29", "#42",
                  "Last 2 of 5", "double-free", "1 lines could not be read"):  # fmt: skip
        assert shown in done.stdout, shown
    for hidden in ("request-2", "whole"):
        assert hidden not in done.stdout


def test_totals_are_those_of_the_server(path: Path) -> None:
    data = json.loads(_run("trace", path, "--json", "--last", "1").stdout)
    totals = data["totals"]
    assert (totals["matches"], totals["hits"], totals["hit_tokens"]) == (6, 6, 448 + 5 * 256)
    assert totals["clips.window-unproved"] == 5
    assert totals["false_hit_tokens_avoided"] == 5 * 192
    assert totals["evicted_tokens.window"] == 64
    assert (totals["load_backs"], totals["load_backs_refused"], totals["insert_cuts"]) == (1, 1, 1)
    assert data["violations"] == {"double-free": 1}
    assert data["unreadable"] == 1
    assert [clip["request"] for clip in data["clipped"]] == ["request-4"]
    assert data["clipped"][0]["proved"] == {"full": 512, "window": 256}


def test_traces_of_several_ranks_are_added_up(path: Path, tmp_path: Path) -> None:
    other = TraceFile(tmp_path / "other")
    other.match(_match("elsewhere"))
    data = json.loads(_run("trace", path, other.path, path, "--json").stdout)
    assert data["totals"]["matches"] == 7


def test_clean_and_empty_traces_say_so(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace")
    assert _run("trace", trace.path).stdout == "no records\n"
    trace.match(_match("whole", clip=None))
    assert "no match was clipped" in _run("trace", trace.path).stdout


def test_request_ids_are_text_and_nothing_else(tmp_path: Path) -> None:
    """A client chooses them. Mutations: read as markup; escapes reach the terminal; cut off."""
    trace = TraceFile(tmp_path / "trace")
    trace.match(_match("[bold]a[/]\x1b[2Jb"))
    trace.match(_match(None))
    trace.match(_match("an-id-of-some-length-" * 5, clip="a", matched={}, proved={}))
    done = _run("trace", trace.path)
    assert done.returncode == 0, done.stderr
    shown = "".join(done.stdout.split())
    assert "\x1b" not in done.stdout
    assert "[bold]" in shown
    assert "x1b" in shown
    assert "(notnamed)" in shown
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if "│" in line]
    assert "an-id-of-some-length-" * 5 in "".join(rows)


@pytest.mark.parametrize(
    "line",
    [
        '{"v":1,"kind":"match"}',
        '{"v":1,"kind":"match","time":1}',
        '{"v":1,"kind":"evict","time":1e999,"group":"full","tokens":1}',
        '{"v":1,"kind":"evict","time":1,"group":"full","tokens":"many"}',
        '{"v":1,"kind":"evict","time":1,"group":"full"}',
        '{"v":1,"kind":"party","time":1}',
        '{"v":1,"kind":[],"time":1}',
    ],
)
def test_records_of_others_are_counted_and_left(line: str, path: Path) -> None:
    trace = path.read_text()
    path.write_text(f"{trace}\n{line}\n")
    done = _run("trace", path, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["unreadable"] == 2
    assert data["totals"]["matches"] == 6
    assert data["totals"]["evictions.full"] == 0


def test_bad_traces_are_one_line_and_exit_2(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "notes"
    other.write_text("remember the milk\n")
    newer = tmp_path / "newer"
    newer.write_text('{"v":2,"kind":"match"}\n')
    for arguments, says in (
        (["trace"], "files"),
        (["trace", tmp_path / "none"], "No such file"),
        (["trace", tmp_path], "cannot read"),
        (["trace", other], "is not a trace"),
        (["trace", newer], "format 2"),
        (["trace", path, "--last", "-1"], "last"),
        (["dashboard", tmp_path], "is there already"),
        (["dashboard", tmp_path, "--force"], "cannot write"),
        (["dashboard", other], "--force"),
        (["dashboard", tmp_path / "no" / "where"], "cannot write"),
    ):
        done = _run(*arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert done.stderr.startswith("hicache-guard: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert says in done.stderr
        assert not done.stdout
    assert other.read_text() == "remember the milk\n"


def test_dashboard_is_printed_or_written(tmp_path: Path) -> None:
    printed = _run("dashboard").stdout
    assert json.loads(printed)["title"] == "hicache-guard"
    place = tmp_path / "grafana.json"
    assert _run("dashboard", place).returncode == 0
    assert place.read_text() == printed
    place.write_text("older")
    assert _run("dashboard", place, "--force").returncode == 0
    assert place.read_text() == printed
