"""Programs of ours that run on one real release each, in a process of their own."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
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
def _zygote(version: str) -> subprocess.Popen[str]:
    """What forks the programs of a release; it ends when this process does."""
    environment = checkouts.environment(fetched(version))
    environment["PYTHONPATH"] += f":{HERE}"
    return subprocess.Popen(
        [sys.executable, "-P", str(HERE / "zygote.py")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


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
    zygote = _zygote(version)
    assert zygote.stdin is not None
    assert zygote.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("printed", "errors")]
        asked = {
            "script": str(HERE / script),
            "options": options,
            "files": [*map(str, files)],
            "limit": limit,
        }
        zygote.stdin.write(json.dumps(asked) + "\n")
        zygote.stdin.flush()
        status = json.loads(zygote.stdout.readline())
        printed, errors = (file.read_text(errors="replace") for file in files)
    assert status is not None, f"not done within {limit} seconds: {printed[-3000:]}{errors[-3000:]}"
    assert status in statuses, printed[-3000:] + errors[-3000:]
    return printed


def in_ci(*chosen: str, of: Iterable[str]) -> list[Any]:
    """Each release as a parameter; CI has no time but for the ``chosen`` ones."""
    return [
        pytest.param(version, marks=() if version in chosen else pytest.mark.slow) for version in of
    ]


def rows_of(version: str, script: str, *options: str, opening: str = "{", **terms: Any) -> Any:
    """The JSON lines of ``output_of`` that begin with ``opening``, in a list."""
    printed = output_of(version, script, *options, **terms).splitlines()
    return [json.loads(line) for line in printed if line.startswith(opening)]
