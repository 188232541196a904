"""What SGLang's backends gather for their window layers is proved, and the step is told.

The scenes are ``real/window_reads.py``, on the backends of each release; with a release on the path
``python -P real/window_reads.py`` runs them alone. Expected is what is looked up there position by
position, and of a dead page how many of its positions are in the window.

Proved by mutation, each of which makes this fail: ``kv_pool`` without ``window_reads.translated``;
``pack_read_stream`` not hooked (0.5.23, Triton); ``counted`` as large as the batch (padded);
``observe`` answered with our own translation; a report that is read where it is made (syncs).
"""

from __future__ import annotations

from typing import Any

import pytest
from programs import in_ci, rows_of

#: The newest tree of each, which makes no difference to what is read.
TREES = {
    "0.5.12": "legacy",
    "0.5.15": "unified",
    "0.5.18": "unified",
    "0.5.23": "unified-rust",
}
BACKENDS = ("triton", "triton, graph", "flashinfer", "flashinfer, prefill")


def _told(version: str, scene: str) -> list[dict[str, Any]]:
    """What each backend gathered at each step of a scene, in each mode."""
    rows = rows_of(version, "real/window_reads.py", "--trees", TREES[version])
    found = [
        {**told, "mode": row["mode"], "backend": backend, "faults": row["faults"]}
        | {"dead": row["dead"], "page_size": row["page_size"]}
        for row in rows
        if row["scene"] == scene
        for backend in BACKENDS
        for told in row["told"][backend]
    ]
    assert {told["mode"] for told in found} == {None, "observe", "enforce", "strict"}
    return found


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=TREES))
@pytest.mark.parametrize("scene", ["runs", "padded"])
def test_live_windows_are_read_as_ever(version: str, scene: str) -> None:
    """At no step of a long run, nor of rows that pad a graph's batch, is anything found or changed.

    And no operator makes the host wait that the release does not have itself.
    """
    waits: dict[str, Any] = {}
    for told in _told(version, scene):
        assert told["differs"] == told["faults"] == told["again"] == [], told
        assert told["reads"] == (told["mode"] is not None), "each gather is one read"
        assert told["syncs"] == waits.setdefault(told["backend"], told["syncs"]), told


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=TREES))
@pytest.mark.parametrize(("scene", "whose"), [("lost", "R1"), ("handed on", "R2")])
def test_a_dead_window_is_found(version: str, scene: str, whose: str) -> None:
    """Its request is named and no other; in enforce its entries lead to the padding slot."""
    for told in _told(version, scene):
        mode = told["mode"]
        if mode is None:
            assert not told["differs"]
            continue
        assert told["dead"], "or the scene shows nothing"
        if mode == "strict":
            assert "raised" in told, told
            continue
        assert "dead-window-read" in told["faults"], told
        assert told["again"] == [whose], told
        # What has no window slot leads to the padding slot anyway.
        changed = len(told["dead"]) if (scene, mode) == ("handed on", "enforce") else 0
        assert len(told["differs"]) == changed, told
        assert told["redirected"], told
