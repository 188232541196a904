"""A retracted request's KV comes back from the host as it went, and nobody else's does.

The scenes are ``real/retraction.py``; with a release since 0.5.21 on the path
``python -P tests/real/retraction.py`` runs them alone. Proved by mutation there: with its host
pages freed as any, and their tickets not looked at, the request goes on with foreign KV unseen.
"""

from __future__ import annotations

import pytest
from programs import rows_of

TREES = ("unified", "unified-rust")
HANDED_ON = ("handed on, full", "handed on, window")
MODES = (None, "observe", "enforce", "strict")
MUTATIONS = ("not kept", "not kept, no ticket")
FAULTS = {
    "observe": ["freed-in-flight", "stale-host-copy"],
    "enforce": ["freed-in-flight"],
    "strict": ["freed-in-flight"],
    "not kept": ["stale-host-copy"],
}


@pytest.mark.sglang
@pytest.mark.slow
def test_a_retracted_request_has_its_own_kv() -> None:
    rows = rows_of("0.5.23", "real/retraction.py")
    assert [(row["tree"], row["page_size"], row["scene"], row["mode"]) for row in rows] == [
        (tree, page, scene, mode)
        for tree in TREES
        for page in (1, 16)
        for scene in ("legal", *HANDED_ON, "row handed on")
        for mode in (*MODES, *(MUTATIONS if scene in HANDED_ON else ()))
    ]
    for row in rows:
        handed_on = row["scene"] in HANDED_ON
        assert row["faults"] == (FAULTS.get(row["mode"], []) if handed_on else []), row
        if row["scene"] == "legal" or (handed_on and row["mode"] == "enforce"):
            assert row["ended"] == "right", row
        elif handed_on and row["mode"] == "strict":
            assert row["ended"] == "raised", row
        else:  # of a row that was handed on before, indices do not tell
            assert row["ended"].startswith("bytes: "), row
