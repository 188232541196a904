"""What the guard costs a device: waits that it adds, and what it does before answers arrive.

The scenes are in ``real/delayed.py`` and ``real/syncs.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RELEASES = ("0.5.12", "0.5.23")

pytestmark = [pytest.mark.sglang, pytest.mark.parametrize("version", RELEASES)]

#: They read the free list, and on a CPU a look at the free list finishes the checks that are due.
LOOKS = {"available_size", "free in a group"}

Results = Callable[[str], Any]


def _found(results: Results, version: str, job: str) -> Any:
    result = results(version)[job]
    assert not result["error"], result["error"]
    return result["found"]


def test_no_operation_gains_a_synchronising_operator(on_release: Results, version: str) -> None:
    rows = _found(on_release, version, "syncs")
    assert {(row["mode"], row["page_size"]) for row in rows} == {
        (mode, size) for mode in ("observe", "enforce", "strict") for size in (1, 64)
    }
    assert any(row["own"] for row in rows), "the counter sees none of the release's own"
    assert [row for row in rows if row["added"]] == []


def test_observe_never_waits_where_the_release_does_not(on_release: Results, version: str) -> None:
    rows = _found(on_release, version, "syncs")
    waiting = [
        (row["what"], row["page_size"])
        for row in rows
        if row["mode"] == "observe" and row["waits"] and not row["own"] and row["what"] not in LOOKS
    ]
    assert waiting == []


def test_enforce_does_not_wait_in_decode(on_release: Results, version: str) -> None:
    rows = _found(on_release, version, "syncs")
    steps = {"alloc", "alloc_extend", "decode", "translate", "alloc_extend_swa_tail"}
    hot = [row for row in rows if row["mode"] == "enforce" and row["what"] in steps]
    assert len(hot) >= 6
    assert [row for row in hot if row["waits"]] == []


def test_strict_waits_for_its_answers(on_release: Results, version: str) -> None:
    rows = _found(on_release, version, "syncs")
    assert sum(row["waits"] for row in rows if row["mode"] == "strict") > 20


def test_the_common_path_never_waits(on_release: Results, version: str) -> None:
    waits = _found(on_release, version, "never waits")
    assert {name.split()[0] for name in waits} == {"observe", "enforce"}
    assert set(waits.values()) == {0}


def test_what_is_freed_is_held_back_and_counts_as_available(
    on_release: Results, version: str
) -> None:
    rows = _found(on_release, version, "holds back")
    assert rows
    for row in rows:
        assert row["listed before the answer"] == 0
        assert row["available before the answer"] == 24  # the whole pool, in pages
        assert row["window available before the answer"] == 20


def test_what_is_freed_twice_is_listed_once(on_release: Results, version: str) -> None:
    for row in _found(on_release, version, "holds back"):
        assert row["listed after it"] == list(range(1, 25))
        assert row["window listed after it"] == list(range(1, 21))
        assert "double-free" in row["kinds"]


def test_an_allocation_waits_only_when_short(on_release: Results, version: str) -> None:
    rows = _found(on_release, version, "waits when short")
    assert rows
    for row in rows:
        assert row["waits with enough"] == 0
        assert row["waits when short"] >= 1
        assert row["got"]
        assert row["got more"]


def test_observe_reports_once_the_answer_is_there(on_release: Results, version: str) -> None:
    said = _found(on_release, version, "reports late")
    assert said
    assert all("double-free" in kinds for kinds in said)


def test_late_answers_to_many_faults_end_well(on_release: Results, version: str) -> None:
    assert _found(on_release, version, "late answers to many faults") is True
