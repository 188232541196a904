"""Real prefix trees over a real guarded allocator, driven as a scheduler does, raise no alarm.

The drive is ``real/trees.py``; ``python -P tests/real/trees.py --seconds 600`` with a release
on the path goes on with new examples.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import programs
import pytest

TREES = {"0.5.12": ("legacy", "unified"), "0.5.23": ("unified", "unified-rust")}
PAGE_SIZES = (1, 4, 64)
MODES = ("observe", "enforce", "strict")


def rows_of(version: str) -> list[dict[str, Any]]:
    """What the drive and its mutations print on one release, in one process."""
    rows: list[dict[str, Any]] = programs.rows_of(
        version,
        "real/trees.py",
        "--examples",
        "2",
        "--steps",
        "30",
        "--seed",
        "20",
        "--break",
        "4",
        statuses=(0, 1),
    )
    return rows


@pytest.mark.sglang
@pytest.mark.parametrize("version", TREES)
@pytest.mark.parametrize("mode", MODES)
def test_trees(version: str, mode: str) -> None:
    rows = [row for row in rows_of(version) if "seen" in row and row["mode"] == mode]
    drives = {(row["tree"], row["page_size"]) for row in rows}
    assert drives == {(tree, size) for tree in TREES[version] for size in PAGE_SIZES}
    for row in rows:
        assert not row["failure"], row["failure"]
    # Not an empty run: whatever a scheduler does came up.
    seen: Counter[str] = Counter()
    for row in rows:
        seen.update(row["seen"])
    for name in (
        "prefill", "decode", "cache prompt", "cache chunk", "finish", "retract", "evict", "lock",
        "unlock", "hit tokens", "tombstones", "slid", "idle", "guarded operations",
    ):  # fmt: skip
        assert seen[name], f"no {name}"


@pytest.mark.sglang
@pytest.mark.parametrize("version", TREES)
def test_one_illegal_thing_is_found(version: str) -> None:
    rows = [row for row in rows_of(version) if "broken" in row]
    assert {(row["tree"], row["mode"]) for row in rows} == {
        (tree, mode) for tree in TREES[version] for mode in ("off", *MODES)
    }
    for row in rows:
        assert row["by"], f"nobody found {row['broken']} in the {row['tree']} tree, {row['mode']}"
        if row["broken"] == "free again" and row["mode"] != "off":
            assert row["by"] == row["alone"] == "guard", row
