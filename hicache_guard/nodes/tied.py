"""Runs a module as ``python -m`` does, in a process that ends with whoever started it.

Run: ``python -m hicache_guard.nodes.tied MODULE ARGUMENT…`` as the leader of a process group, with
a pipe as standard input that is closed with the parent, whichever way that ends. A watcher in the
group waits for that, since the module may never come back to Python.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    if os.fork() == 0:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)
    os.execv(sys.executable, [sys.executable, "-P", "-m", *sys.argv[1:]])


if __name__ == "__main__":
    main()
