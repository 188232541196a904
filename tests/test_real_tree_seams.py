"""Trees that nobody hooked reuse nothing; trees over a single pool are proved by their own rule.

The scenes are ``real/tree_seams.py``; with a release on the path ``python -P
tests/real/tree_seams.py`` runs them alone. Mutations seen: ``tree_params.__init__`` without its
last line lets the unhooked tree hit in enforce; with ``Witness.resident`` that says yes to
everything, the recycled page is matched.
"""

from __future__ import annotations

from typing import Any

import programs
import pytest

#: A match leaves the last token of 24 to be computed, and pages are of 4.
HIT = 20
#: Of 24 tokens on pages of one, those before the page that was recycled.
CLIP = 8
HAS_SINGLE_POOL = ("0.5.15", "0.5.18", "0.5.23")


def rows_of(version: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = programs.rows_of(version, "real/tree_seams.py")
    return rows


@pytest.mark.sglang
@pytest.mark.parametrize("version", ["0.5.12", *HAS_SINGLE_POOL])
def test_unhooked_tree_reuses_nothing(version: str) -> None:
    rows = {row["mode"]: row for row in rows_of(version) if row["scene"] == "unhooked tree"}
    assert set(rows) == {None, "observe", "enforce", "strict", "allowed"}
    for mode, row in rows.items():
        closed = mode in ("enforce", "strict")
        assert row["hit"] == (0 if closed else HIT), row
        assert row["usual"] == HIT, row
        assert len(row["said"]) == (closed or mode == "observe"), row
        if closed:
            assert "prefix reuse is off; HICACHE_GUARD_UNPROVED_TREES=allow" in row["said"][0]


@pytest.mark.sglang
@pytest.mark.parametrize("version", HAS_SINGLE_POOL)
def test_single_pool(version: str) -> None:
    rows = {row["mode"]: row for row in rows_of(version) if row["scene"] == "single pool"}
    for mode, row in rows.items():
        faults = [] if mode is None else ["foreign-prefix"]
        assert row["faults"] == faults, row
        assert row["ended"] == ("raised" if mode == "strict" else "returned"), row
        if mode != "strict":
            assert row["lengths"] == [24, CLIP if mode == "enforce" else 24], row
