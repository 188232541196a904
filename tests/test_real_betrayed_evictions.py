"""An eviction brings as many window slots as it was asked for, whatever was freed behind the tree.

Else a scheduler that was promised them ends the server ("Prefill out of memory"). By hand: 16 are
asked for, the older prefix has 8 of its 16 left, so the newer one must go, too. Mutation seen:
``_evict`` without ``_evict_more`` brings 8.
"""

from __future__ import annotations

import programs
import pytest

TREES = {"0.5.12": {"legacy", "python"}, "0.5.18": {"legacy", "python"},
         "0.5.23": {"python", "rust"}}  # fmt: skip


@pytest.mark.sglang
@pytest.mark.parametrize("version", programs.in_ci("0.5.12", "0.5.23", of=TREES))
def test_what_was_freed_behind_the_tree_is_evicted_elsewhere(version: str) -> None:
    rows = programs.rows_of(version, "real/betrayed_evictions.py")
    assert {row["tree"] for row in rows} == TREES[version]
    for row in rows:
        if row["betrayed"]:
            assert row["older"] == 8, "clipped"
            assert row["came"] >= 16
        else:
            assert (row["older"], row["newer"]) == (16, 16)
            assert row["came"] == 16
            assert row["newer after"] == 16, "no more is evicted than was asked for"
