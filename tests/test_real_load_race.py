"""A load-back between a translation and its write does not send KV to a foreign window slot.

The scenes are ``real/load_race.py``; with a release on the path
``python -P tests/real/load_race.py`` runs them alone. Proved by mutation there: with what is
remembered or passed along not compared, or its epoch not asked, the late write lands on foreign KV
although the guard enforces.
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of

TREES = {
    "0.5.12": ("unified",),
    "0.5.12.post1": ("unified",),
    "0.5.15": ("unified",),
    "0.5.18": ("unified",),
    "0.5.23": ("unified", "unified-rust"),
}
#: CI has time for the last that remembers, and the newest, and for pages of one size.
IN_CI = ("0.5.12.post1", "0.5.23")
ON_EACH = pytest.mark.parametrize("version", in_ci(*IN_CI, of=TREES))
SCENES = ("slots reloaded", "mapping rebuilt")
MODES = (None, "observe", "enforce", "strict", "no comparison", "no epoch")


@pytest.mark.sglang
@ON_EACH
def test_a_late_write_hits_nobody_else(version: str) -> None:
    pages = (16,) if version in IN_CI else (1, 16)
    rows = rows_of(version, "real/load_race.py", "--page-sizes", *map(str, pages))
    assert [(row["tree"], row["page_size"], row["scene"], row["mode"]) for row in rows] == [
        (tree, page, scene, mode)
        for tree in TREES[version]
        for page in pages
        for scene in SCENES
        for mode in MODES
    ]
    for row in rows:
        if row["mode"] == "enforce":
            assert row["ended"] == "right", row
        elif row["mode"] == "strict":
            assert row["ended"] == "raised", row
        elif row["mode"] == "no epoch":
            # Only a pool that remembers relies on the epoch before the first write of a pass.
            relies = row["scene"] == "mapping rebuilt" or version.startswith("0.5.12")
            assert row["ended"].startswith("bytes: ") is relies, row
            assert (row["ended"] == "right") is not relies, row
        else:
            assert row["ended"].startswith("bytes: "), row
        if row["mode"] in ("observe", "enforce", "strict"):
            assert row["faults"] == ["stale-translation"], row
        elif row["mode"] in (None, "no comparison"):
            assert not row["faults"], row
