"""The Triton kernels compile for real GPUs where there is none, and spill nothing.

Ahead of time, for sm_80, sm_90 and sm_100, in the specialisations that are used; registers and
spills are what ptxas says of the cubin. Printed with ``pytest -s``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

HERE = Path(__file__).parent


def _compiled(*options: str) -> list[dict[str, object]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "compile_kernels.py"), *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _assert_no_spills(rows: list[dict[str, object]]) -> None:
    assert rows
    for row in rows:
        print(row)
    assert [row for row in rows if row["local"] or row["stack"]] == []


def test_kernels_compile_and_spill_nothing() -> None:
    _assert_no_spills(_compiled())


@pytest.mark.slow
def test_every_specialisation_compiles_and_spills_nothing() -> None:
    _assert_no_spills(_compiled("--all"))
