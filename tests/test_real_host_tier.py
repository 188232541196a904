"""KV that leaves the device and comes back by the release's own HiCache is what was written.

The story is ``real/host_tier.py``, unguarded, on a CPU; with a release on the path
``python -P tests/real/host_tier.py --break`` runs it alone.
"""

from __future__ import annotations

from typing import Any

import programs
import pytest

TREES = {
    "0.5.12": ("unified",),
    "0.5.15": ("unified",),
    "0.5.18": ("unified",),
    "0.5.23": ("unified", "unified-rust"),
}
PAGE_SIZES = (1, 16, 64)
POLICIES = ("write_through", "write_through_selective", "write_back")
BREAKS = (
    "host byte, full", "host byte, window", "load shifted by a page", "load forgotten",
    "mapping turned",
)  # fmt: skip
#: The newest has both cores.
ON_EACH = pytest.mark.parametrize("version", programs.in_ci("0.5.23", of=TREES))


def rows_of(version: str) -> list[dict[str, Any]]:
    """What all stories and their mutations print on one release, in one process."""
    rows: list[dict[str, Any]] = programs.rows_of(
        version, "real/host_tier.py", "--break", statuses=(0, 1)
    )
    return rows


@pytest.mark.sglang
@ON_EACH
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_come_back(version: str, policy: str) -> None:
    rows = [row for row in rows_of(version) if "seen" in row and row["policy"] == policy]
    stories = {(row["tree"], row["page_size"]) for row in rows}
    assert stories == {(tree, size) for tree in TREES[version] for size in PAGE_SIZES}
    for row in rows:
        assert not row["found"], row
        # Not an empty run: both loads brought the whole window at least.
        window = 2 * max(row["page_size"], 4)
        for name in ("all", "window"):
            assert row["seen"][f"{name}, full"] >= 4 * window
            assert row["seen"][f"{name}, window"] >= window


@pytest.mark.sglang
@ON_EACH
def test_one_wrong_thing_is_noticed(version: str) -> None:
    rows = [row for row in rows_of(version) if "broken" in row]
    assert {(row["tree"], row["page_size"], row["policy"], row["broken"]) for row in rows} == {
        (tree, size, policy, broken)
        for tree in TREES[version]
        for size in PAGE_SIZES
        for policy in POLICIES
        for broken in BREAKS
    }
    for row in rows:
        assert "are not what was written" in row["found"], row
