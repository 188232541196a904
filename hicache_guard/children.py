"""Child processes that end with us.

Each runs in a process group of its own, so that Ctrl-C reaches us alone: we say one line, and the
child goes with all that it started instead of dying of a traceback or going on unseen.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress


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


def end(process: subprocess.Popen[str], grace: float = 10.0) -> None:
    """End a child and all that it started: asked first, killed after ``grace`` seconds."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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
