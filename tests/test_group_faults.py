"""Faults inside and around a free group are counted, contained and raised on every release.

Seen to fail: on 0.5.20 to 0.5.23 before what a group had released already stopped being vouched for
(a second free of it was counted, and yet admitted to the free list).
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of

from hicache_guard import checkouts


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.18", "0.5.23", of=checkouts.SUPPORTED))
def test_faults_around_a_group_are_contained(version: str) -> None:
    rows = rows_of(version, "group_faults.py", opening="[", limit=None)
    assert len(rows) == 6 * 2 * 3 * 2
    for name, page_size, mode, compiled, counted, found, raised in rows:
        where = (name, page_size, mode, compiled, found)
        assert counted, where
        assert raised == (mode == "strict"), where
        assert mode == "observe" or found == [], where
