"""100,000 random legal operations a release without one alarm; observe bit for bit the release's.

The operations, and what is compared when, are in ``long_legal.py``. Seen to fail when the guard
judges a live peer at the free, when observe replaces a free list, and when int32 rows are refused.
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of

OPERATIONS = 100_000


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.23", of=("0.5.12", "0.5.23")))
def test_no_alarm_in_100_000_legal_operations(version: str) -> None:
    rows = rows_of(version, "long_legal.py", "--operations", str(OPERATIONS), limit=None)
    assert [row["mode"] for row in rows] == ["observe", "enforce", "strict"]
    assert sum(row["operations"] for row in rows) >= OPERATIONS
    assert all(row["counted"] == {} for row in rows), rows
