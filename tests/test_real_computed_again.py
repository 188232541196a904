"""Retraction of requests that read a dead window; the story is ``real/computed_again.py``.

Proved by mutation of ``steps._retract``, each of which makes this fail: ``distrust`` left out;
requests that took over what is wrong left where they are; ``never_hits`` left out (cold);
``chunked_req`` kept; batches not filtered.
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of

RELEASES = ("0.5.12", "0.5.15", "0.5.18", "0.5.23")


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.23", of=RELEASES))
def test_what_was_wrong_is_nobodys_hit(version: str) -> None:
    rows = rows_of(version, "real/computed_again.py")
    assert len(rows) >= 2 * 2, "trees, page sizes"
    for row in rows:
        assert row["before"] == 128, row
        assert row["retracted"] == ["wrong", "sharing"], row
        assert row["left"] == [0, 1], row
        assert row["rows"] == [None, None], row
        assert not row["chunked"], row
        assert row["hit"] == 64, "what was computed before is right"
        assert row["hit apart"] == 128, row
        assert row["cold"] == [0, 0], "nothing is given to who is computed again"
