"""Observe makes the host wait for a device nowhere in the host tier, and reports what it saw later.

The scenes are ``real/host_waits.py``; with a release on the path ``python -P real/host_waits.py``
runs them alone. Proved by mutation there: with books that are read on the host, reads are counted.
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of

#: The newest tree of each.
TREES = {"0.5.12": "unified", "0.5.18": "unified", "0.5.23": "unified-rust"}


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.23", of=TREES))
def test_observe_waits_for_nothing(version: str) -> None:
    options = ("--page-sizes", "16", "--trees", TREES[version])
    rows = rows_of(version, "real/host_waits.py", *options)
    assert len(rows) == 3 * 5, "scenes, modes"
    for row in rows:
        handed_on = row["scene"] != "in order"
        right = not handed_on or row["mode"] == "enforce"
        if row["mode"] == "strict":
            assert row["ended"] == ("raised" if handed_on else "right"), row
        else:
            assert (row["ended"] == "right") is right, row
        if row["mode"] is None:
            continue
        assert ("stale-host-copy" in row["faults"]) is handed_on, row
        if row["mode"] == "prints on the host":
            assert row["reads"], row
        elif row["mode"] == "observe":
            assert (row["waits"], row["reads"], row["early"]) == (0, {}, []), row
        else:
            assert row["waits"], "it must know before it loads"
            assert not row["reads"], row
