"""Real releases for tests: one subprocess a release, started when the first test asks for it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_guard import checkouts

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for ``import oracle``; pytest's importlib mode adds nothing

#: Seconds that everything which runs on one release may take.
LIMIT = 300


@functools.cache
def run_on(version: str) -> dict[str, Any]:
    """Job name to result of everything in ``real/serve.py`` on one release; skips without it."""
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    environment = checkouts.environment(checkouts.require(version))
    environment["PYTHONPATH"] += f":{HERE}"
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "real" / "serve.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["job"]: result for result in map(json.loads, lines)}


@pytest.fixture(scope="session")
def on_release() -> Callable[[str], dict[str, Any]]:
    """Results by release; see ``run_on``."""
    return run_on
