"""Each check is proved by removing it: the sequence that it is for must then go wrong.

The table of mutants, and which check each removes, is in ``mutants.py``.
"""

from __future__ import annotations

import pytest
from programs import in_ci, rows_of


@pytest.mark.sglang
@pytest.mark.parametrize("version", in_ci("0.5.23", of=("0.5.12", "0.5.18", "0.5.23")))
def test_every_check_is_needed(version: str) -> None:
    rows = rows_of(version, "mutants.py", opening="[", limit=None)
    assert len(rows) >= 11
    assert [name for name, whole, _ in rows if whole is not False] == [], "wrong without a mutation"
    assert [name for name, _, mutated in rows if mutated is False] == [], "mutants that survive"
