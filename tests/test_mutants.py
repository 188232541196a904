"""Each check is proved by removing it: the sequence that it is for must then go wrong.

The table of mutants, and which check each removes, is in ``mutants.py``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_guard import checkouts

SCRIPT = Path(__file__).with_name("mutants.py")


@pytest.mark.sglang
@pytest.mark.parametrize("version", ["0.5.12", "0.5.18", "0.5.23"])
def test_every_check_is_needed(version: str) -> None:
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
    assert len(rows) >= 11
    assert [name for name, whole, _ in rows if whole is not False] == [], "wrong without a mutation"
    assert [name for name, _, mutated in rows if mutated is False] == [], "mutants that survive"
