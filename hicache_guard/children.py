"""Child processes that end with us.

Each runs in a process group of its own, so that Ctrl-C reaches us alone: we say one line, and the
child goes with all that it started instead of dying of a traceback or going on unseen.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def started(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run ``command`` beside the block: waited for at its end, killed if that is left early."""
    process = subprocess.Popen(
        command, env=env, stdout=stdout, stderr=stderr, text=True, process_group=0
    )
    with process:
        try:
            yield process
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()  # Popen does not, after Ctrl-C
            raise


def end(process: subprocess.Popen[Any], grace: float = 10.0) -> None:
    """End a child's group: asked first, killed after ``grace`` seconds. Nothing of it is left."""
    for sign, patience in ((signal.SIGTERM, grace), (signal.SIGKILL, math.inf)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        limit = time.monotonic() + patience
        while time.monotonic() < limit and (process.poll() is None or lives(process.pid)):
            time.sleep(0.02)


def lives(group: int) -> bool:
    """Whether a process of a group still runs; one that only waits to be buried does not."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` of a text command."""
    with started(command, env=env, stdout=stdout, stderr=stderr) as process:
        out, errors = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)
