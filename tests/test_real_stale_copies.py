"""A host copy that is somebody else's by the time it is loaded back is not loaded.

The scenes are ``real/stale_copies.py``; with a release on the path
``python -P tests/real/stale_copies.py`` runs them alone. Proved by mutation there: with the prints
not asked, foreign KV is loaded although the guard enforces. And guarded in any mode, the stories of
``real/host_tier.py`` raise no alarm, and what they load is proved.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hicache_guard import checkouts

HERE = Path(__file__).parent
TREES = {
    "0.5.12": ("unified",),
    "0.5.15": ("unified",),
    "0.5.18": ("unified",),
    "0.5.23": ("unified", "unified-rust"),
}
#: Seconds that one release may take.
LIMIT = 300
#: CI has time for the oldest and the newest.
ON_EACH = pytest.mark.parametrize(
    "version",
    [
        pytest.param(version, marks=() if version in ("0.5.12", "0.5.23") else pytest.mark.slow)
        for version in TREES
    ],
)


@functools.cache
def rows_of(version: str, script: str, *options: str) -> list[dict[str, Any]]:
    """What a program prints on one release, in one process."""
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    environment = checkouts.environment(checkouts.require(version))
    environment["PYTHONPATH"] += f":{HERE}"
    command = [sys.executable, "-P", str(HERE / "real" / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.sglang
@ON_EACH
def test_stale_copies_are_not_loaded(version: str) -> None:
    rows = rows_of(version, "stale_copies.py")
    assert len(rows) == len(TREES[version]) * 2 * 2 * 5, "trees, page sizes, scenes, modes"
    for row in rows:
        if row["mode"] == "enforce":
            assert row["ended"] == "right", row
            assert row["host hit"], row
            assert not row["loaded"], row
            assert row["faults"] == ["stale-host-copy"], row
        elif row["mode"] == "strict":
            assert row["ended"] == "raised", row
            assert row["faults"] == ["stale-host-copy"], row
        else:
            assert row["ended"].startswith("bytes: "), row
            assert ("stale-host-copy" in row["faults"]) is (row["mode"] == "observe"), row


@pytest.mark.sglang
@ON_EACH
@pytest.mark.parametrize("mode", ["observe", "enforce", "strict"])
def test_what_comes_back_is_proved(version: str, mode: str) -> None:
    rows = rows_of(version, "host_tier.py", "--mode", mode)
    assert {row["tree"] for row in rows} == set(TREES[version])
    for row in rows:
        assert not row["found"], row
        assert row["guard"] == {"faults": [], "load backs": 2, "refused": 0}, row
