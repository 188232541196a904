"""What an embedded server runs: the release's own launcher, with arguments as JSON.

Run: ``python -m hicache_guard.embedded.launch ARGUMENTS``, with the environment of ``server``, and
with a pipe that is closed with the parent as standard input.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from typing import Any


def _end_with_parent() -> None:
    """End the group when the other end of the pipe is gone, whichever way the parent ended."""
    os.read(0, 1)  # not sys.stdin, whose lock a forked process would wait for
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    plugins: Any = importlib.import_module("sglang.srt.plugins")
    plugins.load_plugins()
    server_args: Any = importlib.import_module("sglang.srt.server_args")
    arguments = server_args.ServerArgs(**json.loads(sys.argv[1]))
    importlib.import_module("sglang.srt.managers.scheduler")  # before processes are forked
    launcher: Any = importlib.import_module("sglang.launch_server")
    launcher.run_server(arguments)


if __name__ == "__main__":
    main()
