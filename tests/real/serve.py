"""Everything that the tests want to know of one release, in one process that imports it once.

Each job runs in a forked child and prints one JSON line: its name, what it found, the seconds it
took, and the traceback of whatever ended it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from hicache_guard.core import compiled
from real import delayed, driver, machine, syncs

#: Seconds that one job may take.
LIMIT = 120


def jobs(version: str, examples: int, steps: int) -> dict[str, Callable[[], Any]]:
    """What there is to run, by name."""

    def drive(mode: str, *, collected: bool = False) -> Callable[[], Any]:
        def job() -> Any:
            if collected:
                os.environ[compiled.SWITCH] = "0"
            return machine.run(
                mode, examples, steps, derandomize=True, shrink=False, version=version
            )

        return job

    machines = {f"machine {mode}": drive(mode) for mode in ("observe", "enforce", "strict")}
    for mode in ("observe", "enforce"):
        machines[f"machine {mode}, collected"] = drive(mode, collected=True)
    return {**machines, "syncs": syncs.count, **delayed.SCENES}


def in_child(name: str, job: Callable[[], Any]) -> dict[str, Any]:
    """Run one job in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        signal.alarm(LIMIT)
        result: dict[str, Any] = {"job": name, "found": None, "error": ""}
        started = time.perf_counter()
        try:
            result["found"] = job()
        except BaseException:
            result["error"] = traceback.format_exc()[-4000:]
        result["seconds"] = round(time.perf_counter() - started, 1)
        with os.fdopen(writer, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    died = {"job": name, "found": None, "error": "the child died", "seconds": LIMIT}
    return json.loads(text) if text else died


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=60)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", nargs="*", help="only these")
    options = parser.parse_args(arguments)
    version = driver.prepare()
    for name, job in jobs(version, options.examples, options.steps).items():
        if options.jobs is None or name in options.jobs:
            print(json.dumps(in_child(name, job)), flush=True)


if __name__ == "__main__":
    main()
