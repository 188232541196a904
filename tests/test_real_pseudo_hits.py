"""A cached prefix whose KV went to somebody else is clipped where it must be, and computed again.

The scenes are ``real/pseudo_hits.py``, on every release and tree; with a release on the path
``python -P tests/real/pseudo_hits.py`` runs them alone. Its ``MUTATIONS`` take the checks away one
by one, and each is seen to end in a read of foreign KV.
"""

from __future__ import annotations

from typing import Any

import programs
import pytest

from hicache_guard import checkouts

SCENES = (
    "window tail recycled", "window middle recycled", "full page recycled",
    "full page recycled unseen", "session row recycled",
)  # fmt: skip
HARMLESS = "window middle recycled"


def rows_of(version: str) -> list[dict[str, Any]]:
    """What all scenes and mutations print on one release, in one process."""
    rows: list[dict[str, Any]] = programs.rows_of(version, "real/pseudo_hits.py")
    return rows


@pytest.mark.sglang
@pytest.mark.parametrize("version", checkouts.SUPPORTED)
def test_clip_and_recompute(version: str) -> None:
    rows = [row for row in rows_of(version) if "scene" in row]
    for tree in {row["tree"] for row in rows}:
        scenes = {row["scene"] for row in rows if row["tree"] == tree}
        assert scenes == set(SCENES) - ({"session row recycled"} if tree == "legacy" else set())
    for row in rows:
        _judge(row)


def _judge(row: dict[str, Any]) -> None:
    harmless = row["scene"] == HARMLESS
    if row["mode"] == "enforce" or harmless:
        assert row["ended"] == "right", row
        # The length is a closed form, see SCENES; and once more, and with more after it.
        assert set(row["lengths"][1:3]) == {row["clip"]}, row
        assert bool(row["faults"]) is not harmless, row
    elif row["mode"] == "strict":
        assert row["ended"] == "raised", row
    else:
        assert row["ended"].startswith("kv: "), row
        if row["scene"] != "full page recycled":  # there the guard keeps the page, and the hit
            assert row["lengths"][1] > row["clip"], row
        assert bool(row["faults"]) is (row["mode"] == "observe"), row


@pytest.mark.sglang
@pytest.mark.parametrize("version", checkouts.SUPPORTED)
def test_without_a_check_foreign_kv_is_read(version: str) -> None:
    """Or the release's own assertions end the server."""
    rows = [row for row in rows_of(version) if "without" in row]
    for tree in {row["tree"] for row in rows}:
        assert sum(row["tree"] == tree for row in rows) == (3 if tree == "legacy" else 4)
    for row in rows:
        assert row["ended"].startswith(("kv: ", "release: ")), row
