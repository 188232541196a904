"""A host copy that is somebody else's by the time it is loaded back is not loaded.

The scenes are ``real/stale_copies.py``; with a release on the path
``python -P tests/real/stale_copies.py`` runs them alone. Proved by mutation there: with the prints
not asked, foreign KV is loaded although the guard enforces. And guarded in any mode, the stories of
``real/host_tier.py`` raise no alarm, and what they load is proved.
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
#: The newest has both cores.
ON_EACH = pytest.mark.parametrize("version", in_ci("0.5.23", of=TREES))


@pytest.mark.sglang
@ON_EACH
def test_stale_copies_are_not_loaded(version: str) -> None:
    rows = rows_of(version, "real/stale_copies.py")
    assert len(rows) == len(TREES[version]) * 2 * 2 * 5, "trees, page sizes, scenes, modes"
    for row in rows:
        if row["mode"] == "enforce":
            assert row["ended"] == "right", row
            assert row["host hit"], row
            assert not row["loaded"], row
            assert row["faults"] == ["stale-host-copy"], row
        elif row["mode"] == "strict":
            assert row["ended"] == "raised", row
            assert row["faults"] == ["stale-host-copy"], row
        else:
            assert row["ended"].startswith("bytes: "), row
            assert ("stale-host-copy" in row["faults"]) is (row["mode"] == "observe"), row


@pytest.mark.sglang
@ON_EACH
@pytest.mark.parametrize("mode", ["observe", "enforce", "strict"])
def test_what_comes_back_is_proved(version: str, mode: str) -> None:
    rows = rows_of(version, "real/host_tier.py", "--mode", mode)
    assert {row["tree"] for row in rows} == set(TREES[version])
    for row in rows:
        assert not row["found"], row
        assert row["guard"] == {"faults": [], "load backs": 2, "refused": 0}, row
