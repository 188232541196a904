"""KV comes back from a storage backend as it went, and what was handed on meanwhile does not.

The scenes are ``real/storage.py``; with a release on the path
``python -P tests/real/storage.py`` runs them alone. Proved by mutation there: with prints not
asked, or with a page of which nothing is known excused, foreign KV is loaded although the guard
enforces; and with a fetch taken to begin in a wrong place what is legal is refused.
"""

from __future__ import annotations

import pytest
from programs import rows_of

#: Up to 0.5.12.post1 the tree has no storage.
TREES = {
    "0.5.15": ("unified",),
    "0.5.18": ("unified",),
    "0.5.23": ("unified", "unified-rust"),
}
#: CI has time for the newest, one of its trees, and pages of one size.
ON_EACH = pytest.mark.parametrize(
    ("version", "trees", "pages"),
    [
        ("0.5.23", ("unified",), (16,)),
        *(pytest.param(name, has, (1, 16), marks=pytest.mark.slow) for name, has in TREES.items()),
    ],
)
LEGAL = ("from the start", "goes on", "for nobody known")
HANDED_ON = tuple(
    f"{side} copy handed on {when}"
    for when in ("later", "meanwhile")
    for side in ("full", "window")
)
MODES = (None, "observe", "enforce", "strict")
MUTATIONS = {
    **dict.fromkeys(HANDED_ON, ("no prints", "excused")),
    **dict.fromkeys(LEGAL[:2], ("wrong place",)),
}


@pytest.mark.sglang
@ON_EACH
def test_what_is_fetched_is_proved(
    version: str, trees: tuple[str, ...], pages: tuple[int, ...]
) -> None:
    sizes = map(str, pages)
    rows = rows_of(version, "real/storage.py", "--page-sizes", *sizes, "--trees", *trees)
    assert [(row["tree"], row["page_size"], row["scene"], row["mode"]) for row in rows] == [
        (tree, page, scene, mode)
        for tree in trees
        for page in pages
        for scene in (*LEGAL, *HANDED_ON, "overwritten")
        for mode in (*MODES, *MUTATIONS.get(scene, ()))
    ]
    for row in rows:
        told = ["stale-host-copy"] if row["scene"] in HANDED_ON else []
        if row["scene"] in LEGAL:
            assert row["ended"] == "right", row
            assert row["loaded"] or row["mode"] == "wrong place", row
            told = ["stale-host-copy"] if row["mode"] == "wrong place" else []
        elif row["scene"] == "overwritten":  # what a guard of slots cannot see
            assert row["ended"].startswith("bytes: "), row
        elif row["mode"] == "enforce":
            assert row["ended"] == "right", row
            assert not row["loaded"], row
        elif row["mode"] == "strict":
            assert row["ended"] == "raised", row
        else:
            assert row["ended"].startswith("bytes: "), row
        if row["mode"] == "observe":
            assert set(told) <= set(row["faults"]), row
            assert row["faults"] == told or row["scene"] in HANDED_ON, row
        elif row["mode"] in ("enforce", "strict", "wrong place"):
            assert row["faults"] == told, row
        if row["mode"] is not None:
            assert not row["under way"], row
            # Of all that is fetched the tokens are known, but where another came between.
            assert (row["vouched"] > 0) is (row["scene"] == "for nobody known"), row
