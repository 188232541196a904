"""Records of the real 0.5.12 under the churn of #25805: played again, shrunk, run as a program.

What must come again is what the churn itself knows: its traffic is from a seed, and an audit that
shares nothing with the guard judges it (``test_repro_programs``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import fetched, output_of, rows_of

from hicache_guard import checkouts
from hicache_guard.cli.replay import replay
from hicache_guard.core.errors import ConfigError

RELEASE = "0.5.12"

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["job"]: row for row in rows_of(RELEASE, "real/replay.py", str(folder))}


def test_crash_comes_again_to_the_last_violation(jobs: dict[str, Any]) -> None:
    """Mutation: frees of a group made at once, or a group opened where none was: diverged."""
    job = jobs["replay"]
    assert job["verdict"] == "reproduced"
    assert (job["target"]["fault"], job["target"]["request"]) == ("stale-mapping", "r15")
    assert job["made"] == job["calls"]
    assert job["alike"] == job["recorded"] > 300
    assert job["raised"]["type"] == "AssertionError"
    assert job["whole_seconds"] < 10


def test_shrunk_to_a_program_of_a_few_operations(jobs: dict[str, Any]) -> None:
    """C1 of the catalogue needs an allocation, a free in part and a tail: three by hand.

    Mutations: pools and what fills them do not shrink together: 7; pools not at all: 10.
    """
    job = jobs["shrink"]
    assert job["target"] == "stale-mapping"
    assert 3 <= job["operations"] <= 5
    assert job["of"] > 12
    assert job["full"] < 1280


@pytest.mark.parametrize("mode", ["off", "observe", "enforce", "strict"])
def test_program_shows_it(mode: str, jobs: dict[str, Any], folder: Path) -> None:
    """Unguarded the audit finds somebody's window page in the free list; enforce contains it."""
    assert jobs
    printed = output_of(RELEASE, str(folder / "shrunk.py"), mode, statuses=(1,))
    assert ("stale-mapping: " in printed) == (mode != "off")
    assert ("is in the free list" in printed) == (mode in ("off", "observe"))
    assert ("ended by GuardViolation" in printed) == (mode == "strict")


def test_result_that_differs_is_told(jobs: dict[str, Any]) -> None:
    """One slot of one recorded result was changed. Mutation: compare nothing."""
    job = jobs["falsified"]
    assert job["verdict"] == "diverged"
    assert job["differs"]["call"] == job["falsified"]
    assert job["differs"]["recorded"].startswith("slots 17")
    assert job["made"] == job["falsified"] + 1


def test_calls_that_are_not_recorded_are_noticed(jobs: dict[str, Any]) -> None:
    """The hooks of one method, and of all, did not record."""
    assert jobs["no free"]["verdict"] == "diverged"
    assert jobs["nothing"]["verdict"] == "empty"
    assert jobs["nothing"]["made"] == 0


@pytest.mark.parametrize("mode", ["enforce", "strict"])
def test_records_of_every_mode_are_replayed_in_observe_and_in_theirs(
    mode: str, jobs: dict[str, Any]
) -> None:
    """Mutation: take a call that strict refused for one that differs."""
    first = jobs["replay"]["target"]
    for job in (jobs[mode], jobs[f"{mode} again"]):
        assert job["verdict"] == "reproduced"
        same = ("n", "fault", "pool", "slot", "page", "slots")
        assert [job["target"][key] for key in same] == [first[key] for key in same]
    assert jobs[mode]["stopped"]
    again = jobs[f"{mode} again"]
    assert again["made"] == again["calls"]
    assert again["alike"] == again["recorded"]
    assert jobs["enforce again"]["recorded"] > 1


def test_file_that_begins_in_the_middle_is_replayed_from_its_state(jobs: dict[str, Any]) -> None:
    """After many faults, too. Mutations: without generations, stamps, owners or suspicion."""
    job = jobs["rotated"]
    assert job["part"] > 1
    assert job["target"]["n"] > 400
    assert job["verdict"] == "reproduced"
    assert job["made"] == job["calls"]
    assert job["alike"] == job["recorded"] > 10


def test_all_that_a_guard_keeps_is_in_the_state_of_a_record(jobs: dict[str, Any]) -> None:
    """Mutations: without what of a page is named, since when a tree has it, owners of slots."""
    assert jobs["state"]["names"] == []


def test_pages_of_64_slots(jobs: dict[str, Any]) -> None:
    job = jobs["page 64"]
    assert job["verdict"] == "reproduced"
    assert job["alike"] == job["recorded"] > 10


# -- the command


def test_command_tells_the_story_and_writes_the_program(
    jobs: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """With a torn end. Mutation: let the replay record itself, over what it reads."""
    assert jobs
    fetched(RELEASE)
    path = folder / "torn"
    path.write_bytes((folder / "strict").read_bytes() + b'{"k":"ca')
    before = path.read_bytes()
    out = tmp_path / "out.py"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hicache_guard.cli.main", "replay", str(path), "--out", out],
        capture_output=True,
        text=True,
        env=os.environ | {"HICACHE_GUARD_RECORD": str(path)},
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "8 bytes at the end unreadable" in said
    assert "✓ reproduced: stale-mapping in call 60" in said
    assert "to 4, on 16 full and 16 window slots" in said
    assert path.read_bytes() == before
    compile(out.read_text(), str(out), "exec")


def test_bad_input_is_one_clear_line(
    jobs: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jobs
    path = folder / "strict"
    with pytest.raises(ConfigError, match="unknown mode 'off'"):
        replay(path, guard="off")
    with pytest.raises(ConfigError, match="cannot read"):
        replay(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"no allocator 77; it has \d"):
        replay(path, allocator=77)
    with pytest.raises(ConfigError, match="is a folder, or in none"):
        replay(path, out=tmp_path / "no" / "folder")
    other = tmp_path / "other"
    other.write_text(path.read_text().replace('"sglang":"0.5.12"', '"sglang":"0.4.0"'))
    with pytest.raises(ConfigError, match=r"0\.4\.0"):
        replay(other)
    monkeypatch.setenv(checkouts.HOME_VAR, str(tmp_path))
    with pytest.raises(ConfigError, match=r"releases fetch 0\.5\.12"):
        replay(path)


def test_call_that_cannot_be_made_again_is_one_line(jobs: dict[str, Any]) -> None:
    assert jobs["unmakeable"]["error"] == (
        "call 0, alloc_extend_swa_tail: a list cannot be made again"
    )
