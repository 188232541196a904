"""Hypothesis drives the real allocator and a plain-Python oracle together, legal and illegal.

The oracle (``oracle.py``) knows neither torch nor the guard; the machine (``real/machine.py``) says
what each mode must do. More examples: ``python tests/real/machine.py --examples 1000``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_guard import checkouts

HERE = Path(__file__).parent


@pytest.mark.sglang
@pytest.mark.parametrize("version", ["0.5.23"])
def test_random_sequences_end_as_the_oracle_says(version: str) -> None:
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    environment = checkouts.environment(checkouts.require(version))
    environment["PYTHONPATH"] += os.pathsep + str(HERE)
    command = [sys.executable, "-P", str(HERE / "real" / "machine.py")]
    done = subprocess.run(
        [*command, "--examples", "60", "--steps", "40"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {row["mode"] for row in rows} == {"observe", "enforce", "strict"}
    assert all(row["seen"]["illegal"] > 10 for row in rows), "too few illegal operations were tried"
