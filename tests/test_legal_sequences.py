"""No false alarm on what releases really do, and in observe no difference at all.

Mutations that each of these was seen to catch: judge ``LIVE_PEER`` at once (tree order), judge
sharing at the write (slots that change hands), keep a caller's tensor without a copy (reuse), do
not settle before a queued free is judged (groups), do not widen int32 (every row).
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of

from hicache_guard import checkouts


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.12", "0.5.18", "0.5.23", of=checkouts.SUPPORTED))
def test_legal_sequences_raise_no_alarm(version: str) -> None:
    rows = rows_of(version, "legal_sequences.py", opening="[", limit=None)
    assert len(rows) == 11 * 2 * 3 * 2
    for name, page_size, mode, compiled, faults, counted, same, pinned in rows:
        assert (faults, counted, same) == ([], {}, True), (name, page_size, mode, compiled)
        assert pinned == 0, f"{name}, {mode}: the journal pins {pinned} bytes of other tensors"
