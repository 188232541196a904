"""The doctor over ranks names each rank that is missing, unguarded or of another release.

What a rank of a real server reports is in ``test_nodes_rehearsal``. Mutations seen to fail: no
comparison of the release, of the mode, no look at missing hooks, an old report that counts, a rank
that is too many passed over.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_guard.cli import main
from hicache_guard.core.ranks import rank_of
from hicache_guard.nodes import ranks, topology

RELEASE = "0.5.23"


@pytest.mark.parametrize(
    ("title", "rank"),
    [
        ("sglang::scheduler", {"dp": 0, "pp": 0, "tp": 0}),
        ("sglang::scheduler_TP3", {"dp": 0, "pp": 0, "tp": 3}),
        ("sglang::scheduler_DP1_PP2_TP13_EP4", {"dp": 1, "pp": 2, "tp": 13}),
        ("sglang::scheduler_DP1_ATTN_CP2_MOE_DP7_TP0", {"dp": 1, "pp": 0, "tp": 0}),
        ("sglang::scheduler_PP1_MOE_DP7", {"dp": 0, "pp": 1, "tp": 0}),
        ("sglang::detokenizer", None),
        ("python3", None),
    ],
)
def test_titles_say_which_rank_it_is(title: str, rank: dict[str, int] | None) -> None:
    """As releases 0.5.12 to 0.5.23 put their titles together."""
    assert rank_of(title) == rank


def _report(rank: topology.Rank, **more: Any) -> dict[str, Any]:
    return {
        "v": 1, "time": 1.0, "host": "here", "pid": 7, "sglang": RELEASE, "mode": "enforce",
        "rank": {"dp": rank.dp, "pp": rank.pp, "tp": rank.tp}, "route": "plugin", "hooks": 60,
        "missing": [], "slots": {"full": 100, "window": 50},
    } | more  # fmt: skip


@pytest.fixture(params=["1p1d", "4p2d", "pp-two-nodes", "dp"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, list[topology.Rank]]:
    """A run of a topology on which every rank has reported."""
    whole = topology.read(request.param, release=RELEASE, guard="enforce")
    (tmp_path / "topology.json").write_text(json.dumps(whole.as_data()))
    expected = whole.ranks()
    for pid, rank in enumerate(expected, start=100):
        write(tmp_path, rank, pid, _report(rank))
    return tmp_path, expected


def write(folder: Path, rank: topology.Rank, pid: int, report: dict[str, Any]) -> Path:
    file = folder / ranks.place(rank.server, rank.node).replace("{pid}", str(pid))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(report))
    return file


def said(folder: Path) -> dict[str, str]:
    return {rank.name: rank.wrong for rank in ranks.compare(folder) if rank.wrong}


def test_all_ranks_that_are_there_are_found(run: tuple[Path, list[topology.Rank]]) -> None:
    folder, expected = run
    assert said(folder) == {}
    assert [rank.name for rank in ranks.compare(folder)] == [rank.name for rank in expected]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"sglang": "0.5.22"}, "runs SGLang 0.5.22, not 0.5.23"),
        ({"mode": "observe"}, "guard observe, not enforce"),
        ({"missing": ["x.Y.z"]}, "1 hooks are missing: x.Y.z"),
    ],
)
def test_a_rank_that_is_not_as_it_should_be_is_named(
    run: tuple[Path, list[topology.Rank]], more: dict[str, Any], why: str
) -> None:
    folder, expected = run
    for number, rank in enumerate(expected):
        file = write(folder, rank, 100 + number, _report(rank, **more))
        assert said(folder) == {rank.name: why}
        file.write_text(json.dumps(_report(rank)))


def test_a_rank_that_says_nothing_is_named(run: tuple[Path, list[topology.Rank]]) -> None:
    folder, expected = run
    for number, rank in enumerate(expected):
        file = write(folder, rank, 100 + number, _report(rank))
        file.unlink()
        assert said(folder) == {rank.name: "no report: it is unguarded, or did not start"}
        file.write_text(json.dumps(_report(rank)))


def test_the_newest_report_counts(run: tuple[Path, list[topology.Rank]]) -> None:
    folder, (first, *_) = run
    write(folder, first, 1, _report(first, sglang="0.5.20", time=0.5))
    assert said(folder) == {}
    write(folder, first, 2, _report(first, sglang="0.5.20", time=2.0))
    assert said(folder) == {first.name: "runs SGLang 0.5.20, not 0.5.23"}


def test_what_is_too_much_or_no_report_is_told(run: tuple[Path, list[topology.Rank]]) -> None:
    folder, (first, *_) = run
    write(folder, first, 900, _report(dataclasses.replace(first, tp=99)))
    (extra,) = said(folder).values()
    assert extra == "the topology has no such rank"
    for name, text in (("x.json", "{}"), ("plain0.node0.7.json", "{"), ("a1.node0.7.json", "[]")):
        (folder / ranks.FOLDER / name).write_text(text)
    found = [*said(folder).values()]
    assert len(found) == 4
    assert sum("is no report of a rank" in each for each in found) == 3


Command = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    def called(*arguments: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["hicache-guard", "nodes", "doctor", *arguments])
        with pytest.raises(SystemExit) as ended:
            main.run()
        told = capsys.readouterr()
        return ended.value.code, told.out, told.err

    return called


def test_command(run: tuple[Path, list[topology.Rank]], doctor: Command) -> None:
    folder, (first, *_) = run
    assert doctor(str(folder))[0] == 0
    write(folder, first, 100, _report(first, mode="observe"))
    status, told, _ = doctor(str(folder))
    assert status == 1
    assert "guard observe, not enforce" in told.replace("\n", " ")
    status, told, _ = doctor(str(folder), "--json")
    assert [row["name"] for row in json.loads(told) if row["wrong"]] == [first.name]


@pytest.mark.parametrize("text", [None, "", "{}", '{"servers": 1}'])
def test_what_is_no_run_is_one_line(text: str | None, doctor: Command, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "topology.json").write_text(text)
    status, told, errors = doctor(str(tmp_path))
    assert status == 2
    assert not told
    assert len(errors.strip().splitlines()) == 1
