"""All requests of a scheduling round are proved with one wait for the device.

The scenes are ``real/rounds.py``. Proof by mutation, there: with each match proved by itself there
are as many waits as matches; with what was found not forgotten when KV changes, or nothing looked
at, foreign KV is taken for a hit.
"""

from __future__ import annotations

from typing import Any

import pytest
from programs import in_ci, rows_of

from hicache_guard import checkouts

QUEUE = ["W0", "W1", "W2", "W3", "W4"]
#: Of 16 cached tokens the window of the last 8 is gone, so what a request needs is there up to 8.
WHOLE, CLIPPED = dict.fromkeys(QUEUE, 16), dict.fromkeys(QUEUE, 16) | {"W2": 8}
#: Here a scheduler does not say for whom it matches its queue, only whom it admits.
NAMELESS = ("0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1", "0.5.14")
RELEASES = in_ci("0.5.12", "0.5.23", of=checkouts.SUPPORTED)


def _rows(version: str, key: str) -> list[dict[str, Any]]:
    return [row for row in rows_of(version, "real/rounds.py") if key in row]


@pytest.mark.sglang
@pytest.mark.parametrize("version", RELEASES)
def test_a_round_waits_once(version: str) -> None:
    for row in _rows(version, "scene"):
        whole, mode = row["scene"] == "whole", row["mode"]
        named = set(row["reported for"])
        if version in NAMELESS and not whole:
            named = named - {"None"} if len(named) > 1 else {"W2"}
        assert named == (set() if whole else {"W2"}), row
        if mode == "strict" and not whole:
            assert row["ended"] == "raised", row
            continue
        assert row["ended"] == "right", row
        assert row["lengths"] == (WHOLE if whole or mode == "observe" else CLIPPED), row
        if mode == "observe":
            assert row["waits"] == 0, row
        elif whole:
            assert row["waits"] == 1, row
        # The longest prefix goes first, and the proved one counts.
        clipped_first = mode == "enforce" and row["scene"] == "one recycled"
        assert row["order"] == (["W0", "W1", "W3", "W4", "W2"] if clipped_first else QUEUE), row


@pytest.mark.sglang
@pytest.mark.parametrize("version", RELEASES)
def test_each_part_is_needed(version: str) -> None:
    for row in _rows(version, "without"):
        if row["without"] == "matches proved together":
            assert row["waits"] == 2 * len(QUEUE), row
        else:
            assert row["lengths"] == WHOLE, row
