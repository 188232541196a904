"""Programs of ours that run on one real release each, in a process of their own."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hicache_guard import checkouts

HERE = Path(__file__).parent
#: Seconds that everything which runs on one release may take.
LIMIT = 300


def fetched(version: str) -> Path:
    """Where a release is; skips the test that asks without it."""
    if not checkouts.is_fetched(version):
        pytest.skip(f"SGLang {version} is not fetched; run hicache-guard releases fetch {version}")
    return checkouts.require(version)


@functools.cache
def output_of(
    version: str,
    script: str,
    *options: str,
    limit: float | None = LIMIT,
    statuses: tuple[int, ...] = (0,),
) -> str:
    """What a script beside this one prints on a release. Run once; skips without the release.

    It must end within ``limit`` seconds, and with one of ``statuses``.
    """
    environment = checkouts.environment(fetched(version))
    environment["PYTHONPATH"] += f":{HERE}"
    command = [sys.executable, "-P", str(HERE / script), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    assert done.returncode in statuses, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def in_ci(*chosen: str, of: Iterable[str]) -> list[Any]:
    """Each release as a parameter; CI has no time but for the ``chosen`` ones."""
    return [
        pytest.param(version, marks=() if version in chosen else pytest.mark.slow) for version in of
    ]


def rows_of(version: str, script: str, *options: str, opening: str = "{", **terms: Any) -> Any:
    """The JSON lines of ``output_of`` that begin with ``opening``, in a list."""
    printed = output_of(version, script, *options, **terms).splitlines()
    return [json.loads(line) for line in printed if line.startswith(opening)]
