"""A dead window under a real engine: the wrong answer, and the right one computed again.

The engine, its scheduler and its Triton backend are the release's own (``engine/serve.py``); what
is right is what each request answers alone, unguarded, with an empty cache and without a fault.
Where the fault is contained, the release's own check for lost and doubly held KV stays on.

Proved by mutation of ``steps``, each of which makes this fail: what is found only reported; the
token of the wrong step taken (no ``is_retracted``; without overlap no ``_Skipping``); a request
that the pass under way dooms again retracted twice (no ``_goes_on``, overlap); ``chunked_req``
kept; the first token's log-probability not sent (no ``_unsent``, 0.5.12); requests that a pause
retracted released once more, or what they had taken over kept; a request given up by its name; a
session that keeps its row (no ``release_session``). Of ``session``: a session read of a request
that was taken out of it. Of ``prefix_tree``: no ``_own_prefix`` (0.5.12), so that a chunk goes on
after rows that are nobody's; a request's dead window cached while it runs. What of it is not seen
here, ``test_real_computed_again`` shows.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import HERE, fetched, in_ci

from hicache_guard import checkouts

RELEASES = ("0.5.12", "0.5.15", "0.5.18", "0.5.23")
FAULTS = ("freed", "chunk")
#: What a request left in the tree is taken over by one that waits, if anybody lets it.
SHARED = ("off/overlap/shared", "enforce/overlap/shared")
WAYS = ("overlap", "normal")
PLAYS = (
    *(f"enforce/{way}/none" for way in WAYS),
    *(f"{mode}/overlap/{fault}" for fault in FAULTS for mode in ("off", "observe")),
    *(f"enforce/{way}/{fault}" for fault in FAULTS for way in WAYS),
    *SHARED,
    "enforce/overlap/retracted",
    "enforce/overlap/whenever",
    "enforce/overlap/session",
    "strict/normal/freed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@functools.cache
def _played(version: str, folder: Path) -> dict[str, dict[str, Any]]:
    environment = checkouts.environment(fetched(version))
    shim = HERE / "engine" / "shim"
    environment["PYTHONPATH"] = f"{shim}:{environment['PYTHONPATH']}"
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "engine" / "serve.py"), str(folder), *PLAYS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["play"] for row in rows] == [*PLAYS], done.stderr[-3000:]
    return {row["play"]: row for row in rows}


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=RELEASES))
@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_found_where_nothing_is_wrong(version: str, way: str, folder: Path) -> None:
    row = _played(version, folder)[f"enforce/{way}/none"]
    assert row["apart"] == [], "every answer is as alone"
    assert row["guard"] == {"recomputed": 0, "violations": {}}
    assert row["hits"], "or the cache was not used"
    assert row["overlap"] is (way == "overlap")
    assert row["reads"]["decode, window slots"], "or the backend was not used"


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=RELEASES))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_dead_window_gives_wrong_answers_and_enforce_the_right_ones(
    version: str, fault: str, folder: Path
) -> None:
    played = _played(version, folder)
    assert played[f"off/overlap/{fault}"]["apart"], "the fault does harm"
    observed = played[f"observe/overlap/{fault}"]
    assert observed["apart"], "observe changes nothing"
    assert observed["guard"]["recomputed"] == 0
    assert observed["guard"]["violations"]["dead-window-read"]
    for way in WAYS:
        row = played[f"enforce/{way}/{fault}"]
        assert row["apart"] == [], (way, row)
        assert row["guard"]["violations"]["dead-window-read"], (way, row)
        # The request; of a chunk, where log-probabilities are asked for, its whole batch, and
        # whoever took over what it left in the tree.
        assert 1 <= row["guard"]["recomputed"] <= (1 if fault == "freed" else 4), (way, row)


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=RELEASES))
def test_who_waits_is_not_given_what_was_wrong(version: str, folder: Path) -> None:
    unguarded, guarded = (_played(version, folder)[play] for play in SHARED)
    assert unguarded["apart"], "the fault does harm"
    assert guarded["apart"] == [], guarded


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=RELEASES))
def test_a_pause_may_retract_first(version: str, folder: Path) -> None:
    row = _played(version, folder)["enforce/overlap/retracted"]
    assert row["guard"]["violations"]["dead-window-read"] == 1, row
    assert row["guard"]["recomputed"] == 2, "and who took over what it left in the tree"
    assert row["apart"] == [], row


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=RELEASES))
def test_one_request_is_given_up_and_told_why(version: str, folder: Path) -> None:
    row = _played(version, folder)["enforce/overlap/whenever"]
    assert row["apart"] == [0], "and none whose name begins with its name"
    [error] = row["errors"]
    assert "500" in error, error
    assert "read dead window KV 4 times" in error


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=RELEASES))
def test_a_turn_of_a_session_is_computed_again(version: str, folder: Path) -> None:
    row = _played(version, folder)["enforce/overlap/session"]
    assert row["guard"]["recomputed"] == 1, row
    assert row["apart"] == [], row


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=RELEASES))
def test_strict_ends_the_server_before_a_token_is_taken(version: str, folder: Path) -> None:
    assert "ended" in _played(version, folder)["strict/normal/freed"]
