"""Faults inside and around a free group are counted, contained and raised on every release.

Seen to fail: on 0.5.20 to 0.5.23 before what a group had released already stopped being vouched for
(a second free of it was counted, and yet admitted to the free list).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_guard import checkouts

SCRIPT = Path(__file__).with_name("group_faults.py")


@pytest.mark.sglang
@pytest.mark.parametrize("version", checkouts.SUPPORTED)
def test_faults_around_a_group_are_contained(version: str) -> None:
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT)],
        env=checkouts.environment(checkouts.require(version)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(rows) == 6 * 2 * 3 * 2
    for name, page_size, mode, compiled, counted, found, raised in rows:
        where = (name, page_size, mode, compiled, found)
        assert counted, where
        assert raised == (mode == "strict"), where
        assert mode == "observe" or found == [], where
