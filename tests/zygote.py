"""Imports a release once, and forks a process for each program that is to run on it.

Importing SGLang takes seven seconds, and most programs take less. What is forked has imported torch
and SGLang, and nothing of ours: it is as if it had just done so itself. Asked by lines of JSON on
standard input, each answered by one line: the exit status, or null where the time was up.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from typing import Any

#: What nearly every program imports, and what brings nearly all that is imported.
MODULES = (
    "torch",
    "sglang.srt.managers.schedule_batch",
    "sglang.srt.managers.schedule_policy",
    "sglang.srt.server_args",
)


def main() -> int:
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(_answered(**json.loads(line))), flush=True)
    return 0


def _answered(script: str, options: list[str], files: list[str], limit: float | None) -> int | None:
    child = os.fork()
    if child == 0:
        os._exit(_run(script, options, files))
    until = None if limit is None else time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if until is not None and time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.01)


def _run(script: str, options: list[str], files: list[str]) -> int:
    """Run a script as Python would; its exit status. ``files`` take what it prints."""
    os.setpgrp()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [script, *options]
    status: Any = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
