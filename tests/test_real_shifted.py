"""Serials are not shifted in the middle of a load-back: its parts are proved by what was before it.

The scene is ``real/shifted.py``. Proved by mutation there: with no serials left for a load-back
they are. What comes of it, a false alarm or a lost hit, takes the tree machine thousands of steps.
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of

#: The newest tree of each.
TREES = {"0.5.12": "unified", "0.5.18": "unified", "0.5.23": "unified-rust"}


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.23", of=TREES))
def test_serials_end_with_a_load_back(version: str) -> None:
    rows = rows_of(version, "real/shifted.py", "--page-sizes", "1", "--trees", TREES[version])
    assert len(rows) == 5, "modes"
    for row in rows:
        assert (row["ended"], row["faults"]) == ("right", []), row
        loads = 0 if row["mode"] is None else 2
        assert row["shifts"] == [row["mode"] == "in the middle"] * loads, row
