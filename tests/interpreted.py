"""Programs beside this one that run Triton kernels on a CPU, in a process of their own.

Triton decides when it is imported whether it interprets, and another test may have imported it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def rows_of(script: str, *options: str) -> list[Any]:
    """The JSON lines that a script prints; skips where Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / script), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
