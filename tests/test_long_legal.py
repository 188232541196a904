"""100,000 random legal operations a release without one alarm; observe bit for bit the release's.

The operations, and what is compared when, are in ``long_legal.py``. Seen to fail when the guard
judges a live peer at the free, when observe replaces a free list, and when int32 rows are refused.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_guard import checkouts

SCRIPT = Path(__file__).with_name("long_legal.py")
OPERATIONS = 100_000


@pytest.mark.sglang
@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_no_alarm_in_100_000_legal_operations(version: str) -> None:
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), "--operations", str(OPERATIONS)],
        env=checkouts.environment(checkouts.require(version)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["mode"] for row in rows] == ["observe", "enforce", "strict"]
    assert sum(row["operations"] for row in rows) >= OPERATIONS
    assert all(row["counted"] == {} for row in rows), rows
