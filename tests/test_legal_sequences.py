"""No false alarm on what releases really do, and in observe no difference at all.

Mutations that each of these was seen to catch: judge ``LIVE_PEER`` at once (tree order), judge
sharing at the write (slots that change hands), keep a caller's tensor without a copy (reuse), do
not settle before a queued free is judged (groups), do not widen int32 (every row).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_guard import checkouts

SCRIPT = Path(__file__).with_name("legal_sequences.py")


@pytest.mark.sglang
@pytest.mark.parametrize("version", checkouts.SUPPORTED)
def test_legal_sequences_raise_no_alarm(version: str) -> None:
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
    assert len(rows) == 11 * 2 * 3 * 2
    for name, page_size, mode, compiled, faults, counted, same, pinned in rows:
        assert (faults, counted, same) == ([], {}, True), (name, page_size, mode, compiled)
        assert pinned == 0, f"{name}, {mode}: the journal pins {pinned} bytes of other tensors"
