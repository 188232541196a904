"""Host pages are not handed on while a copy to or from them is queued or under way.

The scenes are ``real/in_flight.py``; with a release on the path
``python -P tests/real/in_flight.py`` runs them alone. Proved by mutation there: with pages under a
copy freed as any, foreign KV is loaded, stored or overwritten although the guard enforces; with a
backup not looked at again when it is submitted, foreign KV bears the prints of the tree's.
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of

TREES = {
    "0.5.12": ("unified",),
    "0.5.15": ("unified",),
    "0.5.18": ("unified",),
    "0.5.23": ("unified", "unified-rust"),
}
#: Since 0.5.21 a backup waits for the next poll; since 0.5.13 there is a storage.
BACKUPS_WAIT, STORES = ("0.5.23",), ("0.5.15", "0.5.18", "0.5.23")
#: CI has time for the newest, and for pages of one size.
IN_CI = ("0.5.23",)
ON_EACH = pytest.mark.parametrize("version", in_ci(*IN_CI, of=TREES))
KEPT = tuple(
    f"{copy}, {side}" for copy in ("load", "backup", "store") for side in ("full", "window")
)
MODES = (None, "observe", "enforce", "strict")


@pytest.mark.sglang
@ON_EACH
def test_nothing_is_handed_on_under_a_copy(version: str) -> None:
    pages = (16,) if version in IN_CI else (1, 16)
    rows = rows_of(version, "real/in_flight.py", "--page-sizes", *map(str, pages))
    assert [(row["tree"], row["page_size"], row["scene"], row["mode"]) for row in rows] == [
        (tree, page, scene, mode)
        for tree in TREES[version]
        for page in pages
        for scene in (*KEPT, "backup, device")
        for mode in (*MODES, "not kept" if scene in KEPT else "not looked at again")
    ]
    for row in rows:
        mode, scene = row["mode"], row["scene"]
        assert not row.get("kept"), row  # nothing is lost
        if scene.startswith("backup") and version not in BACKUPS_WAIT:
            assert row["ended"] == "submitted at once", row
            continue
        if scene.startswith("store") and version not in STORES:
            assert row["ended"] == "no storage", row
            continue
        told = mode in ("observe", "enforce", "strict") and scene in KEPT
        assert row["faults"] == (["freed-in-flight"] if told else []), row
        if (scene == "backup, device" and mode in MODES[1:]) or mode == "enforce":
            assert row["ended"] == "right", row
        elif mode == "strict":
            assert row["ended"] == "raised", row
        else:
            assert row["ended"].startswith("bytes: "), row
